"""lowtide's SFTTrainer and DPOTrainer against TRL 1.16's on rows with images: steps from the same weights.

TRL pads rows, and runs the vision tower for each side of a pair. It scores the places of images where it scores whole
rows, which is left out here: prompts are not scored.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig

from tests.support.parity_world import COMMON, FIRST_STEPS, STEPS, train
from tests.support.vision_models import FAMILIES, processor, rows, vision_model

trl = pytest.importorskip("trl", reason="parity is against trl==1.16.0: install the bench extra")
lowtide = pytest.importorskip("lowtide")

SETTINGS = COMMON | {"learning_rate": 1e-3, "max_length": None}
LORA = ["q_proj", "v_proj", "down_proj", "qkv", "fc1"]
"""In the language model, and in the tower of each family."""


def as_messages(made: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"images": row["images"], "messages": row["prompt"] + row["chosen"]} for row in made]


def as_completions(made: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"images": row["images"], "prompt": row["prompt"], "completion": row["chosen"]} for row in made]


def one_image(made: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Texts in place of parts; the one image is shown before the first."""
    return [
        {
            "image": row["images"][0],
            "prompt": [{"role": "user", "content": f"What is {number}?"}],
            "completion": [{"role": "assistant", "content": row["chosen"][0]["content"][0]["text"]}],
        }
        for number, row in enumerate(made)
    ]


FORMATS: dict[str, Any] = {
    "messages": (as_messages, {"assistant_only_loss": True}),
    "completions": (as_completions, {}),
    "one image": (one_image, {}),
}


def losses(library: Any, name: str, family: str, made: list[dict[str, Any]], folder: Path, lora: bool, **flags: Any):
    config, trainer = getattr(library, f"{name}Config"), getattr(library, f"{name}Trainer")
    adapters = {"peft_config": LoraConfig(r=4, target_modules=LORA)} if lora else {}
    if name == "DPO" and not lora:
        adapters = {"ref_model": vision_model(family)}
    torch.manual_seed(0)  # adapters are drawn
    return train(
        trainer(
            model=vision_model(family),
            args=config(output_dir=str(folder / library.__name__), **SETTINGS, **flags),
            train_dataset=Dataset.from_list(made),
            processing_class=processor(family),
            **adapters,
        )
    )


def assert_agree(name: str, family: str, made: list[dict[str, Any]], folder: Path, *, lora: bool = False, **flags: Any):
    expected, found = (losses(each, name, family, made, folder, lora, **flags) for each in (trl, lowtide))
    assert len(found["loss"]) == flags["max_steps"]
    for metric in ("loss", "grad_norm"):
        torch.testing.assert_close(found[metric], expected[metric], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("format", [*FORMATS])
@pytest.mark.parametrize("family", FAMILIES)
def test_sft_follows_trl(family: str, format: str, tmp_path: Path) -> None:
    shaped, flags = FORMATS[format]
    steps = STEPS if format == "completions" else FIRST_STEPS
    assert_agree("SFT", family, shaped(rows(40)), tmp_path, max_steps=steps, **flags)


@pytest.mark.parametrize("family", FAMILIES)
def test_sft_of_adapters_on_tower_and_language_model_follows_trl(family: str, tmp_path: Path) -> None:
    made = as_completions(rows(24))
    assert_agree("SFT", family, made, tmp_path, max_steps=FIRST_STEPS, lora=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_dpo_follows_trl(family: str, tmp_path: Path) -> None:
    assert_agree("DPO", family, rows(40), tmp_path, max_steps=STEPS)


@pytest.mark.parametrize("family", FAMILIES)
def test_dpo_of_adapters_follows_trl(family: str, tmp_path: Path) -> None:
    assert_agree("DPO", family, rows(24), tmp_path, max_steps=FIRST_STEPS, lora=True)
