"""`generation_weights`: runs that write by a copy of the weights learn what they learn without, and say so."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig

import lowtide
from lowtide.data.batches.values import OLD
from lowtide.engine.forward import compute_in, install
from lowtide.engine.reference import logprobs
from lowtide.memory.optimizers.states import States
from lowtide.ranks.sharding import Sharding
from lowtide.run.writing import chosen_copy, has_room
from tests.support.references.parity_world import build_model
from tests.support.runs.online_runs import assert_near, online, trained, weights
from tests.support.runs.sabotage import out_of_memory

LORA = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj", "down_proj"])


def lines(trainer: Any) -> dict[str, str]:
    return dict(trainer.report_lines())


@pytest.mark.slow
def test_by_masters_cast_once_the_same_is_learned(tmp_path):
    options = {"bf16": True, "max_steps": 2}
    own = trained(tmp_path / "own", model=build_model("llama"), generation_weights="trained", **options)
    copied = trained(tmp_path / "copied", model=build_model("llama"), **options)
    assert "by the trained weights themselves" in lines(own)["written by"]
    assert "by a copy of the weights in the dtype of products, gone before" in lines(copied)["written by"]
    assert_near(weights(copied), weights(own), 0.0)


@pytest.mark.slow
def test_by_merged_adapters_the_same_is_learned_to_rounding(tmp_path):
    options = {"num_iterations": 2, "learning_rate": 1e-2}
    lora = {"arguments": {"peft_config": LORA}}
    own = trained(tmp_path / "own", **lora, **options)
    copied = trained(tmp_path / "copied", **lora, **options, generation_weights="copy")
    assert "generation_weights='copy' takes" in lines(own)["written by"]
    assert copied.maker.generator.copy is not None
    assert_near(weights(copied), weights(own), 1e-5)


def test_what_merged_weights_wrote_is_scored_by_the_policy_and_corrected(tmp_path):
    trainer = online(
        tmp_path,
        model=build_model("llama"),
        arguments={"peft_config": LORA},
        generation_weights="merged",
        bf16=True,
    )
    assert "adapters merged in 16 bits too, which changes numbers" in lines(trainer)["written by"]
    rows = [dict(trainer.train_dataset[row]) for row in (0, 0, 0, 0)]
    made = trainer.maker.make(rows, (0, 0, 0), group=4, version=0)
    batch = made.rollout.batch()
    assert made.rollout.of_scores("plain_logprobs").isnan().all()
    expected = logprobs(trainer.model, batch, padding_free=True).float()
    torch.testing.assert_close(batch.score_values[OLD], expected, rtol=0, atol=1e-6)
    assert made.metrics["sampling/importance_sampling_ratio/mean"] == pytest.approx(1, abs=0.1)


def test_without_memory_for_a_copy_the_weights_write(tmp_path, caplog):
    trainer = online(tmp_path, model=build_model("llama"), bf16=True)
    rows = [dict(trainer.train_dataset[0])] * 4
    expected = trainer.maker.make(rows, (0, 0, 0), group=4, version=0)
    with out_of_memory(trainer.model, "forward", 0) as fired:
        found = trainer.maker.make(rows, (0, 0, 0), group=4, version=0)
    assert fired
    assert trainer.maker.generator.copy is None
    assert "trained weights write them from now on, no copy" in caplog.text
    assert [each.token_ids for each in found.rollout.completions] == [
        each.token_ids for each in expected.rollout.completions
    ]


@pytest.mark.parametrize("asked", ["copy", "merged"])
@pytest.mark.parametrize(
    "others", [{"use_vllm": True}, {"generation_backend": "transformers"}, {"generation_kwargs": {"num_beams": 2}}]
)
def test_a_copy_is_for_the_own_generator(asked, others, tmp_path):
    with pytest.raises(ValueError, match=f"generation_weights='{asked}' is for lowtide's own generator"):
        lowtide.GRPOConfig(output_dir=str(tmp_path), generation_weights=asked, **others)


def chosen(options: dict[str, Any], size: int = 60, device: int | None = None) -> Any:
    model = build_model("llama")
    install(model)
    compute_in(model, torch.bfloat16)
    given = {"generation_weights": "auto", "sharding": Sharding(), "torch_compile": False} | options
    given["optimizer_in_backward"] = given.get("optimizer_in_backward", False)
    return chosen_copy(SimpleNamespace(**given), model, lambda copy: size, lambda: States(200, 80, 160), device)


@pytest.mark.parametrize(
    ("options", "device", "text"),
    [
        ({}, None, "by a copy of the weights"),
        ({"optimizer_in_backward": True}, None, "there is no room"),
        ({"optimizer_in_backward": True}, 1000, "by a copy of the weights"),
        ({"optimizer_in_backward": True}, 999, "there is no room"),
        ({"optimizer_in_backward": True, "generation_weights": "copy"}, None, "by a copy of the weights"),
        ({"torch_compile": True}, None, "since compiled layers hold"),
        ({"sharding": Sharding(kind="fsdp2", devices=2)}, None, "since they are cut over ranks"),
        ({"generation_weights": "trained"}, None, "by the trained weights themselves"),
    ],
)
def test_when_a_copy_is_made(options, device, text):
    found = chosen(options, device=device)
    assert text in found.text
    assert (found.copy is not None) == ("by a copy" in text)


def test_a_copy_that_cannot_be_made_is_refused_when_asked_for():
    with pytest.raises(ValueError, match="generation_weights='copy' copies whole weights, and compiled layers hold"):
        chosen({"torch_compile": True, "generation_weights": "copy"})


def test_room_is_where_gradients_will_be_or_in_half_of_a_gpu():
    states = States(weights=200, gradients=80, optimizer=160)
    assert has_room(80, states, None, waits=True)
    assert not has_room(81, states, None, waits=True)
    assert has_room(81, states, 2 * 521, waits=True)
    assert not has_room(81, states, 2 * 521 - 1, waits=True)
