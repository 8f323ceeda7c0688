"""Two processes with gloo against one: the same weights, the same losses, the same evaluation; a user's loss too, a
stream, and conversations of several rounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, LlamaConfig

from lowtide import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer
from tests.support.ranks.processes import run_ranks
from tests.support.ranks.sharded_training import meeting_place, rank_of
from tests.support.runs.preference_runs import make_tokenizer

ROWS, TALKS = 21, 9  # no multiple of the batch: the last one is filled up with rows that must not count twice
DROPPING = (
    "{% for m in messages %}{{ m['role'][0] }}:"
    "{% if m['role'] == 'assistant' and loop.last %}[{{ m.thinking }}]{% endif %}{{ m['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
"""Earlier thoughts are dropped, so that each turn is a segment of its own."""


class OwnMean(SFTTrainer):
    """A mean over the micro-batch, by logits."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        logits = model(**inputs).logits[:, :-1].flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten())


def token_rows() -> Dataset:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(2, 20, (ROWS,), generator=generator).tolist()
    rows = [torch.randint(0, 40, (length,), generator=generator).tolist() for length in lengths]
    return Dataset.from_dict({"input_ids": rows, "labels": rows})


def talk(rounds: int, number: int, word: str = "is") -> list[dict[str, str]]:
    return [
        message
        for each in range(number, number + rounds)
        for message in (
            {"role": "user", "content": f"And {each}?", "thinking": ""},
            {"role": "assistant", "content": f"It {word} {each}.", "thinking": "so" * (each % 3)},
        )
    ]


def talks() -> Dataset:
    """Conversations of one to four rounds."""
    return Dataset.from_list([{"messages": talk(1 + number % 4, number)} for number in range(TALKS)])


def pairs() -> Dataset:
    """Pairs of which the chosen side has one to three turns, the other one or two."""
    sides = [(talk(1 + number % 3, number), talk(1 + number % 2, number, "was")) for number in range(TALKS)]
    return Dataset.from_list([{"prompt": one[:1], "chosen": one[1:], "rejected": other[1:]} for one, other in sides])


TOKENS: dict[str, Any] = {
    **{"dataset_kwargs": {"skip_prepare_dataset": True}, "learning_rate": 1e-2, "max_grad_norm": 0.1},
    "max_steps": 4,  # the third has a batch of one row
}
GRADIENTS: dict[str, Any] = {
    # AdamW makes whole steps of gradients that are rounding alone, as those of embeddings that few rows have
    **{"optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0},
    "max_steps": 2,  # the second has a batch of one row
}
TURNS = {"assistant_only_loss": True, **GRADIENTS}
KINDS: dict[str, tuple[Any, Any, Any, dict[str, Any]]] = {
    "the method's loss": (SFTTrainer, SFTConfig, token_rows, TOKENS),
    "a loss of one's own": (OwnMean, SFTConfig, token_rows, TOKENS),
    "a stream": (SFTTrainer, SFTConfig, token_rows, TOKENS),
    "rounds": (SFTTrainer, SFTConfig, talks, TURNS),
    "rounds in pieces": (SFTTrainer, SFTConfig, talks, {**TURNS, "tokens_per_microbatch": 48}),
    "rounds of pairs": (DPOTrainer, DPOConfig, pairs, {**GRADIENTS, "beta": 0.5}),
}


def run(folder: Path, batch_size: int, kind: str) -> tuple[dict[str, torch.Tensor], list[float], dict[str, float]]:
    trainer_class, config_class, rows, options = KINDS[kind]
    tokenizer = None if rows is token_rows else make_tokenizer()
    if tokenizer is not None:
        tokenizer.chat_template = DROPPING
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(
            vocab_size=40 if tokenizer is None else len(tokenizer),
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
        )
    )
    args = config_class(
        output_dir=str(folder),
        per_device_train_batch_size=batch_size,
        per_device_eval_batch_size=batch_size,
        gradient_accumulation_steps=2,
        train_sampling_strategy="sequential",
        logging_steps=1,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        **options,
    )
    given = rows().to_iterable_dataset() if kind == "a stream" else rows()
    trainer = trainer_class(model, args=args, train_dataset=given, eval_dataset=given, processing_class=tokenizer)
    trainer.train()
    evaluation = trainer.evaluate()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    keys = ("eval_loss", "eval_entropy", "eval_mean_token_accuracy", "eval_rewards/margins")
    return (
        {n: p.detach() for n, p in model.named_parameters()},
        losses,
        {key: evaluation[key] for key in keys if key in evaluation},
    )


def rank_main(rank: int, folder: str) -> None:
    place = Path(folder)
    with rank_of(place, rank, 2):
        for number, kind in enumerate(KINDS):
            found = run(place, 2, kind)
            if rank == 0:
                torch.save(found, place / f"{number}.pt")


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory) -> Path:
    folder = meeting_place(tmp_path_factory.mktemp("ranks"))
    run_ranks(rank_main, str(folder))
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_train_and_evaluate_as_one(kind, on_two_ranks, tmp_path):
    number = [*KINDS].index(kind)
    weights, losses, evaluation = torch.load(on_two_ranks / f"{number}.pt", weights_only=True)
    expected_weights, expected_losses, expected_evaluation = run(tmp_path, 4, kind)
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    assert evaluation == pytest.approx(expected_evaluation, rel=1e-5)
    for name, value in expected_weights.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-6)
