"""One optimizer step: however the batch is cut, over however many ranks, the gradients are the same."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, LlamaConfig

from lowtide.engine.forward import install
from lowtide.methods.method import TokenObjective
from lowtide.objectives.sft import LOSSES, smoothed_nll
from lowtide.ops.logits.linear_logprobs import Want
from lowtide.ragged import RaggedBatch
from lowtide.score_rules import IGNORE
from lowtide.step.evaluate import evaluate_batch
from lowtide.step.execute import Backward
from lowtide.step.metrics import Totals
from lowtide.step.models import Models
from lowtide.step.train_step import train_step
from lowtide.step_plan import Limits
from tests.support.ranks.processes import run_ranks

NLL = TokenObjective(LOSSES["nll"])
RANK_CASES = {
    f"{'tied' if tied else 'untied'}, {limits}{', weighted' if weighted else ''}": (tied, limits, weighted)
    for tied, weighted in ((False, False), (True, False), (True, True))
    for limits in (Limits(rows=4), Limits(rows=1), Limits(tokens=20))
}
"""Whether the head is tied to the embedding, the limits of two ranks, and whether rows have weights; within 20 tokens
most rows are in pieces."""


def build(tied: bool = False, dtype: torch.dtype = torch.float64):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        initializer_range=0.2,
    )
    model = AutoModelForCausalLM.from_config(config)
    install(model)
    return model.to(dtype)


def rows(count: int = 8, *, weighted: bool = False) -> list[dict]:
    """Ragged rows whose labels are masked here and there; if asked, two of three with weights."""
    generator = torch.Generator().manual_seed(3)
    made = []
    for number in range(count):
        length = int(torch.randint(2, 30, (), generator=generator)) + number
        tokens = torch.randint(0, 61, (length,), generator=generator)
        keep = torch.rand(length, generator=generator) < 0.6
        keep[-1] = True
        made.append({"input_ids": tokens.tolist(), "labels": torch.where(keep, tokens, IGNORE).tolist()})
        if weighted:
            weights = torch.randint(1, 9, (length,), generator=torch.Generator().manual_seed(number)) / 8
            made[-1]["loss_weights"] = weights.tolist() if number % 3 else None
    return made


def gradients(model) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_equal(ours: dict, theirs: dict, tolerance: float = 1e-6) -> None:
    for name, grad in theirs.items():
        assert (ours[name] - grad).norm() <= tolerance * grad.norm(), name


def textbook(model, batch_rows, loss_type: str = "nll") -> tuple[float, dict[str, torch.Tensor]]:
    """Row by row through the model's own logits: the mean over all scored tokens, by their weights."""
    reference = copy.deepcopy(model)
    del reference.forward
    reference.set_attn_implementation("eager")
    losses, weights = [], []
    for row in batch_rows:
        ids, labels = torch.tensor([row["input_ids"]]), torch.tensor(row["labels"])[1:]
        logprobs = torch.log_softmax(type(reference).forward(reference, input_ids=ids).logits[0, :-1], -1)
        scored = labels != IGNORE
        own = logprobs[scored].gather(-1, labels[scored][:, None])[:, 0]
        uniform = logprobs[scored].mean(-1)
        terms = {"nll": -own, "dft": -own * own.detach().exp(), "smoothed": -0.9 * own - 0.1 * uniform}
        losses.append(terms[loss_type])
        weights.append(torch.tensor(row.get("loss_weights") or [1.0] * len(row["labels"])).double()[1:][scored])
    loss = (torch.cat(losses) * torch.cat(weights)).sum() / torch.cat(weights).sum()
    loss.backward()
    return loss.item(), gradients(reference)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "limits",
    [Limits(), Limits(rows=8), Limits(rows=2), Limits(rows=1), Limits(tokens=40), Limits(tokens=61), Limits(3, 90)],
    ids=str,
)
def test_gradients_equal_the_textbook_under_any_cut(limits, tied):
    model, batch_rows = build(tied), rows()
    loss, expected = textbook(model, batch_rows)
    ours = train_step(model, RaggedBatch.from_rows(batch_rows), NLL, limits=limits)
    assert ours.item() == pytest.approx(loss, rel=1e-6)
    assert_equal(gradients(model), expected)


LOSS_TYPES = {"nll": NLL, "dft": TokenObjective(LOSSES["dft"])}
LOSS_TYPES["smoothed"] = TokenObjective(smoothed_nll(0.1), Want(mean_logprobs=True, entropies=True, top1=True))


@pytest.mark.parametrize("padding_free", [False, True])
@pytest.mark.parametrize("limits", [Limits(), Limits(rows=3), Limits(rows=1), Limits(tokens=20)], ids=str)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_losses_are_weighted_and_divided_by_the_sum_of_the_weights(loss_type, limits, padding_free):
    if not padding_free and limits.tokens is not None:
        pytest.skip("padded rows are not run in pieces")
    model, batch_rows, totals = build(), rows(weighted=True), Totals()
    loss, expected = textbook(model, batch_rows, loss_type)
    batch = RaggedBatch.concat([RaggedBatch.from_rows(batch_rows[:1]), RaggedBatch.from_rows(batch_rows[1:])])
    models = Models(model, padding_free=padding_free)
    ours = train_step(models, batch, LOSS_TYPES[loss_type], limits=limits)
    assert ours.item() == pytest.approx(loss, rel=1e-6)
    assert_equal(gradients(model), expected)
    evaluate_batch(models, batch, LOSS_TYPES[loss_type], totals, limits=limits)
    assert totals.read(torch.device("cpu"))["loss"] == pytest.approx(loss, rel=1e-6)


def test_metrics_of_tokens_are_not_weighted():
    found = []
    for weighted in (False, True):
        seen, evaluated = Totals(), Totals()
        batch = RaggedBatch.from_rows(rows(weighted=weighted))
        train_step(build(), batch, LOSS_TYPES["smoothed"], totals=seen, limits=Limits(rows=3))
        evaluate_batch(build(), batch, LOSS_TYPES["smoothed"], evaluated, limits=Limits(rows=3))
        found.append([{**each.read(torch.device("cpu")), "loss": 0.0} for each in (seen, evaluated)])
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-12)
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-12)
    assert {"entropy", "mean_token_accuracy", "scores"} <= found[1][0].keys()


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("padding_free", [False, True])
def test_padded_and_ragged_give_equal_gradients(padding_free, accumulate):
    model, batch_rows = build(), rows()
    _, expected = textbook(model, batch_rows)
    batch = RaggedBatch.from_rows(batch_rows)
    models = Models(model, padding_free=padding_free)
    train_step(models, batch, NLL, limits=Limits(rows=3), backward=Backward(accumulate=accumulate))
    assert_equal(gradients(model), expected)


@pytest.mark.parametrize("limits", [Limits(rows=2), Limits(rows=1), Limits(tokens=61)], ids=str)
def test_float32_gradients_do_not_depend_on_the_cut(limits):
    whole, cut = build(dtype=torch.float32), build(dtype=torch.float32)
    for model, how in ((whole, Limits()), (cut, limits)):
        train_step(model, RaggedBatch.from_rows(rows()), NLL, limits=how)
    ours, theirs = (torch.cat([g.flatten() for g in gradients(m).values()]) for m in (cut, whole))
    assert (ours - theirs).norm() <= 1e-6 * theirs.norm()


@pytest.mark.parametrize(
    "objective",
    [TokenObjective(LOSSES["dft"]), TokenObjective(smoothed_nll(0.1), Want(mean_logprobs=True))],
    ids=["dft", "smoothed"],
)
def test_other_losses_do_not_depend_on_the_cut(objective):
    results = []
    for limits in (Limits(), Limits(rows=1)):
        model = build()
        loss = train_step(model, RaggedBatch.from_rows(rows()), objective, limits=limits)
        results.append((loss.item(), gradients(model)))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-6)
    assert_equal(results[1][1], results[0][1])


def test_a_budget_below_the_longest_row_names_the_row():
    batch = RaggedBatch.from_rows(rows())
    longest = batch.row_tokens.index(max(batch.row_tokens))
    with pytest.raises(ValueError, match=rf"row {longest} of the batch alone has .*tokens_per_microbatch"):
        train_step(build(), batch, NLL, limits=Limits(tokens=8))


def test_evaluation_equals_the_training_loss_and_leaves_no_gradients():
    model, batch_rows = build(), rows()
    loss, _ = textbook(model, batch_rows)
    totals = Totals()
    evaluate_batch(model, RaggedBatch.from_rows(batch_rows), NLL, totals, limits=Limits(rows=3))
    sums = totals.read(torch.device("cpu"))
    assert sums["loss"] == pytest.approx(loss, rel=1e-6)
    assert all(p.grad is None for p in model.parameters())


def rank_main(rank: int, ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
    # Unequal shares, so that ranks have to agree on the number of micro-batches: 1 row here, without weights, 7 there.
    shares = {weighted: rows(weighted=weighted) for weighted in (False, True)}
    found = {}
    for name, (tied, limits, weighted) in RANK_CASES.items():
        share = RaggedBatch.from_rows(shares[weighted][:1] if rank == 0 else shares[weighted][1:])
        model = DistributedDataParallel(build(tied))
        loss = train_step(model, share, NLL, limits=limits, backward=Backward(no_sync=model.no_sync))
        torch.distributed.all_reduce(loss)
        found[name] = (loss / ranks, gradients(model.module))
        # A rank that leaves while the other still talks to it can hang in gloo's teardown.
        torch.distributed.barrier()
        del model
    if rank == 0:
        torch.save(found, f"{folder}/found.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Loss and gradients of two ranks, by case."""
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(rank_main, 2, str(folder))
    return torch.load(folder / "found.pt", weights_only=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", RANK_CASES)
def test_two_ranks_equal_one(name, found):
    tied, _, weighted = RANK_CASES[name]
    model = build(tied)
    expected = train_step(model, RaggedBatch.from_rows(rows(weighted=weighted)), NLL)
    loss, theirs = found[name]
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert_equal(theirs, gradients(model))
