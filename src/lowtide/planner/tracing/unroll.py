"""From the trace of a model with five layers to that of the same model with as many as it has.

Layers are alike: what the third of five does, all but the first and last two do, in its place of the order, forward
and backward. So a trace of few layers is all that is needed, however deep the model; what a layer frees of its
neighbour's, its copies free of theirs. That they are alike is checked, not believed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from lowtide.planner.tracing.trace import Block, Event

TRACED_LAYERS = 5
MIDDLE = 2
"""The layer that is repeated: both its neighbours are like it."""


class UnlikeLayers(Exception):
    """The middle layers did not do the same."""


def unrolled(events: Sequence[Event], layers: int) -> list[Event]:
    """The events of a model with `layers` layers, from those of one with `TRACED_LAYERS`.

    Raises:
        UnlikeLayers: there is no telling from few layers.
    """
    longer = _Unrolled(events, layers - TRACED_LAYERS)
    runs = [(layer, list(run)) for layer, run in groupby(events, key=_layer)]
    order = [layer for layer, _ in runs]
    for number, (layer, run) in enumerate(runs):
        places: Iterable[int | None] = (layer if layer is None or layer < MIDDLE else layer + longer.added,)
        if layer == MIDDLE:
            following = next((other for other in order[number + 1 :] if other not in (None, MIDDLE)), MIDDLE + 1)
            places = longer.copies if following > MIDDLE else reversed(longer.copies)
        for place in places:
            for event in run:
                longer.add(event, layer, place)
    return longer.events


class _Unrolled:
    def __init__(self, events: Sequence[Event], added: int) -> None:
        self.added = added
        self.copies = range(MIDDLE, MIDDLE + added + 1)
        """The places of the middle layer and of those that do as it does."""
        self.events: list[Event] = []
        self._counterparts = _counterparts(events)
        self._copied: dict[tuple[Block, int], Block] = {}
        self._gone: set[Block] = set()

    def add(self, event: Event, layer: int | None, place: int | None) -> None:
        """What a layer of the trace did, done by the one at a place of the deeper model."""
        block = event.block
        if block is None:
            self.events.append(event._replace(layer=place))
        elif event.born:
            self.events.append(Event(self._of(block, place), True, event.phase, place))
        elif layer is None and block.layer == MIDDLE:
            for copy in self.copies:
                self._die(self._of(block, copy), event, place)
        elif layer is None or block.layer is None:
            self._die(block, event, place)
        else:
            assert place is not None
            self._die(self._of(block, place - (layer - block.layer)), event, place)

    def _die(self, block: Block, event: Event, place: int | None) -> None:
        if block not in self._gone:
            self._gone.add(block)
            self.events.append(Event(block, False, event.phase, place))

    def _of(self, block: Block, place: int | None) -> Block:
        """The block that is to a place what this one is to its layer."""
        if place is None or block.layer is None:
            return block
        traced = MIDDLE if place in self.copies else place if place < MIDDLE else place - self.added
        like = self._counterparts.get((block, traced), block)
        if traced != MIDDLE or place == MIDDLE:
            return like
        key = (like, place)
        if key not in self._copied:
            self._copied[key] = Block(like.size, like.category, place)
        return self._copied[key]


def _layer(event: Event) -> int | None:
    """Where a event belongs: a birth to the layer that the block is of."""
    return event.block.layer if event.born and event.block is not None else event.layer


def _counterparts(events: Sequence[Event]) -> dict[tuple[Block, int], Block]:
    """(a block, a layer) -> the block that was born there at the same place in the order.

    Raises:
        UnlikeLayers: the three in the middle bore different ones.
    """
    born: dict[int, list[Block]] = {layer: [] for layer in range(TRACED_LAYERS)}
    for event in events:
        block = event.block
        if event.born and block is not None and block.layer is not None:
            born[block.layer].append(block)
    shapes = {layer: [(block.size, block.category) for block in blocks] for layer, blocks in born.items()}
    if not shapes[1] == shapes[2] == shapes[3]:
        raise UnlikeLayers
    alike = [layer for layer in born if shapes[layer] == shapes[MIDDLE]]
    found: dict[tuple[Block, int], Block] = {}
    for number, group in enumerate(zip(*(born[layer] for layer in (1, 2, 3)), strict=True)):
        whole = {1: group[0], 2: group[1], 3: group[2]} | {layer: born[layer][number] for layer in alike}
        for block in whole.values():
            for layer, other in whole.items():
                found[block, layer] = other
    return found
