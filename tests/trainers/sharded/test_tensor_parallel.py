"""Layers that are split between ranks (`tp_size`) against one rank: the same losses and weights, in every trainer that
learns from rows, and with its options."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import ParallelismConfig
from datasets import Dataset
from peft import IA3Config, LoraConfig
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from lowtide.engine.forward import tensor_parallel_of
from lowtide.ranks.shards import whole_of
from lowtide.trainers.reports.start import StartReport
from tests.support.matrix import matrix
from tests.support.ranks import sharded_training
from tests.support.ranks.processes import run_ranks
from tests.support.ranks.sharded_training import (
    assert_as_on_one_rank,
    assert_near,
    meeting_place,
    of_equal_bits,
    on_ranks,
    rank_of,
    resumed,
    resumed_on_ranks,
)
from tests.support.runs.online_runs import online

ADAPTED = {"target_modules": ["lm_head", "q_proj", "o_proj", "up_proj", "down_proj"], "lora_bias": True}
CASES: dict[str, dict[str, Any]] = {
    **sharded_training.CASES,
    "balanced": {"kind": "SFT", "train_sampling_strategy": "batch_rebalance", "rows": 4},
    "LoRA, on the head too and with dropout": {
        **{"kind": "SFT", "lora": {**ADAPTED, "lora_dropout": 0.3}},
        **{"optim": "sgd", "learning_rate": 0.5},  # AdamW makes steps of gradients that are rounding alone
    },
    "noise": {"kind": "SFT", "neftune_noise_alpha": 5.0},
    "padded": {"kind": "DPO", "padding_free": False},
    "Lion": {"kind": "SFT", "optim": "lion_32bit"},
    "norms of heads": {"kind": "SFT", "model": "qwen3"},
    "soft-caps": {"kind": "DPO", "model": "gemma2"},
    "queries, keys and values in one": {"kind": "SFT", "model": "phi3"},
    "experts": {"kind": "SFT", "model": "mixtral", "router_aux_loss_coef": 0.01},
    "experts and norms of heads": {"kind": "DPO", "model": "qwen3_moe"},
}
OF_SINGLE_BATCHES = ("experts", "experts and norms of heads")
"""Whose loss has a term that is no sum over rows, so that it depends on the rows of a rank."""


# -- two ranks -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What came of every case on two ranks."""
    folder = tmp_path_factory.mktemp("two")
    on_ranks(folder, {name: {**case, "tensor": 2} for name, case in CASES.items()})
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_two_ranks_learn_what_one_does(name, two_ranks):
    assert_as_on_one_rank(two_ranks, name, CASES[name])


def test_two_ranks_learn_and_evaluate_as_one_does(tmp_path):
    on_ranks(tmp_path, {name: {**CASES[name], "tensor": 2} for name in ("SFT", "LoRA, DPO")})
    for name in ("SFT", "LoRA, DPO"):
        assert_as_on_one_rank(tmp_path, name, CASES[name])


# -- four ranks ----------------------------------------------------------------------------------------------------

PLACES: dict[str, dict[str, Any]] = {
    "copies": {},
    "fsdp": {"fsdp": True},
    "shards by size": {"parallelism_config": {"dp_shard_size": 2}},
}
PLACED = ("DPO", "epochs", "tied", "LoRA, DPO", "checkpointing", "clipped")


def cells() -> list[tuple[str, str]]:
    """Most cases in copies, and some of them otherwise; dropout on other rows draws other numbers."""
    same = [name for name in CASES if name not in OF_SINGLE_BATCHES and "dropout" not in name and name != "noise"]
    return [
        *((name, "copies") for name in same),
        *((n, p) for p in PLACES if p != "copies" for n in PLACED if n in same),
    ]


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What came of every case on four ranks, of which two split layers."""
    folder = tmp_path_factory.mktemp("four")
    cases = {f"{name}, {place}": {"tensor": 2, **CASES[name], **PLACES[place]} for name, place in cells()}
    on_ranks(folder, cases, ranks=4)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("name", "place"), cells())
def test_four_ranks_learn_what_one_does(name, place, four_ranks):
    assert_as_on_one_rank(four_ranks, f"{name}, {place}", CASES[name])


# -- environments --------------------------------------------------------------------------------------------------


class Told:
    """An environment that tells each rank something else."""

    def reset(self, **row: Any) -> str:
        return f" {os.environ.get('RANK', 0)}"

    def get_reward(self) -> float:
        return float(os.environ.get("RANK", 0))


def told(folder: Path, **options: Any) -> dict[str, torch.Tensor]:
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": f"{n}"}]} for n in range(12)])
    given = {"environment_factory": Told, "train_dataset": rows}
    trainer = online(folder, arguments=given, num_generations=2, **options)
    trainer.train()
    return {name: whole_of(p).clone() for name, p in trainer.model.named_parameters()}


def tell_ranks(rank: int, folder: str) -> None:
    with rank_of(Path(folder), rank, 2):
        torch.save(told(Path(folder, str(rank)), parallelism_config={"tp_size": 2}), Path(folder, f"{rank}.pt"))


@pytest.mark.slow
def test_ranks_go_on_with_what_the_first_was_told(tmp_path):
    run_ranks(tell_ranks, str(meeting_place(tmp_path)))
    expected = told(tmp_path / "one")
    for rank in range(2):
        assert_near(torch.load(tmp_path / f"{rank}.pt"), expected, 1e-5)


# -- checkpoints ---------------------------------------------------------------------------------------------------

RESUMED = {"whole": {}, "LoRA": {"lora": True}, "experts": {"model": "mixtral"}}


@pytest.mark.slow
def test_a_run_resumes_to_equal_bits_and_from_one_rank(tmp_path):
    expected = {name: resumed(tmp_path / f"one {name}", 1, None, **options) for name, options in RESUMED.items()}
    resumed_on_ranks(tmp_path, {name: {"tensor": 2, **options} for name, options in RESUMED.items()})
    for name in RESUMED:
        assert_near(of_equal_bits(tmp_path, name), expected[name], 1e-5)
        assert_near(torch.load(tmp_path / f"from one rank {name}.pt"), expected[name], 1e-5)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "first whole" / "last")
    assert_near(dict(saved.named_parameters()), expected["whole"], 1e-5)
    with pytest.raises(
        ValueError,
        match="split by tp_size=2, which cannot be cut anew for layers that are split by tp_size=1",
    ):
        resumed(tmp_path / "back", 1, tmp_path / "first whole")
    resumed(tmp_path / "back", 1, tmp_path / "first whole", resume_without_states=True)


# -- memory --------------------------------------------------------------------------------------------------------


def hold_parts(rank: int, folder: str) -> None:
    with rank_of(Path(folder), rank, 2):
        trainer = matrix.make("DPO", parallelism_config={"tp_size": 2}, max_steps=1)
        whole = {name: p.numel() for name, p in matrix.build("DPO", 64).named_parameters()}
        for model in (trainer.model, trainer.reference.model):
            ranks = tensor_parallel_of(model)
            assert ranks is not None
            assert (ranks.size, ranks.rank, ranks.replicas) == (2, rank, None)
            for name, p in model.named_parameters():
                split = "norm" not in name
                assert isinstance(p, DTensor) == split
                assert p.to_local().numel() <= whole[name] // 2 + model.config.hidden_size if split else True
        [report] = [each for each in trainer.callback_handler.callbacks if isinstance(each, StartReport)]
        assert dict(report.lines())["weights"].startswith("layers split between 2 ranks (tensor parallelism), ")
        assert trainer.get_total_train_batch_size(trainer.args) == matrix.BATCH
        trainer.train()
        states = trainer.optimizer.optimizer.state
        assert len(states) == len(whole)
        assert all(state["exp_avg"].shape == p.shape for p, state in states.items())
        assert sum(state["exp_avg"].numel() for state in states.values()) <= 0.55 * sum(whole.values())
        ids = torch.tensor([[5, 6, 7, 8]])
        logits = trainer.model(input_ids=ids).logits  # of any code that calls the model
        assert logits.shape == (1, 4, trainer.model.config.vocab_size)


def test_a_rank_holds_its_parts_of_weights_and_states(tmp_path):
    run_ranks(hold_parts, str(meeting_place(tmp_path)))


# -- what is refused -----------------------------------------------------------------------------------------------

GPT2 = {"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 2}
THREE = {"model_type": "llama", "hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 3}
ODD = {"model_type": "llama", "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 15}
LINE = {"num_hidden_layers": 1}
REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "no plan": ({"described": GPT2}, "model type gpt2 cannot be split by tp_size: transformers has no plan for it"),
    "heads": ({"described": {**LINE, **THREE}}, "q_proj has 3 heads, which 2 ranks cannot share equally"),
    "widths": ({"described": {**LINE, **ODD}}, "gate_proj has a width of 15, which 2 ranks"),
    "DoRA": (
        {"adapters": {"use_dora": True}},
        "q_proj has an adapter of the kind Dora.*, and plain LoRA",
    ),
    "IA3": ({"adapters": "IA3"}, "q_proj has an adapter of the kind peft.tuners.ia3.*, and plain LoRA alone"),
    "matrices": ({"optim": "adafactor"}, "looks at whole matrices"),
    "states in bfloat16": ({"optim": "adamw_compressed"}, "would make the float32 weights bfloat16"),
    "plan": (
        {"model_init_kwargs": {"tp_plan": "auto"}, "by": "name"},
        "tp_plan='auto' has transformers split",
    ),
    "reference stored": ({"kind": "DPO", "ref_model_storage": "8bit"}, "ref_model_storage='8bit' stores a whole ref"),
    "stepped in backward": ({"optimizer_in_backward": True, "max_grad_norm": 0.0}, "gradients of 2 ranks are added up"),
    "compiled": ({"torch_compile": True, "torch_compile_backend": "eager"}, "cannot exchange between ranks"),
}


def refuse(rank: int, folder: str) -> None:
    with rank_of(Path(folder), rank, 2):
        for options, said in REFUSALS.values():
            given: dict[str, Any] = {"kind": "SFT", "parallelism_config": {"tp_size": 2}, **options}
            adapters, described, by = (given.pop(name, None) for name in ("adapters", "described", "by"))
            if adapters is not None:
                names = {"target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"}
                ia3 = adapters == "IA3"
                given["peft_config"] = (
                    IA3Config(**names, feedforward_modules=["down_proj"]) if ia3 else LoraConfig(**names, **adapters)
                )
            if described is not None:
                config = AutoConfig.for_model(**described, vocab_size=len(matrix.tokenizer()), eos_token_id=0)
                given["model"] = AutoModelForCausalLM.from_config(config)
            if by == "name":
                given["model"] = str(Path(folder, "model"))
            with pytest.raises(ValueError, match=said):
                matrix.make(**given)


def test_what_cannot_be_split_is_refused(tmp_path):
    matrix.build("SFT", 64).save_pretrained(tmp_path / "model")
    run_ranks(refuse, str(meeting_place(tmp_path)))


# -- how users say it ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"parallelism_config": {"tp_size": 3}}, "tp_size=3 is 3, and there are 4 processes"),
        ({"parallelism_config": {"tp_size": 2, "dp_shard_size": 4}}, "dp_shard_size=4 times tp_size=2 is 8"),
        ({"parallelism_config": {"tp_size": 2, "sp_size": 2}}, "tp_size=2 does not go with sp_size or cp_size=2"),
        ({"parallelism_config": {"tp_size": "a"}}, "sizes are whole numbers"),
        (
            {"parallelism_config": {"tp_size": 2}, "deepspeed": {"zero_optimization": {"stage": 2}}},
            "tp_size=2 does not go with deepspeed: leave one of them out",
        ),
        (
            {"parallelism_config": {"tp_size": 2}, "fsdp": True, "fsdp_config": {"offload_params": True}},
            "tp_size=2 does not go with weights in the host's memory",
        ),
    ],
    ids=range(6),
)
def test_sizes_that_do_not_fit_are_said(options, said, read):
    with pytest.raises(ValueError, match=said):
        read(4, **options)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"parallelism_config": {"tp_size": 4}}, ("none", 1, 1)),
        ({"parallelism_config": json.dumps({"tp_size": 4})}, ("none", 1, 1)),
        ({"parallelism_config": ParallelismConfig(tp_size=2)}, ("ddp", 1, 2)),
        ({"parallelism_config": {"tp_size": 2, "dp_replicate_size": 2}}, ("ddp", 1, 2)),
        ({"parallelism_config": ParallelismConfig(tp_size=2, dp_shard_size=2)}, ("fsdp2", 2, 2)),
        ({"parallelism_config": {"tp_size": 2}, "fsdp": True}, ("fsdp2", 2, 2)),
    ],
    ids=range(6),
)
def test_sizes_are_read(options, expected, read):
    found = read(4, **options)
    assert (found.kind, found.shards, found.data_ranks) == expected
    assert found.runs


def test_one_process_has_whole_layers(read, caplog):
    with caplog.at_level(logging.WARNING, "lowtide"):
        found = read(1, parallelism_config={"tp_size": 2})
    assert found.tensor_parallel == found.devices == 1
    assert "layers are to be split over 2 processes, not over 1 process" in caplog.text


def test_what_accelerate_launch_says_is_read(read, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "2")
    assert read(4).tensor_parallel == 2
    with pytest.raises(ValueError, match="tp_size=4, and accelerate's parallelism_config: tp_size=2: leave one"):
        read(4, parallelism_config={"tp_size": 4})
