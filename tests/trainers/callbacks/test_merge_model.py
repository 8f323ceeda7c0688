"""The trained model merged with the one that it began from: the numbers of a plain mean, and what cannot be merged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import lowtide
from lowtide import MergeConfig, MergeModelCallback
from lowtide.trainers.callbacks.merge_model import merge_models
from tests.support.references.parity_world import build_model, build_teacher, lora, sums, tokenizer
from tests.support.runs.on_a_cpu import ON_A_CPU


@pytest.fixture
def base(tmp_path: Path) -> str:
    folder = tmp_path / "base"
    build_model("llama").save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


def sft(folder: Path, base: str, callback: Any, **more: Any) -> Any:
    arguments = {name: more.pop(name) for name in ("peft_config",) if name in more}
    options: dict[str, Any] = {"max_steps": 2, "learning_rate": 1e-2, "save_strategy": "steps", "save_steps": 1}
    return lowtide.SFTTrainer(
        model=base,
        args=lowtide.SFTConfig(output_dir=str(folder), **{**ON_A_CPU, **options, **more}),
        train_dataset=Dataset.from_list([{"text": ask} for ask, _ in sums(8)]),
        callbacks=[callback],
        **arguments,
    )


def mean(first: dict[str, Any], second: dict[str, Any], share: float, dtype: torch.dtype) -> dict[str, Any]:
    return {
        name: (share * each.double() + (1 - share) * second[name].double()).to(dtype) for name, each in first.items()
    }


def test_a_checkpoint_is_merged_with_what_training_began_from(base, tmp_path):
    sft(tmp_path / "run", base, MergeModelCallback()).train()
    assert not (tmp_path / "run/checkpoint-1/merged").exists()
    checkpoint = tmp_path / "run/checkpoint-2"
    began, trained = (load_file(Path(each) / "model.safetensors") for each in (base, checkpoint))
    assert not torch.equal(*(each["model.embed_tokens.weight"] for each in (began, trained)))
    found = load_file(checkpoint / "merged/model.safetensors")
    expected = mean(trained, began, 0.5, torch.float16)
    assert found.keys() == expected.keys()
    for name, weight in found.items():
        assert weight.dtype is torch.float16
        torch.testing.assert_close(weight, expected[name], rtol=1e-3, atol=1e-6)
    model = AutoModelForCausalLM.from_pretrained(checkpoint / "merged", dtype="auto")
    assert model.dtype is torch.float16
    assert AutoTokenizer.from_pretrained(checkpoint / "merged").get_vocab() == tokenizer().get_vocab()


@pytest.mark.slow
def test_every_checkpoint_by_weights_of_ones_own(base, tmp_path):
    config = MergeConfig()
    config.policy_model_weight, config.target_model_weight, config.dtype = 3.0, 1.0, "float32"
    sft(tmp_path / "run", base, MergeModelCallback(config, merge_at_every_checkpoint=True)).train()
    began = load_file(Path(base) / "model.safetensors")
    for step in (1, 2):
        checkpoint = tmp_path / f"run/checkpoint-{step}"
        expected = mean(load_file(checkpoint / "model.safetensors"), began, 0.75, torch.float32)
        for name, weight in load_file(checkpoint / "merged/model.safetensors").items():
            torch.testing.assert_close(weight, expected[name])
    resumed = sft(tmp_path / "run", base, MergeModelCallback(config), max_steps=3)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run/checkpoint-2"))
    assert (tmp_path / "run/checkpoint-3/merged/model.safetensors").is_file()


def test_what_cannot_be_merged_is_refused(base, tmp_path):
    with pytest.raises(ValueError, match=r"method='ties'. is mergekit's"):
        MergeConfig("ties")
    with pytest.raises(ValueError, match="Unsupported merge method: 'mean'"):
        MergeConfig("mean")
    with pytest.raises(ValueError, match="save_strategy='no' writes none"):
        sft(tmp_path / "run", base, MergeModelCallback(), save_strategy="no").train()
    with pytest.raises(ValueError, match="run `lowtide merge` on the adapters after training"):
        sft(tmp_path / "run", base, MergeModelCallback(), peft_config=lora()).train()
    config = MergeConfig()
    with pytest.raises(ValueError, match="set both"):
        merge_models(config, tmp_path / "out")
    config.policy_model_path = config.target_model_path = base
    config.target_model_weight = -0.5
    with pytest.raises(ValueError, match="add up to 0"):
        merge_models(config, tmp_path / "out")
    build_teacher().save_pretrained(tmp_path / "other")
    config.target_model_weight, config.target_model_path = 0.5, str(tmp_path / "other")
    with pytest.raises(ValueError, match=r"are not one architecture: .* has the shape"):
        merge_models(config, tmp_path / "out")
    config.target_model_path = str(tmp_path)
    with pytest.raises(ValueError, match="has no model in safetensors files"):
        merge_models(config, tmp_path / "out")
