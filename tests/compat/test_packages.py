"""What is taken from the inside of packages that are optional (bitsandbytes, torchao, liger-kernel, TRL) is there."""

import inspect

import pytest
import torch
from torch import Tensor

from lowtide.compat import liger, trl
from lowtide.compat.traced import bitsandbytes, torchao


def test_paged_states_are_made_by_a_function():
    functional = pytest.importorskip("bitsandbytes.functional")
    own = functional.get_paged, functional.fill
    taken = set(inspect.signature(own[0]).parameters)
    assert {"shape", "dtype", "device"} <= taken, f"bitsandbytes.functional.get_paged takes {taken}"
    with bitsandbytes.paged_states_by(lambda *shape, **_: torch.empty(shape)):
        assert functional.get_paged(2).shape == (2,)
        assert functional.fill is Tensor.fill_
    assert (functional.get_paged, functional.fill) == own, "bitsandbytes.functional stays replaced"
    source = inspect.getsource(__import__("bitsandbytes.optim.optimizer", fromlist=["x"]))
    assert "F.get_paged(" in source, "bitsandbytes' optimizers no longer make paged states by functional.get_paged"


@pytest.mark.parametrize("name", bitsandbytes.PYTHON_KERNELS)
def test_steps_of_bitsandbytes_are_operations(name):
    pytest.importorskip("bitsandbytes")
    namespace, operation = name.split("::")
    known = hasattr(getattr(torch.ops, namespace), operation)
    assert known, f"{name} is gone: bitsandbytes steps by another operation"


def test_a_step_of_torchao_is_made_by_a_function():
    adam = pytest.importorskip("torchao.optim.adam")
    own = adam.single_param_adam
    expected = ["p", "grad"]
    taken = list(inspect.signature(own).parameters)[:2]
    assert taken == expected, f"torchao.optim.adam.single_param_adam begins with {taken}, and not {expected}"
    called = []
    optimizer = adam.AdamW8bit([torch.nn.Parameter(torch.ones(4))])
    optimizer.param_groups[0]["params"][0].grad = torch.ones(4)
    with torch.compiler.set_stance("force_eager"), torchao.parameter_step_by(lambda *args, **_: called.append(args[0])):
        optimizer.step()
    assert called, "torchao's optimizers no longer step a parameter by single_param_adam"
    assert adam.single_param_adam is own, "torchao.optim.adam.single_param_adam stays replaced"
    torchao.make_code_tables()


def test_liger_patches_one_model():
    pytest.importorskip("liger_kernel")
    assert {"rms_norm", "cross_entropy"} <= liger.kernels_of("llama").keys(), "Liger's functions have other options"
    assert callable(liger.patch_model)


@pytest.mark.parametrize("strategy", ["bfd", "bfd_split", "wrapped"])
def test_trl_packs_a_block(strategy):
    pytest.importorskip("trl")
    import pyarrow as pa

    table = pa.table({"input_ids": [[1, 2], [3], [4, 5, 6]]})
    packed = trl.packed_block(table, 3, strategy)
    assert len(packed) == 2, "trl.data_utils packs a table otherwise than by _pack_bfd and _pack_wrapped"
