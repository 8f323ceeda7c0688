"""`model_init_kwargs` in one form, as the loader, the planner and the tokenizer read it.

Scripts fill it with whatever their command line may hold (`trust_remote_code`, `revision`, `attn_implementation=None`),
often after the config was made, so it is read where it is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lowtide.option_values import check_flags

CODE, WEIGHTS = "trust_remote_code", "quantization_config"


def model_init(
    given: Mapping[str, Any] | None, *, trust_remote_code: bool = False, quantization_config: Any = None
) -> dict[str, Any]:
    """The arguments of `from_pretrained`, with `trust_remote_code` always among them.

    A None leaves the default. `torch_dtype` is the older name of `dtype`, and a `revision` is a name.

    Args:
        given: `model_init_kwargs`; what it says of `trust_remote_code` comes first.
        trust_remote_code: the config's own.
        quantization_config: the trainer's argument.

    Raises:
        ValueError: the quantization is given in both places, or the revision is no name.
    """
    init = {name: value for name, value in (given or {}).items() if value is not None}
    check_flags("model_init_kwargs", init, [CODE])
    if "torch_dtype" in init:
        dtype = init.pop("torch_dtype")
        init.setdefault("dtype", dtype)
    if not isinstance(init.get("revision", ""), str):
        raise ValueError(
            f"model_init_kwargs: revision={init['revision']!r} must be the name of a branch, a tag or a commit: put it "
            "in quotation marks"
        )
    if quantization_config is not None:
        if WEIGHTS in init:
            raise ValueError(
                "quantization_config is given twice, as an argument and in model_init_kwargs: keep one of them"
            )
        init[WEIGHTS] = quantization_config
    return {CODE: trust_remote_code, **init}


def config_init(init: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the arguments that choose which config and tokenizer are read."""
    return {name: init[name] for name in (CODE, "revision") if name in init}
