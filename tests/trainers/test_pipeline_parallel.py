"""Ranks that each have some layers (`pipeline_parallel_size`) against one rank: the same losses and weights, in every
trainer that learns from rows, and with its options."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor

from lowtide.trainers.checkpoints.weights import shapes_in
from tests.support import matrix
from tests.support.processes import run_ranks
from tests.support.sharded_training import assert_near, build, meeting_place, on_ranks, rank_of, trained

EVALUATED = {"evaluated": True, "per_device_eval_batch_size": 2, "include_num_input_tokens_seen": "all"}
CASES: dict[str, dict[str, Any]] = {
    "SFT": {"kind": "SFT", "rehearsal": True, "max_steps": 10, **EVALUATED},
    "DPO": {"kind": "DPO", "tokens_per_microbatch": 90, "max_steps": 10, **EVALUATED},
    **{name: {"kind": name} for name in ("KTO", "Reward", "ORPO", "CPO", "BCO")},
    "packed": {"kind": "SFT", "packing": True, "max_length": 52, "rows": 2, "max_steps": 2},
    "epochs": {"kind": "SFT", "max_steps": -1, "num_train_epochs": 2, "rows": 4, **EVALUATED},
    "LoRA": {"kind": "SFT", "lora": True},
    "LoRA, DPO": {"kind": "DPO", "lora": True, "gradient_accumulation_steps": 2, "max_steps": 10},
    "LoRA, Reward": {"kind": "Reward", "lora": True},
    "few scores": {"kind": "SFT", "unscored": True},
    "few scores, small micro-batches": {"kind": "SFT", "unscored": True, "tokens_per_microbatch": 40},
    "a loss of the whole batch": {"kind": "DPO", "loss_type": "aot"},
    "reference computed before": {"kind": "DPO", "precompute_ref_log_probs": True},
    "clipped": {"kind": "SFT", "max_grad_norm": 0.01},
    "one row a micro-batch": {"kind": "SFT", "gradient_accumulation_steps": 2, "tokens_per_microbatch": 50},
    "checkpointing": {"kind": "SFT", "gradient_checkpointing": True, "mlp_tile_tokens": 16},
    "offloading": {"kind": "DPO", "gradient_checkpointing": True, "activation_offloading": True},
    "8-bit states": {"kind": "SFT", "optim": "adamw_8bit"},
    "tied": {"kind": "SFT", "model": "tied"},
    "windows": {"kind": "DPO", "model": "gemma3"},
    "experts": {"kind": "SFT", "model": "mixtral", "router_aux_loss_coef": 0.0},
}


def assert_as_on_one_rank(folder: Path, found: str, case: Mapping[str, Any]) -> None:
    """What ranks left in a file is what one rank comes to in a case."""
    losses, weights, seen = torch.load(folder / f"{found}.pt")
    expected_losses, expected_weights, expected_seen = trained(ranks=1, folder=folder / "one", **case)
    assert losses == pytest.approx(expected_losses, rel=1e-5, abs=1e-6)
    assert seen == pytest.approx(expected_seen, rel=1e-5)
    assert_near(weights, expected_weights, 2e-5)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What came of every case on two ranks."""
    folder = tmp_path_factory.mktemp("two")
    on_ranks(folder, {name: {**case, "stages": 2} for name, case in CASES.items()})
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_two_stages_learn_what_one_rank_does(name, two_ranks):
    assert_as_on_one_rank(two_ranks, name, CASES[name])


def test_two_stages_learn_and_evaluate_as_one_rank_does(tmp_path):
    on_ranks(tmp_path, {"SFT": {**CASES["SFT"], "stages": 2}})
    assert_as_on_one_rank(tmp_path, "SFT", CASES["SFT"])


# -- four ranks ----------------------------------------------------------------------------------------------------

ON_FOUR = ("SFT", "DPO", "LoRA, DPO", "packed", "a loss of the whole batch", "clipped")
OF_FOUR: dict[str, dict[str, Any]] = {
    **{f"{name}, four stages": {**CASES[name], "model": "four layers", "stages": 4} for name in ON_FOUR},
    "tied, four stages": {"kind": "SFT", "model": "tied, four layers", "stages": 4},
    **{
        f"{name}, two pipelines": {**CASES[name], "stages": 2}
        for name in (*ON_FOUR, "few scores, small micro-batches", "tied", "epochs")
    },
}


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What came of some cases on four ranks."""
    folder = tmp_path_factory.mktemp("four")
    on_ranks(folder, OF_FOUR, ranks=4)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_FOUR)
def test_four_ranks_learn_what_one_does(name, four_ranks):
    assert_as_on_one_rank(four_ranks, name, {**OF_FOUR[name], "stages": 1})


# -- checkpoints ---------------------------------------------------------------------------------------------------


def resumed(folder: Path, ranks: int, start: Path | None, **options: Any) -> dict[str, Tensor]:
    """The weights after four steps with dropout, with a checkpoint every second; from one of them, if it is given."""
    saving = {"save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "linear", "max_steps": 4}
    checkpoint = None if start is None else str(start / "checkpoint-2")
    return trained("SFT", ranks, folder, checkpoint=checkpoint, **saving, **options)[1]


RESUMED: dict[str, dict[str, Any]] = {
    "all": {},
    "adapters": {"lora": {"lora_dropout": 0.2}},
    "tied": {"model": "tied"},
    "experts": {"model": "mixtral", "router_aux_loss_coef": 0.0},
}


def resume_on_ranks(rank: int, folder: str) -> None:
    place = Path(folder)
    with rank_of(place, rank, 2):
        for name, options in RESUMED.items():
            for run, start in {"first": None, "again": f"first {name}"}.items():
                begun = None if start is None else place / start
                found = resumed(place / f"{run} {name}", 2, begun, stages=2, **options)
                if rank == 0:
                    torch.save(found, place / f"{run} {name}.pt")


@pytest.mark.slow
def test_a_run_resumes_to_equal_bits_and_its_model_is_that_of_one_rank(tmp_path):
    run_ranks(resume_on_ranks, str(meeting_place(tmp_path)))
    for name, options in RESUMED.items():
        first, again = (torch.load(tmp_path / f"{run} {name}.pt") for run in ("first", "again"))
        assert all(torch.equal(again[key], value) for key, value in first.items())
        folder = tmp_path / f"one {name}"
        if name != "adapters":  # which drop out other numbers on each rank
            assert_near(first, resumed(folder, 1, None, **options), 1e-5)
        else:
            resumed(folder, 1, None, **options)
        assert saved_in(tmp_path / f"first {name}") == saved_in(folder)
        with pytest.raises(
            ValueError, match="stages of pipeline_parallel_size=2, and this run has pipeline_parallel_size=1"
        ):
            resumed(tmp_path / f"back {name}", 1, tmp_path / f"first {name}", **options)
        alone = {**options, "resume_without_states": True}
        resumed(tmp_path / f"back {name}", 1, tmp_path / f"first {name}", **alone)


def saved_in(run: Path) -> dict[str, Any]:
    """Names and shapes of what a checkpoint holds."""
    return {
        name: shape for path in (run / "checkpoint-2").glob("*.safetensors") for name, shape in shapes_in(path).items()
    }


# -- what is refused -----------------------------------------------------------------------------------------------

REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "padded": ({"padding_free": False}, "does not go with padding_free=False, which runs padded"),
    "layers": ({"pipeline_parallel_size": 2, "model": "one layer"}, "=2 is more than the 1 layers of the model"),
    "written": ({"kind": "GRPO"}, "GRPOConfig: layers cannot be split over 2 ranks yet"),
    "shards": ({"fsdp": True}, "pipeline_parallel_size=2 does not go with fsdp2 on 2 devices: leave one of them out"),
    "sequences": ({"parallelism_config": {"sp_size": 2}}, "does not go with sp2"),
    "number": ({"pipeline_parallel_size": 3}, "pipeline_parallel_size=3 does not divide the 2 processes"),
    "budget": ({"memory_budget": "1GiB"}, "does not go with memory_budget='1GiB', which predicts no stages"),
    "experts": ({"model": "mixtral", "router_aux_loss_coef": 0.1}, "router_aux_loss_coef=0.1 weighs a loss of the exp"),
    "in backward": ({"optimizer_in_backward": True, "max_grad_norm": 0.0}, "2 ranks are added up after backward"),
    "nothing trained": ({"peft_config": "of the last layer"}, "the layers of a rank have nothing to train"),
    "shared keys": ({"model": "shared keys"}, "where its layers share more than hidden states"),
}


def refuse(rank: int, folder: str) -> None:
    with rank_of(Path(folder), rank, 2):
        for options, said in REFUSALS.values():
            given = {"kind": "SFT", "pipeline_parallel_size": 2, **options}
            if "model" in given:
                given["model"] = build(given["model"])
            if "peft_config" in given:
                given["peft_config"] = LoraConfig(target_modules=["q_proj"], layers_to_transform=[1])
            with pytest.raises(ValueError, match=re.escape(said)):
                matrix.make(**given)


def test_what_cannot_be_done_in_stages_is_refused(tmp_path):
    run_ranks(refuse, str(meeting_place(tmp_path)))


def test_one_process_has_all_layers(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "lowtide"):
        config = matrix.classes("SFT")[1](output_dir=str(tmp_path), use_cpu=True, pipeline_parallel_size=2)
    assert config.sharding.pipeline_parallel == 1
    assert "torchrun --nproc_per_node 2" in caplog.text


# -- memory --------------------------------------------------------------------------------------------------------


def look_at_ranks(rank: int, folder: str) -> None:
    with rank_of(Path(folder), rank, 2):
        trainer = matrix.make("DPO", pipeline_parallel_size=2, max_steps=1)
        for model in (trainer.model, trainer.reference.model):
            names = {name.split(".")[2] if "layers" in name else name for name, _ in model.named_parameters()}
            assert names == (
                {"0", "model.embed_tokens.weight"} if rank == 0 else {"1", "model.norm.weight", "lm_head.weight"}
            )
        assert trainer.get_total_train_batch_size(trainer.args) == matrix.BATCH
        assert len(trainer.get_train_dataloader()) == matrix.ROWS // matrix.BATCH
        trainer.train()
        stepped = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
        assert stepped == {id(p) for p in trainer.model.parameters()}


def test_a_rank_holds_its_layers_alone(tmp_path):
    run_ranks(look_at_ranks, str(meeting_place(tmp_path)))
