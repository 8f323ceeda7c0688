"""What sharding's formulas read off a trace: by events written by hand."""

from __future__ import annotations

from collections.abc import Iterator

from lowtide.planner.sharding.traced_step import one_device
from lowtide.planner.tracing.trace import Block, Event


def events(layers: int = 3, kept: int = 10, passing: int = 100) -> Iterator[Event]:
    """Each layer keeps some bytes and has others for a while; the head makes its gradient; backward likewise."""

    def born_and_died(phase: str, layer: int | None) -> Iterator[Event]:
        block = Block(passing, "activations", layer)
        yield Event(block, True, phase, layer)
        yield Event(block, False, phase, layer)

    weights = Block(1000, "weights", None)
    yield Event(weights, True, "loading", None)
    saved = [Block(kept, "activations", layer) for layer in range(layers)]
    for layer, block in enumerate(saved):
        yield Event(block, True, "forward", layer)
        yield from born_and_died("forward", layer)
    yield Event(Block(7, "gradients", None), True, "head", None)
    for layer, block in reversed([*enumerate(saved)]):
        yield from born_and_died("backward", layer)
        yield Event(block, False, "backward", layer)


def test_what_layers_keep_is_told_from_what_passes():
    found = one_device(events(), None, tokens=5, micro_batches=2)
    assert found.saved == {"activations": 30}
    assert found.saved_per_layer == 10
    assert found.in_layers == {"activations": 130}
    assert found.phases["forward"]["activations"] == 130
    assert (found.tokens, found.micro_batches) == (5, 2)


def test_a_gradient_that_is_made_in_the_head_is_seen():
    assert one_device(events(), None, tokens=1, micro_batches=1).gradients_in_head
    later = [each for each in events() if each.phase != "head"]
    assert not one_device(later, None, tokens=1, micro_batches=1).gradients_in_head


def test_what_the_head_holds_is_told_from_what_layers_and_embedding_hold_in_backward():
    begun = [each for each in events() if each.phase in ("loading", "forward")]
    logits, slopes, late = (Block(size, "head", None) for size in (40, 60, 900))
    head = [Event(logits, True, "head", None), Event(slopes, True, "backward", None)]
    ended = [Event(logits, False, "backward", None), Event(slopes, False, "backward", None)]
    layers = [each for each in events() if each.phase == "backward"]
    embedding = [Event(late, True, "backward", None), Event(late, False, "backward", None)]
    found = one_device([*begun, *head, *ended, *layers, *embedding], None, tokens=1, micro_batches=1)
    assert found.at_head() == {"activations": 30, "head": 100}
    assert found.in_backward() == {"activations": 130}
