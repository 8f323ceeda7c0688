"""lowtide's own optimizers by the names that `optim` takes, beside those of transformers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lowtide.compat.torch import FakeTensor
from lowtide.compat.trainer_optimizers import is_missing_package, trainer_optimizer, tried_optimizer
from lowtide.engine.weights.load_errors import to_install
from lowtide.memory.optimizers.compressed_adamw import CompressedAdamW
from lowtide.memory.optimizers.file_states import FileStates
from lowtide.memory.optimizers.host_states import HostStates, check_host_states
from lowtide.memory.optimizers.lora_fa import LoraFA, projections_of
from lowtide.memory.optimizers.muon import ADJUSTMENTS, MuonWithAdamW, matrices_of
from lowtide.memory.optimizers.narrow_step import check_separable
from lowtide.memory.optimizers.states import optimizer_name
from lowtide.memory.optimizers.streamed_states import StreamedStates
from lowtide.memory.weights.streaming import stream_of
from lowtide.memory.weights.written_file import NoFile, file_beside
from lowtide.ops.mapped import declare_in_files
from lowtide.ops.target import kind_of

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw_compressed": {"remainder": "exact"},
    "adamw_stochastic": {"remainder": "stochastic"},
    "adamw_stochastic_8bit": {"remainder": "stochastic", "moment_bits": 8},
    "adamw_flash": {"remainder": "8bit", "moment_bits": 8},
}
"""By name, what `CompressedAdamW` does with the bits that bfloat16 has no room for, and with the moments."""

MUON, LORA_FA = "muon", "adamw_lora_fa"
NAMES = (*OPTIMIZERS, MUON, LORA_FA)
"""All of lowtide's own."""
OF_MUON: dict[str, Callable[[str], Any]] = {
    "momentum": float,
    "nesterov": {"true": True, "false": False}.__getitem__,
    "ns_steps": int,
    "adjust_lr_fn": {name: name for name in ADJUSTMENTS}.__getitem__,
}
"""What `optim_args` may hold for Muon, and what makes it a value."""
OF_MATRICES = ("adafactor", "galore", "apollo", "stable_adamw", MUON, LORA_FA)
"""How the names of those begin that look at more of a weight than one number at a time."""
BY_NUMBER = (
    *(torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax),
    *(torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.RMSprop),
)
"""Those whose step of a number depends on nothing but its own gradients."""
KNOWN: dict[type, str] = {torch.optim.AdamW: "adamw_torch", torch.optim.Adam: "adamw_torch"}
"""Optimizers that are passed, by the name of one with the same states."""

logger = logging.getLogger(__name__)


def own_optimizer(args: Any, model: nn.Module) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Class and arguments of one of `NAMES`, for a model.

    Raises:
        ValueError: there are `optim_args` that it does not have, or this torch lacks it.
    """
    betas = (args.adam_beta1, args.adam_beta2)
    options = {"lr": args.learning_rate, "betas": betas, "eps": args.adam_epsilon}
    if args.optim == MUON:
        if not hasattr(torch.optim, "Muon"):
            raise ValueError(f"optim={MUON!r} is torch's, and torch {torch.__version__} has none: update torch")
        return MuonWithAdamW, {**options, "matrices": matrices_of(model), **_muon_arguments(args.optim_args)}
    if args.optim_args:
        raise ValueError(
            f"optim_args={args.optim_args!r}: {args.optim} takes none beyond learning_rate, adam_beta1, adam_beta2, "
            "adam_epsilon and weight_decay; leave it out"
        )
    if args.optim == LORA_FA:
        return LoraFA, {**options, "projections": projections_of(model), "fused": True}
    return CompressedAdamW, {**options, **OPTIMIZERS[args.optim], "seed": args.seed}


def _muon_arguments(given: str | None) -> dict[str, Any]:
    """`optim_args` of Muon, as transformers writes them: `name=value,name=value`."""
    found: dict[str, Any] = {}
    for part in filter(None, (given or "").replace(" ", "").split(",")):
        name, _, value = part.partition("=")
        try:
            found[name] = OF_MUON[name](value.lower())
        except (KeyError, ValueError):
            raise ValueError(
                f"optim_args={given!r}: {part!r} is none of what optim={MUON!r} takes there: momentum=0.95, "
                f"nesterov=true, ns_steps=5, adjust_lr_fn={' or '.join(ADJUSTMENTS)}"
            ) from None
    return found


def check_optimizer_name(name: str) -> None:
    """Refuses optimizers that step in a backward of their own.

    Raises:
        ValueError: says what to take instead.
    """
    if name in ("lomo", "adalomo") or name.endswith("_layerwise"):
        usual = f"{name.removesuffix('_layerwise')!r}" if name.endswith("_layerwise") else "another optimizer"
        raise ValueError(
            f"optim={name!r} steps by itself in each backward, of which a step may have several: take {usual} with "
            "optimizer_in_backward=True, which frees each gradient as it arrives too"
        )


def check_package(args: Any) -> None:
    """Refuses an optimizer of a package that is not installed, and values of `optim_args` that it cannot take, before a
    model is loaded; warns of those that it does not look at.

    Raises:
        ValueError: names the package and how to install it, or the value.
    """
    name = optimizer_name(args)
    if name in NAMES:
        return
    error, unread = tried_optimizer(args)
    if error is not None and is_missing_package(error):
        raise ValueError(f"optim={name!r} needs a package that is not installed: {to_install(error)}")
    if isinstance(error, ValueError) and args.optim_args:
        raise ValueError(f"optim_args={args.optim_args!r} does not go with optim={name!r}: {error}") from error
    if unread:
        logger.warning(f"optim_args={args.optim_args!r}: optim={name!r} does not look at {', '.join(unread)}")


def check_sharded(model: nn.Module, args: Any) -> None:
    """Refuses optimizers that cannot step shards of a model's weights.

    Raises:
        ValueError: says why, and what to take instead.
    """
    name = optimizer_name(args)
    if any(name.startswith(each) for each in OF_MATRICES):
        raise ValueError(
            f"optim={name!r} looks at whole matrices, and with {args.sharding} each rank steps some of their rows: "
            "take optim='adamw_torch_fused', or one of fewer bits ('adamw_torch_8bit')"
        )
    wide = [each for each, p in model.named_parameters() if p.requires_grad and p.dtype == torch.float32]
    if name in OPTIMIZERS and wide:
        raise ValueError(
            f"optim={name!r} would make the float32 weights bfloat16 ({wide[0]}, ...) after they were sharded: load "
            "the model with dtype 'bfloat16', or take optim='adamw_torch_fused'"
        )
    if args.fp16:
        raise ValueError(f"fp16=True scales losses, which is not built for {args.sharding}: take bf16=True")


def check_flat(optimizer: torch.optim.Optimizer) -> None:
    """Refuses an optimizer that is not known to act number by number, as on DeepSpeed's flat parts it has to.

    Raises:
        ValueError: says what to take instead.
    """
    _check_by_number(optimizer, "and DeepSpeed steps flat parts of many weights")


def _check_by_number(optimizer: torch.optim.Optimizer, why: str) -> None:
    """Refuses an optimizer that is not known to act number by number.

    Raises:
        ValueError: says `why` it has to, and what to take instead.
    """
    if type(optimizer) not in BY_NUMBER:
        raise ValueError(
            f"{type(optimizer).__name__} looks at more of a weight than one number, {why}: take "
            "optim='adamw_torch_fused', or another that acts number by number "
            f"({', '.join(sorted(each.__name__ for each in BY_NUMBER))})"
        )


def check_given(kind: type, where: str, args: Any) -> None:
    """Refuses an optimizer that was passed beside a name for one.

    Args:
        kind: its class.
        where: the argument that it came in.

    Raises:
        ValueError: says what to leave out.
    """
    if "optim" in args.requested:
        raise ValueError(
            f"optim={optimizer_name(args)!r} names an optimizer, and `{where}` has one, {kind.__name__}, which would "
            "be used: leave one of them out"
        )


def check_steps(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Refuses an optimizer that would step nothing that is trained.

    Raises:
        ValueError: it holds none of the model's trained parameters; says where to get them.
    """
    trained = {parameter for parameter in model.parameters() if parameter.requires_grad}
    held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    if trained and not trained & held:
        raise ValueError(
            f"the optimizer that was passed, {type(optimizer).__name__}, holds none of the {len(trained)} parameters "
            "that are trained, so no step would change the model: make it of the model that is passed (of "
            "get_peft_model(model, peft_config), where there are adapters), or leave it out"
        )


def check_own_optimizer(model: nn.Module) -> None:
    """Refuses a model whose trained weights are no float32 or bfloat16 throughout.

    Raises:
        ValueError: some weights are frozen, so that weights of two dtypes would meet.
    """
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    if frozen:
        raise ValueError(
            f"{', '.join(OPTIMIZERS)} train all weights in bfloat16; {len(frozen)} are frozen "
            f"({frozen[0]}, ...). Adapters have few states: take optim='adamw_torch_fused'"
        )


def check_one_by_one(optimizer: torch.optim.Optimizer, args: Any) -> None:
    """Refuses an optimizer that is to step parameters one by one, and cannot.

    Raises:
        ValueError: says why.
    """
    if streams_trained(args) and kind_of(args.device) == "cpu":
        check_in_file(optimizer)
    elif streams_trained(args) and isinstance(optimizer, CompressedAdamW):
        raise ValueError(
            f"optim={args.optim!r} stores weights in a form of its own, and trained_weights='stream' those that were "
            "loaded: take optim='adamw_torch_fused'"
        )
    elif streams_trained(args) or wants_host_states(args):
        check_host_states(optimizer)
    elif args.optimizer_in_backward:
        check_separable(optimizer)


def streams_trained(args: Any) -> bool:
    """Whether trained weights and their states lie in a file, or in host memory."""
    return getattr(args, "trained_weights", "resident") == "stream"


def check_in_file(optimizer: torch.optim.Optimizer) -> None:
    """Refuses an optimizer that is not known to act number by number, as it has to where a weight is stepped by rows.

    Raises:
        ValueError: says what to take instead.
    """
    _check_by_number(
        optimizer, "or keeps its states in a form of its own, and trained_weights='stream' steps a weight by rows"
    )
    check_separable(optimizer)


def wants_host_states(args: Any) -> bool:
    """Whether states live in host memory, and their parameters elsewhere."""
    return args.optimizer_states_on_host and kind_of(args.device) == "cuda"


def make_optimizer(model: nn.Module, args: Any) -> torch.optim.Optimizer:
    """The optimizer that `optim` names, as a trainer makes it, with its states where they belong."""
    optimizer = trainer_optimizer(model, args, own_optimizer(args, model) if args.optim in NAMES else None)
    settle_optimizer(optimizer, args, model)
    return optimizer


def settle_optimizer(optimizer: torch.optim.Optimizer, args: Any, model: nn.Module) -> None:
    """What happens to an optimizer before a scheduler is made for it."""
    host = _host_states(optimizer, args, model)
    if host is not None:
        optimizer.host_states = host  # type: ignore[attr-defined]
    elif streams_trained(args):
        first = optimizer.param_groups[0]["params"][0]
        file = NoFile() if isinstance(first, FakeTensor) else file_beside(args.output_dir)
        optimizer.host_states = FileStates(optimizer, file)  # type: ignore[attr-defined]
    if isinstance(optimizer, CompressedAdamW):
        if host is None and kind_of(args.device) == "cpu" and not streams_trained(args):
            weights = (p.data for group in optimizer.param_groups for p in group["params"])
            declare_in_files(each for each in weights if each.dtype == torch.float32)  # which go once they are split
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                optimizer.compress_([parameter])
                if host is not None:
                    host.take_home(parameter)


def _host_states(optimizer: torch.optim.Optimizer, args: Any, model: nn.Module) -> HostStates | None:
    """What keeps states in host memory; None where they are on the device, or in a file."""
    if streams_trained(args) and kind_of(args.device) == "cuda":
        stream = stream_of(model)
        assert stream is not None, "weights are streamed before they have an optimizer"
        return StreamedStates(optimizer, stream, args.device)
    return HostStates(optimizer) if wants_host_states(args) else None
