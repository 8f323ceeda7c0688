"""TRL's collators by name: TRL's tensors when called; to a trainer the tokens that these score, without padding."""

import pytest
import torch
from datasets import Dataset
from trl.experimental.utils import DataCollatorForChatML as TheirChatML
from trl.trainer.dpo_trainer import DataCollatorForPreference as TheirPairs
from trl.trainer.kto_trainer import DataCollatorForUnpairedPreference as TheirSingles
from trl.trainer.reward_trainer import DataCollatorForPreference as TheirAnswers
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling as TheirTexts

import lowtide
from lowtide import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer
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
    batch = lowtide.DataCollatorForLanguageModeling(pad_token_id=0, pad_to_multiple_of=8).ragged(rows)
    theirs = TheirTexts(pad_token_id=0, padding_free=True)(rows)
    labels = theirs["labels"][0]
    assert batch.token_ids.tolist() == theirs["input_ids"][0].tolist()
    assert batch.position_ids.tolist() == theirs["position_ids"][0].tolist()
    assert sorted(batch.score_target.tolist()) == sorted(labels[labels != -100].tolist())


def test_masks_of_completions_and_of_the_assistant_are_kept():
    rows = [{"input_ids": [5, 6, 7, 8], "completion_mask": [0, 0, 1, 1], "assistant_masks": [0, 1, 1, 0]}]
    assert lowtide.DataCollatorForLanguageModeling().ragged(rows).score_target.tolist() == [7]
    whole = lowtide.DataCollatorForLanguageModeling(completion_only_loss=False, max_length=2).ragged(rows)
    assert whole.score_target.tolist() == [6]


def test_pairs_and_single_completions_are_scored_as_by_trls():
    pairs, theirs = lowtide.DataCollatorForPreference(0).ragged(PAIRS), TheirPairs(0)(PAIRS)
    assert scored_by(pairs) == scored(theirs["input_ids"], theirs["completion_mask"])
    assert pairs.tokens == 5 + 6  # a prompt stands once
    singles, theirs = lowtide.DataCollatorForUnpairedPreference(0).ragged(SINGLES), TheirSingles(0)(SINGLES)
    both = [scored(theirs[f"{kind}input_ids"], theirs[f"{kind}completion_mask"]) for kind in ("", "KL_")]
    assert scored_by(singles) == sorted(both[0] + both[1])
    assert singles.row_values["label"].tolist() == theirs["label"].tolist()


def test_conversations_are_scored_as_by_trls():
    tokenizer = make_tokenizer()
    rows = [{"messages": talk} for talk in TALKS]
    batch, theirs = lowtide.DataCollatorForChatML(tokenizer).ragged(rows), TheirChatML(tokenizer)(rows)
    kept = theirs["labels"] != -100
    assert scored_by(batch) == scored(theirs["labels"], kept)
    assert batch.tokens == int(theirs["attention_mask"].sum())


REFERRED = [{**row, "ref_chosen_logps": -0.5, "ref_rejected_logps": -0.25 * n} for n, row in enumerate(PAIRS)]
ANSWERS = [{"chosen_ids": row["chosen_ids"], "rejected_ids": row["rejected_ids"], "margin": 0.5} for row in PAIRS]
WITH_REFERENCES = [{**row, "ref_logps": -0.5, "ref_KL_logps": -0.25 * n} for n, row in enumerate(SINGLES)]


def same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, values in theirs.items():
        if isinstance(values, torch.Tensor):
            torch.testing.assert_close(ours[name], values, msg=name)
        else:
            assert ours[name] == values, name


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"pad_to_multiple_of": 4},
        {"padding_free": True},
        {"padding_free": True, "pad_to_multiple_of": 4},
        {"return_position_ids": True},
    ],
)
@pytest.mark.parametrize("rows", [TOKENS, PACKED, [{"input_ids": [5, 6, 7]}, {"input_ids": [5]}]])
def test_called_alone_it_gives_trls_tensors_of_texts(rows, options):
    if "padding_free" in options and rows is PACKED:
        rows = [*PACKED, *PACKED]
    same(lowtide.DataCollatorForLanguageModeling(99, **options)(rows), TheirTexts(99, **options)(rows))


def test_labels_count_and_not_the_masks_they_were_made_of():
    rows = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3], "completion_mask": [0, 0, 1]}]
    collator = lowtide.DataCollatorForLanguageModeling(0)
    assert collator(rows)["labels"].tolist() == [[1, 2, 3]]
    assert collator.ragged(rows).score_target.tolist() == [2, 3]


@pytest.mark.parametrize(
    "options",
    [{}, {"pad_to_multiple_of": 4}, {"max_length": 3}, {"max_length": 3, "truncation_mode": "keep_end"}],
)
@pytest.mark.parametrize("rows", [PAIRS, REFERRED])
def test_called_alone_it_gives_trls_tensors_of_pairs(rows, options):
    same(lowtide.DataCollatorForPreference(99, **options)(rows), TheirPairs(99, **options)(rows))


@pytest.mark.parametrize("options", [{}, {"pad_to_multiple_of": 4}])
def test_called_alone_it_gives_trls_tensors_of_answers_for_rewards(options):
    same(lowtide.DataCollatorForPreference(99, **options)(ANSWERS), TheirAnswers(99, **options)(ANSWERS))


@pytest.mark.parametrize("options", [{}, {"pad_to_multiple_of": 4}, {"max_length": 2}])
@pytest.mark.parametrize("rows", [SINGLES, WITH_REFERENCES])
def test_called_alone_it_gives_trls_tensors_of_single_completions(rows, options):
    ours = lowtide.DataCollatorForUnpairedPreference(99, **options)(rows)
    same(ours, TheirSingles(99, **options)(rows))


def test_called_alone_it_gives_trls_tensors_of_conversations():
    tokenizer = make_tokenizer()
    rows = [{"messages": talk} for talk in TALKS]
    theirs = TheirChatML(tokenizer)(rows)
    theirs.pop("byte_offsets")  # of GOLD alone
    same(lowtide.DataCollatorForChatML(tokenizer)(rows), theirs)


def test_a_row_that_would_have_to_be_cut_is_refused():
    with pytest.raises(ValueError, match=r"longer than max_length=4.*set max_length in the trainer's config"):
        lowtide.DataCollatorForPreference(0, max_length=4).ragged(PAIRS)
    with pytest.raises(ValueError, match="truncation_mode='middle' is not one of"):
        lowtide.DataCollatorForPreference(0, truncation_mode="middle")
    with pytest.raises(ValueError, match="return_tensors='np' is not there"):
        lowtide.DataCollatorForLanguageModeling(return_tensors="np")


@pytest.mark.slow
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


def test_a_trainer_takes_what_a_derived_class_returns(tmp_path):
    """Its own call is what counts, also where it is TRL's hook that is overridden."""

    class Masked(lowtide.DataCollatorForLanguageModeling):
        def torch_call(self, examples):
            made = super().torch_call(examples)
            made["labels"][:, 3:] = -100
            return made

    save(tmp_path, seed=0)
    rows = Dataset.from_list([{"input_ids": [5, 6, 7, 8, 9, 10]}] * 4)
    args = SFTConfig(
        str(tmp_path / "run"), use_cpu=True, report_to="none", dataset_kwargs={"skip_prepare_dataset": True}
    )
    for collator, scores in ((lowtide.DataCollatorForLanguageModeling(0), 10), (Masked(0), 4)):
        made = SFTTrainer(str(tmp_path), args=args, data_collator=collator, train_dataset=rows)
        assert made.as_ragged(made.data_collator([rows[0], rows[1]])).scores == scores
