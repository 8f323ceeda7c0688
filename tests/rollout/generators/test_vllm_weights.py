"""How weights travel to vLLM: which, merged or not, and in which buckets."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file

from lowtide.rollout.generators.vllm.weights import Assembly, Copies, Piece, buckets, from_bytes, to_bytes
from tests.support.models.adapted_models import STACKS, adapted_experts
from tests.support.models.tiny_llama import tiny_llama


def test_buckets_keep_to_their_size_and_come_together_again():
    weights = {
        "small": torch.randn(3),
        "large": torch.randn(100, 5),
        "number": torch.tensor(2.0),
        "half": torch.ones(4, 2).half(),
    }
    found, assembly = {}, Assembly()
    for bucket in buckets(weights.items(), 256):
        assert sum(piece.rows.numel() * piece.rows.element_size() for piece in bucket) <= 256
        found |= assembly.take(from_bytes(to_bytes(bucket)))
    assert found.keys() == weights.keys()
    for name, weight in weights.items():
        assert torch.equal(found[name], weight)
        assert found[name].dtype == weight.dtype


def test_without_cuts_a_large_weight_is_a_bucket_of_its_own():
    weights = [("a", torch.zeros(10)), ("b", torch.zeros(1000)), ("c", torch.zeros(10))]
    assert [[p.name for p in bucket] for bucket in buckets(weights, 100, cut=False)] == [["a"], ["b"], ["c"]]


def test_rows_that_are_missing_are_told():
    with pytest.raises(ValueError, match="rows 5 and on of w came, where 0 of 10 are there"):
        Assembly().take([Piece("w", torch.zeros(5, 2), 5, 10)])


def adapted() -> torch.nn.Module:
    torch.manual_seed(0)
    model = get_peft_model(tiny_llama(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    return model


def test_adapters_come_merged_under_the_names_of_the_model():
    model = adapted()
    found = dict(Copies().lacking(model))
    merged = model.merge_and_unload().state_dict()
    assert found.keys() == merged.keys()
    for name, weight in merged.items():
        torch.testing.assert_close(found[name], weight)


@pytest.mark.parametrize("kind", STACKS)
def test_adapters_of_experts_come_merged_under_the_names_of_files(kind, tmp_path):
    model, copies = adapted_experts(kind), Copies()
    found = dict(copies.lacking(model))
    copy.deepcopy(model).merge_and_unload().save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert found.keys() == saved.keys()
    for name, weight in saved.items():
        torch.testing.assert_close(found[name], weight)
    assert {name for name in saved if ".experts." in name} <= {name for name, _ in copies.lacking(model)}


def test_afterwards_the_blocks_with_adapters_alone():
    model, copies = adapted(), Copies()
    list(copies.lacking(model))
    again = {name for name, _ in copies.lacking(model)}
    assert again == {name for name in dict(Copies().lacking(model)) if "self_attn" in name}


def test_what_was_written_to_though_it_is_frozen():
    model, copies = adapted(), Copies()
    list(copies.lacking(model))
    assert copies.current(model)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(2)
    assert not copies.current(model)
    assert "model.embed_tokens.weight" in dict(copies.lacking(model))
    assert copies.current(model)


def test_a_copy_that_was_not_taken_whole_is_none():
    model, copies = adapted(), Copies()
    next(copies.lacking(model))
    assert not copies.current(model)
    assert len(list(copies.lacking(model))) == len(tiny_llama().state_dict())


def test_tied_weights_come_once_and_must_stay_tied():
    assert "lm_head.weight" not in dict(Copies().lacking(tiny_llama(tied=True)))
    model = get_peft_model(tiny_llama(tied=True), LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False))
    with pytest.raises(ValueError, match=r"lm_head.weight is tied .* ensure_weight_tying"):
        list(Copies().lacking(model))
