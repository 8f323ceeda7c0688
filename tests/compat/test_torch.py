"""What `lowtide.compat.torch` takes from the inside of torch is there, and does what it is taken for.

A failure here says what a new version of torch has moved; mend it in `lowtide.compat.torch`, and nowhere else.
"""

import copy
import gc
import importlib
import inspect
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from lowtide.compat import torch as inside
from lowtide.compat.torch import FakeTensor, FakeTensorMode, TorchDispatchMode


def test_a_storage_is_told_from_others():
    tensor, other = torch.zeros(4), torch.zeros(4)
    same = inside.storage_id(tensor.untyped_storage()) == inside.storage_id(tensor[1:].untyped_storage())
    assert same, "UntypedStorage._cdata differs between views of one storage"
    told = inside.storage_id(tensor.untyped_storage()) != inside.storage_id(other.untyped_storage())
    assert told, "UntypedStorage._cdata is equal for two storages"
    with FakeTensorMode():
        fakes = [torch.zeros(4), torch.zeros(4)]
    ids = {inside.storage_id(each.untyped_storage()) for each in fakes}
    assert len(ids) == 2, "UntypedStorage._cdata no longer tells storages without memory apart"


def test_writes_are_counted_and_views_know_their_base():
    tensor = torch.zeros(4)
    before = inside.version_of(tensor)
    tensor[1:].add_(1)
    assert inside.version_of(tensor) > before, "Tensor._version does not count a write through a view"
    assert inside.base_of(tensor[1:]) is tensor, "Tensor._base is not the tensor that a view is of"
    assert inside.base_of(tensor) is tensor, "Tensor._base is set for a tensor that is no view"


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_a_gradient_are_seen(register):
    weight = nn.Parameter(torch.zeros(2))
    assert not inside.has_gradient_hooks(weight), "a parameter without hooks appears to have one"
    handle = getattr(weight, register)(lambda *_: None)
    assert inside.has_gradient_hooks(weight), f"Tensor.{register} keeps its hooks under another name"
    handle.remove()
    assert not inside.has_gradient_hooks(weight), f"a hook of Tensor.{register} is still there after it was removed"


def test_backward_is_known_from_forward():
    seen = []

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            seen.append((inside.is_in_backward(), inside.backward_sequence_number()))
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            frame, names = inspect.currentframe(), set()
            while frame is not None:
                names.add(frame.f_code.co_name)
                frame = frame.f_back
            seen.append((inside.is_in_backward(), inside.backward_sequence_number(), inside.BACKWARD in names))
            return grad * 2

    x = torch.ones(2, requires_grad=True)
    number = inside.next_sequence_number()
    Probe.apply(x).sum().backward()  # type: ignore[union-attr]
    assert seen[0] == (False, None), "torch says in forward that backward runs (_current_graph_task_id)"
    assert seen[1][0], "torch._C._current_graph_task_id no longer says that backward runs"
    assert seen[1][1] == number, "autograd numbers its nodes otherwise (_get_sequence_nr, Node._sequence_nr)"
    assert seen[1][2], f"torch runs its engine from another function than {inside.BACKWARD}"


def test_what_a_mode_detaches_shares_its_version():
    class Holds(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.mul.Tensor:
                with inside.seeing_changes_in_place():
                    held.append(out.detach())
            return out

    held: list[Tensor] = []
    with Holds():
        out = torch.ones(2) * 2
    before = inside.version_of(held[0])
    out.add_(1)
    assert inside.version_of(held[0]) > before, "_SetExcludeDispatchKeyGuard no longer brings version counters back"


def test_the_hooks_of_modes_are_asked():
    for hook in ("ignore_compile_internals", "_should_skip_dynamo"):
        assert callable(getattr(TorchDispatchMode, hook, None)), f"TorchDispatchMode has no {hook} to override"
    source = inspect.getsource(TorchDispatchMode)
    assert "cls._should_skip_dynamo()" in source, "TorchDispatchMode no longer asks _should_skip_dynamo"
    plain = inside.PlainMode.__torch_dispatch__
    assert "__wrapped__" not in vars(plain), "a PlainMode's handler is wrapped to hide it from the compiler"
    assert inside.LayerMode.ignore_compile_internals(), "a LayerMode does not ignore what the compiler does"


def test_modes_are_left_for_a_while():
    with FakeTensorMode(), inside.without_modes():
        tensor = torch.ones(2)
    assert type(tensor) is Tensor, "_disable_current_modes leaves the mode of fake tensors on"


def test_fake_tensors_know_their_place_and_are_copied():
    with FakeTensorMode(), inside.copied_without_memory():
        weight = nn.Parameter(torch.ones(2))
        twin = copy.deepcopy(weight)
        buffer = torch.ones(2)
        twins = copy.deepcopy([buffer, buffer])
    assert isinstance(weight, FakeTensor), "FakeTensorMode makes other tensors"
    assert inside.place_of(weight) == torch.device("cpu"), "FakeTensor.fake_device is not where it lies"
    assert isinstance(twin, nn.Parameter), "a copy of a fake parameter is no parameter"
    assert twins[0] is twins[1], "copies of one fake tensor are two"
    assert "__deepcopy__" not in vars(FakeTensor), "FakeTensor.__deepcopy__ stays replaced"


def test_a_fake_tensor_is_made_of_attributes_that_an_earlier_one_had():
    cpu = torch.device("cpu")
    with FakeTensorMode() as mode:
        first = torch.empty(2, 3)
        with inside.without_dispatch():
            meta = torch.empty_strided((4,), (1,), dtype=torch.bfloat16, device="meta")
        made = inside.fake_of(meta, cpu, vars(first))
        assert (made.shape, made.dtype, inside.place_of(made)) == ((4,), torch.bfloat16, cpu)
        assert made.fake_mode is mode
        assert (made + 1).dtype == torch.bfloat16


def test_a_mode_answers_where_a_fake_tensor_lies():
    class Asked(inside.PlainMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            asked.append(inside.asks_for_place(func, args))
            return args[0].fake_device if asked[-1] else func(*args, **(kwargs or {}))

    asked: list[bool] = []
    with FakeTensorMode(), Asked():
        tensor = torch.ones(2, 2)
        torch.nn.functional.linear(tensor, tensor)
    assert any(asked), "the device of a fake tensor is asked for by another operation than prim::device"


@pytest.mark.parametrize("operation", ["nonzero", "unique"])
def test_what_cannot_be_traced_says_so(operation):
    with FakeTensorMode(), pytest.raises(inside.UNTRACEABLE):
        getattr(torch, operation)(torch.ones(2))


def test_models_stay_where_they_are():
    model = nn.Linear(2, 2)
    with inside.models_stay():
        assert model.to("meta") is model, "Module.to is not what moves a model"
        assert model.weight.device.type == "cpu", "Module.to is not what moves a model"
    assert model.to("meta").weight.device.type == "meta", "Module.to stays replaced"


def test_operations_are_there():
    for name in ("NUMBER_READ", "GROUPED_PRODUCT", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "OPEN_ATTENTION"):
        assert getattr(inside, name) is not None
    for name in inside.FUSED_ATTENTION:
        packet = name.removeprefix("aten::")
        assert hasattr(torch.ops.aten, packet), f"{name} is gone: sdpa has other kernels"
    importlib.import_module("torch.nn.attention.varlen")
    assert hasattr(torch.ops.torch_attn, "_varlen_attn"), (
        f"{inside.VARLEN_ATTENTION} is gone: varlen_attn calls another"
    )


def test_a_number_is_read_by_the_operation_that_is_watched():
    class Reads(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    seen = []
    tensor = torch.ones(())
    with Reads():
        tensor.item()
    assert inside.NUMBER_READ in seen, "Tensor.item no longer calls aten::_local_scalar_dense"


def test_schemas_say_what_is_written():
    add, add_ = torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor
    assert inside.changes_arguments(add_), "OpOverload._schema.is_mutable is not set for an operation in place"
    assert not inside.changes_arguments(add), "OpOverload._schema.is_mutable is set for an operation out of place"
    assert inside.changed_arguments(add_, ("self", "other")) == ["self"], "a schema's alias_info has another form"
    assert inside.packet_of(torch.ops.aten.mm.default) in flop_registry, "OpOverload._overloadpacket is no key of flops"


def test_an_operation_runs_by_its_own_kernel():
    out = inside.run_python_kernel(torch.ops.aten.mul.Tensor, torch.ones(2), 3)
    assert out.tolist() == [3, 3], "OpOverload._op_dk does not run an operation by a dispatch key"


def test_grouped_products_have_a_shape():
    with FakeTensorMode(), inside.grouped_products_by(lambda one, other, *_, **__: one.new_empty(7)):
        out = F.grouped_mm(torch.ones(2, 8, 8), torch.ones(2, 8, 8))
    assert out.shape == (7,), "aten::_grouped_mm is not what F.grouped_mm calls, or its Meta kernel stays torch's"


def test_attention_and_its_cast_are_replaced_for_a_while():
    before = F.scaled_dot_product_attention
    with inside.attention_by(lambda *_: "ours"):  # type: ignore[arg-type]
        assert F.scaled_dot_product_attention(None, None, None) == "ours"  # type: ignore[arg-type]
    assert F.scaled_dot_product_attention is before
    half = torch.ones(2, 2, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16), inside.beneath_autocast():
        wide = half.float() @ half.float()
    assert wide.dtype == torch.float32, "_ExcludeDispatchKeyGuard no longer keeps autocast out"


def test_kernels_of_ones_own_end_with_their_context():
    with inside.own_kernels("aten") as kernels:
        kernels.impl("exp", lambda x: x.float(), "AutocastCPU")
        with torch.autocast("cpu", torch.bfloat16):
            inner = torch.ones(2, dtype=torch.bfloat16).exp()
    gc.collect()
    with torch.autocast("cpu", torch.bfloat16):
        outer = torch.ones(2, dtype=torch.bfloat16).exp()
    assert inner.tolist() == [1, 1], "library._scoped_library takes no kernels for autocast"
    assert outer.dtype == torch.bfloat16, "library._scoped_library keeps its kernels beyond its context"
    assert outer[0] != 1, "library._scoped_library keeps its kernels beyond its context"


def test_modules_keep_parameters_children_and_buffers_as_known():
    module = nn.Linear(2, 2)
    module.register_buffer("saved", torch.ones(1))
    module.register_buffer("unsaved", torch.ones(1), persistent=False)
    assert list(inside.saved_buffers(module)) == ["saved"], "Module._non_persistent_buffers_set is kept otherwise"
    twin = inside.with_parameters(module, {"weight": nn.Parameter(torch.zeros(2, 2))})
    assert twin.bias is module.bias, "a copy of a module shares no parameters with it"
    assert twin.weight is not module.weight, "Module._parameters is not where a module keeps its own"
    parent = nn.Sequential(module)
    assert inside.children_of(parent) == {"0": module}, "Module._modules is not where a module keeps its children"


def _tied() -> nn.Module:
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    other.weight = one.weight
    model = nn.ModuleDict({"a": nn.Sequential(one, nn.ReLU()), "b": other, "again": one})
    model.register_parameter("own", nn.Parameter(torch.ones(1)))
    model.register_module("none", None)
    return model


def test_modules_and_parameters_are_those_that_torch_walks_to_in_its_order():
    model = _tied()
    assert [*inside.modules_of(model)] == [*model.modules()]
    assert [id(each) for each in inside.parameters_of(model)] == [id(each) for each in model.parameters()]


def test_gradients_are_dropped_fast_for_a_while_by_copies_too():
    model = _tied()
    with inside.dropping_gradients_fast(model):
        copied = copy.deepcopy(model)
        for each in (*model.parameters(), *copied.parameters()):
            each.grad = torch.ones_like(each)
        copied.zero_grad()
        assert all(each.grad is None for each in copied.parameters())
        assert all(each.grad is not None for each in model.parameters())
        model.zero_grad(set_to_none=False)
        assert all(not each.grad.any() for each in model.parameters())
        model.zero_grad()
        assert all(each.grad is None for each in model.parameters())
    assert model.zero_grad.__func__ is nn.Module.zero_grad


def test_step_hooks_of_an_optimizer_are_seen_and_dropped():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))])
    assert not inside.has_step_hooks(optimizer), "an optimizer without step hooks appears to have one"
    for register in ("register_step_pre_hook", "register_step_post_hook"):
        getattr(optimizer, register)(lambda *_: None)
        assert inside.has_step_hooks(optimizer), f"Optimizer.{register} keeps its hooks under another name"
        inside.drop_step_hooks(optimizer)
        assert not inside.has_step_hooks(optimizer), f"Optimizer.{register} keeps its hooks under another name"


@pytest.mark.parametrize("kind", ["adam", "sgd", "adagrad"])
def test_the_choice_of_an_optimizer_is_replaced(kind):
    module = sys.modules[f"torch.optim.{kind}"]
    own = getattr(module, inside.CHOICE, None)
    assert own is not None, f"torch.optim.{kind} no longer knows {inside.CHOICE}"
    expected = list(inspect.signature(own).parameters)
    assert expected == ["params", "differentiable", "use_fused"], f"{inside.CHOICE} takes other arguments: {expected}"
    with inside.foreach_by_default():
        chosen = getattr(module, inside.CHOICE)([], False, False)
    assert chosen == (False, True), f"{inside.CHOICE} is not replaced"
    assert getattr(module, inside.CHOICE) is own, f"{inside.CHOICE} stays replaced"


def test_the_compiler_takes_its_options_and_tells_of_its_work():
    options = {"recompile_limit": 64, "specialize_float": True}
    with inside.compiler_options(options):
        now = {name: getattr(torch._dynamo.config, name) for name in options}
    assert now == options, "torch._dynamo.config has no recompile_limit or specialize_float any more"
    said = []
    end = inside.watch_compilations(lambda _: said.append("begins"), lambda _: said.append("ends"))
    try:
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    finally:
        end()
    assert said == ["begins", "ends"], "torch._dynamo.callback no longer tells of a compilation"
    said.clear()
    torch.compile(lambda x: x + 2, backend="eager")(torch.ones(2))
    assert not said, "torch._dynamo.callback calls what was removed"


def test_functions_are_left_out_of_graphs_once():
    def function():
        pass

    assert not inside.is_left_out_of_graphs(function)
    left_out = inside.is_left_out_of_graphs(torch.compiler.disable(function))
    assert left_out, "torch.compiler.disable marks what it makes otherwise than by _torchdynamo_disable"


def test_the_store_of_a_process_group_is_found(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        store = inside.default_store()
        store.set("key", "value")
        assert store.get("key") == b"value", "distributed_c10d._get_default_store gives no store"
    finally:
        torch.distributed.destroy_process_group()


def test_a_cpu_says_whether_it_has_bfloat16():
    assert isinstance(inside.cpu_has_bf16(), bool), "torch.cpu no longer says which instructions there are"


def test_the_allocators_history_has_its_functions():
    record = inspect.signature(torch.cuda.memory._record_memory_history).parameters
    for name in ("enabled", "context", "stacks", "max_entries", "clear_history"):
        assert name in record, f"torch.cuda.memory._record_memory_history takes no {name}"
    assert callable(torch.cuda.memory._snapshot), "torch.cuda.memory._snapshot is gone"


def test_parameters_of_a_module_are_replaced_for_a_while():
    layer = nn.Linear(2, 3)
    weight, bias = layer.weight, layer.bias
    with inside.parameters_replaced(layer, {"weight": weight * 2}):
        layer(torch.ones(1, 2)).sum().backward()
    assert layer.weight is weight
    assert layer.bias is bias
    assert torch.equal(weight.grad, torch.full((3, 2), 2.0)), "a gradient goes by what stood in a parameter's place"


def test_a_strided_shard_cuts_each_part():
    cut = inside.strided_shard(1, 2)
    assert (cut.dim, cut.split_factor) == (1, 2), "torch's _StridedShard takes other arguments"
    assert not cut.is_replicate()


def test_the_partitioner_of_graphs_reads_a_budget():
    import torch._functorch.partitioners

    config = torch._functorch.config
    assert config.activation_memory_budget == 1.0, "torch._functorch.config has another budget by default"
    with inside.activation_budget(0.5):
        assert config.activation_memory_budget == 0.5, "torch._functorch.config.patch no longer sets the budget"
    assert config.activation_memory_budget == 1.0, "the budget is still there after it was put back"
    source = inspect.getsource(torch._functorch.partitioners)
    assert "config.activation_memory_budget" in source, "torch's partitioner no longer reads activation_memory_budget"


def test_flash_attention_gives_its_log_sum_exp_and_goes_backward_with_another():
    query, key, value = (torch.randn(1, heads, 9, 8, dtype=torch.float64) for heads in (4, 2, 2))
    out, lse = inside.cpu_flash(query, key, value, False, 0.5)
    whole = key.repeat_interleave(2, 1)
    scores = query @ whole.transpose(-1, -2) * 0.5
    torch.testing.assert_close(lse, scores.logsumexp(-1))
    weights = torch.exp(scores - (lse + 1)[..., None])  # as in a softmax over more keys
    *_, of_value = inside.cpu_flash_backward(out, query, key, value, (out, lse + 1), False, 0.5)
    expected = (weights.transpose(-1, -2) @ out).unflatten(1, (2, 2)).sum(2)
    torch.testing.assert_close(of_value, expected, msg="the backward of a CPU's flash attention no longer takes lse")


def test_torchs_varlen_attention_has_the_arguments_that_are_given_by_position():
    with FakeTensorMode():
        query, key, value = (torch.empty(9, heads, 8, dtype=torch.bfloat16) for heads in (4, 2, 2))
        out, lse = inside.cuda_flash(query, key, value, True, 0.5)
        found = inside.cuda_flash_backward(out, query, key, value, out, lse, True, 0.5)
    assert lse.shape == (4, 9)
    assert [each.shape for each in found] == [query.shape, key.shape, value.shape]


def test_torchs_flash_attention_takes_how_many_keys_are_used():
    query, key, value = (torch.empty(n, 1, 8, dtype=torch.bfloat16, device="meta") for n in (6, 20, 20))
    starts, used = torch.empty(2, 3, dtype=torch.int32, device="meta"), torch.empty(2, dtype=torch.int32, device="meta")
    out, lse = inside.cuda_flash_of_used(query, key, value, (starts[0], starts[1]), (3, 10), used, 0.5)
    assert out.shape == query.shape
    assert (lse.shape, lse.dtype) == ((1, 6), torch.float32)


def test_modes_of_the_compiler_are_listed():
    assert {"default", "reduce-overhead", "max-autotune"} <= {*inside.compile_modes()}
    with pytest.raises(RuntimeError, match="Unrecognized mode"):
        torch.compile(lambda x: x, mode="quick")(torch.zeros(1))
