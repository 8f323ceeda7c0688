"""The trace on fake tensors against what torch's profiler sees the same step allocate on real ones."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, BertConfig, LlamaConfig, Qwen2Config

import lowtide
from lowtide.data.batches.heaviest import heaviest_batch, row_lengths
from lowtide.demo.model import make_tokenizer
from lowtide.methods import METHODS
from lowtide.planner.allocators.replay import peaks, run_of
from lowtide.planner.answers.row_lengths import rows_of
from lowtide.planner.devices import device_named
from lowtide.planner.tracing.fake_run import FakeRun
from lowtide.planner.tracing.teachers import DescribedTeacher
from lowtide.planner.tracing.trace import Event
from lowtide.planner.tracing.unroll import TRACED_LAYERS, unrolled
from lowtide.planning import estimate, estimate_method, plan
from lowtide.run.options.configs import method_of
from lowtide.trainers.public import trainer_class
from tests.support.marks import slow_but

SIZES: dict[str, Any] = {
    "vocab_size": 8_000,
    "hidden_size": 192,
    "intermediate_size": 768,
    "num_hidden_layers": 7,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}
TEXTS, PAIRS, SINGLES = [300, 200, 250, 120], [(60, 120, 200)] * 4, [(60, 160)] * 4
LORA = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
LINEAR = {"optim_target_modules": "all-linear"}
CASES: dict[str, tuple[str, dict[str, Any], list, type, Any]] = {
    "sft": ("SFTConfig", {}, TEXTS, LlamaConfig, None),
    "sft without checkpointing": ("SFTConfig", {"gradient_checkpointing": False}, TEXTS, LlamaConfig, None),
    "sft, tied": ("SFTConfig", {}, TEXTS, Qwen2Config, None),
    "sft, several micro-batches": ("SFTConfig", {"tokens_per_microbatch": 400}, TEXTS, LlamaConfig, None),
    "sft, in pieces": ("SFTConfig", {"tokens_per_microbatch": 128}, TEXTS, LlamaConfig, None),
    "dpo, in pieces": ("DPOConfig", {"tokens_per_microbatch": 128}, PAIRS, LlamaConfig, None),
    "sft, in backward": ("SFTConfig", {"optimizer_in_backward": True, "max_grad_norm": 0.0}, TEXTS, LlamaConfig, None),
    "sft, tiled": ("SFTConfig", {"mlp_tile_tokens": 128}, TEXTS, LlamaConfig, None),
    "sft, offloaded": ("SFTConfig", {"activation_offloading": True}, TEXTS, LlamaConfig, None),
    "sft, compressed": ("SFTConfig", {"optim": "adamw_compressed"}, TEXTS, LlamaConfig, None),
    "sft, flash": ("SFTConfig", {"optim": "adamw_flash"}, TEXTS, LlamaConfig, None),
    "sft, Muon": ("SFTConfig", {"optim": "muon"}, TEXTS, LlamaConfig, None),
    "sft, LoRA-FA": ("SFTConfig", {"optim": "adamw_lora_fa"}, TEXTS, LlamaConfig, LORA),
    "sft, bitsandbytes": ("SFTConfig", {"optim": "adamw_8bit"}, TEXTS, LlamaConfig, None),
    "sft, torchao": ("SFTConfig", {"optim": "adamw_torch_4bit"}, TEXTS, LlamaConfig, None),
    "sft, GaLore": ("SFTConfig", {"optim": "galore_adamw", **LINEAR}, TEXTS, LlamaConfig, None),
    "sft, for all parameters": ("SFTConfig", {"optim": "adamw_torch"}, TEXTS, LlamaConfig, None),
    "sft, Adafactor": ("SFTConfig", {"optim": "adafactor"}, TEXTS, LlamaConfig, None),
    "sft, LoRA": ("SFTConfig", {}, TEXTS, LlamaConfig, LORA),
    "sft, bfloat16": ("SFTConfig", {"bf16": True}, TEXTS, LlamaConfig, None),
    "dpo": ("DPOConfig", {}, PAIRS, LlamaConfig, None),
    "dpo, LoRA": ("DPOConfig", {}, PAIRS, LlamaConfig, LORA),
    "kto": ("KTOConfig", {}, SINGLES, LlamaConfig, None),
    "reward": ("RewardConfig", {}, PAIRS, LlamaConfig, None),
    "token classification": ("TokenClassificationConfig", {}, TEXTS, BertConfig, None),
    "sequence classification": ("SequenceClassificationConfig", {}, TEXTS, BertConfig, None),
    "orpo": ("ORPOConfig", {}, PAIRS, LlamaConfig, None),
    "tpo": ("TPOConfig", {}, [(9, 30, 21, 17)] * 4, LlamaConfig, None),
    "gkd": ("GKDConfig", {"lmbda": 0.0}, TEXTS, LlamaConfig, None),
    "gkd, LoRA": ("GKDConfig", {"lmbda": 0.0, "beta": 0.0}, TEXTS, LlamaConfig, LORA),
}
MEASURED = (
    *("sft", "sft without checkpointing", "sft, several micro-batches", "sft, in pieces", "sft, in backward"),
    *("sft, tiled", "sft, offloaded", "sft, compressed", "sft, torchao", "sft, LoRA", "sft, bfloat16"),
    *("dpo", "dpo, in pieces", "kto", "token classification", "gkd"),
)
"""Cases whose tensors the slow tests count; the sweep counts those of all."""
TEACHER = Qwen2Config(**{**SIZES, "hidden_size": 240, "num_hidden_layers": 9})

PACKAGES = {"sft, bitsandbytes": "bitsandbytes", "sft, torchao": "torchao", "sft, GaLore": "galore_torch"}


def config_of(name: str, options: dict[str, Any], folder: str) -> Any:
    settings = {
        "output_dir": folder,
        "per_device_train_batch_size": 4,
        "max_steps": 2,
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "rehearsal": False,
    }
    return getattr(lowtide, name)(**settings, **options)


def run_of_case(case: str, folder: str, **sizes: int) -> FakeRun:
    name, options, lengths, kind, peft_config = CASES[case]
    config, rows = config_of(name, options, folder), Dataset.from_list(rows_of(lengths))
    described, method = kind(**{**SIZES, **sizes}), method_of(config)
    teacher = DescribedTeacher.of(TEACHER, config) if method.taught else None
    return FakeRun(method, config, described, rows, peft_config=peft_config, prepared=True, teacher_model=teacher)


def allocated(case: str, folder: str) -> int:
    """The most bytes that the tensors of a run's second step hold, weights and states among them."""
    torch.set_num_threads(1)
    gc.collect()  # what a run before left is not freed in the midst of this one
    name, options, lengths, kind, peft_config = CASES[case]
    args = config_of(name, options, folder)
    trainer: Any = trainer_class(method_of(args))

    class OnPreparedRows(trainer):  # type: ignore[valid-type, misc]
        needs_tokenizer = False

        def prepare(self, dataset: Any, name: str) -> Any:
            return dataset, None

    rewards = name == "RewardConfig"
    made = method_of(args).head.auto_class
    rows = Dataset.from_list(rows_of(lengths))
    lengths = row_lengths(rows)
    assert lengths is not None
    heaviest = heaviest_batch(lengths, 4, args.tokens_per_microbatch)
    rows = Dataset.from_list([rows[row] for row in heaviest] * (4 if len(heaviest) < 4 else 2))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        model = made.from_config(kind(**SIZES, **({"num_labels": 1} if rewards else {})))
        beside = {"teacher_model": made.from_config(TEACHER)} if method_of(args).taught else {}
        OnPreparedRows(model, args=args, train_dataset=rows, peft_config=peft_config, **beside).train()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(itertools.accumulate(event.nbytes() for event in sorted(events, key=lambda each: each.start_ns())))


@pytest.mark.slow
def test_layers_that_are_checkpointed_in_turn_are_traced_in_turn(tmp_path):
    args = config_of("SFTConfig", {"checkpointing_every": 1.5}, str(tmp_path))
    described = LlamaConfig(**{**SIZES, "num_hidden_layers": 18})
    run = FakeRun(METHODS["sft"], args, described, Dataset.from_list(rows_of(TEXTS)), prepared=True)
    cpu = device_named("cpu")
    few, whole = run.traced(cpu), run.traced_layers(18, cpu)
    assert few.notes == ()
    assert peaks(run_of(few.events, rehearsal=False)) == peaks(run_of(whole.events, rehearsal=False))
    assert {name: each.flops for name, each in few.costs.items()} == {n: c.flops for n, c in whole.costs.items()}


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[Any]:
    """A process of its own, without the threads and the settings of this one."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        yield pool


@pytest.mark.parametrize("case", slow_but([], CASES, swept=[each for each in CASES if each not in MEASURED]))
def test_the_trace_is_what_tensors_take(case, tmp_path, elsewhere):
    pytest.importorskip(PACKAGES.get(case, "torch"))
    if case == "sft, torchao" and (shutil.which("c++") is None or " " in torch.__file__):
        pytest.skip(
            "torchao compiles its step, and there is no compiler, or torch's path has a space, which it trips on"
        )
    events = run_of_case(case, str(tmp_path)).traced(device_named("cpu")).events
    found = max(sum(held.values()) for held in peaks(run_of(events, rehearsal=False)).values())
    measured = elsewhere.apply(allocated, (case, str(tmp_path)))
    assert found == pytest.approx(measured, rel=0.075)  # buffers of kernels, which no trace sees


@pytest.mark.slow
@pytest.mark.parametrize("case", ["sft", "sft, several micro-batches", "sft, LoRA", "dpo", "sft, in backward", "gkd"])
def test_five_layers_tell_what_eight_do(case, tmp_path):
    """Every part of the run bears and buries as many blocks of each size, and holds as much, in each phase."""
    device, few, whole = device_named("cpu"), TRACED_LAYERS, 8
    short = run_of_case(case, str(tmp_path)).traced_layers(few, device).events
    deep = run_of_case(case, str(tmp_path)).traced_layers(whole, device).events
    found = unrolled(short, whole)
    assert counted(found, lambda event: event.layer) == counted(deep, born_layer)
    assert peaks(run_of(found, rehearsal=True)) == peaks(run_of(deep, rehearsal=True))


STEPPED = ["sft, torchao", "sft, GaLore", "sft, bitsandbytes", "sft, compressed", "sft, Adafactor"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "device"), [*((case, "cpu") for case in STEPPED), ("sft, for all parameters", "H100-80GB")]
)
def test_what_an_optimizer_makes_is_of_the_layer_that_it_steps(case, device, tmp_path):
    pytest.importorskip(PACKAGES.get(case, "torch"))
    run, where = run_of_case(case, str(tmp_path)), device_named(device)
    found = peaks(run_of(unrolled(run.traced_layers(TRACED_LAYERS, where).events, 8), rehearsal=True))
    assert found == peaks(run_of(run.traced_layers(8, where).events, rehearsal=True))


def born_layer(event: Event) -> int | None:
    return event.block.layer if event.born and event.block is not None else event.layer


def counted(events: Sequence[Event], layer_of: Callable[[Event], int | None]) -> Counter:
    return Counter(
        (event.phase, event.born, layer_of(event), event.block.size, event.block.category)
        for event in events
        if event.block is not None
    )


@pytest.mark.slow
def test_no_layer_is_told_by_others_that_are_not_like_it(tmp_path):
    """Two kinds of MLP in turn: all layers are traced, and the estimate says so."""
    from transformers import Qwen3MoeConfig

    described = Qwen3MoeConfig(
        **{**SIZES, "num_hidden_layers": 6},
        decoder_sparse_step=2,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=96,
        head_dim=32,
    )
    found = estimate(config_of("SFTConfig", {}, str(tmp_path)), described, lengths=TEXTS)
    assert "not alike" in found.notes[0]


@pytest.mark.slow
def test_an_estimate_splits_its_peak_and_has_every_phase(tmp_path, monkeypatch):
    monkeypatch.setattr("lowtide.planner.estimate.process_bytes", lambda adapters, sharding: 500_000_000)
    config = config_of("SFTConfig", {"eval_strategy": "steps"}, str(tmp_path))
    found = estimate(config, LlamaConfig(**SIZES), lengths=TEXTS)
    assert found.peak_bytes == sum(found.phases[found.phase].values())
    assert set(found.phases) == {"loading", "forward", "head", "backward", "optimizer", "evaluation"}
    assert all(held["runtime"] == 500_000_000 for held in found.phases.values())
    weights = sum(p.numel() for p in AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)).parameters()) * 4
    assert found.phases["optimizer"]["weights"] == pytest.approx(weights, rel=1e-3)
    assert found.phases["optimizer"]["gradients"] == pytest.approx(weights, rel=1e-3)
    assert found.phases["optimizer"]["optimizer"] == pytest.approx(2 * weights, rel=1e-3)
    assert (found.tokens_per_second or 0) > 0


def test_on_cuda_the_allocator_is_replayed_and_the_context_is_told(tmp_path):
    config = config_of("SFTConfig", {"bf16": True}, str(tmp_path))
    found = estimate(config, LlamaConfig(**SIZES), lengths=TEXTS, device="H100-80GB")
    assert found.device.startswith("H100")
    assert found.phases[found.phase]["cache"] > 0
    assert found.reserved_bytes >= found.tensor_bytes
    assert found.peak_bytes > found.reserved_bytes


@pytest.mark.slow
def test_shards_are_smaller_than_the_whole(tmp_path):
    config = config_of("SFTConfig", {"bf16": True}, str(tmp_path))
    whole, split = (
        estimate(config, LlamaConfig(**SIZES), lengths=TEXTS, device="H100-80GB", world_size=4, sharding=sharding)
        for sharding in (None, "zero3")
    )
    assert split.phases["optimizer"]["optimizer"] < 0.5 * whole.phases["optimizer"]["optimizer"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["DPOConfig", "GKDConfig"])
def test_a_rank_has_its_part_of_a_reference_whose_layers_are_split(name, tmp_path):
    """But for its norms, which every rank has."""
    config = config_of(name, {"bf16": True, **({"lmbda": 0.0} if name == "GKDConfig" else {})}, str(tmp_path))
    more = {"teacher_model": TEACHER} if name == "GKDConfig" else {}
    lengths = TEXTS if name == "GKDConfig" else [(60, 120, 200)] * 4
    whole, split = (
        estimate(config, LlamaConfig(**SIZES), lengths=lengths, device="H100", sharding=sharding, **more, **ranks)
        for sharding, ranks in ((None, {}), ("tp2", {"world_size": 2}))
    )
    held = [each.phases["forward"]["reference"] for each in (whole, split)]
    assert held[1] == pytest.approx(held[0] / 2, rel=0.01)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({}, "either `lengths` or `dataset`"),
        ({"lengths": TEXTS, "device": "H1000"}, "H100"),
        ({"lengths": TEXTS, "world_size": 4, "sharding": "zero4"}, "zero"),
    ],
)
def test_bad_input_is_one_message(more, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        estimate(config_of("SFTConfig", {}, str(tmp_path)), LlamaConfig(**SIZES), **more)


def test_an_estimate_leaves_random_numbers_alone(tmp_path):
    state, python = torch.get_rng_state(), random.getstate()
    run_of_case("sft", str(tmp_path)).traced(device_named("cpu"))
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == python


def test_saving_holds_weights_and_states(tmp_path):
    args = lowtide.SFTConfig(str(tmp_path), use_cpu=True, report_to="none", save_strategy="epoch")
    found = estimate(args, LlamaConfig(**SIZES), lengths=[64] * 8)
    weights = found.phases["optimizer"]["weights"]
    assert found.phases["saving"]["weights"] == weights
    assert found.phases["saving"]["optimizer"] == pytest.approx(2 * weights, rel=0.01)
    assert not found.phases["saving"].get("gradients")


@pytest.mark.slow
def test_mixed_precision_holds_no_casts_of_weights_beyond_their_layer(tmp_path):
    args = lowtide.SFTConfig(str(tmp_path), use_cpu=True, report_to="none", bf16=True)
    found = estimate(args, LlamaConfig(**SIZES), lengths=[8]).phases["forward"]
    in_layers = sum(found[name] for name in ("activations", "head") if name in found)
    assert in_layers < 0.5 * found["weights"] / SIZES["num_hidden_layers"]


@pytest.mark.slow
def test_several_micro_batches_keep_their_gradients_with_the_optimizer_in_backward(tmp_path):
    options = {"optimizer_in_backward": "two_pass", "report_to": "none", "use_cpu": True}
    one, several = (
        estimate(
            lowtide.SFTConfig(str(tmp_path), gradient_accumulation_steps=steps, **options),
            LlamaConfig(**SIZES),
            lengths=[64] * 16,
        ).phases["forward"]
        for steps in (1, 2)
    )
    assert not one.get("gradients")
    assert several["gradients"] == pytest.approx(several["weights"], rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("peft_config", [None, LORA])
def test_a_token_takes_as_long_in_several_micro_batches_as_in_one(peft_config, tmp_path):
    """Also the forward of a reference, whose operations are those of layers."""
    options = {"report_to": "none", "use_cpu": True, "per_device_train_batch_size": 64}
    one, several = (
        estimate(
            lowtide.DPOConfig(str(tmp_path), gradient_accumulation_steps=steps, **options),
            LlamaConfig(**{**SIZES, "vocab_size": 128_000}),
            lengths=[(64, 448, 448)] * 128,
            device="H100",
            peft_config=peft_config,
        ).tokens_per_second
        for steps in (1, 2)
    )
    assert several == pytest.approx(one, rel=0.2)  # what adds to a gradient, and steps less often


BITSANDBYTES = [
    "adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "paged_adamw_32bit", "ademamix_8bit", "paged_ademamix_32bit",
    "paged_ademamix_8bit", "lion_8bit", "paged_lion_8bit", "paged_lion_32bit", "rmsprop_bnb_8bit",
]  # fmt: skip


@pytest.mark.parametrize(
    "optim", slow_but((), BITSANDBYTES, swept=[each for n, each in enumerate(BITSANDBYTES) if n % 4])
)
def test_optimizers_of_bitsandbytes_are_traced_for_a_gpu_that_is_not_here(optim, tmp_path):
    pytest.importorskip("bitsandbytes")
    rows = Dataset.from_list([{"text": "1 + 1 = 2"}] * 4)
    config = {"optim": optim, "output_dir": str(tmp_path), "per_device_train_batch_size": 2}
    described = LlamaConfig(**SIZES | {"num_hidden_layers": 1})
    found = estimate_method(
        "sft", described, rows, device="A100-80GB", config=config, processing_class=make_tokenizer()
    )
    held = found.phases["optimizer"]
    if optim.startswith("paged_"):  # but for small ones, and tables
        assert 0 < held["optimizer"] < 0.1 * held["weights"]
        assert 0.4 * held["weights"] < found.host_bytes < 4.5 * held["weights"]
    else:
        assert 0 < held["optimizer"] < 4.5 * held["weights"]


def test_an_optimizer_that_cannot_be_traced_is_named(tmp_path):
    args = config_of("SFTConfig", {"optim": "galore_adamw_8bit", **LINEAR}, str(tmp_path))
    with pytest.raises(ValueError, match="optim='galore_adamw_8bit' cannot be traced without values, since it steps"):
        estimate(args, LlamaConfig(**SIZES), lengths=[64])


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    for module in ("lowtide.memory.table", "lowtide.planner.tracing.substitutes.package_optimizers"):
        monkeypatch.setattr(f"{module}.find_spec", lambda name: None)
    args = config_of("SFTConfig", {"optim": "adamw_torch_8bit"}, str(tmp_path))
    with pytest.raises(ValueError, match=r"pip install 'lowtide\[ao\]'"):
        estimate(args, LlamaConfig(**SIZES), lengths=[64])


@pytest.mark.slow
def test_torchao_keeps_tables_with_values(tmp_path):
    """They are made once in a process; made in a trace, all steps after it were wrong."""
    tables = pytest.importorskip("torchao.optim.subclass_8bit")
    tables.get_qmap_signed.cache_clear()
    estimate(config_of("SFTConfig", {"optim": "adamw_torch_8bit"}, str(tmp_path)), LlamaConfig(**SIZES), lengths=[64])
    found = tables.get_qmap_signed()
    assert len(set(found)) == 256
    assert (min(found), max(found)) == pytest.approx((-0.993, 1.0), abs=0.01)


def test_arguments_that_there_are_not_are_refused(tmp_path):
    config, described = config_of("SFTConfig", {}, str(tmp_path)), LlamaConfig(**SIZES)
    with pytest.raises(TypeError, match="estimate has no argument 'peft_confg'; did you mean 'peft_config'"):
        estimate(config, described, lengths=[8], peft_confg=None)
    with pytest.raises(TypeError, match="plan has no argument 'source'"):
        plan("sft", described, "rows.jsonl", "1GiB", source={})
    with pytest.raises(TypeError, match="estimate_method has no argument 'devise'"):
        estimate_method("sft", described, "rows.jsonl", devise="cpu")
    with pytest.raises(TypeError, match="a run has no argument 'adapters'"):
        FakeRun(method_of(config), config, described, Dataset.from_list(rows_of([8])), adapters=None)


@pytest.mark.slow
def test_options_that_need_a_gpu_are_taken_where_there_is_none():
    rows = Dataset.from_list([{"text": "17 + 5 = 22 "}] * 8)
    described, tokenizer = LlamaConfig(**SIZES), make_tokenizer()
    on_gpu = {"device": "H100-80GB", "processing_class": tokenizer}
    plain = estimate_method("sft", described, rows, **on_gpu)
    assert estimate_method("sft", described, rows, config={"tf32": True}, **on_gpu).phases == plain.phases
