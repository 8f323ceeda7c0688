"""Runs on families of vision-language models whose processors or features have traits of their own."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoConfig, AutoModelForImageTextToText

from lowtide import DPOConfig, DPOTrainer, GKDConfig, GKDTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer
from tests.support.models.vision_families import TEXT, TOWER
from tests.support.models.vision_models import padded, rows, user
from tests.support.models.vision_processors import PROCESSORS, processed_family

PADDED = {"gemma3", "gemma4_vision"}


def settings(folder: Path, **options: Any) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "max_steps": 1,
        "learning_rate": 0.0,
        "max_length": None,
        "logging_steps": 1,
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "rehearsal": False,
        **options,
    }


def own_loss(model: Any, processor: Any, made: list[dict[str, Any]]) -> torch.Tensor:
    """The mean over the tokens of completions, by the model's own forward on what the processor makes of each row."""
    total, count = torch.zeros(()), 0
    for row in made:
        talks = [row["prompt"], row["prompt"] + row["chosen"]]
        prompt, whole = (padded(processor, [talk], [row["images"]]) for talk in talks)
        start = prompt["input_ids"].shape[1] + len("assistant\n") + 1
        logprobs = model(**whole).logits[0, start - 1 : -1].log_softmax(-1)
        target = whole["input_ids"][0, start:]
        total, count = total - logprobs.gather(-1, target[:, None]).sum(), count + len(target)
    return total / count


def images_of_rows() -> list[dict[str, Any]]:
    """Rows with one image, and with two; no two of one size."""
    return [*rows(2, images=1, seed=3), *rows(2, images=2, seed=4)]


@pytest.mark.parametrize("name", [*PROCESSORS])
def test_a_run_has_the_losses_and_gradients_of_the_models_own_forward(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, processor = processed_family(name)
    made = images_of_rows()
    loss = own_loss(model, processor, made)
    loss.backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    dataset = Dataset.from_list(
        [{"images": row["images"], "prompt": row["prompt"], "completion": row["chosen"]} for row in made]
    )
    seen: dict[str, torch.Tensor] = {}
    with caplog.at_level(logging.WARNING):
        run = SFTTrainer(
            model,
            args=SFTConfig(**settings(tmp_path, max_grad_norm=0.0)),
            train_dataset=dataset,
            processing_class=processor,
        )
    assert run.padding_free == (name not in PADDED)
    assert any("both directions" in record.message for record in caplog.records) == (name in PADDED)
    for parameter_name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, n=parameter_name: seen.__setitem__(n, p.grad.clone()))
    run.train()
    [found] = [entry["loss"] for entry in run.state.log_history if "loss" in entry]
    assert found == pytest.approx(loss.item(), abs=2e-5)
    assert {*expected} <= {*seen}
    for parameter_name, gradient in expected.items():
        torch.testing.assert_close(
            seen[parameter_name], gradient, rtol=1e-3, atol=2e-6, msg=lambda m, n=parameter_name: f"{n}: {m}"
        )


@pytest.mark.parametrize("name", sorted(PADDED))
def test_a_method_that_writes_is_refused_where_image_tokens_see_each_other(name: str, tmp_path: Path) -> None:
    """lowtide's own generator reads a prompt without padding."""
    model, processor = processed_family(name)
    made = Dataset.from_list([{"prompt": [user("Look: ", None)], "images": row["images"]} for row in rows(4, images=1)])
    options = settings(tmp_path, num_generations=2, max_completion_length=4)
    del options["max_length"]
    with pytest.raises(ValueError, match="prompts show images, and only lowtide's own generator writes after them"):
        GRPOTrainer(
            model,
            args=GRPOConfig(**options),
            train_dataset=made,
            processing_class=processor,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
        ).train()


def test_a_pair_shares_its_images_where_they_see_each_other(tmp_path: Path) -> None:
    model, processor = processed_family("gemma3")
    run = DPOTrainer(
        model,
        args=DPOConfig(**settings(tmp_path)),
        train_dataset=Dataset.from_list(images_of_rows()),
        processing_class=processor,
    )
    run.train()
    [found] = [entry["loss"] for entry in run.state.log_history if "loss" in entry]
    assert found == pytest.approx(0.6931, abs=1e-4), "the policy is its reference"


@pytest.mark.parametrize("with_images", [False, True])
def test_a_prefix_language_model_is_refused_by_name(with_images: bool, tmp_path: Path) -> None:
    config = AutoConfig.for_model("paligemma", text_config={**TEXT, "vocab_size": 400}, vision_config=TOWER)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    _, processor = processed_family("llava_next")
    made = [{"messages": row["prompt"] + row["chosen"], "images": row["images"]} for row in rows(4, images=1)]
    if not with_images:
        made = [{"text": "A prompt and an answer."}] * 4
    with pytest.raises(ValueError, match="model type paligemma attends in both directions within a prompt"):
        SFTTrainer(
            model,
            args=SFTConfig(**settings(tmp_path)),
            train_dataset=Dataset.from_list(made),
            processing_class=processor if with_images else processor.tokenizer,
        )


@pytest.mark.parametrize("name", ["qwen3_vl", "gemma3"])
def test_a_teacher_of_a_family_sees_images_as_it_does_by_itself(name: str, tmp_path: Path) -> None:
    """A teacher that is the student has no divergence from it, whatever way it runs in."""
    (model, processor), (teacher, _) = processed_family(name), processed_family(name)
    made = [{"messages": row["prompt"] + row["chosen"], "images": row["images"]} for row in images_of_rows()]
    run = GKDTrainer(
        model,
        teacher_model=teacher,
        args=GKDConfig(**settings(tmp_path, lmbda=0.0, beta=0.5, disable_dropout=True)),
        train_dataset=Dataset.from_list(made),
        processing_class=processor,
    )
    run.train()
    [found] = [entry["loss"] for entry in run.state.log_history if "loss" in entry]
    assert found == pytest.approx(0.0, abs=1e-5)
