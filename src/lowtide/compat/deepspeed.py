"""What the project takes from DeepSpeed, which is imported where it is asked for and nowhere before."""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any
from unittest import mock

import torch
import torch._dynamo  # DeepSpeed changes tensors, after which it could not be imported any more
import torch.distributed as dist
from torch import Tensor, nn

from lowtide.compat.gloo import gather_and_return, sum_and_return
from lowtide.compat.torch import compare_recomputed_by
from lowtide.process.quiet_logs import only_from

INSTALL = "pip install deepspeed, or leave `deepspeed` out"
SHARED_MEMORY = "deepspeed_shm_comm"
"""The operations that DeepSpeed would compile as ranks of a CPU meet."""
HOLDER = -1
"""Stands for a module, of which no number is negative, among those that use a parameter."""


def check_installed() -> None:
    """Refuses a run without the library, before it is imported.

    Raises:
        ValueError: says how to install it.
    """
    if find_spec("deepspeed") is None:
        raise ValueError(f"deepspeed is asked for, and it is not installed: {INSTALL}")


def deepspeed(device: torch.device) -> Any:
    """The library, for ranks whose process group is there.

    Raises:
        ValueError: it cannot be imported; says how to install it.
    """
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        import deepspeed as library
    except ImportError as error:
        raise ValueError(f"deepspeed is asked for, and it cannot be imported ({error}): {INSTALL}") from None
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)  # which it uses
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)  # or it tells of each buffer
    with _nothing_compiled(library):
        library.init_distributed(dist_backend=dist.get_backend())
    if device.type == "cpu":  # gloo's own collectives hold a copy of what they exchange
        backend = library.comm.comm.cdb
        backend.all_gather_function, backend.reduce_scatter_function = gather_and_return, sum_and_return
    # Checkpoints save a frozen parameter as itself, which has given its numbers back once it is recomputed.
    compare_recomputed_by(lambda saved: {"shape": shape_of(saved), "dtype": saved.dtype, "device": saved.device})
    return library


def _schedule_class(kind: str) -> Any:
    """The class of a schedule by the name that a config has, as DeepSpeed looks it up; None if there is none."""
    check_installed()
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    from deepspeed.runtime import lr_schedules

    if kind in lr_schedules.VALID_LR_SCHEDULES:
        return getattr(lr_schedules, kind)
    return getattr(torch.optim.lr_scheduler, kind, None)


def schedule_arguments_of(kind: str) -> list[str] | None:
    """The arguments of a schedule beside the optimizer; None where neither DeepSpeed nor torch has one of the name.

    Raises:
        ValueError: DeepSpeed is not installed.
    """
    found = _schedule_class(kind)
    return None if found is None else [*inspect.signature(found).parameters][1:]


def schedule_of(kind: str, arguments: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> Any:
    """A schedule of a config, whose `step` follows each step of the optimizer. One that resumes also sets the learning
    rates of its place, which DeepSpeed's own leave to the next step."""
    with only_from(logging.ERROR, "DeepSpeed"):  # it warns that no step came before, and there is none
        made = _schedule_class(kind)(optimizer, **arguments)
    if isinstance(made, torch.optim.lr_scheduler.LRScheduler):
        return made

    def load_state_dict(saved: Mapping[str, Any]) -> None:
        if saved["last_batch_iteration"] >= 0:
            made.step(saved["last_batch_iteration"])

    made.load_state_dict = load_state_dict
    if getattr(made, "_last_lr", None) is None:  # OneCycle's, which the Trainer asks for before a step
        made._last_lr = [group["lr"] for group in optimizer.param_groups]
    return made


def _nothing_compiled(library: Any) -> contextlib.AbstractContextManager:
    """While it lasts, no collectives are compiled: those of a CPU in shared memory, with which processes wait for ever
    where an earlier compilation was killed."""
    library.ops.__compatible_ops__  # noqa: B018  # found out when it is first asked for
    return mock.patch.dict(library.ops.__compatible_ops__, {SHARED_MEMORY: False})


def is_partitioned(tensor: Tensor) -> bool:
    """Whether a parameter is one of ZeRO-3, whose numbers are gathered for the calls of its module alone."""
    return hasattr(tensor, "ds_id")


def shape_of(tensor: Tensor) -> torch.Size:
    """The shape of a whole parameter, wherever its parts lie."""
    return torch.Size(getattr(tensor, "ds_shape", tensor.shape))


def gathered(tensor: Tensor) -> Tensor:
    """A copy of all of a parameter of ZeRO-3; every rank asks for it together."""
    import deepspeed as library

    with library.zero.GatheredParameters([tensor]):
        return tensor.detach().clone()


@contextlib.contextmanager
def staying_gathered(parameters: Sequence[Any]) -> Iterator[None]:
    """While it lasts, parameters of ZeRO-3 are whole, and calls of their modules leave them so."""
    import deepspeed as library

    with library.zero.GatheredParameters(list(parameters)):
        for parameter in parameters:
            parameter.ds_active_sub_modules.add(HOLDER)
        try:
            yield
        finally:
            for parameter in parameters:
                parameter.ds_active_sub_modules.discard(HOLDER)


def replaced_by_first_rank(parameters: Sequence[Tensor]) -> contextlib.AbstractContextManager[None]:
    """While it lasts, parameters of ZeRO-3 are whole; what the first rank puts into them is everyone's afterwards."""
    import deepspeed as library

    return library.zero.GatheredParameters(list(parameters), modifier_rank=0)


def put_in(tensor: Tensor, whole: Tensor | None) -> None:
    """Puts other numbers into a parameter of ZeRO-3; the first rank has them, and all call it together."""
    with replaced_by_first_rank([tensor]), torch.no_grad():
        if whole is not None:
            tensor.copy_(whole)


def masters(engine: Any) -> list[Tensor]:
    """The flat parts of weights that lie on this rank and that the engine's optimizer steps, in its precision."""
    steps = engine.optimizer
    for name in ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition"):
        if hasattr(steps, name):
            return list(getattr(steps, name))
    raise AssertionError(f"{type(steps).__name__} keeps its weights under another name")


def partition(model: nn.Module, config: Mapping[str, Any], device: torch.device) -> Callable[[], None]:
    """Leaves on each rank its part of a model's parameters (ZeRO-3), one parameter after the other, and has its modules
    gather them; returns what takes that out of the modules again, for an engine that steps the model."""
    library = deepspeed(device)
    config = {name: value for name, value in config.items() if name not in ("optimizer", "scheduler")}
    library.zero.Init(module=model, config_dict_or_path=config)
    engine = library.initialize(model=model, config=config)[0]

    def undo() -> None:
        engine.module_forward_pre_hook.remove()
        engine.module_forward_post_hook.remove()
        engine.destroy()

    return undo


def engine_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, config: Mapping[str, Any], device: torch.device
) -> Any:
    """The engine that trains a model by an optimizer."""
    library = deepspeed(device)
    with _stepping_the_weights():
        return library.initialize(model=model, optimizer=optimizer, config=dict(config))[0]


@contextlib.contextmanager
def _stepping_the_weights() -> Iterator[None]:
    """While it lasts, an optimizer of stage 3 is made that steps float32 weights themselves. It means to, but compares
    the weights' device with a name (DeepSpeed 0.19), which no device equals, and keeps a copy of all of them."""
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3 as Stage3

    make = Stage3._create_fp32_partitions

    def on_a_device(optimizer: Any) -> None:
        name = optimizer.device
        if not optimizer.offload_optimizer:
            optimizer.device = torch.device(name)
        make(optimizer)
        optimizer.device = name

    with mock.patch.object(Stage3, "_create_fp32_partitions", on_a_device):
        yield


@contextlib.contextmanager
def going_on(engine: Any) -> Iterator[None]:
    """Around a micro-batch that others of the same step follow."""
    engine.set_gradient_accumulation_boundary(False)
    try:
        yield
    finally:
        engine.set_gradient_accumulation_boundary(True)
