"""The settings of a run for a budget: the fastest that fit, those behind them, and what each technique would do."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import yaml
from datasets import Dataset

from lowtide.memory.allocators.measure import bytes_text
from lowtide.planner.answers.assumptions import assumptions_of, files_dtype, in_bfloat16, stored_dtype, with_it
from lowtide.planner.answers.ways_out import is_taken, ways_out
from lowtide.planner.candidate import PlannedRun, counted_weights, measured, prepared_rows
from lowtide.planner.choices import Setting, axes
from lowtide.planner.cluster import Cluster
from lowtide.planner.estimate import BANDS
from lowtide.planner.parallel import processes_at_once
from lowtide.planner.pieces import Searches, sizes_in_pieces
from lowtide.planner.search import HOLES, Candidate, Measured, Refused, Search, Sizes
from lowtide.ranks.sharding import Sharding
from lowtide.run.engine import computed_in
from lowtide.run.options.configs import config_class

RUNNERS_UP = 3
IN_PIECES = "rows in pieces"
DATA = "DATA"
"""Stands for the rows to train on, in commands where nobody has named any."""
NARROWEST = 8
"""How many times the 4 bits of a weight that is not exact go into those of float32."""
STREAMS = ("base_weights", "trained_weights")
"""Options with which weights need not be resident."""


class PlanError(ValueError):
    """Nothing that may be chosen fits the budget.

    Attributes:
        peak_bytes: the least that was found.
        settings: with which.
        ways: what would help, as a user of the command line writes it, each with what it does.
    """

    def __init__(
        self, message: str, peak_bytes: int, settings: Mapping[str, Any], ways: Sequence[str] = (), room: int = 0
    ) -> None:
        super().__init__(message)
        self.reason, self.peak_bytes, self.settings = message, peak_bytes, dict(settings)
        self.ways, self.room = tuple(ways), room

    def __str__(self) -> str:
        return f"{self.reason} Ways out: {'; '.join(self.ways)}." if self.ways else self.reason

    def __reduce__(self) -> tuple:
        """For pickle, which else calls a class with the message alone."""
        return type(self), (self.reason, self.peak_bytes, self.settings, self.ways, self.room)

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return {
            "fits": False,
            "reason": self.reason,
            "peak_bytes": self.peak_bytes,
            "budget_bytes": self.room,
            "spare_bytes": self.room - self.peak_bytes,
            "settings": self.settings,
            "ways": list(self.ways),
        }


class BelowWeights(PlanError):
    """The budget is below the weights alone: no settings that are exact, or else no 4 bits, could fit it."""


@dataclass(frozen=True)
class Alternative:
    """Settings, and what is predicted of them."""

    settings: Mapping[str, Any]
    """Those that differ from the defaults and are not the user's own."""
    peak_bytes: int
    seconds: float
    """Of a token, as a multiple of the plan's."""
    tokens_per_second: float | None = None
    changes: tuple[str, ...] = ()
    """What they change in the numbers; empty where they are exact."""
    traced: bool = True
    """False where it is predicted from the traces of other settings."""
    way: str = ""
    """How the run is spread over several devices."""


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


@dataclass(frozen=True)
class Effect:
    """What one choice would do by itself, against the plain settings: no checkpointing, one micro-batch."""

    technique: str
    settings: Mapping[str, Any]
    saved_bytes: int
    """Of the peak; below 0 where it takes more."""
    seconds: float
    """As a multiple."""
    changes: str | None = None


@dataclass(frozen=True)
class Plan:
    """The fastest settings that fit a budget."""

    method: str
    requested: Mapping[str, Any]
    """The user's own settings, model and dataset among them."""
    chosen: Alternative
    budget_bytes: int
    device: str
    estimate: Any
    """Of the run with the settings."""
    runners_up: tuple[Alternative, ...] = ()
    techniques: tuple[Effect, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    """Choices that cannot work with this model, and why."""
    notes: tuple[str, ...] = ()
    speed_by: str = "relative costs"
    """`roofline`, or what stands in for it."""
    traces: int = 0
    spread: Spread | None = None
    """Over several devices; the budget and the peak are those of each."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """What was chosen beyond defaults and the user's own settings."""
        return self.chosen.settings

    @property
    def start_bytes(self) -> int:
        """The peak before the first forward, while the run starts."""
        return self.estimate.start_bytes

    def to_yaml(self) -> str:
        """A run file: `lowtide sft --config` on it, or the method's own command, runs it."""
        head = (
            f"# lowtide {self.method}: predicted peak {bytes_text(self.chosen.peak_bytes)} of "
            f"{bytes_text(self.budget_bytes)} on {self.device}.\n"
        )
        own = yaml.safe_dump(dict(self.requested), sort_keys=False, allow_unicode=True) if self.requested else ""
        if self.spread is not None:
            head += f"# {self.spread.cluster}: {self.chosen.way}.\n# {self.launch('FILE')}\n"
        if not self.names_rows:
            head += f"# It names no rows: add `dataset:`, or --dataset {DATA} on the command line.\n"
        changes = "".join(f"# Not exact: {change}.\n" for change in self.chosen.changes)
        settings = {**self.settings, **(self.spread.of_launcher if self.spread else {})}
        chosen = yaml.safe_dump(settings, sort_keys=False) if settings else "# nothing but defaults\n"
        return f"{head}{own}\n# Chosen for the budget.\n{changes}{chosen}"

    @property
    def names_rows(self) -> bool:
        """Whether the run file says what to train on; not where the rows were given by their lengths, or as objects."""
        return bool(self.requested.get("dataset") or self.requested.get("datasets"))

    def launch(self, file: str) -> str:
        """The command that runs a run file, with a placeholder where the file names no rows."""
        command = self.spread.launch(self.method, file) if self.spread else f"lowtide {self.method} --config {file}"
        return command if self.names_rows else f"{command} --dataset {DATA}"

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it."""
        named = asdict(self) | {"estimate": self.estimate.to_dict(), "settings": dict(self.settings)}
        named |= {
            "start_bytes": self.start_bytes,
            "fits": True,
            "spare_bytes": self.budget_bytes - self.chosen.peak_bytes,
        }
        return json.loads(json.dumps(named, default=str))

    def summary(self) -> str:
        """The plan in one line."""
        where = self.device if self.spread is None else f"each of {self.spread.cluster}, {self.chosen.way}"
        return (
            f"{bytes_text(self.budget_bytes)} on {where}: {settings_text(self.settings)}; predicted peak "
            f"{bytes_text(self.chosen.peak_bytes)}"
        )

    def __str__(self) -> str:
        lines = [f"memory budget {self.summary()}", *(f"not exact: {change}" for change in self.chosen.changes)]
        lines += [
            f"behind it: {settings_text(each.settings)}, {bytes_text(each.peak_bytes)}" for each in self.runners_up
        ]
        return "\n".join([*lines, *self.notes])


def settings_text(settings: Mapping[str, Any]) -> str:
    """`name=value, ...`."""
    return ", ".join(f"{name}={value}" for name, value in settings.items()) or "the defaults fit"


def make_plan(
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
    """The fastest settings of a run that fit a budget.

    Args:
        run: what is planned.
        rows: as the trainer takes them.
        room: the budget, in bytes.
        exact: whether only settings are chosen that leave the numbers alone.
        explain: whether runners-up and the effect of each technique are wanted, which take more traces.
        source: the user's own settings as a run file has them, model and dataset among them.
        streamed: whether the run reads its rows while it trains.

    Raises:
        PlanError: nothing fits; says what takes most, and what would be needed.
        ValueError: the run cannot be planned, with the reason.
    """
    check_weights(run, rows, room, exact=exact, streamed=streamed)
    prepared, sizes, of_rows = prepared_rows(run, rows)
    setting = setting_of(run, exact=exact, streamed=streamed)

    def search_of(sizes: Sizes) -> Search:
        measure = partial(measured, run, prepared)
        return Search(measure, axes(setting, sizes), sizes, room / (1 + BANDS[run.device.kind]), processes_at_once())

    searches = Searches(search_of, sizes, None if run.whole_rows else sizes_in_pieces(sizes))
    _refuse_below(*_traced_weights(searches.whole), run, room, exact=exact, streamed=streamed)
    found = searches.best(RUNNERS_UP if explain else 0)
    if not found:
        raise _nothing_fits(searches, room, run, exact, streamed)
    search, best = found[0]
    chosen, *others = (_option(each.search, each.candidate, best) for each in found)
    assert best.measured is not None
    return Plan(
        method=run.method.name,
        requested={name: value for name, value in (source or run.requested).items() if name != "memory_budget"},
        chosen=chosen,
        budget_bytes=room,
        device=run.device.name,
        estimate=replace(
            best.measured.estimate,
            room_bytes=room,
            assumptions=assumptions_of(run, search.settings(best), best.measured.estimate),
        ),
        runners_up=tuple(others),
        techniques=tuple(_effects(searches.whole, sizes)) if explain else (),
        refused=_refusals(searches),
        notes=(*notes, *of_rows, *best.measured.estimate.notes, *_proposed(run, search, prepared, best)),
        speed_by="relative costs" if best.measured.tokens_per_second is None else "roofline",
        traces=searches.traces,
    )


def setting_of(run: PlannedRun, *, exact: bool, streamed: bool) -> Setting:
    """What there is to choose from."""
    plain, defaults = run.config({}), config_class(run.method)(output_dir="plan", use_cpu=True, report_to="none")
    stored = {"dtype"} if "dtype" in (plain.model_init_kwargs or {}) else set()
    return Setting(
        names={*vars(plain), "dtype", "use_peft"} - stored,
        defaults=vars(defaults),
        requested=run.requested,
        device_kind=run.device.kind,
        exact=exact,
        adapters=run.peft_config is not None,
        streamed=streamed,
        dtype=str(stored_dtype(run)).removeprefix("torch."),
        files_dtype=files_dtype(run, computed_in(plain)) if run.peft_config is not None else "",
    )


def _option(search: Search, candidate: Candidate, best: Candidate) -> Alternative:
    rate = best.measured.tokens_per_second if best.measured else None
    seconds = candidate.cost / best.cost
    rate = None if rate is None else rate / seconds
    traced = candidate.measured is not None
    return Alternative(
        search.settings(candidate), int(candidate.peak), seconds, rate, search.changes(candidate), traced
    )


def _effects(search: Search, sizes: Sizes) -> list[Effect]:
    plain = search.traced(search.plain, None)

    def seconds(alone: Measured, otherwise: float) -> float:
        if plain.tokens_per_second is None or alone.tokens_per_second is None:
            return otherwise
        return plain.tokens_per_second / alone.tokens_per_second

    found = [
        Effect(
            choice.name,
            choice.options,
            int(plain.peak - alone.peak),
            seconds(alone, choice.slower) if choice.timed else choice.slower,
            choice.changes,
        )
        for choice, alone in search.alone()
    ]
    if sizes.longest < sizes.whole:
        least = search.traced(search.plain, sizes.longest)
        options = {"tokens_per_microbatch": sizes.longest}
        cost = search.cost(search.plain, sizes.longest) / search.cost(search.plain, None)
        found.append(Effect("token budget", options, int(plain.peak - least.peak), seconds(least, cost)))
    return sorted(found, key=lambda each: -each.saved_bytes)


def _refusals(searches: Searches) -> dict[str, str]:
    """Of choices that were refused by themselves, and of rows in pieces."""
    search = searches.whole
    pieces = {} if searches.why_whole is None else {IN_PIECES: searches.why_whole}
    return pieces | {
        next(
            choice.name for choice, number in zip(search.choices(combination), combination, strict=True) if number
        ): why
        for (combination, _), why in search.refused.items()
        if sum(number > 0 for number in combination) == 1
    }


def _on_the_host(estimate: Any) -> tuple[str, ...]:
    """What a run keeps in host memory while it trains."""
    if not estimate.host_bytes:
        return ()
    return (f"{bytes_text(estimate.host_bytes)} of host memory are needed beside the device's.",)


def _proposed(run: PlannedRun, search: Search, prepared: Dataset, best: Candidate) -> tuple[str, ...]:
    """What a plan needs of the host; and frozen weights in bfloat16, where they are float32."""
    assert best.measured is not None
    on_host = _on_the_host(best.measured.estimate)
    settings = search.options(best.combination)
    there = in_bfloat16(run, settings)
    if there is None:
        return on_host
    try:
        other = measured(run, prepared, {**settings, "dtype": "bfloat16"}, best.tokens)
    except Refused:
        return on_host
    return (*on_host, *with_it(there, other.peak, best.peak))


COMPUTING = ("forward", "backward")
"""The phases in which layers are computed, and hold at least a layer of streamed weights."""


def check_weights(run: PlannedRun, rows: Dataset, room: int, *, exact: bool = True, streamed: bool = False) -> None:
    """Refuses a budget below the weights as they are counted, before rows are prepared and anything is traced.

    Args:
        run: what is planned.
        rows: as the trainer takes them.
        room: the budget, in bytes.
        exact, streamed: as `make_plan` takes them.

    Raises:
        BelowWeights: it is below the weights, and below a layer of them where they can be streamed.
    """
    if (counted := counted_weights(run, rows)) is not None:
        _refuse_below(counted.whole, [counted.layer], run, room, exact=exact, streamed=streamed)


def _refuse_below(
    weights: int, streaming: Iterable[int], run: PlannedRun, room: int, *, exact: bool, streamed: bool
) -> None:
    """Refuses a budget below the fewest bytes that weights take: only those that are streamed take fewer, and only
    settings that are not exact store them in fewer bits."""
    most = room if exact else room * NARROWEST
    if weights > most and all(each > most for each in streaming):
        raise BelowWeights(
            f"the budget of {bytes_text(room)} is below the weights, which take {bytes_text(weights)} by themselves"
            f"{'' if exact else f', and in 4 bits {bytes_text(weights // NARROWEST)}'}.",
            weights,
            {},
            ways_out(run, exact=exact, streamed=streamed),
            room,
        )


def _traced_weights(search: Search) -> tuple[int, Iterator[int]]:
    """Bytes of weights as traces find them: of the settings as they are, and of each choice that streams weights."""
    return _weights(search.traced(search.plain, None)), map(_weights, search.alone_with(STREAMS))


def _weights(measured: Measured) -> int:
    """Bytes of weights that are there whenever a model is trained on; of streamed ones, in each phase of that."""
    return int(min(phase.get("weights", 0) for name, phase in measured.phases.items() if name in COMPUTING))


def _nothing_fits(searches: Searches, room: int, run: PlannedRun, exact: bool, streamed: bool) -> PlanError:
    try:
        search, least = searches.smallest()
    except Refused as reason:
        return PlanError(str(reason), 0, {}, room=room)
    assert least.measured is not None
    option = _option(search, least, least)
    phase = max(least.measured.phases.values(), key=lambda each: sum(each.values()) - each.get(HOLES, 0))
    inside = {name: size for name, size in phase.items() if name not in ("runtime", HOLES) or size > room}
    (name, size), *_ = Counter(inside).most_common()
    whole = "" if searches.why_whole is None else f" {IN_PIECES.capitalize()} cannot work here: {searches.why_whole}."
    return PlanError(
        f"nothing fits {bytes_text(room)} on {run.device.name}, {BANDS[run.device.kind]:.0%} of it left for what an "
        f"estimate may miss. The smallest peak found is {bytes_text(option.peak_bytes)} "
        f"({settings_text(option.settings)}); most of it is {name}, {bytes_text(size)}. "
        f"{ADVICE.get(name, ADVICE['weights'])}.{whole}",
        option.peak_bytes,
        option.settings,
        tuple(way for way in ways_out(run, exact=exact, streamed=streamed) if not is_taken(way, option.settings)),
        room,
    )


ADVICE = {
    "weights": "It needs a smaller model, or a device with more memory",
    "gradients": "It needs a smaller model, adapters (use_peft), or a device with more memory",
    "optimizer": "It needs a smaller model, adapters (use_peft), or a device with more memory",
    "reference": "It needs adapters (use_peft), whose reference is the model without them, or precomputed log-probs, "
    "where the method has precompute_ref_log_probs",
    "activations": "It needs shorter rows (max_length), a smaller model, or a device with more memory",
    "keys": "It needs shorter rows (max_length), or a device with more memory",
    "head": "It needs shorter rows (max_length), a smaller vocabulary, or a device with more memory",
    "runtime": "That is the process itself, before any tensor: the budget is too small for any model",
}
"""What would be needed, by what takes most."""
