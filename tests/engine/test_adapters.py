"""Adapters of every kind, on dense and on quantized bases: gradients through the engine are those of PEFT's own
computation, and preparing a model copies and widens nothing."""

import pytest
import torch
from peft import LoraConfig

from lowtide.engine.forward import install, score
from lowtide.engine.probe import probe
from lowtide.engine.weights.loading import adapt, load_model
from lowtide.ragged import RaggedBatch
from tests.support.marks import slow_but
from tests.support.models.adapted_models import (
    CASES,
    HIDDEN,
    QUANTIZED,
    VOCAB,
    adapted,
    bitsandbytes_4bit,
    build,
    dequantized,
    quantized,
    torchao,
)

ROWS = [[5, 6, 7, 8, 9, 10], [11, 12, 13], [14, 15, 16, 17, 18]]


def dense_gradients(model) -> dict[str, torch.Tensor]:
    """Of the summed log-probs of the rows, by the model's own logits, a row at a time."""
    for row in ROWS:
        ids = torch.tensor([row])
        logprobs = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0, :-1].float(), -1)
        logprobs.gather(-1, ids[0, 1:, None]).sum().backward()
    return gradients(model)


def engine_gradients(model, accumulate: bool = True) -> dict[str, torch.Tensor]:
    install(model)
    score(model, RaggedBatch.from_segments(ROWS), accumulate=accumulate).scored.sum().backward()
    return gradients(model)


def gradients(model) -> dict[str, torch.Tensor]:
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def assert_close(got, wanted, tolerance: float = 1e-4) -> None:
    """Each within so much of its own norm, or of a hundredth of the largest."""
    assert got.keys() == wanted.keys()
    floor = max(float(each.norm()) for each in wanted.values()) / 100
    errors = {n: float((got[n] - w).float().norm()) / max(float(w.norm()), floor) for n, w in wanted.items()}
    assert {name: error for name, error in errors.items() if not error <= tolerance} == {}


@pytest.mark.parametrize("accumulate", slow_but([True], [True, False]))
@pytest.mark.parametrize(("make", "options"), CASES.values(), ids=CASES.keys())
def test_gradients_are_those_of_peft_alone(make, options, accumulate):
    plain, model = adapted(make(), **options), adapted(make(), **options)
    wanted = dense_gradients(plain)
    assert len(wanted) == sum(p.requires_grad for p in plain.parameters())
    assert_close(engine_gradients(model, accumulate), wanted)
    assert probe(model).isolated


@pytest.mark.parametrize(
    ("options", "variant"), [({"use_dora": True}, "Dora"), ({"alora_invocation_tokens": [5]}, "ALora")]
)
def test_more_than_lora_on_the_head_is_refused(options, variant):
    with pytest.raises(ValueError, match=f"{variant}LinearVariant on the output head"):
        install(adapted(build(), target_modules=["lm_head"], **options))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_layers_pass_gradients_to_adapters(reentrant):
    kwargs = {"use_reentrant": reentrant}
    config = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    model = adapt(build(), config, gradient_checkpointing=True, checkpointing_kwargs=kwargs)
    wanted = engine_gradients(model)
    model.get_base_model().gradient_checkpointing_enable(kwargs)
    model.train()
    assert_close(engine_gradients(model), wanted, 1e-6)


# -- quantized bases ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    folder = str(tmp_path_factory.mktemp("model"))
    build().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("make", QUANTIZED.values(), ids=QUANTIZED.keys())
def test_preparing_a_quantized_model_widens_nothing(make, folder):
    model = quantized(folder, make(), torch.bfloat16)
    before = {p: p.dtype for p in model.parameters()}
    model = adapt(model, LoraConfig(r=4, target_modules="all-linear"), gradient_checkpointing=True)
    assert {p.dtype for p in before if p.shape == (VOCAB, HIDDEN)} == {torch.bfloat16}
    assert [p.dtype for p in before] == list(before.values())
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    assert not any(p.requires_grad for p in before)


@pytest.mark.parametrize("make", QUANTIZED.values(), ids=QUANTIZED.keys())
def test_adapters_on_a_quantized_base_get_the_dequantized_models_gradients(make, folder):
    model = quantized(folder, make())
    dense = adapted(dequantized(folder, model), target_modules=["q_proj", "down_proj", "lm_head"])
    model = adapted(model, target_modules=["q_proj", "down_proj", "lm_head"])
    wanted = dense_gradients(dense)
    assert probe(model).isolated
    model.eval()
    with torch.no_grad():  # an evaluation before
        model(torch.tensor([ROWS[0]]))
    model.train()
    assert_close(engine_gradients(model), wanted)


@pytest.mark.parametrize("make", QUANTIZED.values(), ids=QUANTIZED.keys())
def test_quantized_layers_compute_alike_in_training_and_evaluation_and_beside_other_rows(make, folder):
    model = adapted(quantized(folder, make()))
    install(model)
    batch = RaggedBatch.from_segments(ROWS)
    loud = RaggedBatch.from_segments([ROWS[0], *[[n] * 9 for n in range(40)]])  # neighbours of other magnitudes
    together = score(model.train(), batch).scored
    torch.testing.assert_close(score(model.eval(), batch).scored, together, rtol=0, atol=0)
    first = len(ROWS[0]) - 1
    torch.testing.assert_close(score(model, loud).scored[:first], together[:first], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("make", QUANTIZED.values(), ids=QUANTIZED.keys())
def test_no_dequantized_weight_waits_for_backward(make, folder):
    model = adapted(quantized(folder, make()))
    install(model)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: kept.append(saved) or saved, lambda saved: saved):
        score(model.train(), RaggedBatch.from_segments(ROWS))
    shapes = {p.shape for name, p in build().named_parameters() if "_proj" in name}
    shapes |= {shape[::-1] for shape in shapes}
    assert not [t for t in kept if t.is_floating_point() and t.shape in shapes]


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("Int4WeightOnlyConfig", r"torchao cannot quantize float32 weights on cpu as its Int4WeightOnlyConfig says \("),
        ("Int8DynamicActivationInt8WeightConfig", "made for inference, and no gradient passes through them"),
    ],
)
def test_torchao_formats_without_gradients_are_refused_before_the_model_is_loaded(kind, reason):
    with pytest.raises(ValueError, match=f"{reason}.*as the base of adapters take bitsandbytes"):
        load_model("nowhere", quantization_config=torchao(kind))


def test_a_loaded_model_in_a_format_without_gradients_is_refused():
    model = build()
    for layer in model.model.layers:
        quantize_in_place(layer, "Int8DynamicActivationInt8WeightConfig")
    with pytest.raises(ValueError, match=r"weight of model.layers.0.self_attn.q_proj is a Int8Tensor of torchao"):
        install(model)


def quantize_in_place(module, kind: str) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    quantization.quantize_(module, getattr(quantization, kind)())


def test_weights_repacked_for_inference_are_refused(folder):
    model = quantized(folder, bitsandbytes_4bit())
    layer = model.model.layers[0].self_attn.q_proj
    if not layer.support_avx512bf16_for_cpu:
        layer.weight.quant_state.packing_format_for_cpu = True  # as a CPU that has the instructions would
    with torch.no_grad():
        model.eval()(torch.tensor([ROWS[0]]))
    with pytest.raises(ValueError, match=r"q_proj was repacked for inference.*anew"):
        install(model)


@pytest.mark.parametrize("adapter", [False, True])
def test_a_quantized_head_is_refused(folder, adapter):
    model = build()
    quantize_in_place(model, "Int8WeightOnlyConfig")
    assert type(model.lm_head.weight) is not torch.nn.Parameter
    model = adapted(model, target_modules=["lm_head"]) if adapter else model
    with pytest.raises(ValueError, match="keep the head in full precision"):
        install(model)
