"""TRL's collators by name: the tokens that TRL's score, without their padding; and the trainers that take them."""

import pytest
import torch
from datasets import Dataset
from trl.experimental.utils import DataCollatorForChatML as TheirChatML
from trl.trainer.dpo_trainer import DataCollatorForPreference as TheirPairs
from trl.trainer.kto_trainer import DataCollatorForUnpairedPreference as TheirSingles
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling as TheirTexts

import lowtide
from lowtide import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer
from lowtide.demo.model import make_tokenizer, save

TOKENS = [
    {"input_ids": [5, 6, 7], "labels": [-100, 6, 7]},
    {"input_ids": [8, 9], "labels": [-100, 9]},
]
PACKED = [{"input_ids": [5, 6, 7, 8, 9], "labels": [-100, 6, 7, -100, 9], "seq_lengths": [3, 2]}]
PAIRS = [
    {"prompt_ids": [1, 2, 3], "chosen_ids": [4, 5], "rejected_ids": [6]},
    {"prompt_ids": [7, 8], "chosen_ids": [9], "rejected_ids": [10, 11]},
]
SINGLES = [
    {"prompt_ids": [1, 2], "completion_ids": [4, 5], "KL_completion_ids": [9], "label": True},
    {"prompt_ids": [7], "completion_ids": [9], "KL_completion_ids": [4, 5], "label": False},
]
TALKS = [
    [{"role": "user", "content": "1 + 1"}, {"role": "assistant", "content": "2"}],
    [{"role": "user", "content": "2 + 2 + 2"}, {"role": "assistant", "content": "6"}],
]


def scored(ids, mask):
    """Of each padded row the tokens that are scored, sorted."""
    return sorted(tuple(row[kept].tolist()) for row, kept in zip(ids, mask.bool(), strict=True))


def scored_by(batch):
    """Of each segment of ours the tokens that are scored, sorted; prompts that are shared score none."""
    found: dict[int, list[int]] = {}
    for segment, target in zip(batch.score_segment.tolist(), batch.score_target.tolist(), strict=True):
        found.setdefault(segment, []).append(target)
    return sorted(map(tuple, found.values()))


@pytest.mark.parametrize("rows", [TOKENS, PACKED, [{"input_ids": [5, 6, 7]}]])
def test_texts_are_scored_as_by_trls(rows):
    batch = lowtide.DataCollatorForLanguageModeling(pad_token_id=0, pad_to_multiple_of=8)(rows)
    theirs = TheirTexts(pad_token_id=0, padding_free=True)(rows)
    labels = theirs["labels"][0]
    assert batch.token_ids.tolist() == theirs["input_ids"][0].tolist()
    assert batch.position_ids.tolist() == theirs["position_ids"][0].tolist()
    assert sorted(batch.score_target.tolist()) == sorted(labels[labels != -100].tolist())


def test_masks_of_completions_and_of_the_assistant_are_kept():
    rows = [{"input_ids": [5, 6, 7, 8], "completion_mask": [0, 0, 1, 1], "assistant_masks": [0, 1, 1, 0]}]
    assert lowtide.DataCollatorForLanguageModeling()(rows).score_target.tolist() == [7]
    whole = lowtide.DataCollatorForLanguageModeling(completion_only_loss=False, max_length=2)(rows)
    assert whole.score_target.tolist() == [6]


def test_pairs_and_single_completions_are_scored_as_by_trls():
    pairs, theirs = lowtide.DataCollatorForPreference(0)(PAIRS), TheirPairs(0)(PAIRS)
    assert scored_by(pairs) == scored(theirs["input_ids"], theirs["completion_mask"])
    assert pairs.tokens == 5 + 6  # a prompt stands once
    singles, theirs = lowtide.DataCollatorForUnpairedPreference(0)(SINGLES), TheirSingles(0)(SINGLES)
    both = [scored(theirs[f"{kind}input_ids"], theirs[f"{kind}completion_mask"]) for kind in ("", "KL_")]
    assert scored_by(singles) == sorted(both[0] + both[1])
    assert singles.row_values["label"].tolist() == theirs["label"].tolist()


def test_conversations_are_scored_as_by_trls():
    tokenizer = make_tokenizer()
    rows = [{"messages": talk} for talk in TALKS]
    batch, theirs = lowtide.DataCollatorForChatML(tokenizer)(rows), TheirChatML(tokenizer)(rows)
    kept = theirs["labels"] != -100
    assert scored_by(batch) == scored(theirs["labels"], kept)
    assert batch.tokens == int(theirs["attention_mask"].sum())


def test_a_row_that_would_have_to_be_cut_is_refused():
    with pytest.raises(ValueError, match=r"longer than max_length=4.*set max_length in the trainer's config"):
        lowtide.DataCollatorForPreference(0, max_length=4)(PAIRS)
    with pytest.raises(ValueError, match="truncation_mode='middle' is not one of"):
        lowtide.DataCollatorForPreference(0, truncation_mode="middle")
    with pytest.raises(ValueError, match="return_tensors='np' is not there"):
        lowtide.DataCollatorForLanguageModeling(return_tensors="np")


@pytest.mark.parametrize(("config", "trainer"), [(DPOConfig, DPOTrainer), (RewardConfig, RewardTrainer)])
def test_a_trainer_takes_one_for_its_own(config, trainer, tmp_path):
    save(tmp_path, seed=0)
    [asked, answer] = TALKS[0]
    rows = Dataset.from_list([{"prompt": [asked], "chosen": [answer], "rejected": [TALKS[1][1]]}] * 4)
    losses = []
    for collator in (None, lowtide.DataCollatorForPreference(pad_token_id=0)):
        args = config(output_dir=str(tmp_path / "run"), max_steps=1, use_cpu=True, report_to="none", disable_tqdm=True)
        made = trainer(str(tmp_path), args=args, data_collator=collator, train_dataset=rows)
        torch.manual_seed(0)
        losses.append(made.train().training_loss)
    assert losses[0] == losses[1]
