"""A reference that follows the policy goes to what the policy computes: base and adapters together."""

import copy

import pytest
import torch

from lowtide.engine.forward import install
from lowtide.engine.reference import FrozenModel
from tests.support.models.adapted_models import MERGED, QUANTIZED, adapted, build, quantized

TIED = {name for name in MERGED if "tied" in name and "saved" not in name}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    folder = str(tmp_path_factory.mktemp("model"))
    build().save_pretrained(folder)
    return folder


def moved(start, policy, share: float = 0.25):
    """The reference's weights before and after it has followed a policy."""
    reference = FrozenModel.copy_of(start)
    with torch.no_grad():
        for p in reference.model.parameters():
            p.add_(1)
    before = {name: p.clone() for name, p in reference.model.named_parameters()}
    reference.check_follows(policy)
    reference.follow(policy, share)
    return before, dict(reference.model.named_parameters())


@pytest.mark.parametrize("name", sorted(MERGED.keys() - TIED))
def test_it_follows_the_merged_weights(name):
    make, options = MERGED[name]
    policy = adapted(make(), **options)
    stored = {name: p.clone() for name, p in policy.named_parameters()}
    before, after = moved(make(), policy)
    assert all(torch.equal(p, stored[name]) for name, p in policy.named_parameters())
    theirs = dict(copy.deepcopy(policy).merge_and_unload().named_parameters())
    assert after.keys() <= theirs.keys()
    for name, p in after.items():
        torch.testing.assert_close(p, before[name] + 0.25 * (theirs[name] - before[name]), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("make", QUANTIZED.values(), ids=QUANTIZED.keys())
def test_it_follows_what_a_quantized_policy_computes(make, folder):
    policy = adapted(quantized(folder, make()))
    install(policy, padding_free=False)
    reference = FrozenModel.copy_of(build())
    reference.check_follows(policy)
    reference.follow(policy, 1.0)
    ids = torch.tensor([[5, 6, 7, 8, 9, 10]])
    reference.model.set_attn_implementation(policy.config._attn_implementation)
    with torch.no_grad():
        torch.testing.assert_close(reference.model(ids).logits, policy(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("reference", "policy", "reason"),
    [
        (lambda: build(), lambda: build(num_hidden_layers=1), r"layers.1.self_attn.q_proj.weight is not one that both"),
        (lambda: build(), lambda: build(intermediate_size=32), "gate_proj.weight is not one that both"),
        (lambda: adapted(build()), lambda: build(), "without adapters"),
        (
            lambda: build(tie_word_embeddings=True),
            lambda: adapted(build(tie_word_embeddings=True), target_modules=["lm_head"]),
            "lm_head.weight is tied in the reference and adapted by itself",
        ),
    ],
    ids=["fewer layers", "narrower", "a reference with adapters", "a tied head adapted"],
)
def test_what_cannot_be_followed_is_refused(reference, policy, reason):
    with pytest.raises(ValueError, match=reason):
        FrozenModel.copy_of(reference()).check_follows(policy())
