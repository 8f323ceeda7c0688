"""What `from_pretrained` says of arguments that it cannot use, in words that name `model_init_kwargs`."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedModel
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from lowtide.engine.weights.places import COUNTS, check_counts
from lowtide.spelling import nearest

DROPOUT = re.compile("dropout|_pdrop$|layerdrop")
"""The names of shares that are dropped, in configs."""
TAKEN = ("attn_implementation", "device_map", "dtype", "max_memory", "quantization_config", "subfolder", "use_kernels")
"""Arguments that `from_pretrained` takes out of its `**kwargs`, beside those of its signature and of the config."""


@contextlib.contextmanager
def arguments_named(name: str, init: Mapping[str, Any]) -> Iterator[None]:
    """Has a failure of `from_pretrained` name the arguments that it was called with.

    Args:
        name: the model's folder or hub name.
        init: the arguments.

    Raises:
        ValueError: the model cannot be loaded so.
    """
    try:
        yield
    except (MemoryError, OSError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever a config that describes no model leads to
        raise init_refused(name, init, error) from error


def init_refused(name: str, init: Mapping[str, Any], error: Exception) -> ValueError:
    """The error for a model that cannot be loaded with the arguments that were asked for.

    Args:
        name: the model's folder or hub name.
        init: the arguments that were passed to `from_pretrained`.
        error: what it raised.
    """
    unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
    if unknown is not None and unknown[1] in init:
        known = {*inspect.signature(PreTrainedModel.from_pretrained).parameters, *TAKEN, *_config_names(name)}
        return ValueError(f"model_init_kwargs: {unknown[1]!r} is unknown for {name!r}{nearest(unknown[1], known)}")
    if "flash_attention" in str(init.get("attn_implementation")) and isinstance(error, ImportError):
        return ValueError(
            f"attn_implementation={init['attn_implementation']!r} needs a GPU and its package: install it, or take "
            f"'sdpa' ({one_line(error)})"
        )
    given = ", ".join(f"{key}={value!r}" for key, value in init.items() if "token" not in key)
    said = one_line(error)
    if not isinstance(error, TypeError | ValueError | ImportError):
        said = f"{type(error).__name__}: {said}. Look at its config.json"
    return ValueError(f"model {name!r} cannot be loaded with {given}: {said}")


def check_layers(config: Any, name: str) -> None:
    """Refuses a config of fewer than no layers, of a vocabulary below 0, or of more than any model has.

    Raises:
        ValueError: names the key.
    """
    for part in (config, getattr(config, "text_config", None), getattr(config, "vision_config", None)):
        check_counts({key: getattr(part, key, None) for key in COUNTS}, name)


def check_quantization(config: Any, name: str) -> None:
    """Refuses a config of weights that are quantized by a method that transformers does not know: it would pass over
    it with a warning, and take the codes for weights.

    Raises:
        ValueError: names the method.
    """
    quantized = getattr(config, "quantization_config", None)
    if not isinstance(quantized, Mapping) or quantized.get("load_in_8bit") or quantized.get("load_in_4bit"):
        return
    method = quantized.get("quant_method")
    if method not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        raise ValueError(
            f"the config of {name!r} says that its weights are quantized by quant_method={method!r:.80}, which "
            f"transformers {transformers.__version__} does not know"
            f"{nearest(str(method), AUTO_QUANTIZATION_CONFIG_MAPPING)}"
        )


def unknown_type(name: str, error: Exception) -> ValueError | None:
    """The error for a model whose type transformers does not know; None where it says something else."""
    named = re.search(r"model type `([^`]*)`", str(error))
    if named is None:
        return None
    return ValueError(
        f"model {name!r} is of model_type {named[1]!r:.80}, which transformers {transformers.__version__} does not "
        f"know: correct its config.json, or install a version that does{nearest(named[1], CONFIG_MAPPING)}"
    )


def check_dropouts(config: Any) -> None:
    """Refuses a model's config with a share of activations to drop that is none.

    Not every attention computes it, so that such a share may pass without a word.

    Raises:
        ValueError: names the key.
    """
    parts = [config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", ()))]
    for key, share in (each for part in parts if part is not None for each in vars(part).items()):
        is_number = isinstance(share, int | float) and not isinstance(share, bool)
        if DROPOUT.search(key) and is_number and not 0 <= share <= 1:
            raise ValueError(
                f"the model's config says {key}={share}, and it is a share of activations, from 0 to 1: correct its "
                "config.json"
            )


def _config_names(name: str) -> set[str]:
    try:
        return set(AutoConfig.from_pretrained(name).to_dict())
    except (OSError, ValueError):
        return set()


def one_line(error: BaseException) -> str:
    """What an error says, in one line that is not too long."""
    return " ".join(str(error).split())[:300]


def to_install(error: BaseException) -> str:
    """What an error says of a package that is not installed, with the command that installs it."""
    said = one_line(error)
    source = error if isinstance(error, ImportError) else error.__context__
    named = re.search(r"package '([\w.-]+)'", said)
    package = named[1] if named else str(getattr(source, "name", None) or "").split(".")[0]
    return said if "pip install" in said or not package else f"{said} (pip install {package})"
