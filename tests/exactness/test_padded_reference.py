"""The reference checked: padding does not reach it, and the features of the tiny models do."""

import pytest
import torch

from tests.support.marks import slow_but
from tests.support.models.architectures import (
    FIRST_TOKEN,
    PADDED,
    RAGGED,
    RECURRENT,
    TYPICAL_OF_ALL,
    VOCAB,
    build,
    tiny_config,
)
from tests.support.references.reference import gradient_errors, gradients, reference_logprobs

ROUNDING = 2e-5
"""Relative distance of gradients; 1.2e-5 is seen, where qwen3_next's gated delta rule takes rows in chunks."""
NEUTRAL = {
    "sliding_window": 128,
    "attention_chunk_size": 128,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "floor_scale": 8192,
    "clip_qkv": None,
}
"""Values under which a setting does nothing on rows as short as these."""

SETTINGS = [
    (name, setting)
    for name, (_, settings) in (RAGGED | RECURRENT | PADDED).items()
    for setting in NEUTRAL
    if setting in settings
]


@pytest.fixture
def rows() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(FIRST_TOKEN, VOCAB, (length,), generator=generator).tolist() for length in (13, 2, 9, 17, 1)]


@pytest.mark.parametrize("name", slow_but(TYPICAL_OF_ALL, RAGGED | RECURRENT | PADDED))
def test_rows_in_a_padded_batch_equal_the_same_rows_alone(name: str, rows: list[list[int]]):
    model = build(name)

    together = torch.cat(reference_logprobs(model, rows))
    alone = torch.cat([reference_logprobs(model, [row])[0] for row in rows])

    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)
    weights = torch.randn(len(alone))
    errors = gradient_errors(gradients(model, together @ weights), gradients(model, alone @ weights))
    assert max(errors.values()) < ROUNDING, max(errors, key=errors.__getitem__)


@pytest.mark.parametrize(("name", "setting"), SETTINGS)
def test_settings_change_the_numbers(name: str, setting: str, rows: list[list[int]]):
    """A setting under a misspelt name would be ignored in silence, and its code path never be tested."""
    assert hasattr(tiny_config(name), setting)
    got = torch.cat(reference_logprobs(build(name), rows))
    without = torch.cat(reference_logprobs(build(name, **{setting: NEUTRAL[setting]}), rows))
    assert (got - without).abs().max() > 1e-2


@pytest.mark.parametrize("name", RAGGED | RECURRENT | PADDED)
def test_every_parameter_takes_part(name: str, rows: list[list[int]]):
    model = build(name)
    loss = torch.cat(reference_logprobs(model, rows)).square().sum()
    untouched = [name for name, gradient in gradients(model, loss).items() if not gradient.abs().max() > 0]
    assert untouched == []
