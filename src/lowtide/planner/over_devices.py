"""The settings of a run over several devices: how it is spread, and the techniques beside, the fastest that fit.

A trace costs a second, and a way to share states costs none: it is a formula over a trace. So for each way the search
of one device runs (`planner.search`), and all of them ask the same traces: settings are traced once for each number of
ranks that split a micro-batch. Ways are tried from the one that would be fastest with the plain settings, and given up
where they cannot be faster than what was found.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from datasets import Dataset

from lowtide.memory.allocators.measure import bytes_text
from lowtide.planner.candidate import PlannedRun
from lowtide.planner.cluster import Cluster
from lowtide.planner.estimate import Estimate, RankTrace
from lowtide.planner.pieces import Searches
from lowtide.planner.search import STATES, Axis, Candidate, Refused, Search, Sizes
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


@dataclass
class Traces:
    """What was traced of a run, for all ways to spread it."""

    run: PlannedRun
    rows: Dataset
    spread_as_given: bool
    """Whether the user says how the run is spread."""
    known: dict[Any, RankTrace | Refused]

    def of(self, sharding: Sharding, options: Mapping[str, Any], tokens: int | None) -> RankTrace:
        """What a rank computes with some options and a token budget.

        Raises:
            Refused: they cannot work together or with this model, with the reason.
        """
        ranks = sharding.same_rows
        traced_with = dict(options) if tokens is None else {**options, "tokens_per_microbatch": tokens}
        several = ranks > 1 and not self.spread_as_given and ACCUMULATION not in self.run.requested
        if several:  # two micro-batches or more do the same, over and over
            traced_with[ACCUMULATION] = 2
        key = (sharding.sequence_parallel, sharding.tensor_parallel, repr(sorted(traced_with.items(), key=str)))
        if key not in self.known:
            try:
                faked = self.run.faked(self.rows, traced_with)
                self.known[key] = RankTrace.of(faked, self.run.device, sharding)
            except ValueError as reason:
                self.known[key] = Refused(str(reason))
        found = self.known[key]
        if isinstance(found, Refused):
            raise found
        return found.repeated(ranks / 2) if several else found

    @functools.cached_property
    def weights(self) -> int:
        """Bytes of the whole model."""
        return byte_sum(self.run.faked(self.rows, {}).layout().parameters)


@dataclass(frozen=True)
class Way:
    """One way to spread a run."""

    sharding: Sharding
    cluster: Cluster
    traces: Traces

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

    def found(self, best: Candidate) -> Candidate:
        """What a search found, spread so."""
        return best._replace(sharding=self.sharding, spread_by=self.options())

    def options(self) -> dict[str, Any]:
        """Those that spread the run so. Ranks that split a micro-batch take more of them, so that a step has as many
        rows as without."""
        requested, ranks = self.traces.run.requested, self.sharding.same_rows
        if self.traces.spread_as_given:
            return {}
        found = options_of(self.sharding)
        if ranks > 1 and ACCUMULATION not in requested:
            found[ACCUMULATION] = ranks
        return found


@dataclass(frozen=True)
class Ways:
    """What a plan chooses from."""

    traces: Traces
    offered: Callable[[Sizes], Sequence[Axis]]
    """What is chosen beside, for sizes of a micro-batch."""
    sizes: Sizes
    pieces: Sizes | None
    """Of rows in pieces; None where none may be cut."""
    room: float
    """Bytes that a peak may take."""

    def over(self, cluster: Cluster, shardings: Sequence[Sharding]) -> tuple[list[Candidate], dict[str, str]]:
        """The best way and those behind it, each with its best settings; and those that cannot work, with the reason.
        Best is the fastest, or a simpler one that is about as fast."""
        searches, refused = self._searches(cluster, shardings)
        hoped = [(1 / (_plain(each).tokens_per_second or 1.0), number) for number, (_, each) in searches.items()]
        worth, found = float("inf"), dict[int, Candidate]()
        for least, number in sorted(hoped):
            way, of_way = searches[number]
            best = next(iter(of_way.fitting(worth=worth)), None) if least <= worth else None
            if best is not None:
                found[number] = way.found(best)
                worth = worth if best.is_last_resort else min(worth, best.cost * ALIKE)
        if not found:
            return [], refused
        order = sorted(found, key=lambda each: (found[each].is_last_resort, found[each].cost))
        limit = found[order[0]].cost * ALIKE
        alike = [each for each in order if found[each].cost <= limit and not found[each].is_last_resort]
        simplest = min(alike, default=order[0])
        return [found[simplest], *(found[each] for each in order if each != simplest)], refused

    def _searches(
        self, cluster: Cluster, shardings: Sequence[Sharding]
    ) -> tuple[dict[int, tuple[Way, Searches]], dict[str, str]]:
        searches, refused = dict[int, tuple[Way, Searches]](), dict[str, str]()
        for number, sharding in enumerate(shardings):
            way = Way(sharding, cluster, self.traces)
            of_way = Searches(functools.partial(self._search, way), self.sizes, self.pieces)
            try:
                _plain(of_way)
            except Refused as reason:
                refused[sharding_name(sharding)] = str(reason)
            else:
                searches[number] = way, of_way
        return searches, refused

    def _search(self, way: Way, sizes: Sizes) -> Search:
        """Beside a way everything is chosen but what several ranks refuse."""
        shared = [
            replace(axis, choices=[each for each in axis.choices if not set(ALONE) & set(each.options)])
            for axis in self.offered(sizes)
        ]
        left = [axis for axis in shared if axis.scales or len(axis.choices) > 1]
        return Search(way.measured, left, sizes, self.room)

    def least(self, cluster: Cluster, shardings: Sequence[Sharding]) -> tuple[Candidate, dict[str, str]]:
        """What takes least, whether it fits or not, of the ways that hold the smallest states; and the ways that cannot
        work, with the reason.

        Raises:
            Refused: no way can work.
        """
        searches, refused = self._searches(cluster, shardings)
        if not searches:
            raise Refused("; ".join(f"{name}: {why}" for name, why in refused.items()))
        states = {number: _states(_plain(each)) for number, (_, each) in searches.items()}
        split = max(searches, key=lambda number: searches[number][0].sharding.same_rows)
        tried = [searches[number] for number in {min(states, key=lambda each: states[each]), split}]
        found = (way.found(of_way.smallest()) for way, of_way in tried)
        return min(found, key=lambda each: each.peak), refused

    def least_that_fits(self, cluster: Cluster, shardings: Sequence[Sharding]) -> list[Candidate]:
        """What takes least, where predictions were too high for all that fits; empty if it does not fit either."""
        with contextlib.suppress(Refused):
            least, _ = self.least(cluster, shardings)
            return [least] if least.peak <= self.room else []
        return []


def _plain(searches: Searches) -> Estimate:
    """Whole rows with the plain settings."""
    return searches.whole.traced(searches.whole.plain, None)


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
