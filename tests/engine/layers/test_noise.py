"""NEFTune's noise, drawn again by hand and given to the plain model as embeddings: the same log-probs and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel
from transformers.integrations.neftune import activate_neftune, deactivate_neftune

from lowtide.engine.forward import install, pad, score
from lowtide.engine.layers.noise import row_lengths, set_noise
from lowtide.ragged import RaggedBatch
from tests.support.references.reference import gradients

ALPHA, HIDDEN = 40.0, 32  # much noise, so that it shows


def build() -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=61, initializer_range=0.2, **sizes)).train()


def noisy(padding_free: bool = True) -> PreTrainedModel:
    model = build()
    install(model, padding_free=padding_free)
    set_noise(model, ALPHA)
    return model


def tokens(length: int) -> list[int]:
    return torch.randint(1, 61, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def rows() -> RaggedBatch:
    return RaggedBatch.from_segments([tokens(length) for length in (13, 2, 30)])


def pairs() -> RaggedBatch:
    """A prompt of 5 tokens with completions of 4 and 9, and a row of its own."""
    return RaggedBatch.from_segments(
        [tokens(5), tokens(4), tokens(9), tokens(6)], [[-100] * 5, tokens(4), tokens(9), tokens(6)],
        prefix=[-1, 0, 0, -1], row=[0, 0, 0, 1],
    )  # fmt: skip


def by_hand(model: PreTrainedModel, batch: RaggedBatch, lengths: list[int]) -> Tensor:
    """Each row by itself, with noise scaled by `lengths`, one for each segment."""
    embedded = model.get_input_embeddings()(batch.token_ids)
    noise = torch.empty(1, *embedded.shape).uniform_(-1, 1)[0]
    scale = torch.cat(
        [
            torch.full((part.length, 1), ALPHA / (length * HIDDEN) ** 0.5)
            for part, length in zip(batch.segments, lengths, strict=True)
        ]
    )
    embedded = embedded + noise * scale
    found = []
    for part in batch.segments:
        if part.score_start == part.score_stop:
            continue
        spans = [(part.start, part.stop)]
        if part.prefix >= 0:
            spans.insert(0, (batch.segments[part.prefix].start, batch.segments[part.prefix].stop))
        whole = torch.cat([embedded[start:stop] for start, stop in spans])
        ids = torch.cat([batch.token_ids[start:stop] for start, stop in spans])
        logprobs = torch.log_softmax(model(inputs_embeds=whole[None]).logits[0, :-1], -1)
        own = logprobs.gather(-1, ids[1:, None])[:, 0]
        found.append(own[-(part.score_stop - part.score_start) :])
    return torch.cat(found)


@pytest.mark.parametrize(
    ("batch", "lengths"), [(rows(), [13, 2, 30]), (pairs(), [14, 9, 14, 6])], ids=["rows", "a shared prompt"]
)
def test_noise_is_scaled_by_the_length_of_the_row(batch, lengths):
    model, plain = noisy(), build()
    torch.manual_seed(1)
    found = score(model, batch).scored
    torch.manual_seed(1)
    wanted = by_hand(plain, batch, lengths)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    got, expected = gradients(model, -found.sum()), gradients(plain, -wanted.sum())
    for name in expected:
        torch.testing.assert_close(got[name], expected[name], rtol=1e-3, atol=1e-3)
    with torch.no_grad():
        assert (score(model.eval(), batch).scored - found).abs().mean() > 0.1


def test_rows_of_one_length_have_the_noise_of_transformers():
    batch = RaggedBatch.from_segments([tokens(12), tokens(12)[::-1], tokens(12)[3:] + tokens(3)])
    theirs = build()
    handle = activate_neftune(theirs, ALPHA)
    inputs, index = pad(batch)
    torch.manual_seed(1)
    logprobs = torch.log_softmax(theirs(**inputs).logits.flatten(0, 1)[index], -1)
    wanted = logprobs.gather(-1, batch.score_target[:, None])[:, 0]
    deactivate_neftune(theirs, handle)
    for padding_free in (True, False):
        model = noisy(padding_free)
        torch.manual_seed(1)
        found = score(model, batch, padding_free=padding_free).scored
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_a_padded_row_has_the_noise_of_its_own_length():
    """Where transformers scales by the longest row of the batch."""
    batch, model = rows(), noisy(padding_free=False)
    seen = []
    handle = model.model.layers[0].register_forward_pre_hook(lambda module, args: seen.append(args[0].detach()))
    score(model, batch, padding_free=False)
    with torch.no_grad():
        score(model.eval(), batch, padding_free=False)
    handle.remove()
    noise = (seen[0] - seen[1]).abs().amax((1, 2))
    bounds = torch.tensor([ALPHA / (length * HIDDEN) ** 0.5 for length in (13, 2, 30)])
    assert (noise <= bounds * 1.0001).all()
    assert (noise > bounds * 0.95).all()


def test_a_prompt_of_several_rows_has_the_length_of_the_longest_row_that_it_begins():
    prompt = tokens(5)
    batch = RaggedBatch.from_segments(
        [prompt, tokens(4), prompt, tokens(20)], [[-100] * 5, tokens(4), [-100] * 5, tokens(20)],
        prefix=[-1, 0, -1, 2], row=[0, 0, 1, 1],
    )  # fmt: skip
    assert row_lengths(batch).tolist() == [9.0] * 9 + [25.0] * 25
    shared = batch.share_prefixes()
    assert row_lengths(shared).tolist() == [25.0] * 5 + [9.0] * 4 + [25.0] * 20


def test_noise_is_off_without_an_alpha():
    model = noisy()
    set_noise(model, None)
    assert torch.equal(score(model, rows()).scored, score(model, rows()).scored)
