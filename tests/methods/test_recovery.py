"""A run that ran out of memory has the numbers of one that had the smaller budget from the start, bit by bit."""

from __future__ import annotations

import functools
import itertools
import random

import pytest
import torch

from lowtide.data.batches.collate import CompletionCollator
from lowtide.memory.optimizers import host_states
from lowtide.methods.bco import METHOD as BCO
from lowtide.methods.bco import BCOOptions
from lowtide.methods.dpo import METHOD as DPO
from lowtide.methods.dpo import DPOOptions
from lowtide.methods.kto import METHOD as KTO
from lowtide.methods.kto import KTOOptions
from lowtide.methods.method import TokenObjective
from lowtide.objectives.sft import LOSSES
from lowtide.ragged import RaggedBatch
from lowtide.ranks.replicas import Averaging
from lowtide.step.execute import Backward
from lowtide.step.metrics import Totals
from lowtide.step.models import Models
from lowtide.step.rank_sync import OutOfMemory
from lowtide.step.recovery import surviving_optimizer_step, surviving_scores, surviving_step
from lowtide.step_plan import Limits
from tests.support.marks import slow_but
from tests.support.models.preference_models import build, gradients
from tests.support.models.preference_models import pair_rows as pairs
from tests.support.models.preference_models import unpaired_rows as unpaired
from tests.support.ranks.processes import run_ranks
from tests.support.runs.sabotage import PLACES, out_of_memory

NLL = TokenObjective(LOSSES["nll"])


def texts() -> RaggedBatch:
    return RaggedBatch.from_rows([{"input_ids": row["prompt_ids"] + row["chosen_ids"]} for row in pairs()])


def collated(made: list[dict], *columns: str) -> RaggedBatch:
    return CompletionCollator(columns, values=("label",) if "label" in made[0] else ())(made)


def paired() -> RaggedBatch:
    return collated(pairs(), "chosen_ids", "rejected_ids")


def dropping(model):
    """With dropout, whose draws a repeated step has to repeat."""
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.2
    return model.train()


OBJECTIVES = {
    "sft": (lambda: NLL, texts),
    "dpo": (lambda: DPO.objective(DPOOptions()), lambda: collated(pairs(), "chosen_ids", "rejected_ids")),
    "aot": (
        lambda: DPO.objective(DPOOptions(loss_type="aot")),
        lambda: collated(pairs(), "chosen_ids", "rejected_ids"),
    ),
    "kto": (
        lambda: KTO.objective(KTOOptions()),
        lambda: collated(unpaired(), "completion_ids", "kl_completion_ids"),
    ),
    "bco": (lambda: BCO.objective(BCOOptions()), lambda: collated(unpaired(), "completion_ids")),
}


def reference(batch: RaggedBatch) -> torch.Tensor:
    return torch.full((batch.scores,), -4.0, dtype=torch.float64)


def step(name: str, model, limits: Limits, backward: Backward = Backward()):
    objective, batch = (make() for make in OBJECTIVES[name])
    totals = Totals()
    torch.manual_seed(5)
    models = Models(model, reference)
    loss, taken = surviving_step(models, batch, objective, limits=limits, totals=totals, backward=backward)
    return loss, taken, totals.read(torch.device("cpu")), vars(getattr(objective, "running", None) or Totals())


@pytest.mark.parametrize("place", slow_but(["backward"], PLACES))
@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_failed_step_is_repeated_with_half_the_budget(name, place):
    number = random.Random(f"{name} {place}").randrange(4)
    model = dropping(build())
    with out_of_memory(model, place, number) as fired:
        loss, taken, metrics, carried = step(name, model, Limits(rows=2))
    assert fired == [place]
    assert taken.tokens is not None

    never_failed = dropping(build())
    expected, same, its_metrics, its_carried = step(name, never_failed, taken)
    assert same == taken
    assert torch.equal(loss, expected)
    assert metrics == its_metrics
    if name == "bco":
        assert carried == its_carried
    found = gradients(model)
    assert all(torch.equal(found[n], g) for n, g in gradients(never_failed).items())


@pytest.mark.parametrize("number", [0, 2])
@pytest.mark.parametrize("place", PLACES)
def test_one_row_that_does_not_fit_stops_the_run_and_says_where_and_what_to_change(place, number):
    model = build()
    model.model.layers[0].self_attn.attention_dropout = 0.1  # with which rows are not run in pieces
    said = rf"in {place} of micro-batch {number} .1 row.* one row of [0-9]+ tokens, .*`max_length`"
    with out_of_memory(model, place, number), pytest.raises(OutOfMemory, match=said):
        surviving_step(Models(model), texts(), NLL, limits=Limits(rows=1), totals=Totals())


@pytest.mark.parametrize(("failures", "tokens"), [(1, 94 // 2), (2, 19)], ids=["half", "the longest row"])
def test_the_budget_is_halved_until_it_fits(failures, tokens):
    model = build()
    plain = type(model.model).forward

    def crowded(self, *args, **kwargs):
        nonlocal failures
        if failures:
            failures -= 1
            raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")
        return plain(self, *args, **kwargs)

    model.model.forward = functools.partial(crowded, model.model)
    _, taken = surviving_step(Models(model), texts(), NLL, limits=Limits(), totals=Totals())
    assert taken.tokens == tokens


@pytest.mark.parametrize("why", [None, "it is so"])
def test_scoring_is_repeated_with_smaller_forwards_until_it_fits(why, caplog):
    batch, seen = texts(), []

    def scorer(part: RaggedBatch) -> torch.Tensor:
        seen.append(part.tokens)
        if part.tokens > 30:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return part.score_target.double()

    found = surviving_scores(Models(build()), batch, Limits(), scorer, why_whole_rows=why)
    assert found.tolist() == batch.score_target.tolist()
    assert seen[0] == batch.tokens
    assert max(seen[-2:]) <= 30
    assert "out of memory in scoring (CUDA out of memory): it is repeated with at most" in caplog.text


def test_one_row_that_cannot_be_scored_stops_the_run():
    def scorer(part: RaggedBatch) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(OutOfMemory, match=r"in scoring one row of [0-9]+ tokens, which cannot be cut"):
        surviving_scores(Models(build()), texts(), Limits(), scorer, why_whole_rows="it is so")


def test_other_errors_are_not_taken_for_an_exhausted_memory():
    model = build()
    model.model.layers[0].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        surviving_step(Models(model), texts(), NLL, limits=Limits(), totals=Totals())


class TestOptimizer:
    def run(self, break_at: str | None):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
        broken = break_at
        for number in range(3):
            model(torch.ones(2, 4)).square().sum().backward()

            def inner(number=number):
                nonlocal broken
                if broken == f"{number} before":
                    broken = None
                    optimizer.state[model.weight]["step"] = torch.zeros(())  # half made
                    raise torch.OutOfMemoryError("CUDA out of memory")
                if broken == f"{number} half way":
                    with torch.no_grad():
                        model.bias.add_(1)
                    raise torch.OutOfMemoryError("CUDA out of memory")
                if broken == f"{number} always":
                    raise torch.OutOfMemoryError("CUDA out of memory")
                optimizer.step()

            surviving_optimizer_step(optimizer, inner)
            optimizer.zero_grad()
        return model.weight

    def test_a_step_that_failed_before_it_changed_anything_is_repeated(self):
        assert torch.equal(self.run("0 before"), self.run(None))

    @pytest.mark.parametrize("name", ["AdamW8bit", "Lion8bit", "PagedAdamW32bit"])
    def test_kernels_that_torch_does_not_see_are_not_repeated_half_way(self, name):
        """bitsandbytes makes the states of a parameter just before it steps it, and torch counts none of its writes."""
        bitsandbytes = pytest.importorskip("bitsandbytes")
        weights = [torch.nn.Parameter(torch.ones(64, 128)) for _ in range(2)]
        optimizer = getattr(bitsandbytes.optim, name)(weights, lr=0.1)
        make, calls = optimizer.init_state, itertools.count()

        def failing(*args):
            if next(calls) == 1:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return make(*args)

        optimizer.init_state = failing
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        with pytest.raises(OutOfMemory, match="others not"):
            surviving_optimizer_step(optimizer, optimizer.step)
        assert not torch.equal(weights[0], weights[1])

    @pytest.mark.parametrize("on_host", [False, True], ids=["at once", "one by one"])
    def test_nor_are_fused_kernels(self, on_host, monkeypatch):
        weights = [torch.nn.Parameter(torch.ones(8, 8)) for _ in range(2)]
        optimizer = torch.optim.AdamW([{"params": [weight]} for weight in weights], lr=0.1, fused=True)
        if on_host:
            host_states.HostStates(optimizer, offload=lambda parameter: True)
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        make, calls = torch.zeros_like, itertools.count()

        def failing(*args, **kwargs):
            if next(calls) == 2:  # two moments a parameter
                raise torch.OutOfMemoryError("CUDA out of memory")
            return make(*args, **kwargs)

        monkeypatch.setattr(torch, "zeros_like", failing)
        with pytest.raises(OutOfMemory, match="others not"):
            surviving_optimizer_step(optimizer, optimizer.step)
        assert not torch.equal(weights[0], weights[1])

    def test_states_in_host_memory_are_where_they_were_when_the_step_is_repeated(self, monkeypatch):
        def run(failures: int):
            torch.manual_seed(0)
            model = torch.nn.Linear(4, 4)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            host_states.HostStates(optimizer, offload=lambda parameter: True)
            step_alone = host_states.step_alone

            def failing(*args):
                nonlocal failures
                if failures:
                    failures -= 1
                    raise torch.OutOfMemoryError("CUDA out of memory")
                step_alone(*args)

            for number in range(3):
                model(torch.ones(2, 4)).square().sum().backward()
                with monkeypatch.context() as patched:
                    if number == 1:
                        patched.setattr(host_states, "step_alone", failing)
                    surviving_optimizer_step(optimizer, optimizer.step)
                optimizer.zero_grad()
            return model.weight

        assert torch.equal(run(1), run(0))
        with pytest.raises(OutOfMemory, match="do not fit"):
            run(2)

    @pytest.mark.parametrize(("place", "message"), [("1 half way", "half way|others not"), ("2 always", "do not fit")])
    def test_otherwise_it_stops_and_says_what_to_change(self, place, message):
        with pytest.raises(OutOfMemory, match=message):
            self.run(place)


def rank_main(rank: int, rendezvous: str, path: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=2)
    found = {}
    for name in ("sft", "aot", "kto"):
        for place in (*PLACES, None):
            model = dropping(build())
            exchange = Averaging(model)
            backward = Backward(exchange=exchange.complete, overlap=exchange.overlap, forgo=exchange.forgo)
            number = random.Random(f"{name} {place}").randrange(3)
            # The second rank alone fails; the first learns of it where they meet.
            limits = Limits(rows=2) if place else taken  # noqa: F821
            with out_of_memory(model, place or "forward", number if place and rank == 1 else 10**6):
                loss, taken, metrics, _ = step(name, model, limits, backward)
            found[f"{name} {place}"] = (loss, taken.tokens, metrics, gradients(model))
    if rank == 0:
        torch.save(found, path)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(rank_main, f"file://{folder}/rendezvous", f"{folder}/found.pt")
    return torch.load(folder / "found.pt", weights_only=True)


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ["sft", "aot", "kto"])
def test_all_ranks_repeat_the_step_when_one_fails(name, place, on_two_ranks):
    loss, tokens, metrics, grads = on_two_ranks[f"{name} {place}"]
    expected, same, its_metrics, its_grads = on_two_ranks[f"{name} None"]
    assert tokens == same is not None
    assert torch.equal(loss, expected)
    assert metrics == its_metrics
    assert all(torch.equal(grads[n], g) for n, g in its_grads.items())
