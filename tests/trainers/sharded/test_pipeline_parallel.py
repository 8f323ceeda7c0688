"""Ranks that each have some layers (`pipeline_parallel_size`) against one rank: the same losses and weights, in every
trainer that learns from rows, and with its options."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig

from lowtide.trainers.checkpoints.weights import shapes_in
from tests.support.matrix import matrix
from tests.support.ranks import sharded_training
from tests.support.ranks.processes import run_ranks
from tests.support.ranks.sharded_training import (
    assert_as_on_one_rank,
    assert_near,
    build,
    meeting_place,
    of_equal_bits,
    on_ranks,
    rank_of,
    resumed,
    resumed_on_ranks,
)

CASES: dict[str, dict[str, Any]] = {
    **sharded_training.CASES,
    "LoRA, Reward": {"kind": "Reward", "lora": True},
    "one row a micro-batch": {"kind": "SFT", "gradient_accumulation_steps": 2, "tokens_per_microbatch": 50},
    "8-bit states": {"kind": "SFT", "optim": "adamw_8bit"},
    "experts": {"kind": "SFT", "model": "mixtral", "router_aux_loss_coef": 0.0},
}


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


RESUMED: dict[str, dict[str, Any]] = {
    "all": {},
    "adapters": {"lora": {"lora_dropout": 0.2}},
    "tied": {"model": "tied"},
    "experts": {"model": "mixtral", "router_aux_loss_coef": 0.0},
}


@pytest.mark.slow
def test_a_run_resumes_to_equal_bits_and_its_model_is_that_of_one_rank(tmp_path):
    resumed_on_ranks(tmp_path, {name: {"stages": 2, **options} for name, options in RESUMED.items()})
    for name, options in RESUMED.items():
        first = of_equal_bits(tmp_path, name)
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
    "shards": ({"fsdp": True}, "pipeline_parallel_size=2 does not go with fsdp2 on 2 devices: leave one of them out"),
    "sequences": ({"parallelism_config": {"sp_size": 2}}, "does not go with sp2"),
    "number": ({"pipeline_parallel_size": 3}, "pipeline_parallel_size=3 does not divide the 2 processes"),
    "budget": ({"memory_budget": "1GiB"}, "does not go with memory_budget='1GiB', which predicts no stages"),
    "experts": ({"model": "mixtral", "router_aux_loss_coef": 0.1}, "router_aux_loss_coef=0.1 weighs a loss of the exp"),
    "in backward": ({"optimizer_in_backward": True, "max_grad_norm": 0.0}, "2 ranks are added up after backward"),
    "other writer": (
        {"kind": "GRPO", "generation_backend": "transformers"},
        "generation_backend='transformers' cannot write with a model whose layers are split into the stages",
    ),
    "server": ({"kind": "GRPO", "use_vllm": True}, "use_vllm=True cannot have the weights of a model whose layers"),
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
