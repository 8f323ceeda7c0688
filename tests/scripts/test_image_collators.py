"""TRL's collators of rows with images by name: the tensors of TRL's, and the trainers that take them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from datasets import Dataset
from trl.trainer.dpo_trainer import DataCollatorForVisionPreference as TheirPairs
from trl.trainer.kto_trainer import DataCollatorForVisionUnpairedPreference as TheirSingles
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling as TheirTexts

import lowtide
from tests.support.models.vision_models import FAMILIES, picture, processor, stored, vision_model

WORDS = ["short", "a longer answer", "words"]


def said(role: str, text: str) -> list[dict[str, Any]]:
    return [{"role": role, "content": text}]


def prompts(column: str = "images") -> list[dict[str, Any]]:
    """Rows with images of several sizes, whose prompts are of several lengths."""
    sizes = [(16, 16), (24, 16), (16, 8)]
    pictures = [picture(number, *size) for number, size in enumerate(sizes)]
    shown = [{"images": [each]} if column == "images" else {"image": each} for each in pictures]
    return [{**each, "prompt": said("user", "what is it? " * (n + 1))} for n, each in enumerate(shown)]


def pairs(column: str = "images") -> list[dict[str, Any]]:
    sides = zip(prompts(column), WORDS, reversed(WORDS), strict=True)
    return [
        {**row, "chosen": said("assistant", one), "rejected": said("assistant", f"not {two}")}
        for row, one, two in sides
    ]


def singles() -> list[dict[str, Any]]:
    rows = zip(prompts(), WORDS, [True, False, True], strict=True)
    return [{**row, "completion": said("assistant", word), "label": label} for row, word, label in rows]


def talks() -> list[dict[str, Any]]:
    rows = zip(prompts(), WORDS, strict=True)
    return [{"images": row["images"], "messages": row["prompt"] + said("assistant", word)} for row, word in rows]


def same(ours: Any, theirs: Any) -> None:
    assert set(ours) == set(theirs)
    for name, values in theirs.items():
        torch.testing.assert_close(ours[name], values, rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("options", [{}, {"max_length": 30}])
@pytest.mark.parametrize("column", ["images", "image"])
def test_pairs_are_trls(family, options, column):
    made = lowtide.DataCollatorForVisionPreference(processor(family), **options)(pairs(column))
    same(made, TheirPairs(processor(family), **options)(copy.deepcopy(pairs(column))))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("options", [{}, {"calculate_kl": False}, {"max_length": 30}])
def test_single_completions_are_trls(family, options):
    made = lowtide.DataCollatorForVisionUnpairedPreference(processor(family), **options)(singles())
    same(made, TheirSingles(processor(family), **options)(copy.deepcopy(singles())))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rows", [talks, singles])
@pytest.mark.parametrize("completion_only", [False, True])
def test_texts_are_trls(family, rows, completion_only):
    if rows is talks and completion_only:
        with pytest.raises(ValueError, match="completion_only_loss=True scores completions"):
            lowtide.DataCollatorForVisionLanguageModeling(processor(family), completion_only_loss=True)(talks())
        return
    given = [{name: value for name, value in row.items() if name != "label"} for row in rows()]
    made = lowtide.DataCollatorForVisionLanguageModeling(processor(family), completion_only_loss=completion_only)(given)
    same(made, TheirTexts(processor(family), completion_only_loss=completion_only)(copy.deepcopy(given)))


def test_a_call_leaves_its_rows_as_they_are():
    rows = pairs("image")
    lowtide.DataCollatorForVisionPreference(processor())(rows)
    assert [row.keys() for row in rows] == [row.keys() for row in pairs("image")]
    assert rows[0]["prompt"] == pairs()[0]["prompt"]


@pytest.mark.slow
def test_a_trainer_takes_one_for_its_own(tmp_path):
    rows = [{**row, "images": [stored(each) for each in row["images"]]} for row in pairs()]
    losses = []
    for collator in (None, lowtide.DataCollatorForVisionPreference(processor())):
        args = lowtide.DPOConfig(str(tmp_path), max_steps=1, use_cpu=True, report_to="none", disable_tqdm=True)
        made = lowtide.DPOTrainer(
            vision_model(),
            args=args,
            data_collator=collator,
            train_dataset=Dataset.from_list(rows),
            processing_class=processor(),
        )
        losses.append(made.train().training_loss)
    assert losses[0] == losses[1]
    cut = lowtide.DataCollatorForVisionPreference(processor(), max_length=5)
    with pytest.raises(ValueError, match="set max_length in its config"):
        lowtide.DPOTrainer(
            vision_model(),
            args=args,
            data_collator=cut,
            train_dataset=Dataset.from_list(rows),
            processing_class=processor(),
        )
