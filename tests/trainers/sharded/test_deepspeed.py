"""DeepSpeed's ZeRO against one rank without it: the same losses and weights, in every trainer and with its options."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, TrainerCallback

from lowtide.compat import deepspeed
from lowtide.ranks.shards import whole_of
from tests.support.marks import slow_but
from tests.support.matrix import matrix, matrix_models
from tests.support.ranks.processes import run_ranks
from tests.support.ranks.sharded_training import A_RANK_WITHOUT, assert_near, meeting_place, on_ranks, rank_of, trained
from tests.support.references.parity_world import build_model
from tests.support.runs.online_runs import online

needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs deepspeed: pip install deepspeed")
SIZES = {
    "reduce_bucket_size": 20_000,
    "stage3_prefetch_bucket_size": 5_000,
    "stage3_param_persistence_threshold": 100,
}
"""Small enough for the tiny Llama to have several buckets, and parameters that are let go."""

KEPT = ("stage3_max_live_parameters", "stage3_max_reuse_distance")
"""What makes stage 3 keep all weights of a small model."""

# Memory techniques are those of `tests/exactness/test_matrix_ranks.py`, each in both stages.
CASES: dict[str, dict[str, Any]] = {
    "SFT": {"kind": "SFT", "evaluated": True},
    "DPO": {"kind": "DPO", "tokens_per_microbatch": 90, "evaluated": True},
    **{name: {"kind": name} for name in ("Reward", "ORPO", "CPO", "BCO", *matrix_models.ONLINE)},
    "KTO": {"kind": "KTO", "rows": A_RANK_WITHOUT},
    "LoRA": {"kind": "SFT", "lora": True, "rows": A_RANK_WITHOUT},
    "LoRA, DPO": {"kind": "DPO", "lora": True, "gradient_accumulation_steps": 2},
    "trained LoRA, DPO": {"kind": "DPO", "lora": {"init_lora_weights": False}, "came": True},
    "LoRA, Reward": {"kind": "Reward", "lora": True},
    "no scores on a rank": {"kind": "SFT", "scored": "half"},
    "no scores, small micro-batches": {"kind": "SFT", "scored": "half", "tokens_per_microbatch": 40},
    "a loss of the whole batch": {
        "kind": "DPO",
        "loss_type": "aot",
        "tokens_per_microbatch": 110,
        "rows": A_RANK_WITHOUT,
    },
    "reference computed before": {"kind": "DPO", "precompute_ref_log_probs": True},
    "clipped": {"kind": "SFT", "max_grad_norm": 0.01},
    "not clipped": {"kind": "SFT", "max_grad_norm": 0.0},
    "accumulation": {"kind": "SFT", "gradient_accumulation_steps": 2, "tokens_per_microbatch": 64},
    "packing": {"kind": "SFT", "packing": True, "max_length": 64},
    "padded": {"kind": "DPO", "padding_free": False},
    "compiled": {"kind": "SFT", "torch_compile": True, "torch_compile_backend": "eager"},
    "SGD": {"kind": "SFT", "optim": "sgd"},
    "tied": {"kind": "SFT", "model": "tied"},
    "windows": {"kind": "DPO", "model": "gemma3"},
    "experts": {"kind": "SFT", "model": "mixtral", "router_aux_loss_coef": 0.0},
}
OF_STAGES: dict[str, dict[str, Any]] = {
    "states on the host": {"stage": 2, "kind": "SFT", "tokens_per_microbatch": 64, "zero": ["offload_optimizer"]},
    "weights on the host": {"stage": 3, "kind": "DPO", "zero": ["offload_param", "offload_optimizer"]},
    "gradients not in one piece": {"stage": 1, "kind": "SFT", "contiguous_gradients": False},
    "weights let go at once": {"stage": 3, "kind": "SFT", **dict.fromkeys(KEPT, 0)},
    "weights let go at once, rows": {"stage": 3, "kind": "DPO", "tokens_per_microbatch": 90, **dict.fromkeys(KEPT, 0)},
}
"""Cases of one stage; `zero` names what lies in the host's memory."""
IN_STAGE_1 = ("SFT", "DPO", "LoRA, DPO", "accumulation", "tied", "no scores, small micro-batches")
"""The others share all but the exchange with stage 2."""


def config_of(stage: int, **more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **SIZES, **more}}


def cells() -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """By name, the options of a case, and DeepSpeed's config."""
    found = {
        f"{name}, stage {stage}": (case, config_of(stage))
        for name, case in CASES.items()
        for stage in (1, 2, 3)
        if stage > 1 or name in IN_STAGE_1
    }
    for name, case in OF_STAGES.items():
        options = dict(case)
        more: dict[str, Any] = {each: {"device": "cpu"} for each in options.pop("zero", ())}
        more |= {key: options.pop(key) for key in ("contiguous_gradients", *KEPT) if key in options}
        found[name] = (options, config_of(options.pop("stage"), **more))
    return found


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What came of every case on two ranks."""
    folder = tmp_path_factory.mktemp("sharded")
    on_ranks(folder, {name: {**case, "deepspeed": config} for name, (case, config) in cells().items()})
    return folder


@needs_deepspeed
@pytest.mark.slow
@pytest.mark.parametrize("name", cells())
def test_two_ranks_learn_what_one_does(name, sharded, tmp_path):
    losses, weights, evaluation = torch.load(sharded / f"{name}.pt")
    expected_losses, expected_weights, expected_evaluation = trained(ranks=1, folder=tmp_path, **cells()[name][0])
    assert losses == pytest.approx(expected_losses, rel=1e-5, abs=1e-6)
    assert evaluation == pytest.approx(expected_evaluation, rel=1e-5)
    assert_near(weights, expected_weights, 2e-5)


# -- generation --------------------------------------------------------------------------------------------------

ONLINE: dict[str, dict[str, Any]] = {
    "GRPO": {"num_generations": 4, "beta": 0.1},
    "GRPO, call by call": {"num_generations": 4, "beta": 0.1, "ds3_gather_for_generation": False},
    "GRPO, some bytes": {"num_generations": 4, "beta": 0.1, "ds3_gather_for_generation": 20_000},
    "PPO": {"num_generations": 1, "num_ppo_epochs": 2},
}


def written(folder: Path, name: str, rows: int, **more: Any) -> dict[str, Tensor]:
    """The weights after three steps on completions of unequal length, of so many rows on each rank."""
    stops = {"generation_kwargs": {"stop_strings": ["7", "e"]}}
    options = {"per_device_train_batch_size": rows, **stops, **ONLINE[name], **more}
    trainer = online(folder, name.split(",")[0], model=build_model("llama"), **options)
    trainer.train()
    return {name: whole_of(p).clone() for name, p in trainer.model.named_parameters()}


def write_on_ranks(rank: int, folder: str) -> None:
    place = Path(folder)
    with rank_of(place, rank, 2):
        for name in ONLINE:
            found = written(place / f"run-{name}", name, 4, deepspeed=config_of(3))
            if rank == 0:
                torch.save(found, place / f"{name}.pt")


@needs_deepspeed
@pytest.mark.slow
def test_completions_are_written_and_learned_from_as_by_one_rank(tmp_path):
    run_ranks(write_on_ranks, str(meeting_place(tmp_path)))
    for name in ONLINE:
        assert_near(torch.load(tmp_path / f"{name}.pt"), written(tmp_path / name, name, 8), 2e-5)


# -- checkpoints ---------------------------------------------------------------------------------------------------

BF16 = {"bf16": {"enabled": "auto"}}
RESUMED: dict[str, dict[str, Any]] = {
    **{f"stage {stage}": {"deepspeed": config_of(stage)} for stage in (1, 2, 3)},
    "LoRA": {"lora": True, "deepspeed": config_of(3)},
    **{f"bfloat16, stage {n}": {"bf16": True, "deepspeed": {**config_of(n), **BF16}} for n in (2, 3)},
}


def resumed(folder: Path, start: Path | None, **options: Any) -> dict[str, Tensor]:
    """The weights after four steps, with a checkpoint every second; from one of them, if it is given."""
    saving = {"save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "linear", "max_steps": 4}
    checkpoint = None if start is None else str(start / "checkpoint-2")
    return trained("SFT", 2, folder, checkpoint=checkpoint, save_to=folder / "last", **saving, **options)[1]


def resume_on_ranks(rank: int, folder: str) -> None:
    place = Path(folder)
    with rank_of(place, rank, 2):
        for name, options in RESUMED.items():
            first = resumed(place / name, None, **options)
            again = resumed(place / f"{name} again", place / name, **options)
            assert all(torch.equal(again[key], value) for key, value in first.items()), name
            if rank == 0:
                torch.save(first, place / f"{name}.pt")
        with pytest.raises(ValueError, match="written by zero2, and this run is zero3"):
            resumed(place / "other", place / "stage 2", **RESUMED["stage 3"])


@needs_deepspeed
@pytest.mark.slow
def test_a_run_resumes_to_equal_bits_and_saves_a_whole_model(tmp_path):
    run_ranks(resume_on_ranks, str(meeting_place(tmp_path)))
    for name in RESUMED:
        trained_weights = torch.load(tmp_path / f"{name}.pt")
        if name == "LoRA":
            assert (tmp_path / name / "last" / "adapter_model.safetensors").exists()
            continue
        dtype = next(iter(trained_weights.values())).dtype
        saved = AutoModelForCausalLM.from_pretrained(tmp_path / name / "last", dtype=dtype)
        assert all(torch.equal(p, trained_weights[key]) for key, p in saved.named_parameters())


# -- memory, and what is told --------------------------------------------------------------------------------------


def hold_parts(rank: int, folder: str) -> None:
    with rank_of(Path(folder), rank, 2):
        trainer = matrix.make("SFT", deepspeed=config_of(3), max_steps=2, per_device_train_batch_size=4)
        whole = sum(p.nbytes for p in matrix.build("SFT", 64).parameters())
        assert sum(p.ds_tensor.nbytes for p in trainer.model.parameters()) <= 0.55 * whole
        trainer.train()
        parts = deepspeed.masters(trainer.runner.updater.engine)
        assert sum(part.nbytes for part in parts) <= 0.55 * whole
        own = {p.ds_tensor.untyped_storage().data_ptr() for p in trainer.model.parameters()}
        assert {part.untyped_storage().data_ptr() for part in parts} == own, "float32 weights are their own masters"
        assert all(trainer.optimizer.optimizer.state[part]["exp_avg"].shape == part.shape for part in parts)
        norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
        assert len(norms) == 2
        assert min(norms) > 0


@needs_deepspeed
def test_a_rank_holds_its_parts_and_knows_the_norm(tmp_path):
    run_ranks(hold_parts, str(meeting_place(tmp_path)))


class Evaluating(TrainerCallback):
    """Evaluates after each step."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.losses.append(self.trainer.evaluate(matrix.rows("SFT").select(range(7)))["eval_loss"])


def evaluations(rows: int, **options: Any) -> list[float]:
    """Before, after each step of two trainings of two steps, and after them."""
    trainer, seen = matrix.make("SFT", max_steps=2, per_device_train_batch_size=rows, **options), Evaluating()
    seen.trainer = trainer
    seen.on_step_end(None, None, None)
    trainer.add_callback(seen)
    trainer.train()
    trainer.train()
    seen.on_step_end(None, None, None)
    return seen.losses


def evaluate_on_ranks(rank: int, folder: str) -> None:
    with rank_of(Path(folder), rank, 2):
        found = {stage: evaluations(4, deepspeed=config_of(stage)) for stage in (2, 3)}
        if rank == 0:
            torch.save(found, Path(folder, "losses.pt"))


@needs_deepspeed
@pytest.mark.slow
def test_evaluations_between_steps_and_a_second_training(tmp_path):
    run_ranks(evaluate_on_ranks, str(meeting_place(tmp_path)))
    expected = pytest.approx(evaluations(8), rel=1e-5)
    assert torch.load(tmp_path / "losses.pt") == {2: expected, 3: expected}


# -- what is refused -----------------------------------------------------------------------------------------------

REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "own optimizer": ({"optim": "adamw_stochastic"}, "take optim='adamw_torch_fused'"),
    "whole matrices": ({"optim": "adafactor"}, "looks at whole matrices"),
    "another optimizer": ({"optim": "lion_32bit"}, "acts number by number"),
    "in backward": ({"optimizer_in_backward": True, "max_grad_norm": 0.0}, "ZeRO-2 frees gradients"),
    "states on the host": ({"optimizer_states_on_host": True}, '"offload_optimizer"'),
    "a rehearsal": ({"rehearsal": True}, "leave it out"),
    "tiles": ({"mlp_tile_tokens": 16}, "gather an MLP's weights for each tile"),
    "a stored reference": ({"kind": "DPO", "ref_model_storage": "cpu"}, "leave it at 'same'"),
    "a reference that follows": ({"kind": "DPO", "sync_ref_model": True}, "take ZeRO-2"),
    "batch size": ({"deepspeed": {**config_of(2), "train_micro_batch_size_per_gpu": 3}}, "=3.*_batch_size=8"),
    "accumulation": ({"deepspeed": {**config_of(2), "gradient_accumulation_steps": 4}}, "=4.*accumulation_steps=1"),
    "clipping": ({"deepspeed": {**config_of(2), "gradient_clipping": 0.5}}, "=0.5.*max_grad_norm=1.0"),
    "bfloat16": ({"deepspeed": {**config_of(2), "bf16": {"enabled": True}}}, "enabled=True.*bf16=False"),
    "float16": ({"deepspeed": {**config_of(2), "fp16": {"enabled": True}}}, "take bf16=True"),
    "learning rate": (
        {"deepspeed": {**config_of(2), "optimizer": {"type": "AdamW", "params": {"lr": 1.0}}}},
        "params.lr=1.0.*learning_rate=0.002",
    ),
    "optimizer of the config": (
        {"deepspeed": {**config_of(2), "optimizer": {"type": "Lamb", "params": {"lr": "auto"}}}},
        "remove the section `optimizer`",
    ),
    "an unknown scheduler": (
        {"deepspeed": {**config_of(2), "scheduler": {"type": "WarmupLog"}}},
        "'WarmupLog', which DeepSpeed does not have",
    ),
    "an argument of no scheduler": (
        {"deepspeed": {**config_of(2), "scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 3}}}},
        "warmup_steps is no argument of WarmupLR",
    ),
    "another rate of the scheduler": (
        {"deepspeed": {**config_of(2), "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.5}}}},
        "warmup_max_lr=0.5.*learning_rate=0.002",
    ),
    "Adam without its own decay": (
        {
            "deepspeed": {**config_of(2), "optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}},
            "weight_decay": 0.1,
        },
        "adds weight_decay=0.1 to the gradients",
    ),
    "no stage": ({"deepspeed": {"bf16": {"enabled": "auto"}}}, "has no `zero_optimization`"),
    "unknown stage": ({"deepspeed": config_of(4)}, "`zero_optimization.stage` is 4"),
    "states on a disk": (
        {"deepspeed": config_of(3, offload_optimizer={"device": "nvme"}), "save_strategy": "epoch"},
        "set save_only_model=True",
    ),
    "no file": ({"deepspeed": "nowhere.json"}, "is not there"),
    "also by fsdp": ({"fsdp": True}, "leave one of them out"),
}


def refuse(rank: int, folder: str) -> None:
    with rank_of(Path(folder), rank, 2):
        for options, said in REFUSALS.values():
            with pytest.raises(ValueError, match=said):
                matrix.make(**{"kind": "SFT", "deepspeed": config_of(3), **options})


@needs_deepspeed
def test_what_cannot_be_done_is_refused(tmp_path):
    run_ranks(refuse, str(meeting_place(tmp_path)))


# -- the schedule --------------------------------------------------------------------------------------------------

AUTOS = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}
SCHEDULES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "nothing said": ({"type": "WarmupLR"}, {}),
    "constant": ({"type": "WarmupLR", "params": AUTOS}, {"warmup_steps": 3}),
    "no warmup": ({"type": "WarmupLR", "params": AUTOS}, {}),
    "linear warmup": ({"type": "WarmupLR", "params": {**AUTOS, "warmup_type": "linear"}}, {"warmup_steps": 4}),
    "falling": ({"type": "WarmupDecayLR", "params": {**AUTOS, "total_num_steps": "auto"}}, {"warmup_steps": 0.4}),
    "cosine": (
        {"type": "WarmupCosineLR", "params": {"warmup_num_steps": "auto", "total_num_steps": "auto"}},
        {"warmup_steps": 2},
    ),
    "one cycle": ({"type": "OneCycle", "params": {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-2}}, {}),
}
"""By name: the section of the config, and options. The config is transformers' own example otherwise."""


def stock(scheduler: dict[str, Any]) -> dict[str, Any]:
    return {
        "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16},
        "bf16": {"enabled": "auto"},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
        },
        "scheduler": scheduler,
        "zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": "auto"},
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "steps_per_print": 2000,
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "wall_clock_breakdown": False,
    }


class Rates(TrainerCallback):
    """The learning rate of each step."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.found.append(kwargs["optimizer"].param_groups[0]["lr"])


def rates(folder: Path, section: dict[str, Any], resume: bool = False, **options: Any) -> list[float]:
    """Of a training of six steps."""
    seen = Rates()
    options = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, **options}
    trainer = matrix.make("SFT", deepspeed=stock(section), output_dir=str(folder), **options)
    trainer.add_callback(seen)
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-3") if resume else None)
    return seen.found


def theirs(section: dict[str, Any], **options: Any) -> list[float]:
    """The same of an engine of DeepSpeed alone, with the config that transformers fills in."""
    import deepspeed as library
    from transformers import TrainingArguments
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    rate = matrix.COMMON["learning_rate"]
    args = TrainingArguments(output_dir="unused", learning_rate=rate, use_cpu=True, max_grad_norm=1.0, **options)
    filled = HfTrainerDeepSpeedConfig(stock(section))
    model = torch.nn.Linear(2, 2)
    filled.trainer_config_process(args)
    filled.config["zero_optimization"]["reduce_bucket_size"] = 1000
    filled.trainer_config_finalize(args, model, 6)
    config = {**filled.config, "zero_allow_untested_optimizer": True}
    del config["optimizer"]  # on a CPU it would be compiled
    engine: Any = library.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters(), rate), config=config)[
        0
    ]
    found = []
    for _ in range(6):
        found.append(engine.optimizer.param_groups[0]["lr"])
        engine.backward(engine(torch.ones(1, 2)).sum())
        engine.step()
    return found


def follow(rank: int, folder: str) -> None:
    place = Path(folder)
    with rank_of(place, rank, 2):
        for name, (section, options) in SCHEDULES.items():
            found = rates(place / name, section, **options)
            again = rates(place / name, section, resume=True, **options)
            plain = theirs({"params": AUTOS, **section}, **options)
            if rank == 0:
                torch.save((found, again, plain), place / f"{name}.pt")


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = meeting_place(tmp_path_factory.mktemp("rates"))
    run_ranks(follow, str(folder))
    return folder


@needs_deepspeed
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_schedule_of_the_config_is_followed_step_by_step(name, followed, tmp_path):
    found, again, plain = torch.load(followed / f"{name}.pt")
    assert found == plain
    assert again == plain[3:]
    section, options = SCHEDULES[name]
    assert rates(tmp_path, section, **options) == plain, "one process, which trains without DeepSpeed"


@needs_deepspeed
def test_a_schedule_that_the_options_say_too_is_not_ignored_in_silence(tmp_path, caplog):
    rates(tmp_path, {"type": "WarmupLR"}, lr_scheduler_type="cosine", max_steps=1, save_strategy="no")
    assert "lr_scheduler_type='cosine' has no effect: deepspeed has a scheduler, WarmupLR" in caplog.text


@pytest.fixture
def two_ranks(monkeypatch):
    """Configs are made as if a launcher had started two processes."""
    monkeypatch.setenv("WORLD_SIZE", "2")

    def made(**options: Any) -> Any:
        config = matrix.classes("SFT")[1]
        monkeypatch.setattr(config, "_setup_devices", torch.device("cpu"))
        monkeypatch.setattr(config, "_n_gpu", 0, raising=False)
        return config(output_dir="unused", use_cpu=True, report_to="none", **options)

    return made


@needs_deepspeed
def test_values_left_to_the_options_are_filled_in(two_ranks, tmp_path):
    path = tmp_path / "ds.json"
    optimizer = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}}
    given = {
        **config_of(2, stage3_prefetch_bucket_size="auto"),
        "optimizer": optimizer,
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_max_lr": "auto", "total_num_steps": "auto"}},
        "train_batch_size": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
    }
    path.write_text(json.dumps(given))
    found = two_ranks(deepspeed=str(path), gradient_accumulation_steps=4, max_grad_norm=0.3)
    assert found.sharding.kind == "zero2"
    assert not found.rehearsal
    assert found.zero_config["train_batch_size"] == 2 * found.per_device_train_batch_size
    assert found.zero_config["gradient_accumulation_steps"] == 1
    assert found.zero_config["gradient_clipping"] == 0.3
    assert found.zero_config["bf16"] == {"enabled": False}
    assert not {"optimizer", "scheduler"} & {*found.zero_config}
    assert two_ranks(deepspeed={**config_of(2), "bf16": {"enabled": True}}).bf16


@needs_deepspeed
def test_what_accelerate_launch_says_is_read(two_ranks, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "3")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", "nvme")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH", "/scratch")
    found = two_ranks()
    assert (found.sharding.kind, found.sharding.offload_weights) == ("zero3", True)
    assert found.zero_config["zero_optimization"]["offload_param"] == {"device": "nvme", "nvme_path": "/scratch"}
    assert found.deepspeed_plugin is None


def test_without_deepspeed_it_is_said_what_to_install(two_ranks, monkeypatch):
    monkeypatch.setattr(deepspeed, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install"):
        two_ranks(deepspeed=config_of(2))


def test_one_process_trains_without_it(caplog):
    found = matrix.classes("SFT")[1](output_dir="unused", use_cpu=True, report_to="none", deepspeed=config_of(2))
    assert found.zero_config is None
    assert "shards over 1 process" in caplog.text


@needs_deepspeed
@pytest.mark.parametrize("stage", slow_but([2], [2]))
def test_a_config_is_kept_as_it_was_given(two_ranks, stage):
    given = config_of(stage)
    found = two_ranks(deepspeed=given)
    assert found.deepspeed == given == config_of(stage)
