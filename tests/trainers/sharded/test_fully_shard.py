"""Weights in shards (`fsdp`) against whole ones: the same losses and weights, in every trainer and with its options."""

from __future__ import annotations

import contextlib
import datetime
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from lowtide.engine.forward import install
from lowtide.engine.weights.quantized import check_shardable
from lowtide.engine.weights.sharded.fully_shard import shard_model, weights_for_writing
from lowtide.memory.allocators.measure import bytes_text
from lowtide.memory.optimizers.states import predict_states
from lowtide.ranks.sharding import Sharding
from lowtide.ranks.shards import place_of, whole_of
from lowtide.rollout.generators.generator import Request, Sampling
from lowtide.rollout.generators.ragged import RaggedGenerator
from lowtide.run.options.sharding import engines_hidden, sharding_of
from lowtide.trainers.reports.start import StartReport
from tests.support.marks import slow_but
from tests.support.matrix import matrix
from tests.support.ranks import sharded_training
from tests.support.ranks.processes import run_ranks
from tests.support.ranks.sharded_training import (
    ONLINE,
    assert_as_on_one_rank,
    assert_near,
    build,
    meeting_place,
    of_equal_bits,
    on_ranks,
    rank_of,
    resumed,
    resumed_on_ranks,
    trained,
    written,
)
from tests.support.runs.sabotage import OPTIMIZER, out_of_memory

CASES: dict[str, dict[str, Any]] = {
    **sharded_training.CASES,
    "padded": {"kind": "DPO", "padding_free": False},
    "Lion": {"kind": "SFT", "optim": "lion_32bit"},
    "grouped": {"kind": "SFT", "train_sampling_strategy": "group_by_length", "rows": 6},
    "experts": {"kind": "SFT", "model": "mixtral", "router_aux_loss_coef": 0.0},
    "adapters of experts": {
        **{"kind": "SFT", "model": "qwen3_moe", "came": True, "max_steps": 2},
        "lora": {
            **{"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
            **{"init_lora_weights": False, "lora_dropout": 0.0},
        },
    },
    "fused layers": {"kind": "DPO", "fused_layers": True, "tokens_per_microbatch": 90},
    "fused layers, LoRA, checkpointing": {
        "kind": "SFT",
        "lora": True,
        "fused_layers": True,
        "gradient_checkpointing": True,
    },
    "fused layers, experts": {"kind": "SFT", "model": "mixtral", "router_aux_loss_coef": 0.0, "fused_layers": True},
    "fused layers, recurrent": {
        "kind": "SFT",
        "model": "qwen3_5",
        "fused_layers": True,
        "gradient_checkpointing": True,
    },
}
CONFIGS: dict[str, dict[str, Any]] = {
    "fsdp": {"fsdp": True},
    "weights kept from forward to backward": {"fsdp": "full_shard", "fsdp_config": {"reshard_after_forward": False}},
    "by sizes": {"parallelism_config": {"dp_shard_size": 2}},
}


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What came of every case on two ranks."""
    folder = tmp_path_factory.mktemp("sharded")
    cases = {f"{name}, {how}": {**case, **CONFIGS[how]} for name, case, how in cells()}
    on_ranks(folder, cases)
    return folder


def cells() -> list[tuple[str, dict[str, Any], str]]:
    """Every case under the first config, and some of them under the others."""
    others = [(name, CASES[name], how) for name in ("SFT", "DPO") for how in CONFIGS if how != "fsdp"]
    return [*((name, case, "fsdp") for name, case in CASES.items()), *others]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "how"), [(name, how) for name, _, how in cells()])
def test_two_ranks_learn_what_one_does(name, how, sharded):
    assert_as_on_one_rank(sharded, f"{name}, {how}", CASES[name])


# -- generation --------------------------------------------------------------------------------------------------


def write_on_ranks(rank: int, name: str, folder: str) -> None:
    place = Path(folder)
    with rank_of(place, rank, 2):
        found = written(place / "run", name, 4, fsdp=True)
        if rank == 0:
            torch.save(found, place / "found.pt")


@pytest.mark.parametrize("name", slow_but(["GRPO, layer by layer"], ONLINE))
def test_completions_are_written_and_learned_from_as_by_one_rank(name, tmp_path):
    run_ranks(write_on_ranks, name, str(meeting_place(tmp_path)))
    assert_near(torch.load(tmp_path / "found.pt"), written(tmp_path, name, 8), 2e-5)


def write_unequally(rank: int, folder: str) -> None:
    """The second rank's completion is longer, then the first's."""
    with rank_of(Path(folder), rank, 2):
        torch.distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
        model = build("four layers")
        install(model)
        request = [Request([3, 4, 5], 1, seed=rank)]
        longest = (2, 9) if rank == 0 else (9, 2)
        expected = [RaggedGenerator().generate(model, request, Sampling(most)) for most in longest]
        shard_model(model, Sharding(kind="fsdp2", devices=2), torch.device("cpu"))
        for most, before in zip(longest, expected, strict=True):
            for gather in (False, 20_000, True):
                with weights_for_writing(model, gather):
                    found = RaggedGenerator().generate(model, request, Sampling(most))
                assert [each.token_ids for each in found[0]] == [each.token_ids for each in before[0]]


def test_a_rank_that_has_written_all_takes_part_until_the_other_has(tmp_path):
    run_ranks(write_unequally, str(meeting_place(tmp_path)))


# -- checkpoints ---------------------------------------------------------------------------------------------------

RESUMED = {"whole": {}, "LoRA": {"lora": True}}


@pytest.mark.slow
def test_a_run_resumes_to_equal_bits_and_on_another_number_of_ranks(tmp_path):
    expected = {name: resumed(tmp_path / f"one {name}", 1, None, **options) for name, options in RESUMED.items()}
    resumed_on_ranks(tmp_path, {name: {"fsdp": True, **options} for name, options in RESUMED.items()})
    for name, options in RESUMED.items():
        assert_near(of_equal_bits(tmp_path, name), expected[name], 1e-5)
        assert_near(torch.load(tmp_path / f"from one rank {name}.pt"), expected[name], 1e-5)
        back = resumed(tmp_path / f"back {name}", 1, tmp_path / f"first {name}", **options)
        assert_near(back, expected[name], 1e-5)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "first whole" / "last")
    assert_near(dict(saved.named_parameters()), expected["whole"], 1e-5)
    assert saved.config.architectures == ["LlamaForCausalLM"]
    assert not list((tmp_path / "first LoRA" / "last").glob("model*.safetensors"))


# -- memory --------------------------------------------------------------------------------------------------------


def hold_shards(rank: int, folder: str) -> None:
    with rank_of(Path(folder), rank, 2):
        trainer = matrix.make("SFT", fsdp=True, max_steps=1, per_device_train_batch_size=4)
        held = sum(p.to_local().nbytes for p in trainer.model.parameters())
        whole = sum(p.nbytes for p in matrix.build("SFT", 64).parameters())
        assert held <= 0.55 * whole
        states = predict_states(trainer.model, "adamw_torch")
        assert (states.gradients, states.optimizer) == (held, 2 * held)
        [report] = [each for each in trainer.callback_handler.callbacks if isinstance(each, StartReport)]
        assert dict(report.lines())["weights"] == (
            f"sharded over 2 ranks (FSDP2), {bytes_text(states.weights)} a rank"  # with the buffers
        )
        trainer.train()
        states = trainer.optimizer.optimizer.state
        assert len(states) == len(list(trainer.model.parameters()))
        for parameter, state in states.items():
            rows = place_of(parameter.whole).rows
            assert state["exp_avg"].shape == parameter.shape == (rows[1] - rows[0], *parameter.whole.shape[1:])
        assert all(p.grad is None for p in states)


def test_a_rank_holds_its_shards_of_weights_and_states(tmp_path):
    run_ranks(hold_shards, str(meeting_place(tmp_path)))


def rehearse_without_room(rank: int, folder: str) -> None:
    with rank_of(Path(folder), rank, 2):
        trainer = matrix.make("SFT", fsdp=True, rehearsal=True, per_device_train_batch_size=8, max_steps=2)
        begin = trainer.runner.rehearsal

        def rehearsal(batch: Any) -> None:
            with out_of_memory(trainer.model, "backward", 0) if rank == 1 else contextlib.nullcontext():
                begin(batch)

        trainer.runner.rehearsal = rehearsal
        trainer.train()
        budgets: list[Any] = [None, None]
        torch.distributed.all_gather_object(budgets, trainer.runner.token_budget)
        assert budgets[0] == budgets[1] is not None
        weights = {name: whole_of(p).clone() for name, p in trainer.model.named_parameters()}
        if rank == 0:
            torch.save(weights, Path(folder, "weights.pt"))


@pytest.mark.slow
def test_a_rehearsal_without_room_on_one_rank_lowers_the_budget_of_all(tmp_path):
    run_ranks(rehearse_without_room, str(meeting_place(tmp_path)))
    _, expected, _ = trained("SFT", 1, tmp_path, max_steps=2, rows=16)
    assert_near(torch.load(tmp_path / "weights.pt"), expected, 2e-5)


def make_states_without_room(rank: int, folder: str) -> None:
    with rank_of(Path(folder), rank, 2):
        trainer = matrix.make("SFT", fsdp=True, per_device_train_batch_size=8, max_steps=2)
        failing = out_of_memory(trainer.model, OPTIMIZER, 3) if rank == 1 else contextlib.nullcontext([])
        with failing as fired:
            trainer.train()
        assert len(fired or []) == rank
        weights = {name: whole_of(p).clone() for name, p in trainer.model.named_parameters()}
        if rank == 0:
            torch.save(weights, Path(folder, "weights.pt"))


@pytest.mark.slow
def test_a_step_of_the_optimizer_without_room_on_one_rank_is_taken_again_there(tmp_path):
    run_ranks(make_states_without_room, str(meeting_place(tmp_path)))
    _, expected, _ = trained("SFT", 1, tmp_path, max_steps=2, rows=16)
    assert_near(torch.load(tmp_path / "weights.pt"), expected, 2e-5)


# -- what is refused -----------------------------------------------------------------------------------------------

REFUSALS = {
    "whole matrices": ({"optim": "adafactor"}, "looks at whole matrices"),
    "float32 made bfloat16": ({"optim": "adamw_compressed"}, "load the model with dtype 'bfloat16'"),
    "in backward": ({"optimizer_in_backward": True, "max_grad_norm": 0.0}, "cannot work here"),
    "a stored reference": ({"kind": "DPO", "ref_model_storage": "cpu"}, "leave it at 'same'"),
}


def refuse(rank: int, folder: str) -> None:
    with rank_of(Path(folder), rank, 2):
        for options, said in REFUSALS.values():
            with pytest.raises(ValueError, match=said):
                matrix.make(**{"kind": "SFT", "fsdp": True, **options})
        with pytest.raises(ValueError, match="torchao's form: take load_in_4bit=True"):
            check_shardable(of_torchao())


def differ(rank: int, folder: str) -> None:
    with rank_of(Path(folder), rank, 2):
        for fsdp in (None, True):
            for options, said in DIFFERENCES:
                own = {"kind": "SFT", "fsdp": fsdp, "output_dir": f"{folder}/{rank}", **(options if rank else {})}
                with pytest.raises(ValueError, match=said):
                    matrix.make(**own)
            versions = mock.patch("importlib.metadata.version", return_value=f"2.{rank}")
            with versions, pytest.raises(ValueError, match=r"version of .* is 2.0 on rank 0, and 2.1 on rank 1"):
                matrix.make("SFT", fsdp=fsdp)
            matrix.make("SFT", fsdp=fsdp, output_dir=f"{folder}/{rank}")


DIFFERENCES = [
    ({"learning_rate": 0.25}, "learning_rate is .* on rank 0, and 0.25 on rank 1. Start all ranks"),
    ({"max_steps": 77}, "max_steps is .* on rank 0, and 77 on rank 1"),
    ({"seed": 5}, "seed is .* on rank 0, and 5 on rank 1"),
]


@pytest.mark.slow
def test_ranks_with_other_options_or_versions_are_refused(tmp_path):
    run_ranks(differ, str(meeting_place(tmp_path)))


def of_torchao() -> nn.Module:
    quantization = pytest.importorskip("torchao.quantization")
    layer = nn.ModuleDict({"layer": nn.Linear(32, 32, bias=False)})
    quantization.quantize_(layer, quantization.Int8WeightOnlyConfig())
    return layer


def test_what_cannot_be_done_on_shards_is_refused(tmp_path):
    run_ranks(refuse, str(meeting_place(tmp_path)))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"fsdp": True, "fsdp_config": {"reshard_after_foward": True}}, "did you mean 'reshard_after_forward'"),
        ({"fsdp": True, "fsdp_config": {"xla": True}}, "TPUs"),
        ({"fsdp": True, "parallelism_config": {"dp_shard_size": 3}}, "dp_shard_size=3 is 3, and there are 2 processes"),
        ({"fsdp": "full_shard", "parallelism_config": {"dp_replicate_size": 2, "dp_shard_size": 1}}, None),
        ({"fsdp": "shard_grad_op", "parallelism_config": {"dp_shard_size": 2}}, "leave one of them out"),
    ],
    ids=str,
)
def test_contradictions_are_said(options, said, monkeypatch, tmp_path):
    config = matrix.classes("SFT")[1](output_dir=str(tmp_path), use_cpu=True, report_to="none")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name, value in options.items():
        setattr(config, name, value)
    if said is None:
        assert sharding_of(config).kind == "fsdp2"
        return
    with pytest.raises(ValueError, match=said):
        sharding_of(config)


def test_what_accelerate_launch_says_is_read(monkeypatch, tmp_path):
    config = matrix.classes("SFT")[1](output_dir=str(tmp_path), use_cpu=True, report_to="none")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    monkeypatch.setenv("FSDP_RESHARD_AFTER_FORWARD", "false")
    found = sharding_of(config)
    assert (found.kind, found.devices, found.reshard) == ("fsdp2", 4, False)
    with engines_hidden(config):
        assert "ACCELERATE_USE_FSDP" not in os.environ
    assert os.environ["ACCELERATE_USE_FSDP"] == "true"
