"""Steps of Online DPO and PPO on completions that the policy writes: cut in other ways, resumed, and with bad input."""

from __future__ import annotations

import pytest
import torch

from tests.support.marks import slow_but
from tests.support.matrix.matrix import check_equal, without_it
from tests.support.runs.online_runs import assert_near, even_tokens, online, trained, weights

CUTS = {
    "accumulated": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4},
    "within a token budget": {"tokens_per_microbatch": 80},
    "prompts repeated": {"prefix_sharing": False},
    "written in turns": {"tokens_per_generation_batch": 100},
}
METHODS = {
    "OnlineDPO": {"num_generations": 2, "beta": [0.1, 0.3], "missing_eos_penalty": 0.5, "ld_alpha": 0.4},
    "PPO": {"num_generations": 1, "num_ppo_epochs": 2, "num_mini_batches": 2, "max_steps": 5, "learning_rate": 1e-3},
}
SAVING = {"save_strategy": "steps", "save_steps": 1}


def options(method: str, **more) -> dict:
    return {"per_device_train_batch_size": 4, **METHODS[method], **more}


@pytest.mark.slow
@pytest.mark.parametrize("cut", slow_but(["within a token budget"], CUTS))
@pytest.mark.parametrize("method", METHODS)
def test_however_a_step_is_cut_it_learns_the_same(method, cut, tmp_path):
    whole = trained(tmp_path / "whole", method, **options(method))
    parts = trained(tmp_path / "parts", method, **options(method, **CUTS[cut]))
    before = weights(online(tmp_path / "none", method, **options(method)))
    assert_near(weights(parts), weights(whole), 1e-5)  # log-probs that wait for their step are in float32
    assert not all(torch.equal(before[name], value) for name, value in weights(whole).items())


RESUMED = [("OnlineDPO", 2, 5), ("PPO", 2, 6), ("OnlineDPO", 2, 10), ("PPO", 7, 10)]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "step", "steps"), slow_but(RESUMED[:1], RESUMED))
def test_resumed_anywhere_in_a_window_the_bits_are_the_same(method, step, steps, tmp_path):
    window = {"max_steps": steps} | (
        {"gradient_accumulation_steps": 2, "steps_per_generation": 6} if "DPO" in method else {}
    )
    window = options(method, **window)
    whole = trained(tmp_path / "whole", method, **window)
    first = online(tmp_path / "parts", method, **window, **SAVING)
    first.args.max_steps = step
    first.train()
    assert (tmp_path / "parts" / f"checkpoint-{step}" / "rollout_0.safetensors").exists()
    second = online(tmp_path / "parts", method, **window, **SAVING)
    second.train(resume_from_checkpoint=str(tmp_path / "parts" / f"checkpoint-{step}"))
    expected, found = weights(whole), weights(second)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.slow
def test_on_the_pairs_of_dpo_it_is_dpo_bit_by_bit():
    """A `rollout_func` writes the completions of DPO's rows, and the reward prefers the chosen ones."""
    check_equal(without_it("OnlineDPO"), without_it("DPO", learning_rate=1e-3), bits=True)


class Undecided:
    """A judge that cannot tell for every other prompt."""

    def judge(self, prompts, completions, shuffle_order=True):
        return [-1 if number % 2 else 1 for number in range(len(prompts))]


@pytest.mark.slow
def test_pairs_that_a_judge_cannot_tell_teach_nothing(tmp_path):
    given = options("OnlineDPO", missing_eos_penalty=None, max_steps=2)
    judge = {"reward_funcs": None, "judge": Undecided()}
    trainer = online(tmp_path, "OnlineDPO", arguments=judge, **given)
    rows = [dict(trainer.train_dataset[row]) for row in (0, 0, 1, 1)]
    made = trainer.maker.make(rows, (0, 0, 0), group=2, version=0)
    assert made.rollout.row_values["preference"].tolist() == [-1, 1, 0, 0]
    batch = trainer.learning.batch(made.rollout, [0, 1], sharing=True)
    alone = trainer.learning.batch(made.rollout, [0], sharing=True)
    assert torch.equal(trainer.runner.gradients(batch), trainer.runner.gradients(alone))


@pytest.mark.slow
def test_a_long_prompt_keeps_its_end(tmp_path):
    given = options("OnlineDPO", max_length=16)
    trainer = online(tmp_path, "OnlineDPO", **given)
    row = max(trainer.train_dataset, key=lambda row: len(row["prompt_ids"]))
    rollout = trainer.maker.make([dict(row)] * 2, (0, 0, 0), group=2, version=0).rollout
    longest = max(len(each.token_ids) for each in rollout.completions)
    assert rollout.prompts == [row["prompt_ids"][-(16 - longest) :]] * 2


@pytest.mark.slow
def test_beta_is_that_of_the_epoch(tmp_path):
    arguments = {"train_dataset": online(tmp_path, "OnlineDPO", **options("OnlineDPO")).train_dataset.select(range(4))}
    arguments["train_dataset"] = arguments["train_dataset"].remove_columns("prompt_ids")
    given = options("OnlineDPO", beta=[0.1, 0.3], max_steps=4)
    trainer = trained(tmp_path, "OnlineDPO", arguments=arguments, **given)
    found = [entry["beta"] for entry in trainer.state.log_history if "beta" in entry]
    assert found == pytest.approx([0.1, 0.3, 0.3, 0.3])


@pytest.mark.slow
def test_evaluation_keeps_pairs_together(tmp_path):
    given = options("OnlineDPO", per_device_eval_batch_size=1)
    trainer = online(tmp_path, "OnlineDPO", **given)
    found = trainer.evaluate(trainer.train_dataset.select(range(3)).remove_columns("prompt_ids"))
    assert found["eval_loss"] == pytest.approx(torch.log(torch.tensor(2.0)).item(), abs=1e-4)


@pytest.mark.parametrize(
    ("method", "arguments", "more", "text"),
    [
        ("OnlineDPO", {"judge": Undecided()}, {}, "keep one of them"),
        ("OnlineDPO", {"judge": Undecided(), "reward_funcs": None}, {}, "missing_eos_penalty"),
        ("OnlineDPO", {"reward_funcs": None}, {}, "reward_funcs"),
        ("OnlineDPO", {"reward_model": even_tokens}, {}, "older name"),
        ("OnlineDPO", {"data_collator": list}, {}, "data_collator"),
        ("OnlineDPO", {}, {"beta": []}, "empty"),
        ("OnlineDPO", {}, {"max_new_tokens": 20, "max_completion_length": 30}, "older name"),
        ("OnlineDPO", {}, {"max_length": 12}, "max_length"),
        ("OnlineDPO", {}, {"num_generations": 4}, "num_generations"),
        ("PPO", {"judge": Undecided(), "reward_funcs": None}, {}, "does not"),
        ("GRPO", {"value_model": "x"}, {}, "value function"),
    ],
)
def test_bad_input(method, arguments, more, text, tmp_path):
    given = {"num_generations": 4} if method == "GRPO" else options(method)
    with pytest.raises(ValueError, match=text):
        online(tmp_path, method, arguments=arguments, **given | more)
