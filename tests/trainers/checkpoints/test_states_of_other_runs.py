"""A run resumes with all states of the run that it goes on with, or says what it goes on without."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from peft import LoraConfig
from transformers import MixtralConfig, MixtralForCausalLM

from lowtide.memory.optimizers.compressed_adamw import CompressedAdamW
from lowtide.ranks.shards import Place
from lowtide.trainers.checkpoints.shards import OfAnotherRun, load_optimizer_states
from lowtide.trainers.checkpoints.soundness import Damage
from tests.support.matrix.matrix import make
from tests.support.runs.small_runs import SAVING, assert_same, small, trained, weights


def adapters(**options):
    return LoraConfig(**{"r": 4, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM", **options})


def without(folder, *names):
    """A checkpoint that lacks files, and its manifest, as one that was put together by hand."""
    for name in (*names, "manifest.json"):
        (folder / name).unlink()


@pytest.mark.parametrize(
    "names", [["optimizer.pt"], ["scheduler.pt"], ["rng_state.pth"], ["optimizer.pt", "scheduler.pt"]]
)
def test_a_checkpoint_that_lacks_states_is_refused(names, tmp_path):
    trained(tmp_path, max_steps=2)
    without(tmp_path / "checkpoint-2", *names)
    with pytest.raises(ValueError, match=rf"{', '.join(names)}: it is missing\. .*resume_without_states=True"):
        small(tmp_path).train(resume_from_checkpoint=True)


def test_a_checkpoint_of_the_model_alone_is_refused_and_goes_on_when_told_to(tmp_path, caplog):
    trained(tmp_path, max_steps=2, save_only_model=True)
    with pytest.raises(
        ValueError, match=r"optimizer\.pt, scheduler\.pt, rng_state\.pth: it is missing \(saved with save_only"
    ):
        small(tmp_path).train(resume_from_checkpoint=True)
    told = small(tmp_path, resume_without_states=True)
    told.train(resume_from_checkpoint=True)
    assert (told.state.global_step, len(told.run.losses)) == (5, 3)
    assert "the optimizer starts without moments" in caplog.text
    assert "without optimizer*.pt, scheduler.pt, rng_state*.pth" in str(told.resumption)


@pytest.mark.slow
def test_without_a_scheduler_the_rate_is_that_of_its_step(tmp_path):
    options = {"lr_scheduler_type": "linear", "save_steps": 1}
    whole = trained(tmp_path, **options)
    expected = {each["step"]: each["learning_rate"] for each in whole.state.log_history if "learning_rate" in each}
    for name in ("scheduler.pt", "optimizer.pt"):
        folder = tmp_path / name
        shutil.copytree(tmp_path / "checkpoint-2", folder / "checkpoint-2")
        without(folder / "checkpoint-2", name)
        again = small(folder, **options, resume_without_states=True)
        again.train(resume_from_checkpoint=True)
        rates = {each["step"]: each["learning_rate"] for each in again.state.log_history if "learning_rate" in each}
        assert rates == pytest.approx(expected)
        if name == "scheduler.pt":  # nothing else is lost
            assert_same(weights(again), weights(whole))


OTHERS = [
    ("adamw_torch_fused", "adamw_compressed", r"of torch\.AdamW, and this run's optimizer is lowtide\.CompressedAdamW"),
    ("adamw_compressed", "adamw_torch", r"CompressedAdamW \(remainder=exact.*this run's optimizer is torch\.AdamW"),
    ("adamw_compressed", "adamw_stochastic", "remainder=exact.*remainder=stochastic"),
    ("adamw_torch", "sgd", r"optimizer is torch\.SGD"),
    ("adamw_torch", "adamw_8bit", r"bitsandbytes\.AdamW \(bits=8\)"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("then", "now", "message"), OTHERS, ids=lambda value: value if "_" in value else "")
def test_states_of_another_optimizer_are_refused(then, now, message, tmp_path):
    if "8bit" in now:
        pytest.importorskip("bitsandbytes")
    trained(tmp_path, max_steps=2, optim=then)
    with pytest.raises(ValueError, match=message):
        small(tmp_path, optim=now).train(resume_from_checkpoint=True)
    told = small(tmp_path, optim=now, resume_without_states=True)
    told.train(resume_from_checkpoint=True)
    assert told.state.global_step == 5
    assert isinstance(told.optimizer.optimizer, CompressedAdamW) == now.startswith("adamw_c") or "stochastic" in now


@pytest.mark.slow
@pytest.mark.parametrize(("then", "now", "message"), OTHERS[:4], ids=lambda value: value if "_" in value else "")
def test_states_of_another_optimizer_are_refused_without_a_record_too(then, now, message, tmp_path):
    """As far as they tell: those of a checkpoint that transformers or an earlier version wrote."""
    trained(tmp_path, max_steps=2, optim=then)
    without(tmp_path / "checkpoint-2", "run_state.json")
    trainer = small(tmp_path, optim=now)
    if {then, now} == {"adamw_compressed", "adamw_stochastic"}:
        return  # which the states do not tell
    with pytest.raises(ValueError, match=r"it is of another optimizer than this run's \w+: it lacks \w+\. "):
        trainer.train(resume_from_checkpoint=True)


def test_one_optimizer_by_two_names_goes_on(tmp_path):
    trained(tmp_path, max_steps=2, optim="adamw_torch")
    again = small(tmp_path, optim="adamw_torch_fused")
    again.train(resume_from_checkpoint=True)
    assert len(again.run.losses) == 3


def test_a_run_that_trains_other_parameters_is_refused(tmp_path):
    trained(tmp_path, max_steps=2)
    other = small(tmp_path)
    for name, parameter in other.model.named_parameters():
        parameter.requires_grad_("norm" not in name)
    with pytest.raises(ValueError, match=r"it is of 21 trained parameters, and this run trains 16"):
        other.train(resume_from_checkpoint=True)


def test_settings_that_the_states_keep_are_said(tmp_path, caplog):
    trained(tmp_path, max_steps=2)
    again = small(tmp_path, learning_rate=1e-4, per_device_train_batch_size=4)
    again.train(resume_from_checkpoint=True)
    assert "learning_rate=0.0001 has no effect: the states of the checkpoint go on with 0.002" in caplog.text
    assert "a step has 4 rows and had 8" in caplog.text
    assert again.optimizer.param_groups[0]["lr"] == 2e-3


def test_a_checkpoint_names_its_run(tmp_path):
    trained(tmp_path, max_steps=2)
    record = json.loads((tmp_path / "checkpoint-2" / "run_state.json").read_text())["run"]
    assert record["optimizer"] == {"class": "torch.AdamW"}
    assert record["versions"]["torch"] == torch.__version__
    assert (record["scheduler"], record["rows"], record["rows_a_step"]) == ("constant", 16, 8)


# -- weights of another model ----------------------------------------------------------------------------------------


def test_the_checkpoint_of_another_model_is_refused(tmp_path):
    trained(tmp_path, max_steps=2)
    with pytest.raises(
        ValueError, match=r"model\.safetensors is of another model: 6 have another shape \(model\.layers"
    ):
        small(tmp_path, intermediate_size=96).train(resume_from_checkpoint=True)


@pytest.mark.parametrize(
    ("then", "now", "message"),
    [
        (None, adapters(), "holds a whole model, and this run trains adapters"),
        (adapters(), None, "holds adapters, and this run trains a whole model"),
        (adapters(), adapters(r=8), "r is 4, and this run's adapter has 8"),
        (adapters(), adapters(lora_alpha=32), "lora_alpha is 8, and this run's adapter has 32"),
        (adapters(), adapters(target_modules=["v_proj"]), r"4 of the model's 4 weights are missing \(base_model"),
    ],
    ids=["a model", "adapters", "another rank", "another scale", "other modules"],
)
def test_adapters_are_those_that_the_run_began_with(then, now, message, tmp_path):
    make("SFT", output_dir=str(tmp_path), peft_config=then, **SAVING | {"max_steps": 2}).train()
    with pytest.raises(ValueError, match=message):
        make("SFT", output_dir=str(tmp_path), peft_config=now, **SAVING).train(resume_from_checkpoint=True)


def mixture():
    """A model whose checkpoints have each expert's weights by themselves, and the model has them stacked."""
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=257, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=2, eos_token_id=0,
    )  # fmt: skip
    return MixtralForCausalLM(config)


@pytest.mark.slow
def test_experts_go_on_from_their_checkpoint(tmp_path):
    whole = make("SFT", model=mixture(), output_dir=str(tmp_path / "whole"), **SAVING)
    whole.train()
    make("SFT", model=mixture(), output_dir=str(tmp_path / "again"), **SAVING | {"max_steps": 2}).train()
    again = make("SFT", model=mixture(), output_dir=str(tmp_path / "again"), **SAVING)
    again.train(resume_from_checkpoint=True)
    assert_same(weights(again), weights(whole))


def test_states_of_another_number_of_ranks_are_not_called_damaged(tmp_path, monkeypatch):
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight])
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    monkeypatch.setattr(optimizer, "place", Place((2,), 0, 2), raising=False)
    with pytest.raises(OfAnotherRun, match=r"states of 1 rank\(s\) cannot be cut anew for 2") as caught:
        load_optimizer_states(optimizer, tmp_path)
    assert not isinstance(caught.value, Damage)
