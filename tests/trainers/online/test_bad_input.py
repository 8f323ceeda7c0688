"""What cannot work in a method whose policy writes is refused by one clear message, and loses nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from datasets import Dataset

import lowtide
from lowtide.rollout.generators.ragged import RaggedGenerator
from tests.support.models.architectures import build
from tests.support.references.parity_world import lora, tokenizer
from tests.support.runs.online_runs import SETTINGS, online, prompts, weights

CONFIGS = {
    "a group that does not divide": ({"num_generations": 3}, "num_generations=3 does not divide"),
    "a group of one": ({"num_generations": 1}, "num_generations=1 leaves a completion nothing"),
    "no temperature": ({"temperature": 0}, "temperature=0 writes the likeliest"),
    "both ways to say how much": ({"generation_batch_size": 8, "steps_per_generation": 1}, "set one of them"),
    "an odd generation batch": ({"generation_batch_size": 12}, "must be a multiple of 8"),
    "an unknown setting": ({"generation_kwargs": {"beams": 2}}, "generation_kwargs: 'beams' is unknown"),
    "a setting of another generator": (
        {"generation_kwargs": {"num_beams": 2}, "generation_backend": "lowtide"},
        "num_beams of transformers' generate has no effect with generation_backend='lowtide'",
    ),
    "a setting of another loss": ({"loss_type": "sapo", "delta": 2.0}, "delta=2.0 would have no effect"),
    "no such loss": ({"loss_type": "gpro"}, "loss_type"),
    "no such scale": ({"scale_rewards": "row"}, "scale_rewards='row' is not one of"),
    "a reference to move that is not there": ({"sync_ref_model": True}, "beta=0 has none"),
    "bounds that cross": (
        {"vllm_importance_sampling_clip_min": 3.0, "vllm_importance_sampling_clip_max": 2.0},
        "must be below",
    ),
    "no number of bytes": ({"ds3_gather_for_generation": "all"}, "must be true, false or a number of bytes"),
    "a batch that is found": ({"auto_find_batch_size": True}, "auto_find_batch_size"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_options_that_cannot_work_are_refused_at_construction(name, tmp_path):
    options, message = CONFIGS[name]
    with pytest.raises(ValueError, match=message):
        lowtide.GRPOConfig(output_dir=str(tmp_path), **SETTINGS | options)


def wrong_count(completions: list[Any], **_: Any) -> list[float]:
    return [0.0] * (len(completions) - 1)


def not_a_number(completions: list[Any], **_: Any) -> list[float]:
    return [float("nan")] * len(completions)


def raising(completions: list[Any], **_: Any) -> list[float]:
    raise KeyError("answer")


@pytest.mark.parametrize("reward", [wrong_count, not_a_number, raising])
def test_a_reward_that_is_none_stops_the_run_by_its_name(reward, tmp_path):
    trainer = online(tmp_path, arguments={"reward_funcs": reward})
    before = weights(trainer)
    with pytest.raises(ValueError, match=reward.__name__):
        trainer.train()
    assert all(torch.equal(value, before[name]) for name, value in weights(trainer).items())


def logging_reward(*calls: tuple[str, Any, Any]) -> Any:
    """A reward that also calls `log_extra` or `log_metric`."""

    def logs(completions: list[Any], log_extra: Any, log_metric: Any, **_: Any) -> list[float]:
        for function, name, value in calls:
            {"log_extra": log_extra, "log_metric": log_metric}[function](name, value)
        return [float(number) for number in range(len(completions))]

    return logs


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (("log_extra", "said", ["x"]), r"log_extra\('said', ...\) got 1 values for 8 completions"),
        (("log_extra", "said", ["x"] * 9), r"log_extra\('said', ...\) got 9 values for 8 completions"),
        (("log_extra", "said", "8letters"), r"'logs': log_extra\('said', ...\) got a str: it takes a list"),
        (("log_extra", "said", 3), r"'logs': log_extra\('said', ...\) got a int"),
        (("log_extra", 3, ["x"] * 8), r"'logs': log_extra\(3, ...\): the name must be text"),
        (("log_extra", "completion", ["x"] * 8), r"'logs': log_extra\('completion', ...\) would replace a column"),
        (("log_metric", "share", "0.5"), r"'logs': log_metric\('share', '0.5'\): the value must be one number"),
        (("log_metric", "share", None), r"'logs': log_metric\('share', None\): the value must be one number"),
        (("log_metric", 3, 0.5), r"'logs': log_metric\(3, ...\): the name must be text"),
    ],
)
def test_what_rewards_log_wrongly_is_refused_by_its_name(call, message, tmp_path):
    trainer = online(tmp_path, log_completions=True, max_steps=1, arguments={"reward_funcs": logging_reward(call)})
    with pytest.raises(ValueError, match=message):
        trainer.train()


@pytest.mark.slow
def test_a_column_may_be_logged_in_parts_and_is_checked_only_where_it_is_shown(tmp_path):
    parts = [("log_extra", "said", ["x"])] * 8
    whole = {"log_completions": True, "max_steps": 1}
    online(tmp_path / "whole", **whole, arguments={"reward_funcs": logging_reward(*parts)}).train()
    online(tmp_path / "short", max_steps=1, arguments={"reward_funcs": logging_reward(*parts[:1])}).train()


@pytest.mark.slow
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_metric_that_is_no_number_is_warned_of_once(value, tmp_path, caplog):
    calls = logging_reward(("log_metric", f"share {value}", value))
    online(tmp_path, max_steps=2, arguments={"reward_funcs": calls}).train()
    assert caplog.text.count(f"log_metric('share {value}', ...) got NaN or infinity") == 1


def test_no_reward_at_all(tmp_path):
    with pytest.raises(ValueError, match="No reward source provided: GRPOTrainer needs `reward_funcs`"):
        online(tmp_path, arguments={"reward_funcs": None})


def test_rows_without_a_prompt(tmp_path):
    rows = Dataset.from_list([{"question": "What is 1 + 1?"}] * 8)
    with pytest.raises(ValueError, match="has no column `prompt`"):
        online(tmp_path, arguments={"train_dataset": rows})


def test_a_prompt_that_is_empty_names_its_row(tmp_path):
    rows = Dataset.from_list([{"prompt": "What is 1 + 1?"}, {"prompt": ""}])
    with pytest.raises(ValueError, match=r"row 1.*no tokens"):
        online(tmp_path, arguments={"train_dataset": rows})


def test_prompts_above_the_token_budget(tmp_path):
    with pytest.raises(ValueError, match=r"tokens_per_microbatch=20 is below the longest row.*runs padded"):
        online(tmp_path, tokens_per_microbatch=20, padding_free=False)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"prompt_ids": [[1]]}, "returns no completion_ids, logprobs"),
        ({"prompt_ids": [[1]], "completion_ids": [[1]], "logprobs": None}, "returned 1 prompt_ids for 8 prompts"),
        ({"prompt_ids": [[1]] * 8, "completion_ids": [[]] * 8, "logprobs": None}, "has no tokens"),
        (
            {"prompt_ids": [[1]] * 8, "completion_ids": [[10**6]] * 8, "logprobs": None},
            "row 0 has the token id 1000000",
        ),
        (
            {"prompt_ids": [[1]] * 7 + [[-1]], "completion_ids": [[1]] * 8, "logprobs": None},
            "row 7 has the token id -1",
        ),
        (None, "must return a dict with keys .*, and returns a NoneType"),
        ({"prompt_ids": 3, "completion_ids": [[1]] * 8, "logprobs": None}, "as prompt_ids a list of lists of numbers"),
        (
            {"prompt_ids": [[1]] * 8, "completion_ids": [["a"]] * 8, "logprobs": None},
            "as completion_ids a list of lists of numbers",
        ),
        (
            {"prompt_ids": [[1]] * 8, "completion_ids": [[1]] * 8, "logprobs": torch.zeros(8)},
            "as logprobs a list of lists of numbers",
        ),
    ],
)
def test_a_rollout_func_that_returns_something_else(answer, message, tmp_path):
    trainer = online(tmp_path, arguments={"rollout_func": lambda prompts, trainer: answer})
    with pytest.raises(ValueError, match=message):
        trainer.train()


def test_a_rollout_func_that_raises_is_named_in_its_traceback(tmp_path):
    def out_of_ideas(prompts, trainer):
        raise KeyError("nothing")

    trainer = online(tmp_path, arguments={"rollout_func": out_of_ideas})
    with pytest.raises(KeyError) as raised:
        trainer.train()
    assert "raised by rollout_func, a function that was passed" in raised.value.__notes__[0]
    assert "out_of_ideas" in raised.value.__notes__[0]


@pytest.mark.slow
def test_completions_that_are_all_rewarded_alike_teach_nothing_and_are_counted(tmp_path, caplog):
    trainer = online(tmp_path, arguments={"reward_funcs": lambda completions, **_: [1.0] * len(completions)})
    before = weights(trainer)
    trainer.train()
    assert all(torch.equal(value, before[name]) for name, value in weights(trainer).items())
    assert trainer.state.log_history[0]["frac_reward_zero_std"] == 1.0
    assert caplog.text.count("all completions of each prompt were rewarded alike (frac_reward_zero_std=1)") == 1


@pytest.mark.slow
def test_where_writing_runs_out_of_memory_less_is_written_at_a_time(tmp_path, monkeypatch):
    plain = online(tmp_path / "plain")
    plain.train()
    inner, failures = RaggedGenerator.generate, []

    def generate(self, model, requests, sampling, reply=None):
        if self.budget is None or self.budget > 200:
            failures.append(self.budget)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return inner(self, model, requests, sampling, reply)

    monkeypatch.setattr(RaggedGenerator, "generate", generate)
    trainer = online(tmp_path / "short of memory")
    trainer.train()
    assert failures
    for name, value in weights(plain).items():
        torch.testing.assert_close(weights(trainer)[name], value, rtol=2e-6, atol=2e-6)


def test_the_dataset_is_left_as_it_was(tmp_path):
    rows = prompts()
    online(tmp_path, arguments={"train_dataset": rows})
    assert rows.column_names == ["prompt", "number"]


def test_a_prompt_that_leaves_no_positions_to_write_is_found_before_training(tmp_path):
    data = Dataset.from_list([{"prompt": "1+1="}, {"prompt": "1" * 125}])
    with pytest.raises(ValueError, match=r"row 1 of .* has a prompt of 12\d tokens.*set max_prompt_length=116"):
        online(tmp_path, model=build("gpt2", vocab_size=len(tokenizer())), arguments={"train_dataset": data})
    online(
        tmp_path,
        model=build("gpt2", vocab_size=len(tokenizer())),
        arguments={"train_dataset": data},
        max_prompt_length=116,
    )


def test_prompts_with_images_are_refused(tmp_path):
    data = Dataset.from_list([{"prompt": "What is this?", "image": "cat.png"}])
    with pytest.raises(ValueError, match="has the column 'image', and text models are trained here"):
        online(tmp_path, arguments={"train_dataset": data})


@pytest.mark.parametrize("method", ["GRPO", "RLOO"])
def test_a_reference_beside_adapters_is_refused_without_an_argument_that_is_not_there(method, tmp_path):
    with pytest.raises(ValueError, match=r"shares the policy's base: leave it at 'same'$"):
        online(tmp_path, method, beta=0.1, ref_model_storage="8bit", arguments={"peft_config": lora()})
