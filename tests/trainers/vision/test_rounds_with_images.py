"""Conversations with images whose template drops earlier thoughts: each turn of the assistant is trained as the plain
forward has it of its own context and images, in value and in gradient."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor

from lowtide import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer
from tests.support.models.vision_models import (
    FAMILIES,
    IMAGE_MARKS,
    TEMPLATE,
    assistant,
    picture,
    processor,
    user,
    vision_model,
)
from tests.support.runs.online_runs import assert_near, weights

RATE = 0.5
ASSISTANT = "{% if message['role'] == 'assistant' %}"
DROPPING = (
    TEMPLATE.replace("{% generation %}", "")
    .replace("{% endgeneration %}", "")
    .replace(ASSISTANT, ASSISTANT + "{% if loop.last %}[{{ message['thinking'] }}]{% endif %}", 1)
)


def dropping(family: str) -> Any:
    made = processor(family)
    made.chat_template = made.tokenizer.chat_template = DROPPING.replace("IMAGE", IMAGE_MARKS[family])
    made.tokenizer.eos_token = "<|im_end|>"
    return made


def said(number: int) -> dict[str, Any]:
    return {**assistant(f"It is {number}"), "thinking": "so" * number}


TALKS = [
    [user(None, "What?"), said(1), user("And?"), said(2), user("Then ", None, "?"), said(3)],
    [user("No image?"), said(2)],
    [user(None, None), said(4), user("Which?"), said(1)],
]
SIZES = [[(16, 8), (8, 24)], [], [(8, 8), (16, 16)]]
"""Of the images of each, in their order."""


def rows(images: bool) -> list[dict[str, Any]]:
    """The conversations, or with texts in the place of their images."""
    if images:
        pictures = [[picture(10 * row + n, *size) for n, size in enumerate(each)] for row, each in enumerate(SIZES)]
        return [{"messages": talk, "images": own} for talk, own in zip(TALKS, pictures, strict=True)]
    return [{"messages": [{**each, "content": _text(each["content"])} for each in talk]} for talk in TALKS]


def _text(parts: list[dict[str, Any]]) -> str:
    return "".join(part["text"] or "(none)" for part in parts)


def plain_loss(family: str, model: Any, made: list[dict[str, Any]]) -> Tensor:
    """The mean over the tokens that the assistant has to write, from one forward of the model for each turn."""
    own, found = dropping(family), []

    def encoded(text: str, images: list[Any]) -> Any:
        shown = images[: text.count(own.image_token)] or None
        return own(text=[text], images=None if shown is None else [shown], return_tensors="pt")

    for row in made:
        messages, images = row["messages"], row.get("images", [])
        for number in range(1, len(messages), 2):
            context = own.apply_chat_template(messages[:number], add_generation_prompt=True, tokenize=False)
            whole = own.apply_chat_template(messages[: number + 1], tokenize=False).removesuffix("\n")
            assert whole.startswith(context)
            batch = encoded(whole, images)
            before = encoded(context, images)["input_ids"].shape[1]
            logprobs = model(**batch).logits[0, before - 1 : -1].log_softmax(-1)
            found.append(logprobs.gather(-1, batch["input_ids"][0, before:, None])[:, 0])
    return -torch.cat(found).mean()


@pytest.mark.parametrize("images", [True, False], ids=["images", "text"])
@pytest.mark.parametrize("family", FAMILIES)
def test_turns_have_the_images_of_their_context(family: str, images: bool, tmp_path: Path) -> None:
    made = rows(images)
    args = SFTConfig(
        output_dir=str(tmp_path),
        assistant_only_loss=True,
        per_device_train_batch_size=len(made),
        max_steps=1,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=1e9,
        max_length=None,
        logging_steps=1,
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        rehearsal=False,
    )
    run = SFTTrainer(
        vision_model(family).double(),
        args=args,
        train_dataset=Dataset.from_list(made),
        processing_class=dropping(family),
    )
    assert [len(row["seq_lengths"]) for row in run.train_dataset] == [3, 1, 2]
    run.train()
    plain = vision_model(family).double().train()
    loss = plain_loss(family, plain, made)
    loss.backward()
    expected = {name: p.detach() - RATE * p.grad for name, p in plain.named_parameters() if p.grad is not None}
    assert any("visual" in name or "vision_model" in name for name in expected) == images
    assert run.state.log_history[0]["loss"] == pytest.approx(loss.item(), abs=1e-6)
    assert_near(weights(run), expected, 2e-6)


def prepared(made: list[dict[str, Any]], folder: Path, **options: Any) -> Any:
    """The rows that a model is trained on."""
    pairs = "chosen" in made[0]
    options |= {"output_dir": str(folder), "use_cpu": True, "bf16": False, "max_length": None, "rehearsal": False}
    return (DPOTrainer if pairs else SFTTrainer)(
        vision_model(),
        args=(DPOConfig if pairs else SFTConfig)(**options),
        train_dataset=Dataset.from_list(made),
        processing_class=dropping("qwen2_5_vl"),
    ).train_dataset


def test_completions_have_the_turns_of_conversations(tmp_path: Path) -> None:
    made = [
        {"images": row["images"][:number], "messages": row["messages"][:4]}
        for number, row in zip((1, 2), rows(True)[::2], strict=True)
    ]
    parted = [
        {"images": row["images"], "prompt": row["messages"][:1], "completion": row["messages"][1:]} for row in made
    ]
    columns = ["input_ids", "labels", "seq_lengths", "prefix", "prefix_length"]
    whole = prepared(made, tmp_path, assistant_only_loss=True).select_columns(columns)
    assert list(prepared(parted, tmp_path).select_columns(columns)) == list(whole)


def test_pairs_with_images_and_several_turns_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = [
        {"images": row["images"][:1], "prompt": [user(None, "?")], "chosen": turns, "rejected": [said(3)]}
        for row, turns in zip(rows(True)[::2], ([said(1)], [said(1), user("And?"), said(2)]), strict=True)
    ]
    one, several = prepared(made, tmp_path)
    tokenizer = dropping("qwen2_5_vl").tokenizer
    assert tokenizer.decode(one["chosen_ids"]) == "[so]It is 1<|im_end|>"
    assert tokenizer.decode(several["chosen_ids"]).endswith("[soso]It is 2<|im_end|>\n")
    assert caplog.text.count("in 1 of 2 rows (the first is row 1) a completion is not one message") == 1


def test_an_image_that_nobody_answers_is_refused(tmp_path: Path) -> None:
    [first, *_] = rows(True)
    unanswered = {**first, "messages": first["messages"][:-1]}
    with pytest.raises(ValueError, match=r"row 0 .*2 images, of which no turn of the assistant is given more than 1"):
        prepared([unanswered], tmp_path, assistant_only_loss=True)
