"""Distillation on conversations of several turns, each in the context that the model would be given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from datasets import Dataset

from lowtide import GKDConfig, GKDTrainer
from lowtide.data.batches.prompted import PromptedCollator, prompts_of
from lowtide.ragged import RaggedBatch
from tests.support.marks import slow_but
from tests.support.references.parity_world import assistant, build_model, tokenizer, user
from tests.support.runs.distilling import SETTINGS, build_teacher, losses, weights

DROPPING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and loop.last %}[{{ m.thinking }}] {% endif %}"
    "{{ m['content'] }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Earlier thoughts are dropped."""


def talk(turns: int, start: int) -> list[dict[str, str]]:
    return [
        message
        for number in range(start, start + turns)
        for message in (user(f"And {number}?"), assistant(f"It is {number}") | {"thinking": f"{number} + 1"})
    ]


TALKS = [talk(3, 1), talk(1, 5), talk(2, 7), talk(3, 9)]
ROWS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "completions": ([{"prompt": each[:1], "completion": each[1:]} for each in TALKS], {}),
    "all turns": ([{"messages": each} for each in TALKS], {"assistant_only_loss": True}),
    "last turns": ([{"messages": each} for each in TALKS], {}),
}


IN_ORDER = {"train_sampling_strategy": "sequential"}
GRADIENTS: dict[str, Any] = {"optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 0.0}
"""The step is the gradient."""


def turns_of(messages: list[dict[str, str]]) -> list[tuple[list[int], list[int]]]:
    """Context and target of each turn, from two plain renderings."""
    tok, found = with_template(), []
    for number in range(1, len(messages), 2):
        context = str(tok.apply_chat_template(messages[:number], add_generation_prompt=True, tokenize=False))
        whole = str(tok.apply_chat_template(messages[: number + 1], tokenize=False))
        assert whole.startswith(context)
        texts = context, whole[len(context) :].removesuffix("\n")
        found.append(tuple(tok(text, add_special_tokens=False)["input_ids"] for text in texts))
    return found


def with_template() -> Any:
    tok = tokenizer()
    tok.chat_template = DROPPING
    return tok


def distilling(folder: Any, rows: list[dict[str, Any]], **options: Any) -> Any:
    return GKDTrainer(
        model=build_model("llama").double(),
        teacher_model=build_teacher(),
        args=GKDConfig(output_dir=str(folder), **SETTINGS | {"max_steps": 1} | options),
        train_dataset=Dataset.from_list(rows),
        processing_class=with_template(),
    )


@pytest.mark.parametrize("name", ROWS)
def test_each_turn_is_distilled_in_the_context_that_it_is_generated_in(name, tmp_path):
    rows, options = ROWS[name]
    student, teacher, total, count = build_model("llama").double(), build_teacher(), 0.0, 0
    for messages in TALKS:
        for context, target in turns_of(messages)[-1 if name == "last turns" else 0 :]:
            log_q, log_p = (
                torch.log_softmax(model(torch.tensor([context + target])).logits[0, len(context) - 1 : -1], -1)
                for model in (student, teacher)
            )
            log_m = ((log_p.exp() + log_q.exp()) / 2).log()
            total += sum((each.exp() * (each - log_m)).sum() for each in (log_p, log_q)) / 2
            count += len(target)
    expected = total / count
    expected.backward()
    trainer = distilling(tmp_path, rows, **GRADIENTS, **options)
    trainer.train()
    assert losses(trainer).item() == pytest.approx(expected.item(), rel=1e-6)
    for parameter, before in student.named_parameters():
        gradient = before - trainer.model.get_parameter(parameter)
        torch.testing.assert_close(gradient, before.grad, rtol=1e-5, atol=1e-6, msg=parameter)


SAME: dict[str, dict[str, Any]] = {
    "each round repeated": {"prefix_sharing": False},
    "padded": {"padding_free": False},
    "in pieces": {"tokens_per_microbatch": 24},
}


@pytest.mark.parametrize("name", slow_but([*SAME][:1], SAME))
def test_how_rounds_are_laid_changes_no_number(name, tmp_path):
    rows, options = ROWS["completions"]
    made = [
        distilling(tmp_path / str(n), rows, **GRADIENTS, **options | more) for n, more in enumerate(({}, SAME[name]))
    ]
    lengths = made[0].row_lengths()
    assert lengths[0] < sum(len(context) + len(target) for context, target in turns_of(TALKS[0]))
    for each in made:
        each.train()
    torch.testing.assert_close(losses(made[1]), losses(made[0]), rtol=1e-6, atol=0.0)
    torch.testing.assert_close(weights(made[1]), weights(made[0]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sharing", [True, False])
def test_the_first_turn_is_written_anew(sharing, tmp_path):
    trainer = distilling(tmp_path, ROWS["completions"][0], lmbda=1.0, prefix_sharing=sharing, **IN_ORDER)
    seen: list[tuple[RaggedBatch, RaggedBatch]] = []
    drawn = trainer.drawn

    def watched(batch: RaggedBatch, epoch: int) -> RaggedBatch:
        seen.append((batch, drawn(batch, epoch)))
        return seen[-1][1]

    trainer.drawn = watched
    trainer.train()
    [(given, taken)] = seen
    contexts = [turns_of(messages)[0][0] for messages in TALKS]
    assert prompts_of(given) == prompts_of(taken) == contexts
    assert len(given.segments) == 9
    assert len(taken.segments) == 4
    own = [sum(given.segments[n].length for n in numbers) for numbers in given.row_segments]
    longest = [max(tokens, len(context) + 12) for tokens, context in zip(own, contexts, strict=True)]
    assert trainer.row_lengths().tolist() == longest
    rehearsed = trainer.rehearsed_batch([0, 1, 2, 3])
    assert [sum(rehearsed.segments[n].length for n in each) for each in rehearsed.row_segments] == longest


def test_the_prompt_of_a_row_ends_before_the_first_token_that_is_scored():
    row = {"input_ids": [5, 6, 7, 8, 9, 3, 4], "labels": [-100, -100, -100, 8, 9, 3, 4]}
    told = {"seq_lengths": [5, 2], "prefix": [-1, 0], "prefix_length": [-1, 2]}
    batch = RaggedBatch.from_rows([row | told, {"input_ids": [5, 6], "labels": [5, 6]}])
    assert prompts_of(batch) == [[5, 6], [5]]
    rows = Dataset.from_list([row | told, {"input_ids": [5, 6], "labels": [5, 6]} | dict.fromkeys(told)][:1])
    assert PromptedCollator(most=20).row_lengths(rows).tolist() == [22]
    assert PromptedCollator(most=2, sharing=False).row_lengths(rows).tolist() == [9]
