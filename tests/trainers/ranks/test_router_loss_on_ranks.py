"""The load-balancing loss of a mixture of experts: the mean over the forwards of a step, on all ranks, each weighed by
its tokens. Here a forward is a row; the rows of two ranks have unequal numbers of tokens, and the last step has one row
alone, so that one rank has none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM

from lowtide import SFTConfig, SFTTrainer
from lowtide.ranks.shards import whole_of
from tests.support.ranks.processes import run_ranks
from tests.support.ranks.sharded_training import assert_near, meeting_place, rank_of

COEFFICIENT, LEARNING_RATE, LENGTHS, VOCABULARY = 0.5, 0.05, (30, 6, 9, 25, 12), 40


def rows() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, VOCABULARY, (length,), generator=generator).tolist() for length in LENGTHS]


def mixture() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2}
    config = AutoConfig.for_model(
        "mixtral", **sizes, **experts, vocab_size=VOCABULARY, initializer_range=0.2, router_aux_loss_coef=COEFFICIENT
    )
    return AutoModelForCausalLM.from_config(config)


def trained(folder: Path, rows_of_a_rank: int, **options: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = mixture()
    args = SFTConfig(
        output_dir=str(folder),
        per_device_train_batch_size=rows_of_a_rank,
        tokens_per_microbatch=max(LENGTHS),
        num_train_epochs=1,
        train_sampling_strategy="sequential",
        optim="sgd",
        lr_scheduler_type="constant",
        learning_rate=LEARNING_RATE,
        max_grad_norm=0.0,
        logging_steps=1,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        dataset_kwargs={"skip_prepare_dataset": True},
        **options,
    )
    trainer = SFTTrainer(model, args, train_dataset=Dataset.from_dict({"input_ids": rows(), "labels": rows()}))
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, {name: whole_of(p.detach()).clone() for name, p in model.named_parameters()}


def plain() -> tuple[list[float], dict[str, torch.Tensor]]:
    """A forward of transformers for each row, and the two means as they are defined."""
    model, losses = mixture(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for first in range(0, len(LENGTHS), 2):
        batch = rows()[first : first + 2]
        tokens, scored = sum(map(len, batch)), sum(len(row) - 1 for row in batch)
        loss = torch.zeros(())
        for row in batch:
            ids = torch.tensor([row])
            found = model(input_ids=ids, output_router_logits=True)
            nll = torch.nn.functional.cross_entropy(found.logits[0, :-1], ids[0, 1:], reduction="sum")
            loss = loss + nll / scored + COEFFICIENT * found.aux_loss * len(row) / tokens
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def assert_is_plain(found: tuple[list[float], dict[str, torch.Tensor]]) -> None:
    losses, weights = plain()
    assert found[0] == pytest.approx(losses, rel=1e-5)
    assert_near(found[1], weights, 1e-5)


def test_one_rank_weighs_forwards_by_their_tokens(tmp_path: Path):
    assert_is_plain(trained(tmp_path, 2))


PLACES: dict[str, dict[str, Any]] = {"copies": {}, "fsdp": {"fsdp": True}}


def rank_main(rank: int, folder: str) -> None:
    with rank_of(Path(folder), rank, 2):
        for place, options in PLACES.items():
            found = trained(Path(folder) / f"run {place}", 1, **options)
            if rank == 0:
                torch.save(found, Path(folder) / f"{place}.pt")


@pytest.mark.slow
def test_two_ranks_weigh_forwards_by_their_tokens(tmp_path: Path):
    run_ranks(rank_main, str(meeting_place(tmp_path)), ranks=2)
    for place in PLACES:
        assert_is_plain(torch.load(tmp_path / f"{place}.pt"))
