"""The settings of a run over several devices: how it is spread, and the techniques beside, the fastest that fit.

A trace costs a second, and a way to share states costs none: it is a formula over a trace. So for each way the search
of one device runs (`planner.search`), and all of them ask the same traces: settings are traced once for each number of
ranks that split a micro-batch. Ways are tried from the one that would be fastest with the plain settings, and given up
where they cannot be faster than what was found.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lowtide.memory.allocators.measure import bytes_text
from lowtide.planner.candidate import PlannedRun
from lowtide.planner.choices import Asked
from lowtide.planner.cluster import Cluster
from lowtide.planner.estimate import Estimate, RankTrace
from lowtide.planner.pieces import Searches
from lowtide.planner.search import STATES, Candidate, Refused, Search, Sizes
from lowtide.planner.sharding.degrees import options_of, sharding_name, shardings_over
from lowtide.planner.sharding.layout import byte_sum
from lowtide.ranks.sharding import Sharding
from lowtide.run.options.sharding import SAY_HOW, sharding_said

ALIKE = 1.1
"""A simpler way that takes this much longer is preferred: predicted speeds are no closer than that."""
ACCUMULATION = "gradient_accumulation_steps"
ALONE = ("optimizer_in_backward", "optimizer_states_on_host", "ref_model_storage", "base_weights")
"""Options that a plan leaves out where states are shared: refused, or done by offloading shards."""


def rate_of_all(found: Candidate) -> float:
    """Tokens a second of all devices together."""
    assert found.estimate is not None
    assert found.sharding is not None
    return (found.estimate.tokens_per_second or 0.0) * found.sharding.devices


@dataclass(frozen=True)
class Spread:
    """How a run is spread over several devices, and what is predicted of all of them."""

    sharding: Sharding
    cluster: Cluster
    host_bytes: int
    """That the host of each node holds while the run trains."""
    loading_bytes: int
    """That it holds while the run begins: the files of the model once, mapped, where processes cut their parts from
    them; else the whole model for each process."""
    tokens_per_second: float
    """Of all devices together."""
    cost: float | None = None
    """Device-seconds a token, over those of the best plan of one node; None where nothing fits there, or it was not
    asked."""

    def launch(self, method: str, file: str) -> str:
        """The command that runs a run file."""
        if self.cluster.nodes == 1:
            return f"lowtide {method} --config {file}"
        return (
            f"torchrun --nnodes {self.cluster.nodes} --nproc_per_node {self.cluster.per_node} --rdzv_backend c10d "
            f"--rdzv_endpoint FIRST-NODE:29500 -m lowtide {method} --config {file}"
        )

    @property
    def of_launcher(self) -> dict[str, int]:
        """What a run file says to start the processes, which `torchrun` does on several nodes."""
        return {"num_processes": self.cluster.devices} if self.cluster.nodes == 1 and self.cluster.devices > 1 else {}

    @property
    def notes(self) -> tuple[str, ...]:
        """What a host lacks."""
        if self.loading_bytes <= self.cluster.host_bytes or self.sharding.cuts_files:
            return ()
        return (
            f"the processes of a node load the whole model each, {bytes_text(self.loading_bytes)} together, and its "
            f"host has {bytes_text(self.cluster.host_bytes)}: it needs more memory than that, or swap, to begin",
        )


@dataclass
class Traces:
    """What was traced of a run, for all ways to spread it."""

    asked: Asked
    spread_as_given: bool
    """Whether the user says how the run is spread."""
    wanted: set[Any] = field(default_factory=set)
    """What a plan asked for; those of `PlannedRun.known` may be of other plans."""

    def of(self, sharding: Sharding, options: Mapping[str, Any], tokens: int | None) -> RankTrace:
        """What a rank computes with some options and a token budget.

        Raises:
            Refused: they cannot work together or with this model, with the reason.
        """
        run, ranks = self.asked.run, sharding.same_rows
        traced_with = dict(options) if tokens is None else {**options, "tokens_per_microbatch": tokens}
        several = ranks > 1 and not self.spread_as_given and ACCUMULATION not in run.requested
        if several:  # two micro-batches or more do the same, over and over
            traced_with[ACCUMULATION] = 2
        key = (sharding.sequence_parallel, sharding.tensor_parallel, repr(sorted(traced_with.items(), key=str)))
        self.wanted.add(key)
        if key not in run.known:
            try:
                faked = run.faked(self.asked.rows, traced_with)
                run.known[key] = RankTrace.of(faked, run.device, sharding)
            except ValueError as reason:
                run.known[key] = Refused(str(reason))
        found = run.known[key]
        if isinstance(found, Refused):
            raise found
        return found.repeated(ranks / 2) if several else found

    @functools.cached_property
    def weights(self) -> int:
        """Bytes of the whole model."""
        return byte_sum(self.asked.run.faked(self.asked.rows, {}).layout().parameters)


@dataclass(frozen=True)
class Way:
    """One way to spread a run, with the searches over everything else."""

    sharding: Sharding
    cluster: Cluster
    traces: Traces

    @functools.cached_property
    def searches(self) -> Searches:
        """Over what is chosen beside."""
        return self.traces.asked.searches(self._search)

    def _search(self, sizes: Sizes) -> Search:
        """Of everything but what several ranks refuse."""
        asked = self.traces.asked
        shared = [
            replace(axis, choices=[each for each in axis.choices if not set(ALONE) & set(each.options)])
            for axis in asked.axes(sizes)
        ]
        left = [axis for axis in shared if axis.scales or len(axis.choices) > 1]
        return Search(self.measured, left, sizes, asked.most)

    def measured(self, options: Mapping[str, Any], tokens: int | None) -> Estimate:
        """What a rank takes.

        Raises:
            Refused: the settings cannot work, or the hosts have not enough memory for what lies there.
        """
        beside = self.cluster.device.context_bytes
        found = self.traces.of(self.sharding, options, tokens).estimate(self.sharding, self.cluster, beside)
        on_host = found.host_bytes * self.cluster.per_node
        if on_host > self.cluster.host_bytes:
            raise Refused(
                f"the host of a node would hold {bytes_text(on_host)}, and has {bytes_text(self.cluster.host_bytes)}"
            )
        return found

    def best(self, worth: float) -> Candidate | None:
        """The fastest settings that fit; None where none do, or they cost more than is wanted."""
        return next(map(self._found, self.searches.fitting(worth=worth)), None)

    def smallest(self) -> Candidate:
        """The settings that take least."""
        return self._found(self.searches.smallest())

    def _found(self, candidate: Candidate) -> Candidate:
        """What a search found, spread so."""
        return candidate._replace(sharding=self.sharding, spread_by=self.options())

    def options(self) -> dict[str, Any]:
        """Those that spread the run so. Ranks that split a micro-batch take more of them, so that a step has as many
        rows as without."""
        ranks = self.sharding.same_rows
        if self.traces.spread_as_given:
            return {}
        found = options_of(self.sharding)
        if ranks > 1 and ACCUMULATION not in self.traces.asked.run.requested:
            found[ACCUMULATION] = ranks
        return found


class OverDevices:
    """What a plan chooses from, where several devices share the run.

    Args:
        asked: the question.
        given: the run with what the user says of engines.
        cluster: the devices.
        shardings: the ways to share it.
    """

    def __init__(self, asked: Asked, given: PlannedRun, cluster: Cluster, shardings: Sequence[Sharding]) -> None:
        self.asked, self.given, self.cluster, self.shardings = asked, given, cluster, shardings
        self.traces = Traces(asked, says_how(given))
        self.refused: dict[str, str] = {}
        """Ways that cannot work, with the reason."""

    def best(self) -> list[Candidate]:
        """What is chosen, and what is behind it; where predictions were too high for all that fits, what takes least.
        Empty if nothing fits."""
        found, self.refused = self._over(self.cluster, self.shardings)
        if found:
            return found
        with contextlib.suppress(Refused):
            least = self.smallest()
            return [least] if least.peak <= self.asked.most else []
        return []

    def smallest(self) -> Candidate:
        """What takes least, whether it fits or not, of the ways that hold the smallest states.

        Raises:
            Refused: no way can work.
        """
        ways, refused = self._ways(self.cluster, self.shardings)
        if not ways:
            raise Refused("; ".join(f"{name}: {why}" for name, why in refused.items()))
        fewest = min(range(len(ways)), key=lambda number: _states(ways[number].searches.plain()))
        split = max(range(len(ways)), key=lambda number: ways[number].sharding.same_rows)
        return min((ways[number].smallest() for number in {fewest, split}), key=lambda each: each.peak)

    def told(self, best: Candidate) -> dict[str, Any]:
        """What the plan of the one that is chosen says beside: fields of `Plan`."""
        estimate, sharding, traces = best.estimate, best.sharding, len(self.traces.wanted)
        assert estimate is not None
        assert sharding is not None
        per_node = self.cluster.per_node
        spread = Spread(
            sharding,
            self.cluster,
            host_bytes=estimate.host_bytes * per_node,
            loading_bytes=self.traces.weights * (1 if sharding.cuts_files else per_node),
            tokens_per_second=rate_of_all(best),
            cost=self._cost(best) if self.asked.explain else None,
        )
        return {
            "estimate": replace(estimate, room_bytes=self.asked.room),
            "notes": spread.notes,
            "speed_by": "roofline",
            "traces": traces,
            "spread": spread,
        }

    def _cost(self, best: Candidate) -> float | None:
        """Device-seconds a token, over those of the best plan of one node; None where nothing fits there."""
        if self.cluster.nodes == 1:
            return 1.0
        node = self.cluster.node()
        try:
            found, _ = self._over(node, shardings_of(self.given, node))
        except ValueError:  # the sizes that the user gives are of more ranks
            return None
        if not found:
            return None
        return rate_of_all(found[0]) / node.devices / (rate_of_all(best) / self.cluster.devices)

    def _over(self, cluster: Cluster, shardings: Sequence[Sharding]) -> tuple[list[Candidate], dict[str, str]]:
        """The best way and those behind it, each with its best settings; and those that cannot work, with the reason.
        Best is the fastest, or a simpler one that is about as fast."""
        ways, refused = self._ways(cluster, shardings)
        hoped = sorted((1 / (way.searches.plain().tokens_per_second or 1.0), number) for number, way in enumerate(ways))
        worth, found = float("inf"), dict[int, Candidate]()
        for least, number in hoped:
            best = ways[number].best(worth) if least <= worth else None
            if best is not None:
                found[number] = best
                worth = worth if best.is_last_resort else min(worth, best.cost * ALIKE)
        if not found:
            return [], refused
        order = sorted(found, key=lambda each: (found[each].is_last_resort, found[each].cost))
        limit = found[order[0]].cost * ALIKE
        alike = [each for each in order if found[each].cost <= limit and not found[each].is_last_resort]
        simplest = min(alike, default=order[0])
        return [found[simplest], *(found[each] for each in order if each != simplest)], refused

    def _ways(self, cluster: Cluster, shardings: Sequence[Sharding]) -> tuple[list[Way], dict[str, str]]:
        """Those that can work, simplest first; and why others cannot."""
        ways, refused = [], {}
        for sharding in shardings:
            way = Way(sharding, cluster, self.traces)
            try:
                way.searches.plain()
            except Refused as reason:
                refused[sharding_name(sharding)] = str(reason)
            else:
                ways.append(way)
        return ways, refused


def _states(found: Estimate) -> float:
    return max(sum(phase.get(name, 0) for name in STATES) for phase in found.phases.values())


def says_how(run: PlannedRun) -> bool:
    """Whether the user says how the run is spread."""
    return any(run.requested.get(name, default) != default for name, default in SAY_HOW.items())


def without_engines(requested: Mapping[str, Any]) -> dict[str, Any]:
    """For a trace, which is of one rank."""
    return {name: value for name, value in requested.items() if name not in SAY_HOW}


def shardings_of(run: PlannedRun, cluster: Cluster) -> list[Sharding]:
    """Those that may be chosen: the one that the user asks for, or all.

    Raises:
        ValueError: the one that the user asks for cannot be done, or is not predicted.
    """
    if says_how(run):
        found = sharding_said(run.requested, cluster.devices)
        if found.pipeline_parallel > 1:
            raise ValueError(f"a plan over devices does not predict {found}: leave pipeline_parallel_size out")
        return [found]
    heads = getattr(run.described.get_text_config(), "num_attention_heads", 0) or 0
    ways = shardings_over(cluster, heads)
    return [way for way in ways if way.same_rows == 1] if run.method.taught else ways
