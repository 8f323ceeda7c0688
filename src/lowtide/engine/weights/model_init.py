"""`model_init_kwargs` in one form, as the loader, the planner and the tokenizer read it.

Scripts fill it with whatever their command line may hold (`trust_remote_code`, `revision`, `attn_implementation=None`),
often after the config was made, so it is read where it is used.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

from lowtide.option_values import check_flags

CODE, WEIGHTS, CONFIG = "trust_remote_code", "quantization_config", "config"

logger = logging.getLogger(__name__)


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
        ValueError: the quantization is given in both places, the revision is no name, or `config` no configuration.
    """
    init = {name: value for name, value in (given or {}).items() if value is not None}
    check_flags("model_init_kwargs", init, [CODE])
    if "torch_dtype" in init:
        older = init.pop("torch_dtype")
        if str(init.setdefault("dtype", older)).removeprefix("torch.") != str(older).removeprefix("torch."):
            _warn_of_two(init["dtype"], older)
    if CONFIG in init and not isinstance(init[CONFIG], PretrainedConfig):
        raise ValueError(
            f"model_init_kwargs: config={init[CONFIG]!r} is no configuration (a PretrainedConfig), and would have no "
            "effect: give the values that differ from the model's config.json themselves, "
            "model_init_kwargs={'attention_dropout': 0.1} say"
        )
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


@functools.cache
def _warn_of_two(dtype: Any, older: Any) -> None:
    """Once, although the arguments are read in several places."""
    logger.warning(
        f"model_init_kwargs has dtype={dtype!r} and torch_dtype={older!r}, its older name: dtype={dtype!r} is taken. "
        "Leave one of them out"
    )


def config_init(init: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the arguments that choose which config and tokenizer are read."""
    return {name: init[name] for name in (CODE, "revision") if name in init}
