"""Steps on ranks that split sequences: gradients, losses and metrics are those of one rank with all rows."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from lowtide.data.batches.collate import CompletionCollator
from lowtide.engine.forward import score
from lowtide.engine.over_ranks.splitting import split_over
from lowtide.engine.reference import FrozenModel
from lowtide.methods.dpo import METHOD as DPO
from lowtide.methods.dpo import DPOOptions
from lowtide.methods.kto import METHOD as KTO
from lowtide.methods.kto import KTOOptions
from lowtide.methods.method import OwnLoss, TokenObjective
from lowtide.methods.reward import METHOD as REWARD
from lowtide.methods.reward import RewardOptions
from lowtide.objectives.sft import LOSSES
from lowtide.ops.logits.linear_logprobs import Want
from lowtide.ragged import RaggedBatch
from lowtide.ranks.replicas import Averaging
from lowtide.ranks.sequence import SequenceParallel
from lowtide.score_rules import LastToken
from lowtide.step.evaluate import evaluate_batch
from lowtide.step.execute import Backward
from lowtide.step.metrics import Totals
from lowtide.step.models import Models
from lowtide.step.rank_sync import NotFinite, OutOfMemory
from lowtide.step.recovery import surviving_step
from lowtide.step.train_step import train_step
from lowtide.step_plan import Limits
from tests.support.models.preference_models import build, gradients, pair_rows, unpaired_rows
from tests.support.models.tiny_models import assert_close
from tests.support.ranks.processes import run_ranks

PAIRS = CompletionCollator(("chosen_ids", "rejected_ids"))
UNPAIRED = CompletionCollator(("completion_ids", "kl_completion_ids"), values=("label",))


def texts() -> list[dict]:
    """Only the ends of rows are scored."""
    made = [{"input_ids": [*row["prompt_ids"], *row["chosen_ids"]]} for row in pair_rows()]
    ends = [len(row["prompt_ids"]) for row in pair_rows()]
    return [{**row, "labels": [-100] * end + row["input_ids"][end:]} for row, end in zip(made, ends, strict=True)]


def trees() -> list[dict]:
    """Two answers to a question, of which the second goes on from the question alone; some with weights."""
    return [_tree(row["prompt_ids"], row["chosen_ids"], row["rejected_ids"]) for row in pair_rows()]


def _tree(question: list[int], answer: list[int], other: list[int]) -> dict:
    tokens, before = [*question, *answer, *other], len(question)
    lengths = {"seq_lengths": [before + len(answer), len(other)], "prefix": [-1, 0], "prefix_length": [-1, before]}
    weights = {"loss_weights": [1.0] * len(tokens) if tokens[-1] % 2 else [0.25 + place % 4 / 4 for place in tokens]}
    return {"input_ids": tokens, "labels": [-100] * before + tokens[before:]} | lengths | weights


def own_loss(model, part: RaggedBatch, counts, totals: Totals):
    """A loss with a forward of its own, which is padded and runs on each rank whole."""
    output = score(model, part, padding_free=False)
    output.loss = -output.scored.sum() / counts["scores"]
    return output


CASES = {
    "sft": (TokenObjective(LOSSES["nll"], Want(entropies=True, top1=True)), RaggedBatch.from_rows, texts),
    "dpo": (DPO.objective(DPOOptions()), PAIRS, pair_rows),
    "aot": (DPO.objective(DPOOptions(loss_type="aot")), PAIRS, pair_rows),  # which sees the whole batch at once
    "kto": (KTO.objective(KTOOptions()), UNPAIRED, unpaired_rows),  # which has a baseline
    "reward": (
        REWARD.objective(RewardOptions()),
        CompletionCollator(PAIRS.completions, score_rule=LastToken()),
        pair_rows,
    ),
}
CASES["trees"] = (CASES["sft"][0], RaggedBatch.from_rows, trees)
CASES["own"] = (OwnLoss(CASES["sft"][0], own_loss), *CASES["sft"][1:])
FAST = ("sft", "kto")
CUTS = {"whole": Limits(), "two rows": Limits(rows=2)}


def step(name: str, cut: str, rows: slice, sequence: SequenceParallel | None = None):
    """Loss, metrics of training and evaluation, and gradients."""
    objective, collate, made = CASES[name]
    values = {"kind": AutoModelForSequenceClassification, "num_labels": 1}
    model = build(0, **values if name == "reward" else {"kind": AutoModelForCausalLM})
    reference = build(1)
    if sequence is not None:
        split_over(model, sequence)
        split_over(reference, sequence)
    models, batch = Models(model, FrozenModel(reference, padding_free=True)), collate(made()[rows])
    seen, evaluated = Totals(), Totals()
    backward = Backward(exchange=Averaging(model).complete) if sequence is not None else Backward()
    loss = train_step(models, batch, objective, limits=CUTS[cut], backward=backward, totals=seen)
    if sequence is not None:
        dist.all_reduce(loss)
        loss /= dist.get_world_size()
    found = {key: value.clone() for key, value in gradients(model).items()}
    if name not in ("aot", "own"):  # an evaluation takes the loss of a rank's rows, and by the method's objective
        evaluate_batch(models, batch, objective, evaluated, limits=CUTS[cut])
    cpu = torch.device("cpu")
    return loss, seen.read(cpu), evaluated.read(cpu), found


def rank_main(rank: int, groups: int, names: Sequence[str], rendezvous: str, path: str) -> None:
    """Groups of two ranks; with two groups, the second has fewer rows than the first."""
    wait = timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=2 * groups, timeout=wait)
    sequence = SequenceParallel.of_size(2)
    rows = slice(None) if groups == 1 else (slice(0, 5), slice(5, None))[rank // 2]
    found = {(name, cut): step(name, cut, rows, sequence) for name in names for cut in CUTS}
    if rank == 2 * groups - 1:  # a rank that leads no group
        torch.save(found, path)
    dist.barrier()
    dist.destroy_process_group()


def assert_same_as_one(groups: int, names: Sequence[str], tmp_path) -> None:
    run_ranks(rank_main, groups, names, f"file://{tmp_path}/rendezvous", f"{tmp_path}/found.pt", ranks=2 * groups)
    found = torch.load(tmp_path / "found.pt", weights_only=True)
    assert len(found) == len(names) * len(CUTS)
    for (name, cut), (loss, seen, evaluated, gradient) in found.items():
        wanted = step(name, cut, slice(None))
        where = f"{name}, {cut}"
        assert loss.item() == pytest.approx(wanted[0].item(), rel=1e-9), where
        assert seen == pytest.approx(wanted[1], rel=1e-9), where
        if groups == 1 or name != "kto":  # whose baseline an evaluation takes of a rank's rows
            assert evaluated == pytest.approx(wanted[2], rel=1e-9), where
        assert_close(gradient, wanted[3], 1e-9)


@pytest.mark.slow
def test_two_ranks_of_one_sequence_step_as_one(tmp_path):
    assert_same_as_one(1, FAST, tmp_path)


@pytest.mark.slow
def test_two_ranks_of_one_sequence_step_as_one_by_each_objective(tmp_path):
    assert_same_as_one(1, [name for name in CASES if name not in FAST], tmp_path)


@pytest.mark.slow
def test_two_groups_of_two_ranks_step_as_one(tmp_path):
    assert_same_as_one(2, [*CASES], tmp_path)


# -- failures ---------------------------------------------------------------------------------------------------------


def failing(rank: int, rendezvous: str) -> None:
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    model, batch = build(0), RaggedBatch.from_rows(texts())
    split_over(model, SequenceParallel())
    backward = Backward(exchange=Averaging(model).complete, finite=True)
    with torch.no_grad():
        model.lm_head.weight[5] = float("nan")
    with pytest.raises(NotFinite):  # on both ranks, wherever the scores are
        train_step(model, batch, CASES["sft"][0], backward=backward)
    if rank == 1:
        model.model.layers[1].register_forward_pre_hook(stop)
    said = "out of memory in forward of micro-batch 0 .* lower `tokens_per_microbatch`" if rank else "closed|reset"
    with pytest.raises(OutOfMemory if rank else RuntimeError, match=said):  # and nothing is repeated
        surviving_step(Models(model), batch, CASES["sft"][0], backward=backward, limits=Limits(), totals=Totals())


def stop(*_: object) -> None:
    """What a rank meets that the others do not."""
    dist.destroy_process_group()
    raise MemoryError("none left")


def test_ranks_that_wait_for_one_another_are_not_left_waiting(tmp_path):
    run_ranks(failing, f"file://{tmp_path}/rendezvous")
