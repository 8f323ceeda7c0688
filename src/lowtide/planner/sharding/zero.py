"""ZeRO as DeepSpeed does it: optimizer states split (stage 1), gradients too (2), weights too (3).

Mixed precision takes 16 bytes a parameter with AdamW: 2 for the weight, 2 for its gradient, 12 for the float32 master
and the moments. With N ranks that is 4 + 12/N, 2 + 14/N and 16/N (ZeRO, arXiv 1910.02054, figure 1). To that come,
read from DeepSpeed 0.19 (`runtime/zero/stage_1_and_2.py`, `stage3.py`, `partitioned_param_coordinator.py`):

- in stages 1 and 2 a master even of float32 weights, so that they take 4/N more than without ZeRO; in stage 3 where
  states are offloaded, and else it steps these weights themselves (`compat.deepspeed` sees to that);
- the buffer that gradients are reduced in, allocated whole however small the model is, and a copy of its content;
- the partition's gradients in a buffer of their own, which holds whole the parameters that are cut at its ends, and in
  stages 1 and 2 comes anew in each backward;
- over gloo, what another rank sends of a sum in stage 3 (`compat.gloo`): one more part of what is reduced;
- the flat copy of all weights in stages 1 and 2, beside them while it is made;
- in stage 3 what is gathered: it lets go only what is not wanted again within `max_reuse` elements, so that a model of
  less than half as many is whole from the end of forward to the end of backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from lowtide.planner.sharding.layout import MASTER, Layout, byte_sum
from lowtide.planner.sharding.moment import OneDevice, PeakMoment
from lowtide.ranks.sharding import Sharding

Found = tuple[Mapping[str, Sequence[PeakMoment]], int]


def stages_1_and_2(layout: Layout, traced: OneDevice, sharding: Sharding) -> Found:
    """Stages 1 and 2: moments by phase, and bytes in the host's memory."""
    width = sharding.compute_width or _width(layout)
    frozen = byte_sum((p for p in layout.parameters if not p.trained), sharding.compute_width)
    sizes = [p.numel for p in layout.trained]
    elements = _padded(sum(sizes), 2 * sharding.shards)
    part = elements // sharding.shards
    within = _touched(sizes, part, sharding.shards) * width
    largest, gradients = max(sizes, default=0) * width, sum(sizes) * width
    states = part * MASTER + layout.state_bytes(part, MASTER)
    offloaded = sharding.offload_optimizer
    optimizer = 0 if offloaded else states
    host = states + part * (MASTER + width) + largest if offloaded else 0
    within = 0 if offloaded else within
    bucket = sharding.reduce_bucket * width * (2 if sharding.overlap else 1) + (largest if offloaded else 0)
    filled = min(sharding.reduce_bucket * width, gradients)
    base = PeakMoment(weights=frozen + elements * width, optimizer=optimizer)
    first = sharding.kind == "zero1"
    before = (gradients if first else within) if traced.accumulates else 0
    kept = replace(base, gradients=before, communication=bucket if first and before else 0)
    found = {phase: [replace(kept, rest=traced.rest(phase))] for phase in traced.phases}
    found["loading"] = [
        PeakMoment(weights=frozen + 2 * elements * width),
        replace(base, gradients=0 if offloaded else part * MASTER, optimizer=0 if offloaded else part * MASTER),
    ]
    early = replace(base, communication=bucket, rest=traced.at_head())
    over = replace(base, communication=bucket, rest=traced.lasting())
    if first:
        found["backward"] = [
            replace(early, gradients=max(traced.gradients("backward"), before), rest=traced.rest("backward")),
            replace(early, gradients=before or largest),
            replace(over, gradients=gradients + within),
            replace(over, gradients=gradients, communication=bucket + filled),
        ]
    else:
        small = max((size * width for size in sizes if size <= sharding.reduce_bucket), default=0)
        copied = filled if gradients > filled else 0  # all of them fit: they are reduced when backward is over
        reduced = replace(over, gradients=before + within, communication=bucket + filled)
        found["backward"] = [
            replace(early, gradients=before + largest),
            replace(reduced, communication=bucket + copied + small, rest=traced.in_backward()),
            replace(reduced, communication=bucket + largest, rest=traced.between()),
            reduced,
        ]
    stepping = 0 if offloaded else part * MASTER
    step = traced.temporaries(stepping, stepping)
    rest = traced.rest("optimizer")
    found["optimizer"] = [
        replace(base, gradients=within + stepping * width // MASTER, rest=rest),
        replace(base, gradients=stepping, optimizer=optimizer + step, rest=rest),
    ]
    for phase in {"saving", "evaluation"} & set(found):
        found[phase] = [replace(base, rest=traced.rest(phase))]
    return found, host


def stage_3(layout: Layout, traced: OneDevice, sharding: Sharding) -> Found:
    """Stage 3: moments by phase, and bytes in the host's memory."""
    width = sharding.compute_width or _width(layout)
    ranks = sharding.shards
    lasting = sum(p.numel for p in layout.parameters if p.numel < sharding.persistence) * width
    shards = sum(_ceil(p.numel, ranks) for p in layout.parameters) * width
    part = sum(_ceil(p.numel, ranks) for p in layout.trained)
    largest = max((p.numel for p in layout.parameters), default=0) * width
    trained = max((p.numel for p in layout.trained), default=0) * width
    masters = 0 if width == MASTER and not sharding.offload_optimizer else part * MASTER
    states = masters + layout.state_bytes(part, MASTER)
    reduced = part * width
    host = (states + reduced if sharding.offload_optimizer else 0) + (shards if sharding.offload_weights else 0)
    bucket = sharding.reduce_bucket * width
    base = PeakMoment(
        weights=lasting + (0 if sharding.offload_weights else shards),
        optimizer=0 if sharding.offload_optimizer else states,
        gradients=0 if sharding.offload_optimizer else reduced,
        communication=bucket,
    )
    stepping = 0 if sharding.offload_optimizer else min(part, sharding.sub_group) * MASTER
    gathered, arriving = (elements * width for elements in gathered_elements(layout, sharding))
    whole = replace(base, communication=bucket + gathered)
    found = {phase: [replace(whole, rest=traced.rest(phase))] for phase in traced.phases}
    found["loading"] = [
        replace(base, optimizer=0, gradients=0, communication=largest),
        replace(base, optimizer=min(masters, base.optimizer), communication=bucket + largest),
        replace(base, optimizer=min(masters, base.optimizer), gradients=stepping, communication=0),
    ]
    came = 1 / ranks if sharding.backend == "gloo" else 0
    arrival = replace(whole, communication=bucket + gathered + arriving)
    found["forward"] = [*found["forward"], replace(arrival, rest=traced.between())]
    if traced.gradients_in_head:
        found["head"] = [replace(each, gradients=each.gradients + trained) for each in found["head"]]
    filled = min(bucket, byte_sum(layout.trained, width))
    alone = trained if trained > bucket else 0
    found["backward"] = [
        replace(whole, gradients=base.gradients + trained, rest=traced.at_head()),
        replace(
            whole,
            gradients=base.gradients + alone,
            communication=bucket + gathered + int(came * alone),
            rest=traced.between(),
        ),
        replace(arrival, rest=traced.in_backward()),
        replace(whole, communication=bucket + gathered + int((1 + came) * filled), rest=traced.in_backward()),
    ]
    step = traced.temporaries(stepping, stepping)
    found["optimizer"] = [
        replace(
            base,
            gradients=base.gradients + stepping,
            optimizer=base.optimizer + step,
            rest=traced.rest("optimizer"),
        )
    ]
    if "saving" in found:
        one = largest if sharding.gather_on_save else 0
        found["saving"] = [replace(base, communication=bucket + one, rest=traced.rest("saving"))]
    return found, host


def gathered_elements(layout: Layout, sharding: Sharding) -> tuple[int, int]:
    """The most that stage 3 holds gathered while it computes, beside what it never lets go: what it wants again soon,
    what it computes with, and what it has gathered ahead; and the flat buffer that several parameters arrive in.

    Embedding and head are wanted in forward alone, where the head forms its gradient with its loss.
    """
    sizes = [p.numel for p in layout.parameters if p.numel >= sharding.persistence]
    every = sum(sizes)
    ahead = _gathered_ahead(sizes, min(sharding.prefetch, sharding.max_live))
    groups = [sizes[:1], *ahead]
    most = max((max(now) + sum(then) for now, then in pairwise(groups)), default=max(sizes, default=0))
    arriving = max((sum(group) for group in ahead if len(group) > 1), default=0)
    in_layers = [p.numel for p in layout.parameters if p.layer and p.numel >= sharding.persistence]
    soon = wanted_again(in_layers, sharding.max_reuse)
    return min(every, soon + most), arriving


def _gathered_ahead(sizes: Sequence[int], bucket: int) -> list[list[int]]:
    """What follows the first parameter, each group as large as the bucket or larger by one parameter."""
    groups: list[list[int]] = []
    for size in sizes[1:] if bucket else ():
        if not groups or sum(groups[-1]) >= bucket:
            groups.append([])
        groups[-1].append(size)
    return groups


def wanted_again(sizes: Sequence[int], distance: int) -> int:
    """Elements at the end of forward whose use in backward is within a distance: each is as far as twice what comes
    after it."""
    after = 0
    for size in reversed(sizes):
        if 2 * after >= distance:
            break
        after += size
    return after


def _touched(sizes: Iterable[int], part: int, ranks: int) -> int:
    """The most elements of whole parameters that any rank's partition cuts into."""
    touched = [0] * ranks
    start = 0
    for size in sizes:
        for rank in range(start // part, min((start + size - 1) // part + 1, ranks)):
            touched[rank] += size
        start += size
    return max(touched)


def _width(layout: Layout) -> int:
    return max((p.width for p in layout.trained or layout.parameters), default=MASTER)


def _ceil(count: int, ranks: int) -> int:
    return -(-count // ranks)


def _padded(count: int, multiple: int) -> int:
    return _ceil(count, multiple) * multiple
