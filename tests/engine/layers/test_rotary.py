"""Each row has the rotary embeddings of its own length, whatever stands beside it."""

import copy

import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from lowtide.engine.forward import install, score
from lowtide.engine.layers.rotary import kinds_by_length, rows_alike
from lowtide.engine.probe import probe
from lowtide.ragged import RaggedBatch
from tests.support.models.tiny_models import SIZES, assert_close, build, checkpointed, gradients, tokens, with_adapters

LIMIT = 12
LENGTHS = (7, 30, LIMIT, 13, 3, 25)
"""Of rows: half of them are long."""
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.5, 2.0, 3.0, 4.0],
}
BY_KIND = {"sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}, "full_attention": DYNAMIC}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}


def dynamic(model_type="llama", **changes):
    return build(model_type, torch.float64, rope_parameters=dict(DYNAMIC), max_position_embeddings=LIMIT, **changes)


def longrope(model_type="phi3", more=None, **changes):
    return build(
        model_type,
        torch.float64,
        rope_parameters={**LONGROPE, **(more or {})},
        original_max_position_embeddings=LIMIT,
        max_position_embeddings=64,
        **changes,
    )


def of_two_kinds():
    kinds = {"layer_types": list(BY_KIND), "sliding_window": 6, "query_pre_attn_scalar": 8}
    rotary = copy.deepcopy(BY_KIND)
    return build("gemma3_text", torch.float64, rope_parameters=rotary, max_position_embeddings=LIMIT, **kinds)


def scaled_by_length():
    """Its class chooses a scale, not frequencies, by the longest position."""
    more = {"short_mscale": 1.1, "long_mscale": 1.4, "original_max_position_embeddings": LIMIT}
    model = longrope("phimoe", more, **EXPERTS)
    model.set_experts_implementation("eager")
    return model.eval()  # in training its router draws experts at random


MODELS = {
    "llama, dynamic": dynamic,
    "phi3, longrope": longrope,
    "llama, longrope": lambda: longrope("llama"),
    "cohere, dynamic": lambda: dynamic("cohere"),
    "gemma3, dynamic in full layers": of_two_kinds,
    "phimoe": scaled_by_length,
    "checkpointed": lambda: checkpointed(dynamic()),
    "adapters": lambda: with_adapters(longrope()).double(),
}
ROUNDED = {"gemma3, dynamic in full layers": 1e-5, "cohere, dynamic": 1e-5}
"""Norms in float32, whatever the weights are in."""


def alone(model, rows):
    """Log-probs and gradients of each row by itself, in a model that has seen no row before."""
    found, total = [], {}
    for row in rows:
        new = copy.deepcopy(model)
        logits = new(input_ids=torch.tensor([row]), use_cache=False).logits[0, :-1]
        logprobs = torch.log_softmax(logits, -1).gather(-1, torch.tensor(row[1:])[:, None])[:, 0]
        logprobs.sum().backward()
        found.append(logprobs.detach())
        for name, each in gradients(new).items():
            total[name] = total.get(name, 0) + each
    return torch.cat(found), total


@pytest.mark.parametrize("padding_free", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_rows_beside_others_are_as_alone(name, padding_free):
    model, rows = MODELS[name](), [tokens(length, length) for length in LENGTHS]
    logprobs, wanted = alone(model, rows)
    install(model, padding_free=padding_free)
    tolerance = ROUNDED.get(name, 1e-9)
    for order in (range(len(rows)), reversed(range(len(rows)))):  # a model may keep what it saw
        order = list(order)
        batch = RaggedBatch.from_segments([rows[number] for number in order])
        got = score(model, batch, padding_free=padding_free).scored
        got.sum().backward()
        parts = dict(zip(order, got.split([len(rows[number]) - 1 for number in order]), strict=True))
        torch.testing.assert_close(torch.cat([parts[n] for n in range(len(rows))]), logprobs, rtol=0, atol=tolerance)
        assert_close(gradients(model), wanted, tolerance)


def test_the_rows_of_the_test_differ_beside_longer_ones_in_transformers():
    model, (short, long) = longrope(), (tokens(7, 7), tokens(30, 30))
    padded = torch.tensor([short + [0] * 23, long])
    mask = torch.tensor([[1] * 7 + [0] * 23, [1] * 30])
    beside = model(input_ids=padded, attention_mask=mask).logits[0, :7]
    assert (beside - model(input_ids=torch.tensor([short])).logits[0]).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("make", "completions"),
    [(longrope, (9, 20)), (longrope, (3, 5)), (dynamic, (9, 9)), (dynamic, (3, 5))],
    ids=["all long", "all short", "equal", "all short, dynamic"],
)
def test_prompts_are_shared_by_rows_with_one_table(make, completions):
    model = make()
    prompt, parts = tokens(6, 1), [tokens(length, length + 1) for length in completions]
    logprobs, _ = alone(model, [prompt + part for part in parts])
    wanted = torch.cat([each[5:] for each in logprobs.split([5 + length for length in completions])])
    install(model)
    batch = RaggedBatch.from_segments(
        [prompt, *parts, tokens(30)], [[-100] * 6, *parts, [-100] * 30], prefix=[-1, 0, 0, -1], row=[0, 0, 0, 1]
    )
    torch.testing.assert_close(score(model, batch).scored, wanted, rtol=0, atol=1e-9)


@pytest.mark.parametrize(("make", "completions"), [(longrope, (4, 9)), (dynamic, (9, 10))])
def test_prompts_of_rows_with_different_tables_are_refused(make, completions):
    model = make()
    install(model)
    parts = [tokens(length, length) for length in completions]
    prompt, labels = tokens(6), [[-100] * 6, *parts]
    batch = RaggedBatch.from_segments([prompt, *parts], labels, prefix=[-1, 0, 0], row=[0, 0, 0])
    with pytest.raises(ValueError, match=r"shared by rows of 1\d and 1\d tokens.* set prefix_sharing=False"):
        score(model, batch)
    score(model, batch, padding_free=False)  # which repeats it


@pytest.mark.parametrize("name", ["llama, dynamic", "phi3, longrope", "gemma3, dynamic in full layers"])
def test_the_probe_sees_tables_that_depend_on_neighbours(name, monkeypatch):
    model = MODELS[name]()
    limit = rows_alike(model)
    found = probe(model)
    assert found.isolated
    assert found.shares_prefixes
    assert rows_alike(model) == limit == LIMIT
    monkeypatch.setattr("lowtide.engine.attention._runs", lambda plan: None)
    assert not probe(MODELS[name]()).isolated


def test_a_call_without_lowtide_is_that_of_transformers():
    model, row = dynamic(), torch.tensor([tokens(30)])
    wanted = copy.deepcopy(model)(input_ids=row).logits
    install(model)
    score(model, RaggedBatch.from_segments([tokens(20), tokens(4)]))
    assert model.model.rotary_emb.inv_freq is model.model.rotary_emb.original_inv_freq or torch.equal(
        model.model.rotary_emb.inv_freq, model.model.rotary_emb.original_inv_freq
    )
    install(model, padding_free=False)
    model.set_attn_implementation("sdpa")
    torch.testing.assert_close(model(input_ids=row).logits, wanted)


def test_other_models_are_left_alone():
    model = build()
    install(model)
    assert kinds_by_length(model) == []
    assert rows_alike(model) is None
    assert "forward" not in vars(model.model.rotary_emb)


def test_transformers_takes_lengths_from_these_places():
    """What `compat.transformers` reads off rotary modules is there, and two kinds alone depend on the length."""
    model = dynamic()
    rotary = model.model.rotary_emb
    for name in ("rope_type", "original_inv_freq", "inv_freq", "original_max_seq_len", "max_seq_len_cached", "config"):
        assert hasattr(rotary, name), f"rotary modules have no {name} any more"
    assert set(ROPE_INIT_FUNCTIONS) == {"linear", "dynamic", "yarn", "longrope", "llama3", "proportional"}
    rotary(torch.zeros(1), torch.arange(30)[None])
    assert rotary.max_seq_len_cached == 30
    assert not torch.equal(rotary.inv_freq, rotary.original_inv_freq)
    assert SIZES["head_dim"] == 2 * len(rotary.inv_freq)
