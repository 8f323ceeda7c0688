"""What a run will take, and which settings fit a budget: known before any weight is loaded.

All is traced in a process of its own, which takes some seconds to begin and half a gigabyte of host memory, so that a
training beside it is left alone.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Unpack, cast

from datasets import Dataset, IterableDataset
from transformers import PretrainedConfig

from lowtide.data.sources.load import Source, load_rows
from lowtide.engine.weights.loading import load_tokenizer
from lowtide.engine.weights.model_init import config_init, model_init
from lowtide.methods.method import Method
from lowtide.planner.answers.assumptions import assumptions_of, in_bfloat16, with_it
from lowtide.planner.answers.device_table import DeviceTable, device_table
from lowtide.planner.answers.kept_grid import KIND, kept_traces
from lowtide.planner.answers.known_models import known_config
from lowtide.planner.answers.row_lengths import (
    DEFAULT,
    Lengths,
    RowLengths,
    notes_of_lengths,
    options_of_lengths,
    row_lengths,
)
from lowtide.planner.answers.traces import KINDS, kind_of
from lowtide.planner.budget import bytes_of, read_budget
from lowtide.planner.candidate import PlannedRun, first_rows, measured, prepared_rows
from lowtide.planner.cluster import Cluster
from lowtide.planner.devices import DEVICES, Device, device_named
from lowtide.planner.estimate import Estimate, estimate_run
from lowtide.planner.plan import Plan, make_plan
from lowtide.planner.process import known_process_bytes
from lowtide.planner.search import Refused
from lowtide.planner.tracing.described_model import config_of_model, with_adapters_of
from lowtide.planner.tracing.fake_run import FakeRun, ModelInputs, RunInputs
from lowtide.planner.tracing.positions import check_lengths
from lowtide.planner.tracing.reward_models import DescribedRewards
from lowtide.planner.tracing.teachers import DescribedTeacher
from lowtide.planner.tracing_process import in_tracing_process
from lowtide.ranks.sharding import Sharding
from lowtide.run.options.configs import ConfigState, method_named, method_of
from lowtide.run.options.sharding import sharding_of
from lowtide.run.options.training import TrainingConfig
from lowtide.spelling import check_arguments_known

PATIENCE = 25.0
"""Seconds that a plan looks for settings that fit; what takes least is then traced in some more."""


class PlanInputs(RunInputs, total=False):
    """What a run is made of beside its method, model and rows."""

    config: TrainingConfig | Mapping[str, Any] | None
    """Your own settings, which are never overruled: those that a config was made with, or options by name."""
    lengths: Lengths | None
    """In the place of a dataset, the tokens of each row: a number for `SFTConfig`; for pairs (prompt, chosen,
    rejected), for single completions (prompt, completion), for `Seq2SeqConfig` (source, target); for a method whose
    policy writes, those of the prompt. Or "1024x8": so many tokens in so many rows."""


class EstimateInputs(PlanInputs, total=False):
    """The same, of devices that train together."""

    world_size: int
    """How many there are; with a config in the place of the method's name."""
    sharding: Any
    """How they share states: "zero3", "fsdp2", "tp2+fsdp2", a DeepSpeed configuration or its path; None for what the
    config says (`fsdp`), else equal copies."""


class PlanOverInputs(PlanInputs, total=False):
    """The same, and several devices that share the run."""

    devices: str | None
    """In place of `device`: those of one node, "8xH100"."""
    nodes: int
    """Machines with so many devices each."""
    host_memory: str | int | None
    """Of each node, as a budget is written; by default 256 GiB for each of its devices."""


def estimate(
    method: str | TrainingConfig,
    model: str | PretrainedConfig,
    dataset: Source | None = None,
    budget: str | int | None = None,
    *,
    device: str = "cpu",
    **inputs: Unpack[EstimateInputs],
) -> Estimate:
    """What a run will take, on each device, and whether that fits; no weight is made.

    Args:
        method: "sft", "dpo" or another command's name; or the trainer's config, as the run will have it.
        model: its config, or a path or hub name of it.
        dataset: rows to train on, or where they are; or `lengths` among the inputs.
        budget: what it may take, as `plan` has it; by default what the device has, or has free.
        device: "cpu", "cuda" (the one that is there), or a name as "H100-80GB".
        inputs: see `EstimateInputs`; `config` is for a method's name.

    Raises:
        ValueError: the config is of no method, the lengths do not fit it, the device is unknown, or the model's step
            cannot be traced.
    """
    check_arguments_known("estimate", inputs, EstimateInputs.__annotations__)
    lengths, world_size = inputs.pop("lengths", None), inputs.pop("world_size", 1)
    sharding = inputs.pop("sharding", None)
    if (lengths is None) == (dataset is None):
        raise ValueError("estimate needs either `lengths` or `dataset`, to know what a step will see")
    own = cast(PlanInputs, inputs)
    if isinstance(method, str):
        if world_size != 1 or sharding is not None:
            raise ValueError("world_size and sharding need the trainer's config in the place of the method's name")
        return estimate_method(method, model, dataset, budget, device=device, **{**own, "lengths": lengths})
    if own.pop("config", None) is not None:
        raise ValueError("the config stands in the place of the method already: leave `config` out")
    rows: Any = dataset if lengths is None else row_lengths(lengths, method_of(method))
    if lengths is None and not isinstance(dataset, Dataset):
        rows, _ = first_rows(load_rows(cast(Source, dataset)))
    place = device_named(device).with_rates()
    room, of_budget = read_budget(budget, place)
    if lengths is not None:
        model, own = _known(model), cast(PlanInputs, _beside_known(own, vars(method)))
    found = _estimate_config(method, model, rows, place, _spread(method, sharding, world_size), own)
    return replace(found, room_bytes=room, notes=(*of_budget, *found.notes))


def _estimate_config(
    config: TrainingConfig,
    model: str | PretrainedConfig,
    rows: Dataset | RowLengths,
    device: Device,
    sharding: Sharding | None,
    inputs: PlanInputs,
) -> Estimate:
    """Of a trainer's config."""
    inputs = with_adapters_of(model, inputs)
    rewards = DescribedRewards.of(_rewards(inputs.pop("reward_funcs", None), vars(config)))
    inputs["teacher_model"] = DescribedTeacher.of(inputs.get("teacher_model"), config)
    init = model_init(
        cast(Any, config.model_init_kwargs),
        trust_remote_code=config.trust_remote_code,
        quantization_config=inputs.pop("quantization_config", None),
    )
    described, notes = config_of_model(model, **config_init(init)), ()
    if isinstance(rows, RowLengths):
        notes = check_lengths(rows, described, _written(rows.method, vars(config)))
        notes = (*notes, *notes_of_lengths(rows, {name: vars(config)[name] for name in config.requested}))
    found = in_tracing_process(
        _estimated,
        ConfigState.of(config),
        described,
        rows,
        device,
        sharding,
        rewards,
        {**cast(ModelInputs, inputs), "quantization_config": init.get("quantization_config")},
    )
    return replace(found, notes=(*notes, *found.notes))


def _spread(config: TrainingConfig, sharding: Any, world_size: int) -> Sharding | None:
    """How a run is spread, as the caller says it or the config; None for one device."""
    if world_size == 1 and sharding is None:
        return None
    if not sharding:
        return sharding_of(config, world_size)
    said = Sharding.read(sharding, devices=world_size)
    return replace(said, split_vocabulary=said.kind == "fsdp2" and config.fsdp_split_vocabulary)


def _estimated(
    state: ConfigState,
    described: PretrainedConfig,
    rows: Dataset | RowLengths,
    device: Device,
    sharding: Sharding | None,
    rewards: DescribedRewards,
    inputs: ModelInputs,
) -> Estimate:
    """See `estimate`."""
    config, prepared = state.config(), isinstance(rows, RowLengths)
    dataset = rows.rows() if isinstance(rows, RowLengths) else rows
    run = FakeRun(method_of(config), config, described, dataset, prepared=prepared, rewards=rewards, **inputs)
    return estimate_run(run, device, sharding=sharding)


def plan(
    method: str,
    model: str | PretrainedConfig,
    dataset: Source | None = None,
    budget: str | int | None = None,
    *,
    device: str = "cpu",
    exact: bool = True,
    explain: bool = True,
    **inputs: Unpack[PlanOverInputs],
) -> Plan:
    """The fastest settings of a run that fit a budget; no weight is made.

    Args:
        method: "sft", "dpo" or another command's name.
        model: its config, or a path or hub name of it.
        dataset: rows to train on, or where they are; or `lengths` among the inputs.
        budget: "24GiB", "24GB", "24g", a number of bytes, or "auto", as by default, for what the device has free. One
            above the device's memory is taken as that, which the notes of the plan say.
        device: "cpu", "cuda", or a GPU that need not be here, such as "H100-80GB".
        exact: whether only settings are chosen that leave the numbers alone; others are named with what they change.
        explain: whether runners-up and the effect of each technique are wanted, which take some traces more.
        inputs: see `PlanOverInputs`. With `devices` the budget is of each, and how they share the run is chosen too:
            whole copies, FSDP2, copies of shards, split sequences, shards in host memory.

    Raises:
        PlanError: nothing fits; says what takes most, and what would be needed.
        ValueError: the method, the device, the budget or the rows are none, or the model cannot be traced.
    """
    check_arguments_known("plan", inputs, PlanOverInputs.__annotations__)
    devices, nodes, host_memory = inputs.get("devices"), inputs.get("nodes", 1), inputs.get("host_memory")
    if devices is None and (nodes != 1 or host_memory is not None):
        raise ValueError("nodes and host_memory need `devices`, those of one node: '8xH100'")
    host_bytes = None if host_memory is None else bytes_of(host_memory)
    cluster = None if devices is None else Cluster.of(devices, nodes, host_bytes)
    run, loaded = _run(method, model, dataset, cluster.device.name if cluster else device, inputs)
    rows, notes = first_rows(loaded)
    run = replace(run, cluster=cluster, exact=exact, streamed=rows is not loaded)
    room, of_budget = read_budget(budget, run.device)
    own = {name: each for name, each in (("model", model), ("dataset", dataset)) if isinstance(each, str)}
    lengths = inputs.get("lengths")
    if lengths is not None:
        known = row_lengths(lengths, run.method)
        own |= options_of_lengths(known, _requested(inputs))
        notes = (*notes, *notes_of_lengths(known, {**own, **_requested(inputs)}))
    return in_tracing_process(
        make_plan,
        run,
        rows,
        room,
        explain=explain,
        source=own | dict(run.requested),
        notes=(*of_budget, *notes),
        seconds=PATIENCE,
    )


def estimate_method(
    method: str,
    model: str | PretrainedConfig,
    dataset: Source | None = None,
    budget: str | int | None = None,
    *,
    device: str = "cpu",
    **inputs: Unpack[PlanInputs],
) -> Estimate:
    """The peak of a run as `lowtide estimate` describes it: arguments are those of `plan`."""
    check_arguments_known("estimate_method", inputs, PlanInputs.__annotations__)
    run, rows = _run(method, model, dataset, device, inputs)
    rows, notes = first_rows(rows)
    room, of_budget = read_budget(budget, run.device)
    if (lengths := inputs.get("lengths")) is not None:
        notes = (*notes, *notes_of_lengths(row_lengths(lengths, run.method), _requested(inputs)))
    found = in_tracing_process(_estimated_as_planned, run, rows)
    return replace(found, room_bytes=room, notes=(*of_budget, *notes, *found.notes))


def _estimated_as_planned(run: PlannedRun, rows: Dataset) -> Estimate:
    prepared, _, of_rows = prepared_rows(run, rows)
    found = measured(run, prepared, {}, None)
    proposed = ()
    if (said := in_bfloat16(run, {})) is not None:
        with contextlib.suppress(Refused):
            proposed = with_it(said, measured(run, prepared, {"dtype": "bfloat16"}, None).peak_bytes, found.peak_bytes)
    notes = (*of_rows, *found.notes, *proposed)
    return replace(found, notes=notes, assumptions=assumptions_of(run, {}, found))


def gpus(
    method: str,
    model: str | PretrainedConfig,
    *,
    name: str = "",
    device: str | None = None,
    seconds: float = math.inf,
    trace: bool = False,
    **inputs: Unpack[PlanInputs],
) -> DeviceTable:
    """Which devices hold a run: all of the table of devices, each with full, LoRA and QLoRA training.

    What the grid of the page of devices has (SFT and DPO of well-known models with no option asked for, on GPUs with
    bfloat16) is answered from it, and all else is traced. The traces run in this process and in some that are forked
    from it, so nothing else may compute meanwhile.

    Args:
        method: "sft", "dpo" or another command's name.
        model: its config, or a path or hub name of it; the shapes of well-known models are built in.
        name: what the model is called, where its config is given.
        device: of this one alone: "cpu", "cuda" (the one that is there), or a name as "RTX-4090".
        seconds: in which traces are begun, those of the rows that are asked for first; what is left out is noted.
        trace: whether what the grid has is traced too.
        inputs: see `PlanInputs`; `lengths` are 8 rows of 1,024 tokens by default, and with `peft_config` only adapters
            are compared.

    Raises:
        ValueError: there is no such method, model or device, or no way to train it can be traced.
    """
    check_arguments_known("gpus", inputs, PlanInputs.__annotations__)
    devices = tuple(DEVICES.values()) if device is None else (device_named(device).with_rates(),)
    kinds = dict.fromkeys(map(kind_of, devices))
    called = name or (model if isinstance(model, str) else type(model).__name__)
    built_in = model if isinstance(model, str) and not trace else None
    model = config_of_model(_known(model))
    lengths = inputs.get("lengths") or DEFAULT
    runs, asked = {}, {**inputs, "lengths": lengths, "config": _requested(inputs)}
    for kind in kinds:
        runs[kind], _ = _run(method, model, None, KINDS[kind], cast(PlanInputs, asked), timed=False)
    first = next(iter(runs.values()))
    beside = known_process_bytes(adapters=inputs.get("peft_config") is not None)
    rows = row_lengths(lengths, first.method)
    kept = kept_traces(runs[KIND], built_in, rows, devices) if built_in and KIND in runs else None
    table = device_table(runs, rows, model=called, beside=beside, devices=devices, seconds=seconds, kept=kept)
    notes = check_lengths(rows, model, _written(first.method, first.requested))
    return replace(table, notes=(*notes, *notes_of_lengths(rows, first.requested), *table.notes))


def _requested(inputs: PlanInputs) -> dict[str, Any]:
    config = inputs.get("config")
    return dict(config.requested if isinstance(config, TrainingConfig) else config or {})


def _run(
    method: str,
    model: str | PretrainedConfig,
    dataset: Source | None,
    device: str,
    inputs: PlanInputs,
    *,
    timed: bool = True,
) -> tuple[PlannedRun, Dataset | IterableDataset]:
    """The run that is asked for, with its rows; `timed` is whether the rates of a device at hand are wanted."""
    lengths = inputs.get("lengths")
    if (lengths is None) == (dataset is None):
        raise ValueError("it needs either `dataset` or `lengths`, to know what a step will see")
    declared, place, given = method_named(method), device_named(device), _requested(inputs)
    known = None if lengths is None else row_lengths(lengths, declared)
    if known is not None:
        given.setdefault("per_device_train_batch_size", known.batch)
    init = model_init(
        given.get("model_init_kwargs"),
        trust_remote_code=bool(given.get("trust_remote_code")),
        quantization_config=inputs.get("quantization_config"),
    )
    named = model
    if known is not None:
        named, inputs = _known(model), cast(PlanInputs, _beside_known(inputs, given))
    described = config_of_model(named, **config_init(init))
    inputs = with_adapters_of(named, inputs)
    if known is not None:
        check_lengths(known, described, _written(declared, given))
    processing_class = inputs.get("processing_class")
    as_they_are = known is not None or (given.get("dataset_kwargs") or {}).get("skip_prepare_dataset")
    if processing_class is None and isinstance(model, str) and not as_they_are:
        processing_class = load_tokenizer(model, **config_init(init))
    run = PlannedRun(
        declared,
        described,
        given,
        place.with_rates() if timed else place,
        processing_class,
        peft_config=inputs.get("peft_config"),
        adapters_trained=bool(inputs.get("adapters_trained")),
        quantization_config=init.get("quantization_config"),
        rewards=DescribedRewards.of(_rewards(inputs.get("reward_funcs"), given)),
        teacher=DescribedTeacher.of(inputs.get("teacher_model"), given),
        prepared=known is not None,
    )
    return run, load_rows(cast(Source, dataset)) if known is None else known.rows()


def _written(method: Method, given: Mapping[str, Any]) -> int:
    """Tokens that a policy writes after a row."""
    if method.writes is None:
        return 0
    return given.get("max_completion_length") or method.options.max_completion_length


def _known(model: Any) -> Any:
    """The built-in config of a well-known model that is given by name, else what was given; of several each."""
    if isinstance(model, Mapping):
        return {name: _known(each) for name, each in model.items()}
    if isinstance(model, list | tuple):
        return [_known(each) for each in model]
    return (known_config(model) if isinstance(model, str) else None) or model


def _beside_known(inputs: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Likewise the teacher and the rewards of a run, which options may name."""
    named = given.get("teacher_model_names_or_paths") or given.get("teacher_model_name_or_path")
    teacher = inputs.get("teacher_model") or named
    rewards = _rewards(inputs.get("reward_funcs"), given)
    return {**inputs, "teacher_model": _known(teacher), "reward_funcs": _known(rewards)}


def _rewards(reward_funcs: Any, given: Mapping[str, Any]) -> Any:
    """What rewards completions, which PPO's options may name."""
    return given.get("reward_model_path") if reward_funcs is None else reward_funcs
