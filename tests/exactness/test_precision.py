"""Which numbers are held in which dtype under each precision, and that float16's small gradients survive."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from lowtide.engine.forward import install
from lowtide.methods.method import TokenObjective
from lowtide.objectives.sft import LOSSES
from lowtide.ragged import RaggedBatch
from lowtide.step.execute import Backward
from lowtide.step.train_step import train_step
from lowtide.step_plan import Limits

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
ROWS = [[5, 6, 7, 8, 9, 10], [11, 12, 13], [14, 15, 16, 17, 18]]
NLL = TokenObjective(LOSSES["nll"])


def build(dtype: torch.dtype = F32):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=301,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
    )
    model = AutoModelForCausalLM.from_config(config).to(dtype).train()
    install(model)
    return model


def autocast(dtype: torch.dtype | None):
    return torch.autocast("cpu", dtype) if dtype is not None else contextlib.nullcontext()


@pytest.mark.parametrize(
    ("stored", "compute", "moments", "products"),
    [(F32, None, F32, F32), (F32, BF16, F32, BF16), (F32, F16, F32, F16), (BF16, None, BF16, BF16)],
    ids=["float32", "bf16 mixed", "fp16 mixed", "pure bf16"],
)
def test_what_is_held_in_which_dtype(stored, compute, moments, products):
    model = build(stored)
    scaler = torch.amp.GradScaler("cpu", enabled=compute == F16)
    seen = set()

    def note(output: Any) -> None:
        if isinstance(output, torch.Tensor):  # the head gives what it made of its products
            seen.add(output.dtype)

    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda _module, _inputs, output: note(output))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    with autocast(compute):
        loss = train_step(
            model,
            RaggedBatch.from_segments(ROWS),
            NLL,
            backward=Backward(backward=lambda loss: scaler.scale(loss).backward(), grad_scale=scaler.get_scale()),
        )
    assert seen == {products}
    assert {p.dtype for p in model.parameters()} == {stored}
    assert {p.grad.dtype for p in model.parameters()} == {stored}
    scaler.step(optimizer)
    scaler.update()
    states = [value for state in optimizer.state.values() for name, value in state.items() if name != "step"]
    assert {value.dtype for value in states} == {moments}
    assert loss.dtype == F32
    assert all(not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def textbook_gradients(model, loss_scale: float) -> dict[str, torch.Tensor]:
    """The summed negative log-probs times a tiny factor, from dense logits under autocast, with a loss scaler."""
    with autocast(F16):
        for row in ROWS:
            ids = torch.tensor([row])
            logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
            loss = nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum") * TINY
            (loss * loss_scale).backward()
    return {name: p.grad / loss_scale for name, p in model.named_parameters()}


TINY = 2.0**-22
"""A token's share of a batch of some millions."""


@pytest.mark.parametrize("limits", [Limits(), Limits(rows=1)])
@pytest.mark.parametrize("accumulate", [False, True])
def test_small_gradients_survive_in_float16(accumulate, limits):
    tiny = TokenObjective(lambda stats: -stats.logprobs * (TINY * sum(len(row) - 1 for row in ROWS)))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
    scale = scaler.get_scale()
    wanted = textbook_gradients(build(), scale)

    def errors(grad_scale: float) -> dict[str, float]:
        model = build()
        with autocast(F16):
            train_step(
                model,
                RaggedBatch.from_segments(ROWS),
                tiny,
                limits=limits,
                backward=Backward(
                    accumulate=accumulate and grad_scale == scale,
                    backward=lambda loss: scaler.scale(loss).backward(),
                    grad_scale=grad_scale,
                ),
            )
        got = {name: p.grad / scale for name, p in model.named_parameters()}
        return {name: float((got[name] - value).norm() / value.norm()) for name, value in wanted.items()}

    assert max(errors(scale).values()) < 0.02
    assert max(errors(1.0).values()) > 0.5


def test_gradients_that_overflow_skip_the_step_and_leave_the_loss_alone():
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    before = [p.detach().clone() for p in model.parameters()]
    with autocast(F16):
        loss = train_step(
            model,
            RaggedBatch.from_segments(ROWS),
            NLL,
            backward=Backward(backward=lambda loss: scaler.scale(loss).backward(), grad_scale=scaler.get_scale()),
        )
    scaler.step(optimizer)
    scaler.update()
    assert torch.isfinite(loss)
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    assert scaler.get_scale() == 2.0**39
