"""Replaced-token detection on two ranks of gloo against one: whole copies of the weights, sharded ones, and sequences
that are split."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file
from transformers import AutoModelForMaskedLM, AutoModelForPreTraining

from lowtide.cli.main import main
from lowtide.ranks.shards import is_sharded
from tests.support.models.masked_texts import losses, texts
from tests.support.models.replaced_tokens import assert_near, run, weights
from tests.support.ranks.processes import run_ranks
from tests.support.ranks.sharded_training import meeting_place, rank_of


def config_of(stage: int) -> dict[str, Any]:
    """Of DeepSpeed, with parameters that are cut though they are small."""
    return {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}


CASES: dict[str, dict[str, Any]] = {
    "copies": {},
    "FSDP2": {"fsdp": "full_shard"},
    "FSDP2, embeddings apart": {"fsdp": "full_shard", "share_embeddings": False},
    "FSDP2, checkpointed": {"fsdp": "full_shard", "gradient_checkpointing": True},
    "FSDP2, few masked": {"fsdp": "full_shard", "mlm_probability": 0.02, "tokens_per_microbatch": 40},
    "FSDP2, adapters": {"fsdp": "full_shard", "lora": True},
    "FSDP2, a file a rank": {"fsdp": "full_shard", "fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT"}},
    "sequences": {"sequence": 2},
    "sequences, one head": {"sequence": 2, "generator_size": 0.25, "gradient_checkpointing": True},
    "sequences, few masked": {"sequence": 2, "mlm_probability": 0.02, "tokens_per_microbatch": 40},
    "FSDP2, sequences": {"sequence": 2, "fsdp": "full_shard", "packing": True, "max_length": 40},
    "FSDP2, sequences, adapters": {"sequence": 2, "fsdp": "full_shard", "lora": True},
    "ZeRO-2": {"deepspeed": config_of(2)},
    "ZeRO-3": {"deepspeed": config_of(3)},
    "ZeRO-3, adapters": {"deepspeed": config_of(3), "lora": True},
}
INSTALLED = [name for name, options in CASES.items() if "deepspeed" not in options or find_spec("deepspeed")]
SPREAD = ("fsdp", "fsdp_config", "deepspeed", "sequence")
"""The options that one rank goes without."""
EVALUATED = (
    "generator_loss",
    "discriminator_loss",
    "discriminator_accuracy",
    "discriminator_recall",
    "generator_accuracy",
)


def trained(
    folder: Path, batch: int, *, lora: bool = False, sharded: bool = False, sequence: int = 1, **options: Any
) -> Any:
    """Weights, losses and evaluation; what is saved lies in `saved`."""
    if sequence > 1:
        options["parallelism_config"] = {"sp_size": sequence}
    adapters = LoraConfig(r=4, target_modules=["query", "dense"]) if lora else None
    made = run(
        folder, 24, per_device_train_batch_size=batch, eval_dataset=texts(9, seed=1), peft_config=adapters, **options
    )
    assert is_sharded(made.model) is sharded
    evaluated = made.evaluate()
    made.save_model(str(folder / "saved"))
    found = {name: evaluated[f"eval_{name}"] for name in EVALUATED}
    return weights(made, trained=True), losses(made), found


def rank_main(rank: int, folder: str) -> None:
    with rank_of(Path(folder), rank, 2):
        for name in INSTALLED:
            batch = 4 * CASES[name].get("sequence", 1)
            found = trained(Path(folder) / name, batch, sharded=name.startswith(("FSDP2", "ZeRO-3")), **CASES[name])
            if rank == 0:
                torch.save(found, Path(folder) / f"{name}.pt")


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = meeting_place(tmp_path_factory.mktemp("ranks"))
    run_ranks(rank_main, str(folder))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_two_ranks_learn_what_one_does(name: str, on_two_ranks: Path, tmp_path: Path):
    if name not in INSTALLED:
        pytest.skip("needs deepspeed: pip install deepspeed")
    found, found_losses, evaluated = torch.load(on_two_ranks / f"{name}.pt")
    alone = {option: value for option, value in CASES[name].items() if option not in SPREAD}
    expected, own_losses, own_evaluated = trained(tmp_path / "alone", 8, **alone)
    torch.testing.assert_close(found_losses, own_losses, rtol=1e-5, atol=0.0)
    assert evaluated == pytest.approx(own_evaluated, rel=1e-4)
    assert_near(found, expected)


@pytest.mark.slow
def test_what_shards_save_is_whole(on_two_ranks: Path):
    found, _, _ = torch.load(on_two_ranks / "FSDP2.pt")
    saved = AutoModelForPreTraining.from_pretrained(on_two_ranks / "FSDP2" / "saved").state_dict()
    assert all(torch.equal(saved[name], value) for name, value in found.items() if not name.startswith("generator."))
    found, _, _ = torch.load(on_two_ranks / "FSDP2, adapters.pt")
    generator = AutoModelForMaskedLM.from_pretrained(on_two_ranks / "FSDP2, adapters" / "saved" / "generator")
    prefix, own = "base_model.model.generator.", generator.state_dict()
    assert all(torch.equal(own[n.removeprefix(prefix)], v) for n, v in found.items() if n.startswith(prefix))


@pytest.mark.slow
def test_files_of_ranks_are_merged_with_the_generator(on_two_ranks: Path, tmp_path: Path):
    parts = on_two_ranks / "FSDP2, a file a rank" / "saved"
    assert main(["merge", "--checkpoint", str(parts), "--output_dir", str(tmp_path / "merged")]) == 0
    merged, (found, _, _) = load_file(tmp_path / "merged" / "model.safetensors"), torch.load(on_two_ranks / "FSDP2.pt")
    assert all(torch.equal(merged[name], value) for name, value in found.items())
    assert any(name.startswith("generator.") for name in found)
