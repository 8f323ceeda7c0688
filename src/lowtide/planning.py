"""What a run will take, and which settings fit a budget: known before any weight is loaded.

All is traced in a process of its own, which takes some seconds to begin and half a gigabyte of host memory, so that a
training beside it is left alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Unpack, cast

from datasets import Dataset, IterableDataset
from transformers import PretrainedConfig

from lowtide.data.sources.load import Source, load_rows
from lowtide.engine.weights.loading import load_tokenizer
from lowtide.engine.weights.model_init import config_init, model_init
from lowtide.planner.budget import budget_bytes, bytes_of
from lowtide.planner.candidate import PlannedRun, first_rows, measured, prepared_rows
from lowtide.planner.cluster import Cluster
from lowtide.planner.devices import Device, device_named
from lowtide.planner.estimate import Estimate, estimate_run
from lowtide.planner.over_devices import plan_over
from lowtide.planner.plan import Plan, make_plan
from lowtide.planner.tracing.described_model import config_of_model
from lowtide.planner.tracing.fake_run import FakeRun, ModelInputs, RunInputs
from lowtide.planner.tracing.reward_models import DescribedRewards
from lowtide.planner.tracing.teachers import DescribedTeacher
from lowtide.planner.tracing_process import in_tracing_process
from lowtide.ranks.sharding import Sharding
from lowtide.run.options.configs import ConfigState, method_named, method_of
from lowtide.run.options.sharding import sharding_of
from lowtide.run.options.training import TrainingConfig
from lowtide.spelling import check_arguments_known


class PlanInputs(RunInputs, total=False):
    """What a run is made of beside its method, model and rows."""

    config: TrainingConfig | Mapping[str, Any] | None
    """Your own settings, which are never overruled: those that a config was made with, or options by name."""


class PlanOverInputs(PlanInputs, total=False):
    """The same, and several devices that share the run."""

    devices: str | None
    """In place of `device`: those of one node, "8xH100"."""
    nodes: int
    """Machines with so many devices each."""
    host_memory: str | int | None
    """Of each node, as a budget is written; by default 256 GiB for each of its devices."""


def estimate(
    config: TrainingConfig,
    model: str | PretrainedConfig,
    *,
    lengths: Sequence[int | Sequence[int]] | None = None,
    dataset: Dataset | None = None,
    device: str = "cpu",
    world_size: int = 1,
    sharding: Any = None,
    **inputs: Unpack[RunInputs],
) -> Estimate:
    """What a run will take, on each device; no weight is made.

    Args:
        config: of the trainer, as the run will have it.
        model: its config, or a path or hub name of it.
        lengths: the tokens of each row: a number for `SFTConfig`; for pairs (prompt, chosen, rejected), for single
            completions (prompt, completion), for `Seq2SeqConfig` (source, target); for a method whose policy writes,
            those of the prompt.
        dataset: rows to train on, in place of their lengths.
        inputs: see `RunInputs`.
        device: "cpu", "cuda" (the one that is there), or a name as "H100-80GB".
        world_size: devices that train together.
        sharding: how they share states: "zero3", "fsdp2", "tp2+fsdp2", a DeepSpeed configuration or its path; None
            for what the config says (`fsdp`), else equal copies.

    Raises:
        ValueError: the config is of no method, the lengths do not fit it, the device is unknown, or the model's step
            cannot be traced.
    """
    check_arguments_known("estimate", inputs, RunInputs.__annotations__)
    if (lengths is None) == (dataset is None):
        raise ValueError("estimate needs either `lengths` or `dataset`, to know what a step will see")
    rewards = DescribedRewards.of(_rewards(inputs.pop("reward_funcs", None), config))
    inputs["teacher_model"] = DescribedTeacher.of(inputs.get("teacher_model"), config)
    init = model_init(
        cast(Any, config.model_init_kwargs),
        trust_remote_code=config.trust_remote_code,
        quantization_config=inputs.pop("quantization_config", None),
    )
    return in_tracing_process(
        _estimated,
        ConfigState.of(config),
        config_of_model(model, **config_init(init)),
        cast(Any, lengths if dataset is None else dataset),
        device_named(device).with_rates(),
        _spread(config, sharding, world_size),
        rewards,
        {**inputs, "quantization_config": init.get("quantization_config")},
    )


def _spread(config: TrainingConfig, sharding: Any, world_size: int) -> Sharding | None:
    """How a run is spread, as the caller says it or the config; None for one device."""
    if world_size == 1:
        return None
    if not sharding:
        return sharding_of(config, world_size)
    said = Sharding.read(sharding, devices=world_size)
    return replace(said, split_vocabulary=said.kind == "fsdp2" and config.fsdp_split_vocabulary)


def _estimated(
    state: ConfigState,
    described: PretrainedConfig,
    rows: Dataset | Sequence[int | Sequence[int]],
    device: Device,
    sharding: Sharding | None,
    rewards: DescribedRewards,
    inputs: ModelInputs,
) -> Estimate:
    """See `estimate`; rows are a dataset, or lengths."""
    config, prepared = state.config(), not isinstance(rows, Dataset)
    method = method_of(config)
    dataset = (
        rows
        if isinstance(rows, Dataset)
        else Dataset.from_list(rows_of(rows, writes=method.writes is not None, parts=method.rows.parts))
    )
    run = FakeRun(method, config, described, dataset, prepared=prepared, rewards=rewards, **inputs)
    return estimate_run(run, device, sharding=sharding)


def plan(
    method: str,
    model: str | PretrainedConfig,
    dataset: Source,
    budget: str | int,
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
        dataset: rows to train on, or where they are.
        budget: "24GiB", "24GB", "24g", a number of bytes, or "auto" for what the device has free.
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
    cluster = None if devices is None else Cluster.of(devices, nodes, _amount(host_memory))
    run, loaded = _run(method, model, dataset, cluster.device.name if cluster else device, inputs)
    run = replace(run, cluster=cluster)
    rows, notes = first_rows(loaded)
    own = {name: each for name, each in (("model", model), ("dataset", dataset)) if isinstance(each, str)}
    return in_tracing_process(
        make_plan if cluster is None else plan_over,
        run,
        rows,
        budget_bytes(budget, run.device),
        exact=exact,
        explain=explain,
        source=own | dict(run.requested),
        streamed=rows is not loaded,
        notes=notes,
    )


def _amount(memory: str | int | None) -> int | None:
    """Bytes of an amount of host memory; None where none is said."""
    return None if memory is None else bytes_of(memory)


def estimate_method(
    method: str,
    model: str | PretrainedConfig,
    dataset: Source,
    *,
    device: str = "cpu",
    **inputs: Unpack[PlanInputs],
) -> Estimate:
    """The peak of a run as `lowtide estimate` describes it: arguments are those of `plan`."""
    check_arguments_known("estimate_method", inputs, PlanInputs.__annotations__)
    run, rows = _run(method, model, dataset, device, inputs)
    rows, notes = first_rows(rows)
    found = in_tracing_process(_estimated_as_planned, run, rows)
    return replace(found, notes=(*notes, *found.notes))


def _estimated_as_planned(run: PlannedRun, rows: Dataset) -> Estimate:
    prepared, _, of_rows = prepared_rows(run, rows)
    found = measured(run, prepared, {}, None).estimate
    return replace(found, notes=(*of_rows, *found.notes))


def _run(
    method: str,
    model: str | PretrainedConfig,
    dataset: Source,
    device: str,
    inputs: PlanInputs,
) -> tuple[PlannedRun, Dataset | IterableDataset]:
    declared, place, config = method_named(method), device_named(device), inputs.get("config")
    given = dict(config.requested if isinstance(config, TrainingConfig) else config or {})
    init = model_init(
        given.get("model_init_kwargs"),
        trust_remote_code=bool(given.get("trust_remote_code")),
        quantization_config=inputs.get("quantization_config"),
    )
    described = config_of_model(model, **config_init(init))
    processing_class = inputs.get("processing_class")
    as_they_are = (given.get("dataset_kwargs") or {}).get("skip_prepare_dataset")
    if processing_class is None and isinstance(model, str) and not as_they_are:
        processing_class = load_tokenizer(model, **config_init(init))
    adapters, quantized = inputs.get("peft_config"), init.get("quantization_config")
    rewards = DescribedRewards.of(_rewards(inputs.get("reward_funcs"), given))
    teacher = DescribedTeacher.of(inputs.get("teacher_model"), given)
    beside: dict[str, Any] = {"rewards": rewards, "teacher": teacher}
    run = PlannedRun(declared, described, given, place.with_rates(), processing_class, adapters, quantized, **beside)
    return run, load_rows(dataset)


def _rewards(reward_funcs: Any, config: Any) -> Any:
    """What rewards completions, which PPO's config may name."""
    name = "reward_model_path"
    path = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
    return path if reward_funcs is None else reward_funcs


def rows_of(lengths: Sequence[int | Sequence[int]], *, writes: bool = False, parts: Sequence[str] = ()) -> list[dict]:
    """Prepared rows of such lengths; of prompts alone, where the policy writes what follows.

    Args:
        parts: the columns of tokens, where their number does not say which they are.
    """
    if writes:
        return [{"prompt_ids": [1] * (length if isinstance(length, int) else length[0])} for length in lengths]
    columns = {
        1: ("input_ids",),
        2: ("prompt_ids", "completion_ids"),
        3: ("prompt_ids", "chosen_ids", "rejected_ids"),
    }
    columns |= {len(parts): tuple(parts)}
    made = []
    for length in lengths:
        each = (length,) if isinstance(length, int) else tuple(length)
        row: dict[str, Any] = {name: [1] * size for name, size in zip(columns[len(each)], each, strict=True)}
        if "input_ids" in row:
            row |= {"labels": row["input_ids"], "number": len(made), "text_label": len(made) % 2}
        if "completion_ids" in row:
            row |= {"kl_completion_ids": row["completion_ids"], "label": True}
        made.append(row)
    return made
