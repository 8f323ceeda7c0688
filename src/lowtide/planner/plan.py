"""The settings of a run for a budget: the fastest that fit, those behind them, and what each technique would do."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import yaml
from datasets import Dataset

from lowtide.memory.allocators.measure import bytes_text
from lowtide.planner.answers.assumptions import assumptions_of, in_bfloat16, with_it
from lowtide.planner.answers.ways_out import is_taken, ways_out
from lowtide.planner.candidate import PlannedRun, counted_weights, measured, prepared_rows
from lowtide.planner.choices import Asked
from lowtide.planner.estimate import BANDS, Estimate
from lowtide.planner.over_devices import OverDevices, Spread, rate_of_all, shardings_of, without_engines
from lowtide.planner.parallel import processes_at_once
from lowtide.planner.search import HOLES, Candidate, Patience, Refused, Search, Sizes
from lowtide.planner.sharding.degrees import sharding_name

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


def _with_text_keys(value: Any) -> Any:
    """A value with each key of its mappings as text: a device has rates by dtype."""
    if isinstance(value, Mapping):
        return {str(key).removeprefix("torch."): _with_text_keys(each) for key, each in value.items()}
    return [_with_text_keys(each) for each in value] if isinstance(value, (list, tuple)) else value


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
        return json.loads(json.dumps(_with_text_keys(named), default=str))

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
    explain: bool = True,
    source: Mapping[str, Any] | None = None,
    notes: tuple[str, ...] = (),
    seconds: float = math.inf,
) -> Plan:
    """The fastest settings of a run that fit a budget; over several devices also how it is spread.

    Args:
        run: what is planned, and over which devices; what it says of engines is kept.
        rows: as the trainer takes them.
        room: the budget of each device, in bytes.
        explain: whether runners-up and the effect of each technique are wanted, which take more traces.
        source: the user's own settings as a run file has them, model and dataset among them.
        notes: of the rows.
        seconds: after which, on one device, a search ends that has found nothing; without end by default, so that the
            same run always has the same plan.

    Raises:
        PlanError: nothing fits; says what takes most, and what would be needed.
        ValueError: the run cannot be planned, with the reason.
    """
    cluster = run.cluster
    alone = run if cluster is None else replace(run, requested=without_engines(run.requested))
    shardings = [] if cluster is None else shardings_of(run, cluster)
    if cluster is None:
        check_weights(run, rows, room)
    prepared, sizes, of_rows = prepared_rows(alone, rows)
    asked = Asked(alone, prepared, sizes, room, explain)
    looked = OnOne(asked, Patience(seconds)) if cluster is None else OverDevices(asked, run, cluster, shardings)
    found = looked.best()
    if not found:
        raise _nothing_fits(asked, looked)
    best, *others = found
    assert best.estimate is not None
    told = looked.told(best)
    told["notes"] = (*notes, *of_rows, *best.estimate.notes, *told["notes"])
    return Plan(
        method=run.method.name,
        requested={name: value for name, value in (source or run.requested).items() if name != "memory_budget"},
        chosen=_beside(best, best),
        budget_bytes=room,
        device=run.device.name,
        runners_up=tuple(_beside(each, best) for each in others[: RUNNERS_UP if explain else 0]),
        refused=looked.refused,
        **told,
    )


def _beside(each: Candidate, best: Candidate) -> Alternative:
    """Settings as a plan shows them, beside the best."""
    seconds, rate = each.cost / best.cost, None
    if each.sharding is not None:  # which are all traced, and of which the rate is that of all devices
        rate = rate_of_all(each)
        seconds = rate_of_all(best) / rate
    elif best.estimate is not None and best.estimate.tokens_per_second is not None:
        rate = best.estimate.tokens_per_second / seconds
    traced, way = each.estimate is not None, "" if each.sharding is None else sharding_name(each.sharding)
    return Alternative(each.settings, int(each.peak), seconds, rate, each.changes, traced, way)


# -- one device ------------------------------------------------------------------------------------------------------


class OnOne:
    """What a plan chooses from, on one device."""

    def __init__(self, asked: Asked, patience: Patience) -> None:
        self.asked, self.patience = asked, patience
        self.searches = asked.searches(self._search)

    def _search(self, sizes: Sizes) -> Search:
        asked, measure = self.asked, partial(measured, self.asked.run, self.asked.rows)
        return Search(measure, asked.axes(sizes), sizes, asked.most, processes_at_once(), self.patience)

    def best(self) -> list[Candidate]:
        """What is chosen, and what is behind it; empty if nothing fits.

        Raises:
            BelowWeights: the budget is below the weights.
        """
        streaming = map(_weights, self.searches.whole.alone_with(STREAMS))
        _refuse_below(_weights(self.searches.plain()), streaming, self.asked.run, self.asked.room)
        return self.searches.best(RUNNERS_UP if self.asked.explain else 0)

    def smallest(self) -> Candidate:
        """What takes least, whether it fits or not."""
        return self.searches.smallest()

    @property
    def refused(self) -> dict[str, str]:
        """What cannot work, and why: choices by themselves, and rows in pieces."""
        search = self.searches.whole
        pieces = {} if self.searches.why_whole is None else {IN_PIECES: self.searches.why_whole}
        return pieces | {
            next(
                choice.name for choice, number in zip(search.choices(combination), combination, strict=True) if number
            ): why
            for (combination, _), why in search.refused.items()
            if sum(number > 0 for number in combination) == 1
        }

    @property
    def tried(self) -> str:
        """What was tried, in a sentence."""
        return f"Tried: {self.searches.tried}."

    def told(self, best: Candidate) -> dict[str, Any]:
        """What the plan of the one that is chosen says beside: fields of `Plan`."""
        found, asked = best.estimate, self.asked
        assert found is not None
        assumptions = assumptions_of(asked.run, best.settings, found)
        return {
            "estimate": replace(found, room_bytes=asked.room, assumptions=assumptions),
            "techniques": tuple(_effects(self.searches.whole, asked.sizes)) if asked.explain else (),
            "notes": (*_proposed(asked, best), *([self.tried] if asked.explain else [])),
            "speed_by": "relative costs" if found.tokens_per_second is None else "roofline",
            "traces": self.searches.traces,
        }


def _effects(search: Search, sizes: Sizes) -> list[Effect]:
    plain = search.traced(search.plain, None)

    def seconds(alone: Estimate, otherwise: float) -> float:
        if plain.tokens_per_second is None or alone.tokens_per_second is None:
            return otherwise
        return plain.tokens_per_second / alone.tokens_per_second

    found = [
        Effect(
            choice.name,
            choice.options,
            plain.peak_bytes - alone.peak_bytes,
            seconds(alone, choice.slower) if choice.timed else choice.slower,
            choice.changes,
        )
        for choice, alone in search.alone()
    ]
    if sizes.longest < sizes.whole:
        least = search.traced(search.plain, sizes.longest)
        options = {"tokens_per_microbatch": sizes.longest}
        cost = search.cost(search.plain, sizes.longest) / search.cost(search.plain, None)
        found.append(Effect("token budget", options, plain.peak_bytes - least.peak_bytes, seconds(least, cost)))
    return sorted(found, key=lambda each: -each.saved_bytes)


NOTICED = 64 << 20
"""Bytes of host memory that go without saying: a process holds many times that before it trains."""


def _proposed(asked: Asked, best: Candidate) -> tuple[str, ...]:
    """What a plan needs of the host; and frozen weights in bfloat16, where they are float32."""
    assert best.estimate is not None
    size, settings = best.estimate.host_bytes, best.search.options(best.combination)
    on_host = (f"{bytes_text(size)} of host memory are needed beside the device's.",) if size > NOTICED else ()
    there = in_bfloat16(asked.run, settings)
    if there is None:
        return on_host
    try:
        other = measured(asked.run, asked.rows, {**settings, "dtype": "bfloat16"}, best.tokens)
    except Refused:
        return on_host
    return (*on_host, *with_it(there, other.peak_bytes, best.peak))


COMPUTING = ("forward", "backward")
"""The phases in which layers are computed, and hold at least a layer of streamed weights."""


def check_weights(run: PlannedRun, rows: Dataset, room: int) -> None:
    """Refuses a budget below the weights as they are counted, before rows are prepared and anything is traced.

    Args:
        run: what is planned.
        rows: as the trainer takes them.
        room: the budget, in bytes.

    Raises:
        BelowWeights: it is below the weights, and below a layer of them where they can be streamed.
    """
    if (counted := counted_weights(run, rows)) is not None:
        _refuse_below(counted.whole, [counted.layer], run, room)


def _refuse_below(weights: int, streaming: Iterable[int], run: PlannedRun, room: int) -> None:
    """Refuses a budget below the fewest bytes that weights take: only those that are streamed take fewer, and only
    settings that are not exact store them in fewer bits."""
    most = room if run.exact else room * NARROWEST
    if weights > most and all(each > most for each in streaming):
        raise BelowWeights(
            f"the budget of {bytes_text(room)} is below the weights, which take {bytes_text(weights)} by themselves"
            f"{'' if run.exact else f', and in 4 bits {bytes_text(weights // NARROWEST)}'}.",
            weights,
            {},
            ways_out(run),
            room,
        )


def _weights(found: Estimate) -> int:
    """Bytes of weights that are there whenever a model is trained on; of streamed ones, in each phase of that."""
    return int(min(phase.get("weights", 0) for name, phase in found.phases.items() if name in COMPUTING))


# -- nothing fits ----------------------------------------------------------------------------------------------------


def _nothing_fits(asked: Asked, looked: OnOne | OverDevices) -> PlanError:
    cluster, device, room = asked.run.cluster, asked.run.device, asked.room
    each = "" if cluster is None else f"each of {cluster.devices} "
    where = f"nothing fits {bytes_text(room)} on {each}{device.name}"
    try:
        least = looked.smallest()
    except Refused as reason:
        return PlanError(str(reason) if cluster is None else f"{where}: {reason}", 0, {}, room=room)
    found = least.estimate
    assert found is not None
    held = found.phases[found.phase]
    inside = {name: size for name, size in held.items() if name not in ("runtime", HOLES) or size > room}
    (name, size), *_ = Counter(inside).most_common()
    way = "" if least.sharding is None else f"{sharding_name(least.sharding)}; "
    advice, refused = ADVICE.get(name, ADVICE["weights"]), looked.refused
    if isinstance(looked, OnOne):
        why = refused.get(IN_PIECES)
        advice += "." if why is None else f". {IN_PIECES.capitalize()} cannot work here: {why}."
        advice += f" {looked.tried}"
    else:
        others = next((f"{other} is left out: {why}. " for other, why in refused.items()), "")
        advice = f"{others}{advice}, or more of them."
    return PlanError(
        f"{where}, {BANDS[device.kind]:.0%} of it left for what an estimate may miss. The smallest peak found is "
        f"{bytes_text(int(least.peak))} ({way}{settings_text(least.settings)}); most of it is {name}, "
        f"{bytes_text(int(size))}. {advice}",
        int(least.peak),
        least.settings,
        tuple(way for way in ways_out(asked.run) if cluster is not None or not is_taken(way, least.settings)),
        room,
    )


ADVICE = {
    "weights": "It needs a smaller model, or a device with more memory",
    "gradients": "It needs a smaller model, adapters (use_peft), or a device with more memory",
    "optimizer": "It needs a smaller model, adapters (use_peft), or a device with more memory",
    "reference": "It needs new adapters (use_peft), whose reference is the model without them",
    "activations": "It needs shorter rows (max_length), a smaller model, or a device with more memory",
    "keys": "It needs shorter rows (max_length), or a device with more memory",
    "head": "It needs shorter rows (max_length), a smaller vocabulary, or a device with more memory",
    "runtime": "That is the process itself, before any tensor: the budget is too small for any model",
}
"""What would be needed, by what takes most."""
