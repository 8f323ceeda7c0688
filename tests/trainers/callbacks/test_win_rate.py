"""`WinRateCallback`: a judge compares what the model writes with what it wrote before training."""

import pytest
import torch
from transformers import GenerationConfig

import lowtide
from lowtide import WinRateCallback
from lowtide.trainers.callbacks.log_completions import prompts_of, write
from tests.support.runs.talking import trainer

GREEDY = GenerationConfig(max_new_tokens=6, do_sample=False)
OPTIONS = {"disable_tqdm": True, "learning_rate": 3e-2, "eval_strategy": "steps", "eval_steps": 1}


class Judge(lowtide.BasePairwiseJudge):
    """Prefers the completion that differs from what was there before training, and remembers what it saw."""

    def __init__(self):
        self.seen = []

    def judge(self, prompts, completions, shuffle_order=True, return_scores=False):
        self.seen.append((list(prompts), [list(pair) for pair in completions], shuffle_order))
        if return_scores:
            return [0.25 if before != after else 0.75 for before, after in completions]
        return [int(before != after) for before, after in completions]


def rates(made, name="eval_win_rate"):
    return [entry[name] for entry in made.state.log_history if name in entry]


@pytest.mark.parametrize("soft", [False, True])
def test_the_share_of_prompts_is_what_the_judge_says(soft, tmp_path):
    made, judge = trainer(tmp_path, **OPTIONS), Judge()
    callback = WinRateCallback(judge, made, GREEDY, num_prompts=3, shuffle_order=False, use_soft_judge=soft)
    made.add_callback(callback)
    tokenizer = made.processing_class
    prompts = prompts_of(made.eval_dataset, tokenizer)[:3]
    before = write(made.model, tokenizer, prompts, GREEDY, 8)
    made.train()
    after = write(made.model, tokenizer, prompts, GREEDY, 8)
    assert before != after
    assert judge.seen[0] == (prompts, [[text, text] for text in before], False)
    assert judge.seen[-1] == (prompts, [list(pair) for pair in zip(before, after, strict=True)], False)
    won = [sum(one != two for one, two in pairs) / 3 for _, pairs, _ in judge.seen]
    assert len(won) == 3  # before training, and after each of two steps
    assert rates(made) == pytest.approx(won)
    if soft:
        assert rates(made, "eval_avg_win_prob") == pytest.approx([0.25 + 0.5 * each for each in won])


def test_training_goes_on_as_without_it(tmp_path):
    plain, watched = (trainer(tmp_path / name, **OPTIONS) for name in ("plain", "watched"))
    watched.add_callback(WinRateCallback(Judge(), watched, GenerationConfig(max_new_tokens=4, do_sample=True)))
    for each in (plain, watched):
        each.train()
    for one, two in zip(plain.model.parameters(), watched.model.parameters(), strict=True):
        assert torch.equal(one, two)


def test_what_is_missing_is_named(tmp_path):
    made = trainer(tmp_path, disable_tqdm=True)
    made.eval_dataset = None
    with pytest.raises(ValueError, match="WinRateCallback reads prompts from the trainer's eval_dataset"):
        WinRateCallback(Judge(), made)
