"""Muon over one optimizer: the steps are those of torch's Muon and AdamW, stepped by hand."""

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    GPT2Config,
    LlamaConfig,
    T5Config,
)

from lowtide.memory.optimizers.muon import MuonWithAdamW, matrices_of
from lowtide.memory.optimizers.states import predict_states
from tests.support.matrix.matrix import make
from tests.support.models.tiny_llama import same_bits, tiny_llama, token_ids

OPTIONS = {"lr": 1e-3, "weight_decay": 0.1}


def take_step(model: nn.Module, step: int) -> None:
    model.zero_grad()
    ids = token_ids(step)
    model(input_ids=ids, labels=ids).loss.backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("adjust", ["match_rms_adamw", "original"])
def test_steps_are_those_of_torchs_two_by_hand(adjust, dtype):
    plain, model = tiny_llama(dtype=dtype), tiny_llama(dtype=dtype)
    matrices = [p for name, p in plain.named_parameters() if ".layers." in name and p.dim() == 2]
    others = [p for name, p in plain.named_parameters() if ".layers." not in name or p.dim() != 2]
    assert len(matrices) == 14
    by_hand = (
        torch.optim.Muon(matrices, **OPTIONS, adjust_lr_fn=adjust),
        torch.optim.AdamW(others, **OPTIONS, betas=(0.9, 0.95), fused=True),
    )
    optimizer = MuonWithAdamW(model.parameters(), matrices_of(model), **OPTIONS, betas=(0.9, 0.95), adjust_lr_fn=adjust)
    schedules = [torch.optim.lr_scheduler.LinearLR(o, total_iters=4) for o in (*by_hand, optimizer)]
    for step in range(4):
        take_step(plain, step)
        take_step(model, step)
        for each in (*by_hand, optimizer, *schedules):
            each.step()
    for left, right in zip(plain.parameters(), model.parameters(), strict=True):
        assert same_bits(left.data, right.data)
    assert [group["muon"] for group in optimizer.param_groups] == [True, False]


def test_a_saved_run_goes_on_as_if_it_had_not_stopped(tmp_path):
    model, resumed = tiny_llama(), tiny_llama()
    optimizer = MuonWithAdamW(model.parameters(), matrices_of(model), **OPTIONS)
    for step in range(2):
        take_step(model, step)
        optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    resumed.load_state_dict(model.state_dict())
    other = MuonWithAdamW(resumed.parameters(), matrices_of(resumed), **OPTIONS)
    other.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    for step in range(2, 4):
        for each, stepping in ((model, optimizer), (resumed, other)):
            take_step(each, step)
            stepping.step()
    for left, right in zip(model.parameters(), resumed.parameters(), strict=True):
        assert same_bits(left.data, right.data)


SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24, "vocab_size": 32}


@pytest.mark.parametrize(
    ("model", "count"),
    [
        (lambda: AutoModelForCausalLM.from_config(LlamaConfig(**SMALL)), 7),
        (lambda: AutoModelForSequenceClassification.from_config(LlamaConfig(**SMALL)), 7),
        (lambda: AutoModelForCausalLM.from_config(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=32)), 4),
        # an encoder's 4 + 2, a decoder's 4 + 4 + 2; the table of relative positions is an embedding
        (lambda: AutoModelForSeq2SeqLM.from_config(T5Config(d_model=16, num_layers=1, num_heads=2, d_kv=8)), 16),
    ],
    ids=["llama", "with a head of labels", "gpt2", "t5"],
)
def test_the_matrices_are_those_of_layers(model, count):
    made = model()
    found = matrices_of(made)
    assert len(found) == len({*found}) == count
    outside = {made.get_input_embeddings().weight}
    assert not outside & {*found}


def test_frozen_matrices_are_none_and_a_model_of_none_is_refused():
    model = tiny_llama()
    for layer in model.model.layers:
        layer.requires_grad_(False)
    assert matrices_of(model) == []
    trained = [p for p in model.parameters() if p.requires_grad]
    with pytest.raises(ValueError, match=r"none is trained here: take optim='adamw_torch_fused'"):
        MuonWithAdamW(trained, matrices_of(model))


def test_states_are_those_that_were_predicted():
    run = make("SFT", optim="muon", max_steps=1)
    predicted = predict_states(run.model, "muon")
    run.train()
    states = [value for state in run.optimizer.state.values() for value in state.values()]
    assert sum(value.nbytes for value in states if value.dim()) == predicted.optimizer
    kinds = [sorted(state) for state in run.optimizer.state.values()]
    assert kinds.count(["momentum_buffer"]) == 14


@pytest.mark.parametrize("given", ["momentum=high", "nesterov=2", "adjust_lr_fn=other", "beta=0.9"])
def test_arguments_that_it_does_not_have_are_refused(given):
    with pytest.raises(ValueError, match=r"optim_args=.* is none of what optim='muon' takes there: momentum=0.95"):
        make("SFT", optim="muon", optim_args=given)


def test_its_arguments_reach_it():
    run = make("SFT", optim="muon", optim_args="momentum=0.9, nesterov=False, ns_steps=3, adjust_lr_fn=original")
    run.create_optimizer()
    matrices, others = run.optimizer.param_groups[0], run.optimizer.param_groups[-1]
    assert [matrices[name] for name in ("momentum", "nesterov", "ns_steps", "adjust_lr_fn")] == [
        0.9,
        False,
        3,
        "original",
    ]
    assert others["betas"] == (0.9, 0.999)
    assert not others["muon"]


def test_a_torch_without_it_is_named(monkeypatch):
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(ValueError, match=r"optim='muon' is torch's, and torch .* has none: update torch"):
        make("SFT", optim="muon")
