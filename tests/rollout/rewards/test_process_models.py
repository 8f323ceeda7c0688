"""Process reward models as rewards: the probabilities of steps are those of the model's own dense forward, and stand at
the tokens of the policy that end them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor
from transformers import LlamaConfig, LlamaForTokenClassification

import lowtide
from lowtide.rollout.rewards.completed import Completed
from lowtide.rollout.rewards.models import RewardModelOptions
from lowtide.rollout.rewards.process_models import ProcessReward
from lowtide.rollout.rewards.rewards import Rewards
from tests.support.references.parity_world import SMALL, lora, tokenizer
from tests.support.runs.on_a_cpu import ON_A_CPU
from tests.support.runs.online_runs import online

ANSWERS = [
    ("What is one plus two?", ["It is one\nand two\nso three", "Three\n", "\n \n"]),
    ("What is two?", ["Two\n\nIt is two\n", "It is one\nand one"]),
]


def model(**more: Any) -> Any:
    torch.manual_seed(0)
    return LlamaForTokenClassification(
        LlamaConfig(**{**SMALL, "num_labels": 2, "classifier_dropout": 0.0, **more})
    ).eval()


def completed(chat: bool = False) -> Completed:
    prompts = [prompt for prompt, answers in ANSWERS for _ in answers]
    texts = [answer for _, answers in ANSWERS for answer in answers]
    ids = [[*tokenizer()(text)["input_ids"], tokenizer().eos_token_id] for text in texts]
    if not chat:
        return Completed(prompts, texts, ids, tokenizer=tokenizer())
    messages = [[{"role": "user", "content": each}] for each in prompts]
    said = [[{"role": "assistant", "content": each}] for each in texts]
    return Completed(messages, said, ids, tokenizer=tokenizer())


def dense(judge: Any, prompt: str, steps: list[str], separator: str = "\n") -> list[float]:
    """The probability of each step, a forward for each, up to the end of its separator."""
    codes = lambda text: tokenizer()(text, add_special_tokens=False)["input_ids"]  # noqa: E731
    first, found = tokenizer().bos_token_id, []
    ids = [*([] if first is None else [first]), *codes(prompt)]
    for step in steps:
        ids += [*codes(step), *codes(separator)]
        logits: Tensor = judge(input_ids=torch.tensor([ids])).logits[0, -1]
        found.append(logits.double().softmax(-1)[1].item())
    return found


@pytest.mark.parametrize(
    "how", [{}, {"padding_free": False}, {"prefix_sharing": False}, {"tokens_per_microbatch": 30}], ids=str
)
@pytest.mark.parametrize("chat", [False, True], ids=["texts", "chats"])
@torch.no_grad()
def test_steps_have_the_probabilities_of_a_dense_forward(how, chat):
    judge, known = model(), completed(chat)
    scored = Rewards(
        [model(), lambda completions: [1.0] * len(completions)],
        processing_classes=[tokenizer(), None],
        models=RewardModelOptions(**how),
    ).scored(known)
    of_each: list[list[tuple[int, float]]] = [[] for _ in range(5)]
    assert known.completion_ids is not None
    for number, place, value in zip(scored.steps.completion, scored.steps.place, scored.steps.value, strict=True):
        of_each[int(number)].append((int(place), value.item()))
    texts = [(prompt, answer) for prompt, answers in ANSWERS for answer in answers]
    for (prompt, text), ids, found in zip(texts, known.completion_ids, of_each, strict=True):
        steps = [each for each in text.split("\n") if each.strip()]
        assert [value for _, value in found] == pytest.approx(dense(judge, prompt, steps), abs=1e-6)
        if steps:
            assert found[-1][0] == len(ids) - 1, "the last step ends with the completion"
        for (place, _), step in zip(found[:-1], steps, strict=False):
            assert tokenizer().decode(ids[: place + 1]).rstrip("\n").endswith(step)
    sums = torch.tensor([sum(value for _, value in each) if each else torch.nan for each in of_each])
    torch.testing.assert_close(scored.rewards[:, 0].float(), sums, equal_nan=True)
    assert torch.equal(scored.rewards[:, 1], torch.ones(5).double())


def test_what_cannot_be_judged_is_refused():
    with pytest.raises(ValueError, match="has 3 labels, and a step is right or wrong"):
        Rewards(model(num_labels=3), processing_classes=tokenizer())
    of_turns = Completed(["Why?"], ["So."], [[7, 8]])
    with pytest.raises(ValueError, match=r"reads answers of one turn, and completion 0 of the batch .* with tools"):
        Rewards(model(), processing_classes=tokenizer()).scored(of_turns)


@pytest.mark.slow
@pytest.mark.parametrize("adapters", [False, True], ids=["whole", "adapters"])
def test_a_trained_model_rewards_a_policys_steps_with_its_separator(adapters, tmp_path):
    rows = [{"prompt": "ab", "completions": ["c", "de"], "labels": [True, False]}] * 4
    model().save_pretrained(tmp_path / "base")
    tokenizer().save_pretrained(tmp_path / "base")
    options: dict[str, Any] = {"step_separator": ". ", "max_steps": 1, **ON_A_CPU}
    trainer = lowtide.PRMTrainer(
        model=str(tmp_path / "base"),
        args=lowtide.PRMConfig(output_dir=str(tmp_path / "judge"), **options),
        train_dataset=Dataset.from_list(rows),
        **({"peft_config": lora(task_type="TOKEN_CLS")} if adapters else {}),
    )
    trainer.train()
    trainer.save_model(str(tmp_path / "judge"))
    policy = online(tmp_path / "run", max_steps=1, arguments={"reward_funcs": str(tmp_path / "judge")})
    [source] = policy.rewards.sources
    assert isinstance(source, ProcessReward)
    assert source.separator == ". "
    policy.train()
    assert policy.state.log_history[0]["rewards/judge/mean"] > 0
    assert (Path(tmp_path) / "judge" / ("adapter_config.json" if adapters else "config.json")).is_file()
