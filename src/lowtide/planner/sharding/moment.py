"""What the formulas of sharding take from the unsharded trace, and the points of a step that they speak of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from lowtide.planner.sharding.layout import Layout, byte_sum

STATES = ("weights", "gradients", "optimizer")
"""Categories that sharding splits; the others are taken from the trace as they are."""


@dataclass(frozen=True, kw_only=True)
class PeakMoment:
    """One point of a step, in bytes."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    communication: int = 0
    """Gathered weights, and buffers on their way."""
    rest: Mapping[str, int] = field(default_factory=dict)
    """Activations and whatever else the trace found."""

    @property
    def held(self) -> dict[str, int]:
        """By category."""
        states = {name: getattr(self, name) for name in (*STATES, "communication")}
        return {**self.rest, **states}


@dataclass(frozen=True, kw_only=True)
class OneDevice:
    """A step on one device."""

    phases: Mapping[str, Mapping[str, int]]
    """For each phase, the bytes by category when it held most."""
    in_head: Mapping[str, int] = field(default_factory=dict)
    """The most that all but the states take in the head, forward and backward, by category; where it is not known, the
    peak of backward or of the head stands for it."""
    in_layers: Mapping[str, int] = field(default_factory=dict)
    """The most that all but the states take in backward once it has left the head, by category; where it is not known,
    `at_head` stands for it."""
    saved: Mapping[str, int] = field(default_factory=dict)
    """What all but the states take when the last layer has run forward: what layers save, and nothing that passes.
    Where it is not known, the peak of forward stands for it."""
    saved_per_layer: int = 0
    """Activations that each keeps from forward to backward: what the trace of one layer more holds more, in bytes.
    With 0 all stay to the end, which is too much where a late point of backward holds most."""
    gradients_in_head: bool = False
    """Whether the head's gradient is made with its loss, before backward begins."""
    tokens: int = 0
    """Of a micro-batch, of all ranks that split it."""
    micro_batches: int = 1
    """In a step of one rank."""
    sent: int = 0
    """Bytes of a micro-batch that a rank sends to those that split its tokens."""
    on_host: int = 0
    """Bytes in the host's memory at most, of offloaded activations say."""
    reference_share: float = 1.0
    """What a rank that splits layers has of a reference that was traced: the trace has all of its vocabulary."""
    largest: int = 0
    """Bytes of the largest tensor that was stepped; set by `on`."""
    together: int = 0
    """Bytes of all that were stepped; set by `on`."""

    def rest(self, phase: str, gone: int = 0) -> dict[str, int]:
        """All but the states at the peak of a phase, when so many layers have not made their activations yet."""
        rest = {name: size for name, size in self.phases.get(phase, {}).items() if name not in STATES}
        if phase == "optimizer":
            rest.pop("activations", None)  # what the step itself needs: `temporaries`
        return self._without(rest, gone)

    def at_head(self) -> dict[str, int]:
        """The rest as backward begins. The trace's own peak may be late, when whole gradients are there; that of a rank
        that shards them is early, when the activations are."""
        if self.in_head:
            return dict(self.in_head)
        return self.rest(max(("backward", "head"), key=lambda name: sum(self.rest(name).values())))

    def in_backward(self, gone: int = 0) -> dict[str, int]:
        """The rest in the backward of a layer, when so many have let their activations go."""
        return self._without(dict(self.in_layers) or self.at_head(), gone)

    def lasting(self) -> dict[str, int]:
        """The rest when backward is over: a reference, say."""
        return {name: size for name, size in self.rest("backward").items() if name not in ("activations", "head")}

    def between(self, gone: int = 0) -> dict[str, int]:
        """The rest between two layers, when so many are not run yet, or have let their activations go."""
        return self._without(dict(self.saved) or self.rest("forward"), gone)

    def _without(self, rest: dict[str, int], gone: int) -> dict[str, int]:
        if gone and "activations" in rest:
            rest["activations"] = max(0, rest["activations"] - gone * self.saved_per_layer)
        return rest

    def gradients(self, phase: str) -> int:
        """Whole gradients at the peak of a phase."""
        return self.phases.get(phase, {}).get("gradients", 0)

    @property
    def accumulates(self) -> bool:
        """Whether gradients of micro-batches before are there in forward."""
        return self.gradients("forward") > 0

    def temporaries(self, largest: int, together: int) -> int:
        """What an optimizer step holds for itself: by the largest tensor where it steps one at a time, by all where
        it steps them together, nothing where it is fused.

        Args:
            largest: bytes of the largest tensor that a rank steps.
            together: bytes of all of them.
        """
        held = self.phases.get("optimizer", {})
        states = self.phases.get("forward", {}).get("optimizer", 0)
        found = max(0, held.get("optimizer", 0) + held.get("activations", 0) - states)
        if not found or not self.largest:
            return 0
        if found <= 4 * self.largest:
            return found * largest // self.largest
        return found * together // self.together

    def on(self, layout: Layout) -> OneDevice:
        """The trace of a model, of which it then knows what is stepped."""
        return replace(
            self, largest=max((byte_sum([p]) for p in layout.trained), default=0), together=byte_sum(layout.trained)
        )

    def with_states(self, layout: Layout) -> Layout:
        """The layout with the states of an optimizer that only the trace knows."""
        elements = sum(p.numel for p in layout.trained)
        if layout.state is not None or not elements:
            return layout
        return replace(layout, state=self.phases.get("forward", {}).get("optimizer", 0) / elements)
