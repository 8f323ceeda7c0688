"""Losses that look at the whole batch are the same on two ranks with gloo as on one."""

from __future__ import annotations

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from lowtide.data.batches.collate import CompletionCollator
from lowtide.engine.reference import FrozenModel
from lowtide.methods.bco import METHOD as BCO
from lowtide.methods.bco import BCOOptions
from lowtide.methods.dpo import METHOD as DPO
from lowtide.methods.dpo import DPOOptions
from lowtide.methods.kto import METHOD as KTO
from lowtide.methods.kto import KTOOptions
from lowtide.methods.reward import METHOD as REWARD
from lowtide.methods.reward import RewardOptions
from lowtide.score_rules import LastToken
from lowtide.step.execute import Backward
from lowtide.step.metrics import Totals
from lowtide.step.models import Models
from lowtide.step.train_step import train_step
from lowtide.step_plan import Limits
from tests.support.models.preference_models import assert_equal, build, gradients
from tests.support.models.preference_models import pair_rows as pairs
from tests.support.models.preference_models import unpaired_rows as unpaired
from tests.support.models.rounds_of_completions import rows_of_pairs
from tests.support.ranks.processes import run_ranks

pytestmark = pytest.mark.slow


def rounds() -> list[dict]:
    """Pairs whose completions have several turns."""
    return [*rows_of_pairs(), *rows_of_pairs()]


PAIRS = CompletionCollator(("chosen_ids", "rejected_ids"))
CASES = {
    "sigmoid and sft": (DPO.objective(DPOOptions(loss_type=["sigmoid", "sft"])), PAIRS, pairs),
    "rounds": (DPO.objective(DPOOptions(loss_type="ipo")), PAIRS, rounds),
    "aot": (DPO.objective(DPOOptions(loss_type="aot")), PAIRS, pairs),
    "aot_unpaired": (DPO.objective(DPOOptions(loss_type="aot_unpaired")), PAIRS, pairs),
    "kto": (
        KTO.objective(KTOOptions()),
        CompletionCollator(("completion_ids", "kl_completion_ids"), values=("label",)),
        unpaired,
    ),
    "bco": (BCO.objective(BCOOptions()), CompletionCollator(("completion_ids",), values=("label",)), unpaired),
    "reward": (REWARD.objective(RewardOptions()), CompletionCollator(PAIRS.completions, score_rule=LastToken()), pairs),
}


def step(name: str, model, rows: list[dict], **more) -> tuple[torch.Tensor, dict[str, float]]:
    objective, collate, _ = CASES[name]
    totals = Totals()
    models = Models(model, FrozenModel(build(1), padding_free=True))
    loss = train_step(models, collate(rows), objective, totals=totals, **more)
    return loss, totals.read(torch.device("cpu"))


def policy(name: str):
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    if name == "reward":
        return build(0, kind=AutoModelForSequenceClassification, num_labels=1)
    return build(0, kind=AutoModelForCausalLM)


def rank_main(rank: int, ranks: int, rendezvous: str, path: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=ranks)
    found = {}
    for name, (_, _, rows) in CASES.items():
        model = DistributedDataParallel(policy(name))
        # Unequal shares, so that ranks run unequally many rows and one has to keep the other company.
        share = rows()[:5] if rank == 0 else rows()[5:]
        loss, metrics = step(name, model, share, limits=Limits(rows=2), backward=Backward(no_sync=model.no_sync))
        torch.distributed.all_reduce(loss)
        found[name] = (loss / ranks, metrics, gradients(model.module))
        torch.distributed.barrier()
        del model
    if rank == 0:
        torch.save(found, path)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(rank_main, 2, f"file://{folder}/rendezvous", f"{folder}/found.pt")
    return torch.load(folder / "found.pt", weights_only=True)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_equal_one(name, on_two_ranks):
    model = policy(name)
    loss, metrics = step(name, model, CASES[name][2]())
    found_loss, found_metrics, found = on_two_ranks[name]
    assert found_loss.item() == pytest.approx(loss.item(), rel=1e-6)
    assert found_metrics == pytest.approx(metrics, rel=1e-6)
    assert_equal(found, gradients(model))
