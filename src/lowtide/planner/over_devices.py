"""The settings of a run over several devices: how it is spread, and the techniques beside, the fastest that fit.

A trace costs a second, and a way to share states costs none: it is a formula over a trace. So for each way the search
of one device runs (`planner.search`), and all of them ask the same traces: settings are traced once for each number of
ranks that split a micro-batch. Ways are tried from the one that would be fastest with the plain settings, and given up
where they cannot be faster than what was found.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from datasets import Dataset

from lowtide.memory.allocators.measure import bytes_text
from lowtide.planner.answers.ways_out import ways_out
from lowtide.planner.candidate import PlannedRun, prepared_rows
from lowtide.planner.choices import axes
from lowtide.planner.cluster import Cluster
from lowtide.planner.estimate import BANDS, Estimate, RankTrace
from lowtide.planner.pieces import Found, Searches, sizes_in_pieces
from lowtide.planner.plan import (
    ADVICE,
    RUNNERS_UP,
    Alternative,
    Plan,
    PlanError,
    Spread,
    setting_of,
    settings_text,
)
from lowtide.planner.search import STATES, Axis, Candidate, Measured, Refused, Search, Sizes
from lowtide.planner.sharding.degrees import options_of, sharding_name, shardings_over
from lowtide.planner.sharding.layout import byte_sum
from lowtide.ranks.sharding import Sharding
from lowtide.run.options.sharding import SAY_HOW, sharding_said

ALIKE = 1.1
"""A simpler way that takes this much longer is preferred: predicted speeds are no closer than that."""
ACCUMULATION = "gradient_accumulation_steps"
ALONE = ("optimizer_in_backward", "optimizer_states_on_host", "ref_model_storage", "base_weights")
"""Options that a plan leaves out where states are shared: refused, or done by offloading shards."""


@dataclass(frozen=True)
class FoundWay:
    """A way to spread the run, with the settings beside."""

    sharding: Sharding
    candidate: Candidate
    settings: Mapping[str, Any]
    """Beyond the user's own."""
    changes: tuple[str, ...]
    last_resort: bool

    @property
    def estimate(self) -> Estimate:
        assert self.candidate.measured is not None
        return self.candidate.measured.estimate

    @property
    def tokens_per_second(self) -> float:
        """Of the whole run."""
        return (self.estimate.tokens_per_second or 0.0) * self.sharding.devices

    def beside(self, best: FoundWay) -> Alternative:
        """As a plan shows it, beside the best."""
        return Alternative(
            self.settings,
            int(self.candidate.peak),
            best.tokens_per_second / self.tokens_per_second,
            self.tokens_per_second,
            self.changes,
            way=sharding_name(self.sharding),
        )


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

    def measured(self, options: Mapping[str, Any], tokens: int | None) -> Measured:
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
        return Measured(found.phases, found.tokens_per_second, found)

    def found(self, best: Found) -> FoundWay:
        """What a search found."""
        search, candidate = best
        settings = self.options() | search.settings(candidate)
        return FoundWay(self.sharding, candidate, settings, search.changes(candidate), best.is_last_resort)

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
    room: float
    """Bytes that a peak may take."""

    def over(self, cluster: Cluster, shardings: Sequence[Sharding]) -> tuple[list[FoundWay], dict[str, str]]:
        """The best way and those behind it, each with its best settings; and those that cannot work, with the reason.
        Best is the fastest, or a simpler one that is about as fast."""
        searches, refused = self._searches(cluster, shardings)
        hoped = [(1 / (_plain(each).tokens_per_second or 1.0), number) for number, (_, each) in searches.items()]
        worth, found = float("inf"), dict[int, FoundWay]()
        for least, number in sorted(hoped):
            way, of_way = searches[number]
            best = next(iter(of_way.fitting(worth=worth)), None) if least <= worth else None
            if best is not None:
                found[number] = way.found(best)
                worth = worth if best.is_last_resort else min(worth, best.candidate.cost * ALIKE)
        if not found:
            return [], refused
        order = sorted(found, key=lambda each: (found[each].last_resort, found[each].candidate.cost))
        limit = found[order[0]].candidate.cost * ALIKE
        alike = [each for each in order if found[each].candidate.cost <= limit and not found[each].last_resort]
        simplest = min(alike, default=order[0])
        return [found[simplest], *(found[each] for each in order if each != simplest)], refused

    def _searches(
        self, cluster: Cluster, shardings: Sequence[Sharding]
    ) -> tuple[dict[int, tuple[Way, Searches]], dict[str, str]]:
        searches, refused = dict[int, tuple[Way, Searches]](), dict[str, str]()
        cut = None if self.traces.run.whole_rows else sizes_in_pieces(self.sizes)
        for number, sharding in enumerate(shardings):
            way = Way(sharding, cluster, self.traces)
            of_way = Searches(functools.partial(self._search, way), self.sizes, cut)
            try:
                _plain(of_way)
            except Refused as reason:
                refused[sharding_name(sharding)] = str(reason)
            else:
                searches[number] = way, of_way
        return searches, refused

    def _search(self, way: Way, sizes: Sizes) -> Search:
        return Search(way.measured, self.offered(sizes), sizes, self.room)

    def least(self, cluster: Cluster, shardings: Sequence[Sharding]) -> tuple[FoundWay, dict[str, str]]:
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
        return min(found, key=lambda each: each.candidate.peak), refused

    def least_that_fits(self, cluster: Cluster, shardings: Sequence[Sharding]) -> list[FoundWay]:
        """What takes least, where predictions were too high for all that fits; empty if it does not fit either."""
        with contextlib.suppress(Refused):
            least, _ = self.least(cluster, shardings)
            return [least] if least.candidate.peak <= self.room else []
        return []


def _plain(searches: Searches) -> Measured:
    """Whole rows with the plain settings."""
    return searches.whole.traced(searches.whole.plain, None)


def _states(measured: Measured) -> float:
    return max(sum(phase.get(name, 0) for name in STATES) for phase in measured.phases.values())


def plan_over(
    run: PlannedRun,
    rows: Dataset,
    room: int,
    *,
    exact: bool = True,
    explain: bool = True,
    source: Mapping[str, Any] | None = None,
    streamed: bool = False,
    notes: tuple[str, ...] = (),
) -> Plan:
    """The fastest way to spread a run that fits a budget, and its settings.

    Args:
        run: what is planned, and over which devices; what it says of engines is kept.
        rows: as the trainer takes them.
        room: the budget of each device, in bytes.
        exact: whether only settings are chosen that leave the numbers alone.
        explain: whether other ways are wanted, and the cost a token of one node.
        source: the user's own settings as a run file has them.
        streamed: whether the run reads its rows while it trains.
        notes: of the rows.

    Raises:
        PlanError: nothing fits; says what takes least.
        ValueError: the run cannot be planned, with the reason.
    """
    assert run.cluster is not None
    cluster, shardings = run.cluster, _shardings(run, run.cluster)
    alone = replace(run, requested=_without_engines(run.requested))
    prepared, sizes, of_rows = prepared_rows(alone, rows)
    traces = Traces(alone, prepared, _says_how(run), run.known)
    offered = functools.partial(_axes, alone, exact=exact, streamed=streamed)
    ways = Ways(traces, offered, sizes, room / (1 + BANDS[run.device.kind]))
    found, refused = ways.over(cluster, shardings)
    if not (found := found or ways.least_that_fits(cluster, shardings)):
        raise _nothing_fits(ways, alone, shardings, room, exact)
    best, *others = found
    estimate, loaded = best.estimate, traces.weights * (1 if best.sharding.cuts_files else cluster.per_node)
    return Plan(
        method=run.method.name,
        requested={name: value for name, value in (source or run.requested).items() if name != "memory_budget"},
        chosen=best.beside(best),
        budget_bytes=room,
        device=run.device.name,
        estimate=replace(estimate, room_bytes=room),
        runners_up=tuple(each.beside(best) for each in others[: RUNNERS_UP if explain else 0]),
        refused=refused,
        notes=(*notes, *of_rows, *estimate.notes, *_loading(loaded, best.sharding, cluster)),
        speed_by="roofline",
        traces=len(traces.known),
        spread=Spread(
            best.sharding,
            cluster,
            host_bytes=estimate.host_bytes * cluster.per_node,
            loading_bytes=loaded,
            tokens_per_second=best.tokens_per_second,
            cost=_cost(best, ways, run, cluster) if explain else None,
        ),
    )


def _loading(size: int, sharding: Sharding, cluster: Cluster) -> tuple[str, ...]:
    if size <= cluster.host_bytes or sharding.cuts_files:
        return ()
    return (
        f"the processes of a node load the whole model each, {bytes_text(size)} together, and its host has "
        f"{bytes_text(cluster.host_bytes)}: it needs more memory than that, or swap, to begin",
    )


def _says_how(run: PlannedRun) -> bool:
    """Whether the user says how the run is spread."""
    return any(run.requested.get(name, default) != default for name, default in SAY_HOW.items())


def _without_engines(requested: Mapping[str, Any]) -> dict[str, Any]:
    """For a trace, which is of one rank."""
    return {name: value for name, value in requested.items() if name not in SAY_HOW}


def _shardings(run: PlannedRun, cluster: Cluster) -> list[Sharding]:
    """Those that may be chosen: the one that the user asks for, or all.

    Raises:
        ValueError: the one that the user asks for cannot be done, or is not predicted.
    """
    if _says_how(run):
        found = sharding_said(run.requested, cluster.devices)
        if found.pipeline_parallel > 1:
            raise ValueError(f"a plan over devices does not predict {found}: leave pipeline_parallel_size out")
        return [found]
    heads = getattr(run.described.get_text_config(), "num_attention_heads", 0) or 0
    ways = shardings_over(cluster, heads)
    return [way for way in ways if way.same_rows == 1] if run.method.taught else ways


def _axes(run: PlannedRun, sizes: Sizes, *, exact: bool, streamed: bool) -> list[Axis]:
    """What is chosen beside: all but what several ranks refuse."""
    shared = [
        replace(axis, choices=[each for each in axis.choices if not set(ALONE) & set(each.options)])
        for axis in axes(setting_of(run, exact=exact, streamed=streamed), sizes)
    ]
    return [axis for axis in shared if axis.scales or len(axis.choices) > 1]


def _cost(best: FoundWay, ways: Ways, run: PlannedRun, cluster: Cluster) -> float | None:
    """Device-seconds a token, over those of the best plan of one node; None where nothing fits there."""
    if cluster.nodes == 1:
        return 1.0
    node = cluster.node()
    try:
        found, _ = ways.over(node, _shardings(run, node))
    except ValueError:  # the sizes that the user gives are of more ranks
        return None
    if not found:
        return None
    return found[0].tokens_per_second / node.devices / (best.tokens_per_second / cluster.devices)


def _nothing_fits(ways: Ways, run: PlannedRun, shardings: Sequence[Sharding], room: int, exact: bool) -> PlanError:
    assert run.cluster is not None
    cluster = run.cluster
    where = f"nothing fits {bytes_text(room)} on each of {cluster.devices} {cluster.device.name}"
    try:
        least, refused = ways.least(cluster, shardings)
    except Refused as reason:
        return PlanError(f"{where}: {reason}", 0, {}, room=room)
    held = {name: size for name, size in least.estimate.phases[least.estimate.phase].items() if name != "runtime"}
    (name, size), *_ = Counter(held).most_common()
    with_what = f"{sharding_name(least.sharding)}; {settings_text(least.settings)}"
    others = next((f"{way} is left out: {why}. " for way, why in refused.items()), "")
    return PlanError(
        f"{where}, {BANDS[cluster.device.kind]:.0%} of it left for what an estimate may miss. The smallest peak found "
        f"is {bytes_text(int(least.candidate.peak))} ({with_what}); "
        f"most of it is {name}, {bytes_text(int(size))}. {others}{ADVICE.get(name, ADVICE['weights'])}, or more of "
        "them.",
        int(least.candidate.peak),
        least.settings,
        ways_out(run, exact=exact),
        room,
    )
