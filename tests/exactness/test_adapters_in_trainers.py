"""Adapters, on dense and on quantized bases, train in every trainer as they would without the memory techniques."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import BitsAndBytesConfig, PreTrainedModel, TorchAoConfig

from lowtide.engine.heads.language_model import LanguageModel
from lowtide.engine.heads.value import Value
from lowtide.engine.weights.loading import load_model
from lowtide.engine.weights.quantized import dense_weight, is_quantized
from tests.support.marks import slow_but
from tests.support.matrix import matrix
from tests.support.matrix.matrix import ACTED, PLAIN, TECHNIQUES, Run, check_equal, with_it
from tests.support.matrix.matrix_models import TRAINERS

LEAN = ("gradient checkpointing", "activation offloading", "tiled MLP", "token budget")
"""Together in one run."""
RUN = {"max_steps": 3, "adam_epsilon": 1e-4}
"""Of every run. Some gradients of a fresh adapter are all but 0, and with its usual epsilon Adam would make whole steps
of their rounding."""


def four_bits() -> Any:
    pytest.importorskip("bitsandbytes")
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)


def eight_bits() -> Any:
    pytest.importorskip("bitsandbytes")
    return BitsAndBytesConfig(load_in_8bit=True)


def torchao() -> Any:
    return TorchAoConfig(pytest.importorskip("torchao.quantization").Int8WeightOnlyConfig())


BASES = {"dense": None, "4 bits": four_bits, "8 bits": eight_bits, "torchao": torchao}
CASES = [(kind, base) for kind in TRAINERS for base in ("dense", "4 bits")]
CASES += [("DPO", "8 bits"), ("DPO", "torchao")]
CASES += [(kind, "dense") for kind in ("Pretrain", "ReplacedTokenDetection", "Seq2Seq")]
ADAPTED = {"Seq2Seq": 32}
"""Linear layers of a model, where they are not 14."""


@functools.cache
def saved(kind: str) -> Path:
    """The folder of a kind's model."""
    folder = matrix.folder() / f"base of {kind}"
    matrix.build(kind, 64).save_pretrained(folder)
    return folder


def base_model(kind: str, base: str) -> PreTrainedModel:
    make = BASES[base]
    if make is None:
        return matrix.build(kind, 64)
    return load_model(str(saved(kind)), head=Value if kind == "Reward" else LanguageModel, quantization_config=make())


def dequantized(kind: str, base: str) -> PreTrainedModel:
    """The dense model with the values of a quantized one, which PEFT would read with others' scales on a CPU: rows are
    no whole blocks of 64."""
    dense, stored = matrix.build(kind, 64), base_model(kind, base)
    with torch.no_grad():
        for name, module in dense.named_modules():
            if isinstance(module, torch.nn.Linear):
                layer: Any = stored.get_submodule(name)
                quantized = is_quantized(layer.weight)
                module.weight.copy_(dense_weight(layer, torch.float32) if quantized else layer.weight)
    return dense


def trained(kind: str, model: PreTrainedModel, **options: Any) -> Run:
    config = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    run = matrix.watched(matrix.make(kind, model=model, peft_config=config, **RUN, **options))
    moved = [name for name, p in run.weights.items() if "lora_B" in name and p.any()]
    assert len(moved) == ADAPTED.get(kind, 14), "an adapter was not trained"
    return run


@functools.cache
def plain(kind: str, base: str, **options: Any) -> Run:
    return trained(kind, base_model(kind, base), **options)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "base"), slow_but([("SFT", "dense")], CASES))
def test_the_lean_techniques_together_change_nothing(kind, base):
    options = {name: value for each in LEAN for name, value in with_it(TECHNIQUES[each]).items()}
    run = trained(kind, base_model(kind, base), **options)
    assert [each for each in LEAN if not ACTED[each](run, plain(kind, base))] == []
    check_equal(run, plain(kind, base), bits=False)


@pytest.mark.parametrize(("kind", "base"), slow_but([("SFT", "dense")], CASES))
def test_checkpointing_and_offloading_change_no_bit(kind, base):
    options = {name: value for each in LEAN[:2] for name, value in with_it(TECHNIQUES[each]).items()}
    check_equal(trained(kind, base_model(kind, base), **options), plain(kind, base), bits=True)


@pytest.mark.parametrize(("kind", "base"), slow_but([("SFT", "dense")], CASES))
def test_the_optimizer_in_backward_changes_no_bit(kind, base):
    technique = TECHNIQUES["optimizer in backward"]
    run = trained(kind, base_model(kind, base), **with_it(technique))
    unclipped = plain(kind, base, **PLAIN[technique.name])
    assert ACTED[technique.name](run, unclipped)
    check_equal(run, unclipped, bits=True)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "base"), [case for case in CASES if case[1] != "dense"])
def test_a_quantized_base_trains_as_the_dense_model_of_its_values(kind, base):
    check_equal(plain(kind, base), trained(kind, dequantized(kind, base)), bits=False)


@pytest.mark.parametrize("base", BASES)
def test_policy_and_reference_are_one_model_at_first(base):
    assert plain("DPO", base).losses[0] == pytest.approx(math.log(2), abs=1e-6)


@pytest.mark.parametrize("kind", TRAINERS)
@pytest.mark.parametrize("optim", ["adamw_compressed", "adamw_stochastic"])
def test_optimizers_of_all_weights_are_refused_beside_adapters(kind, optim):
    with pytest.raises(ValueError, match=r"are frozen .*Adapters have few states: take optim='adamw_torch_fused'"):
        trained(kind, base_model(kind, "dense"), optim=optim)


@pytest.mark.parametrize("kind", ["SFT", "DPO"])
def test_adapters_that_begin_at_a_token_need_padded_rows(kind):
    start = matrix.tokenizer().convert_tokens_to_ids("=")
    config = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", alora_invocation_tokens=[start])
    with pytest.raises(ValueError, match=r"alora_invocation_tokens.* set padding_free=False"):
        matrix.make(kind, peft_config=config)
    run = matrix.watched(matrix.make(kind, peft_config=config, padding_free=False, **RUN))
    assert any(p.any() for name, p in run.weights.items() if "lora_B" in name)
