"""Judges: what they say of pairs, checked like rewards."""

import math
import time

import pytest
import torch

from lowtide.rollout.calls import Caller
from lowtide.rollout.judges import BasePairwiseJudge, RandomPairwiseJudge, RewardJudge, judge_pairs
from lowtide.rollout.rewards.rewards import Rewards
from tests.support.models.classifiers import classifier
from tests.support.texts.byte_tokenizer import byte_tokenizer

PROMPTS = ["Why?", "How many?", "Who?"]
PAIRS = [["a", "bb"], ["ccc", "d"], ["e", "f"]]


def lengths(completions):
    return [len(each) for each in completions]


class Own(BasePairwiseJudge):
    def __init__(self, *choices):
        self.choices = list(choices)

    def judge(self, prompts, completions, shuffle_order=True):
        assert shuffle_order
        assert completions == PAIRS
        return self.choices


async def asks(prompts, completions):
    return [1 if len(second) > len(first) else 0 for first, second in completions]


def test_the_larger_reward_wins():
    assert judge_pairs(RewardJudge(lengths), PROMPTS, PAIRS) == [1, 0, -1]
    shorter = Rewards([lengths, lengths], weights=[1, -2])
    assert judge_pairs(RewardJudge(shorter), PROMPTS, PAIRS) == [0, 1, -1]
    silent = RewardJudge(lambda completions: [None] * 5 + [0.0])
    assert judge_pairs(silent, PROMPTS, PAIRS) == [-1, -1, -1]
    with pytest.raises(ValueError, match="takes an argument 'completion_ids'"):
        RewardJudge(lambda completion_ids: completion_ids).judge(PROMPTS, PAIRS)


def test_a_reward_model_as_a_judge():
    model, tokenizer = classifier(), byte_tokenizer(pad="<eos>")
    texts = [prompt + each for prompt, pair in zip(PROMPTS, PAIRS, strict=True) for each in pair]
    model.config.pad_token_id = tokenizer.pad_token_id
    with torch.no_grad():
        dense = model(**tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")).logits.view(-1, 2)
    wanted = dense.argmax(1).tolist()
    assert len(set(wanted)) == 2
    assert judge_pairs(RewardJudge(classifier(), processing_classes=tokenizer), PROMPTS, PAIRS) == wanted


def test_judges_of_every_kind():
    assert judge_pairs(Own(1, 0, -1), PROMPTS, PAIRS) == [1, 0, -1]
    assert judge_pairs(Own(*torch.tensor([1, 0, -1])), PROMPTS, PAIRS) == [1, 0, -1]
    assert judge_pairs(asks, PROMPTS, PAIRS) == [1, 0, 0]
    drawn = [judge_pairs(RandomPairwiseJudge(seed), PROMPTS * 9, PAIRS * 9) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert set(drawn[0]) == {0, 1}


WRONG = {
    "too few": (Own(1, 0), "'Own' returned 2 choices for 3 prompts"),
    "a number": (lambda prompts, completions: 1, "returned a int for 3 prompts"),
    "another number": (Own(1, 2, 0), r"returned 2 for completion 1 of the batch .*'How many\?'"),
    "a share": (Own(1, 0.5, 0), r"returned 0\.5 for completion 1"),
    "nothing": (Own(1, None, 0), "returned None for completion 1"),
    "nan": (Own(1, math.nan, 0), "returned nan for completion 1"),
    "a text": (Own(1, "0", 0), "returned '0' for completion 1"),
    "raises": (lambda prompts, completions: 1 / 0, "raised ZeroDivisionError"),
    "no judge": ("random", "has no method judge"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_judgement(case):
    judge, message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        judge_pairs(judge, PROMPTS, PAIRS)


def test_a_judge_that_hangs():
    with pytest.raises(ValueError, match=r"gave nothing within 0\.1 seconds, for 3 prompts"):
        judge_pairs(lambda prompts, completions: time.sleep(20), PROMPTS, PAIRS, Caller(0.1))
