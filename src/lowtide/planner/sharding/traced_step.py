"""What sharding's formulas take from a trace: where in a step its activations are, and how much a layer keeps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from lowtide.planner.allocators.replay import Allocator, peaks
from lowtide.planner.sharding.moment import STATES, OneDevice
from lowtide.planner.tracing.trace import ON_HOST, Block, Event


def one_device(events: Iterable[Event], allocator: Allocator | None, *, tokens: int, micro_batches: int) -> OneDevice:
    """A step on one device, from the events of a run.

    Args:
        events: of `replay.run_of`.
        allocator: what holds the blocks; what it holds beyond them is "cache". None: nothing does.
        tokens: of a micro-batch.
        micro_batches: in a step.
    """
    events = list(events)
    saved, in_head, in_layers = dict[str, int](), dict[str, int](), dict[str, int]()
    after_layers, left_head = list[int](), False
    before = Event(None, False, "", None)
    for event, held in _held(events):
        if before.phase == "forward" and event.layer != before.layer:
            after_layers.append(held.get("activations", 0))
        if before.phase != "forward" and event.phase == "forward":
            after_layers.clear()
        if before.phase == "forward" and event.phase == "head":
            saved = _rest(held)
        left_head = event.phase == "backward" and (left_head or event.layer is not None)
        if event.phase in ("head", "backward") and not left_head:
            in_head = max(in_head, _rest(held), key=_total)
        if event.phase == "backward" and event.layer is not None:
            in_layers = max(in_layers, _rest(held), key=_total)
        before = event
    # the first entry is from before the first layer
    each = (after_layers[-1] - after_layers[1]) // (len(after_layers) - 2) if len(after_layers) > 2 else 0
    return OneDevice(
        phases=peaks(events, allocator),
        in_head=in_head,
        in_layers=in_layers,
        saved=saved,
        saved_per_layer=max(each, 0),
        gradients_in_head=any(e.phase == "head" and e.block and e.block.category == "gradients" for e in events),
        tokens=tokens,
        micro_batches=micro_batches,
    )


def _held(events: Iterable[Event]) -> Iterator[tuple[Event, Mapping[str, int]]]:
    """Each event with the bytes by category as they are before it."""
    held, alive = Counter[str](), set[Block]()
    for event in events:
        block = event.block
        if block is None or block.category in ON_HOST or event.born == (block in alive):
            continue
        yield event, held
        (alive.add if event.born else alive.discard)(block)
        held[block.category] += block.size if event.born else -block.size


def _rest(held: Mapping[str, int]) -> dict[str, int]:
    return {name: size for name, size in held.items() if size and name not in STATES}


def _total(held: Mapping[str, int]) -> int:
    return sum(held.values())
