"""From the trace of a model with five layers to that of the same model with as many as it has.

Layers are alike: what the third of five does, all but the first and last two do, in its place of the order, forward
and backward. So a trace of few layers is all that is needed, however deep the model; what a layer frees of its
neighbour's, its copies free of theirs. That they are alike is checked, not believed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from lowtide.planner.trace import Block, Moment

TRACED_LAYERS = 5
MIDDLE = 2
"""The layer that is repeated: both its neighbours are like it."""


class UnlikeLayers(Exception):
    """The middle layers did not do the same."""


def unrolled(moments: Sequence[Moment], layers: int) -> list[Moment]:
    """The moments of a model with `layers` layers, from those of one with `TRACED_LAYERS`.

    Raises:
        UnlikeLayers: there is no telling from few layers.
    """
    longer = _Unrolled(moments, layers - TRACED_LAYERS)
    runs = [(layer, list(run)) for layer, run in groupby(moments, key=_layer)]
    order = [layer for layer, _ in runs]
    for number, (layer, run) in enumerate(runs):
        places: Iterable[int | None] = (layer if layer is None or layer < MIDDLE else layer + longer.added,)
        if layer == MIDDLE:
            following = next((other for other in order[number + 1 :] if other not in (None, MIDDLE)), MIDDLE + 1)
            places = longer.copies if following > MIDDLE else reversed(longer.copies)
        for place in places:
            for moment in run:
                longer.add(moment, layer, place)
    return longer.moments


class _Unrolled:
    def __init__(self, moments: Sequence[Moment], added: int) -> None:
        self.added = added
        self.copies = range(MIDDLE, MIDDLE + added + 1)
        """The places of the middle layer and of those that do as it does."""
        self.moments: list[Moment] = []
        self._counterparts = _counterparts(moments)
        self._copied: dict[tuple[Block, int], Block] = {}
        self._gone: set[Block] = set()

    def add(self, moment: Moment, layer: int | None, place: int | None) -> None:
        """What a layer of the trace did, done by the one at a place of the deeper model."""
        block = moment.block
        if block is None:
            self.moments.append(moment._replace(layer=place))
        elif moment.born:
            self.moments.append(Moment(self._of(block, place), True, moment.phase, place))
        elif layer is None and block.layer == MIDDLE:
            for copy in self.copies:
                self._die(self._of(block, copy), moment, place)
        elif layer is None or block.layer is None:
            self._die(block, moment, place)
        else:
            assert place is not None
            self._die(self._of(block, place - (layer - block.layer)), moment, place)

    def _die(self, block: Block, moment: Moment, place: int | None) -> None:
        if block not in self._gone:
            self._gone.add(block)
            self.moments.append(Moment(block, False, moment.phase, place))

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


def _layer(moment: Moment) -> int | None:
    """Where a moment belongs: a birth to the layer that the block is of."""
    return moment.block.layer if moment.born and moment.block is not None else moment.layer


def _counterparts(moments: Sequence[Moment]) -> dict[tuple[Block, int], Block]:
    """(a block, a layer) -> the block that was born there at the same place in the order.

    Raises:
        UnlikeLayers: the three in the middle bore different ones.
    """
    born: dict[int, list[Block]] = {layer: [] for layer in range(TRACED_LAYERS)}
    for moment in moments:
        block = moment.block
        if moment.born and block is not None and block.layer is not None:
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
