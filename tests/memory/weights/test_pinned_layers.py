"""Layers whose weights wait in pinned memory, on a CPU: streams that copy as late as their events allow.

What is asked of CUDA is played by the stand-ins of `test_pinned_host`: a copy that nobody waited for has not run, so
that a missing wait shows as a wrong number.
"""

import weakref

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from lowtide.engine.forward import install
from lowtide.engine.weights.quantized import compute_where_brought, stored_tensors
from lowtide.memory.weights.pinned_layers import PinnedLayers
from lowtide.memory.weights.streaming import WeightStream
from tests.support.memory.late_copies import CPU, FakeCuda
from tests.support.models.tiny_models import (
    assert_close,
    assert_same,
    build,
    checkpointed,
    gradients,
    loss_of,
    separate,
    with_adapters,
)


class Layers(PinnedLayers):
    def buffer(self, size):
        made = torch.empty(size, dtype=torch.uint8)
        made.is_host = True
        return made


def streamed(model):
    frozen = [p for p in model.parameters() if not p.requires_grad]
    return WeightStream(model, frozen, Layers(CPU, FakeCuda()))


@pytest.mark.parametrize("kwargs", [None, {"use_reentrant": False}, {"use_reentrant": True}], ids=str)
def test_the_gradients_are_those_of_resident_weights(kwargs):
    found = []
    for streams in (False, True):
        model = with_adapters(build(num_hidden_layers=4))
        install(model)
        if kwargs is not None:
            model.enable_input_require_grads()
            checkpointed(model, kwargs=kwargs)
        stream = streamed(model) if streams else None
        for _ in range(2):
            if stream is None:
                loss_of(model, separate()).backward()
            else:
                with stream.store.around():
                    loss = loss_of(model, separate())
                loss.backward()
        found.append(gradients(model))
    assert_same(found[1], found[0])


def test_two_layers_at_most_are_on_the_device():
    model = with_adapters(build(num_hidden_layers=5))
    install(model)
    stream = streamed(model)
    store, most = stream.store, []
    bring = store.bring

    def counted(unit, following):
        bring(unit, following)
        most.append(len(store._visits))

    store.bring = counted
    with store.around():
        loss = loss_of(model, separate())
    loss.backward()
    assert max(most) == 2
    layers = [unit for unit in stream.units if unit.is_layer]
    assert len(layers) == len(stream.units) == 5
    stream.let_all_go()
    assert not store._visits


QUANTIZATIONS = {
    "4 bits": {"load_in_4bit": True, "bnb_4bit_compute_dtype": "float32"},
    "4 bits, scales quantized": {"load_in_4bit": True, "bnb_4bit_use_double_quant": True},
    "8 bits": {"load_in_8bit": True},
}


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_quantized_layers_compute_where_they_are_brought(quantization, tmp_path):
    """And no graph keeps what was brought: the device's copies are gone before backward brings them again."""
    pytest.importorskip("bitsandbytes")
    build(hidden_size=128, intermediate_size=256, num_hidden_layers=4).save_pretrained(tmp_path)
    found, brought = [], []

    class Seen(Layers):
        def bring(self, unit, following):
            super().bring(unit, following)
            brought.append(weakref.ref(self._visits[unit].buffer))

    for streams in (False, True):
        config = BitsAndBytesConfig(**QUANTIZATIONS[quantization])
        torch.manual_seed(0)
        model = with_adapters(AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config).train())
        install(model)
        if streams:
            compute_where_brought(model, CPU)
            frozen = [p for p in model.parameters() if not p.requires_grad]
            stream = WeightStream(model, frozen, Seen(CPU, FakeCuda()), stored_tensors(model))
            stream.let_all_go()
            with stream.store.around():
                loss = loss_of(model, separate())
            assert len(brought) == 4
            assert [each() for each in brought] == [None] * 4
        else:
            loss = loss_of(model, separate())
        loss.backward()
        found.append(gradients(model))
    assert_close(found[1], found[0], 1e-5)
