"""The object that takes steps, driven by hand: gradients, clipping, the optimizer's step, and what it leaves behind."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lowtide.engine.forward import install
from lowtide.methods import METHODS
from lowtide.methods.sft import SFTOptions
from lowtide.ragged import RaggedBatch
from lowtide.step.metrics import Totals
from lowtide.step.runner import StepOptions, StepRunner
from lowtide.step.updaters.updater import NotFiniteStep, Updater
from tests.support.models.tiny_models import build

ROWS = [[1, 2, 3, 4, 5, 6], [7, 8, 9], [4, 4, 2, 1, 3]]


def batch() -> RaggedBatch:
    return RaggedBatch.from_segments(ROWS)


def runner(**options) -> tuple[StepRunner, nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = build()
    install(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made = StepRunner(model, METHODS["sft"].objective(SFTOptions()), StepOptions(**options), updater=Updater(optimizer))
    return made, model, optimizer


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def plain(model: nn.Module) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss of each row by itself through the model's own forward, and its gradients."""
    model.zero_grad()
    total, count = torch.zeros(()), 0
    for row in ROWS:
        ids = torch.tensor([row])
        logprobs = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
        total = total - logprobs.gather(1, ids[0, 1:, None]).sum()
        count += len(row) - 1
    (total / count).backward()
    return total.detach() / count, gradients(model)


@pytest.mark.parametrize("tokens", [None, 8, 6])
def test_gradients_are_those_of_the_plain_loss_however_a_batch_is_cut(tokens):
    made, model, _ = runner(tokens_per_microbatch=tokens)
    loss, wanted = plain(model)
    model.zero_grad()
    made.begin()
    torch.testing.assert_close(made.gradients(batch()), loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradients(model), wanted, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(made.totals.read(torch.device("cpu"))["tokens"], float(sum(map(len, ROWS))))


def test_clipping_gives_the_norm_before_and_zero_clips_nothing():
    for most in (0.0, 0.01):
        made, model, _ = runner(max_grad_norm=most)
        made.begin()
        made.gradients(batch())
        before = nn.utils.get_total_norm(list(gradients(model).values()))
        torch.testing.assert_close(made.clip(), before)
        after = nn.utils.get_total_norm(list(gradients(model).values()))
        torch.testing.assert_close(after, before if not most else torch.tensor(most), rtol=1e-4, atol=1e-6)


def test_the_optimizers_step_is_the_runners_until_it_ends():
    made, model, optimizer = runner()
    own = optimizer.step
    seen: list[str] = []
    made.phases.listeners.append(lambda ended, begins: seen.append(begins))
    made.begin()
    made.reserved = [torch.zeros(4)]
    before = [p.clone() for p in model.parameters()]
    made.gradients(batch())
    optimizer.step()
    assert "optimizer" in seen
    assert made.reserved == []
    assert not all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    made.end()
    assert optimizer.step == own
    assert not made.begun


def test_the_optimizer_in_backward_ends_at_the_same_weights():
    found = []
    for in_backward in (False, True):
        made, model, optimizer = runner(optimizer_in_backward=in_backward)
        made.begin()
        made.gradients(batch())
        optimizer.step()
        found.append([p.detach().clone() for p in model.parameters()])
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=1e-7)


def test_evaluation_is_the_same_loss_and_leaves_no_gradients():
    made, model, _ = runner(per_device_eval_batch_size=2)
    loss, _ = plain(model)
    model.zero_grad()
    totals = Totals()
    made.evaluate(batch(), totals, model.eval())
    assert totals.read(torch.device("cpu"))["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert gradients(model) == {}


def test_a_loss_that_is_no_number_says_where_it_comes_from_and_leaves_no_gradients():
    made, model, _ = runner()
    made.begin()
    with torch.no_grad():
        next(model.parameters())[7] = float("nan")
    for look in (made.clip, made.gradient_norm, made.optimizer_step):
        made.gradients(batch())
        with pytest.raises(NotFiniteStep, match="Micro-batch 0"):
            look()
        assert gradients(model) == {}


def test_a_smaller_budget_is_a_part_of_its_state():
    made, *_ = runner(tokens_per_microbatch=100)
    made.token_budget = 40
    again, *_ = runner(tokens_per_microbatch=100)
    again.load_state_dict(made.state_dict())
    assert again.limits.tokens == 40
    capped, *_ = runner(tokens_per_microbatch=30)
    capped.load_state_dict(made.state_dict())
    assert capped.limits.tokens == 30


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_smaller_budget_holds_the_longest_row_where_rows_are_not_cut(dropout):
    """Dropout of attention keeps rows whole; a piece has at least 16 tokens."""
    made, model, _ = runner(tokens_per_microbatch=40)
    model.train().model.layers[0].self_attn.attention_dropout = dropout
    rows = {length: RaggedBatch.from_segments([[3] * length, [4] * 5]) for length in (18, 30, 60)}
    found = {}
    for budget in (None, 20, 16, 15):
        made.token_budget = budget
        found[budget] = [made.limits_of(each).tokens for each in rows.values()]
    whole = {None: [40, 40, 40], 20: [20, 30, 40], 16: [18, 30, 40], 15: [18, 30, 40]}
    assert found == (whole if dropout else whole | {20: [20] * 3, 16: [16] * 3})
