"""A reference that takes the averaged weights: as TRL's does, in a run of DPO, after a stop, and where it cannot."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset

import lowtide
from lowtide import BEMACallback
from tests.support.references.parity_world import build_model, lora, sums, tokenizer
from tests.support.runs.on_a_cpu import ON_A_CPU


def moved(model: Any, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for weight in model.parameters():
        weight.data += 0.1 * torch.randn(weight.shape, generator=generator)


OPTIONS: dict[str, Any] = {"update_freq": 1, "update_ref_model": True, "ref_model_update_freq": 2}


@pytest.mark.parametrize("after", [0, 1])
def test_a_reference_takes_what_trls_does(after):
    trl = pytest.importorskip("trl.experimental.bema_for_ref_model")
    policy, made = build_model("llama"), []
    for kind in (BEMACallback, trl.BEMACallback):
        callback = kind(**OPTIONS, ref_model_update_after=after)
        model, reference = copy.deepcopy(policy), copy.deepcopy(policy)
        if kind is BEMACallback:
            callback._reference = dict(reference.named_parameters())
        callback.on_train_begin(None, None, None, model=model)
        for step in (1, 2, 3, 4):
            moved(model, step)
            callback.on_step_end(None, SimpleNamespace(global_step=step), None, model=model, ref_model=reference)
        made.append(dict(reference.named_parameters()))
    for name, weight in made[0].items():
        torch.testing.assert_close(weight, made[1][name])


def dpo(folder: Path, callback: Any, **more: Any) -> Any:
    rows = [{"prompt": ask, "chosen": f" {answer}", "rejected": f" {answer[::-1]}"} for ask, answer in sums(8)]
    arguments = {name: more.pop(name) for name in ("peft_config",) if name in more}
    options: dict[str, Any] = {"per_device_train_batch_size": 4, "max_steps": 6, "learning_rate": 1e-2, **ON_A_CPU}
    return lowtide.DPOTrainer(
        model=build_model("llama"),
        args=lowtide.DPOConfig(output_dir=str(folder), **options | more),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer(),
        callbacks=[callback],
        **arguments,
    )


@pytest.mark.slow
def test_the_reference_of_a_run_is_averaged_and_resumed_with_the_same_bits(tmp_path):
    callback = BEMACallback(**OPTIONS)
    whole = dpo(tmp_path / "whole", callback, save_strategy="steps", save_steps=1)
    arrived = copy.deepcopy(whole.ref_model.state_dict())
    whole.train()
    averaged = dict(callback.running_model.named_parameters())
    reference = dict(whole.ref_model.named_parameters())
    assert all(torch.equal(weight, averaged[name]) for name, weight in reference.items())
    assert not all(torch.equal(weight, arrived[name]) for name, weight in reference.items())
    expected = {name: weight.detach().clone() for name, weight in whole.model.named_parameters()}
    for step in (1, 2, 3):  # before, at and after a move of the reference
        again = BEMACallback(**OPTIONS)
        resumed = dpo(tmp_path / f"from {step}", again)
        resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{step}"))
        assert all(torch.equal(weight, expected[name]) for name, weight in resumed.model.named_parameters())
        for name, weight in again.running_model.named_parameters():
            assert torch.equal(weight, averaged[name])


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "computed before": ({"precompute_ref_log_probs": True}, "precompute_ref_log_probs=True both say"),
    "followed": ({"sync_ref_model": True}, "and sync_ref_model=True both say"),
    "adapters": ({"peft_config": lora()}, "with adapters take sync_ref_model=True instead"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_reference_that_cannot_move_is_refused(case, tmp_path):
    options, said = REFUSED[case]
    with pytest.raises(ValueError, match=said):
        dpo(tmp_path, BEMACallback(**OPTIONS), **options)


def test_a_run_without_a_reference_is_refused(tmp_path):
    rows = Dataset.from_list([{"text": ask} for ask, _ in sums(4)])
    args = lowtide.SFTConfig(output_dir=str(tmp_path), max_steps=1, **ON_A_CPU)
    given: dict[str, Any] = {"model": build_model("llama"), "args": args, "train_dataset": rows}
    with pytest.raises(ValueError, match="needs a reference with the weights that are trained"):
        lowtide.SFTTrainer(**given, processing_class=tokenizer(), callbacks=[BEMACallback(**OPTIONS)])
    alone = BEMACallback(**OPTIONS)
    with pytest.raises(ValueError, match="knows of none: pass it in `callbacks`"):
        alone.on_train_begin(None, None, None, model=build_model("llama"))
