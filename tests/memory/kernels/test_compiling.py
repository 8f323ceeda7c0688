"""Compiled layers: gradients of the eager ones, and no compilation after the first batches, whatever their lengths."""

import pytest
import torch
import torch._dynamo
from torch._dynamo.utils import counters

from lowtide.memory.kernels.compiling import compile_layers, remove_compilation
from tests.support.marks import slow_but
from tests.support.models.architectures import build as architecture
from tests.support.models.tiny_models import (
    RaggedBatch,
    assert_close,
    build,
    checkpointed,
    gradients,
    loss_of,
    prepared,
    tokens,
)


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.config.error_on_recompile = False
    torch._dynamo.reset()


def batches(count: int = 10):
    """Segments of unlike lengths and numbers; every second batch shares prefixes."""
    generator = torch.Generator().manual_seed(0)
    for number in range(count):
        lengths = torch.randint(2, 40, (3 + number % 4,), generator=generator).tolist()
        segments = [tokens(length, length) for length in lengths]
        if number % 2:
            yield RaggedBatch.from_segments(segments, prefix=[-1] + [0] * (len(lengths) - 1), row=[0] * len(lengths))
        else:
            yield RaggedBatch.from_segments(segments)


def run(model, batch):
    loss = loss_of(model, batch)
    loss.backward()
    return loss.detach(), gradients(model)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "policy"), slow_but([("llama", "full")], [("llama", None), ("llama", "full"), ("mistral", "attention")])
)
def test_gradients_are_the_eager_ones_and_nothing_is_compiled_anew(kind, policy):
    plain, model = prepared(build(kind)), prepared(build(kind))
    graphs = 0
    assert compile_layers(model, backend="eager" if policy else "aot_eager") == 2
    if policy is not None:
        checkpointed(plain, policy)
        checkpointed(model, policy)
    for number, batch in enumerate(batches()):
        if number == 2:
            torch._dynamo.config.error_on_recompile = True
            graphs = counters["stats"]["unique_graphs"]
            assert graphs > 0
        wanted_loss, wanted = run(plain, batch)
        loss, got = run(model, batch)
        torch.testing.assert_close(loss, wanted_loss)
        assert_close(got, wanted, 1e-5)
    assert counters["stats"]["unique_graphs"] == graphs
    assert all("torch.compiler.disable" in reason for reason in counters["graph_break"])  # of attention, and no other


@pytest.mark.slow
def test_dropouts_are_left_out_of_graphs_and_drop_the_same():
    found = []
    for compiled in (False, True):
        model = prepared(architecture("gpt2", resid_pdrop=0.3))
        if compiled:
            compile_layers(model, backend="eager")
        torch.manual_seed(3)
        found.append(run(model, next(batches(1))))
    (wanted_loss, wanted), (loss, got) = found
    torch.testing.assert_close(loss, wanted_loss)
    assert_close(got, wanted, 1e-5)
    assert all("torch.compiler.disable" in reason for reason in counters["graph_break"])


def test_it_can_be_undone():
    model = prepared(build())
    before = [dict(vars(module)) for module in model.modules()]
    compile_layers(model, backend="aot_eager")
    remove_compilation(model)
    run(model, next(batches()))
    assert counters["stats"]["unique_graphs"] == 0
    assert [dict(vars(module)).keys() for module in model.modules()] == [attributes.keys() for attributes in before]


def test_a_model_without_layers_is_refused():
    with pytest.raises(ValueError, match="no layers of this model"):
        compile_layers(torch.nn.Linear(2, 2))


@pytest.mark.slow
def test_a_budget_keeps_less_and_changes_no_gradient():
    batch = next(batches())
    kept, found = {}, {}
    for budget in (None, 0.1):
        torch._dynamo.reset()
        model = prepared(build())
        compile_layers(model, backend="aot_eager", budget=budget)
        sizes: dict[int, int] = {}

        def pack(tensor: torch.Tensor, sizes: dict[int, int] = sizes) -> torch.Tensor:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = loss_of(model, batch)
        loss.backward()
        kept[budget], found[budget] = sum(sizes.values()), gradients(model)
    assert kept[0.1] < 0.9 * kept[None]
    assert_close(found[0.1], found[None], 1e-5)
    assert torch._functorch.config.activation_memory_budget == 1.0
