"""What PEFT raises of a configuration, in one sentence with its options; and values that it takes and should not.

PEFT checks little of a configuration as it is made. What is wrong shows deep inside of it, when adapters are put on a
model, as an IndexError of a tensor or a TypeError of a comparison that names no option.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from peft import PEFT_TYPE_TO_CONFIG_MAPPING
from torch import nn

from lowtide.engine.weights.load_errors import one_line, to_install

OF_PEFT = {"auto_mapping", "base_model_name_or_path", "inference_mode", "peft_type", "peft_version", "revision"}
"""Fields of a configuration that PEFT fills in."""
OF_NAMES = ("target_modules", "exclude_modules", "modules_to_save", "target_parameters", "layers_pattern")
"""Options that take names of modules or parameters: one, or a list."""
MOST_NAMES = 20_000
"""Of a list in `OF_NAMES`: PEFT compares each with all others."""


@contextlib.contextmanager
def options_named(config: Any, model: nn.Module, folder: str | None = None) -> Iterator[None]:
    """Has a failure to put adapters on a model name the options that it is about.

    These are the ones that the error speaks of, by name or by value; where it speaks of none, all that were set.

    Args:
        config: PEFT's, or the content of its JSON file.
        folder: the adapters', where they come from one.

    Raises:
        ValueError: PEFT refused or failed.
    """
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        said = to_install(error) if isinstance(error, ImportError) else one_line(error)
        given = _set_options(config)
        spoken = {name: value for name, value in given.items() if _speaks_of(str(error), name, value)}
        options = ", ".join(f"{name}={value!r:.80}" for name, value in (spoken or given).items())
        what = f"the adapters of a {type(config).__name__}" if folder is None else f"the adapters in {folder!r}"
        needed = re.search(r"does not work with (\w+) != 0", str(error))
        if needed is not None and needed[1] in given:  # adapters of parameters, as of the experts of a mixture
            raise ValueError(
                f"{what} on {type(model).__name__} need {needed[1]}=0: {said} It is {given[needed[1]]}"
            ) from error
        correct = "correct" if folder is None else "copy the whole folder again, or correct in its adapter_config.json"
        raise ValueError(
            f"{what} cannot be put on {type(model).__name__} ({type(error).__name__}: {said}): {correct} "
            f"{options or 'the configuration'}"
        ) from error


def check_values(config: Any) -> None:
    """Refuses numbers that are not finite, tokens below 0, names that are no text, and lists of more names than there
    are modules, each of which PEFT would look for in each module.

    Args:
        config: PEFT's, or the content of its JSON file.

    Raises:
        ValueError: names the option.
    """
    what = "adapter_config.json" if isinstance(config, Mapping) else f"the {type(config).__name__}"
    for option, value in _set_options(config).items():
        if option in OF_NAMES and isinstance(value, list | tuple | set) and len(value) > MOST_NAMES:
            raise ValueError(f"{option} of {what} holds {len(value):,} names: at most {MOST_NAMES:,}")
        wrong = next((each for each in _leaves(value) if isinstance(each, float) and not math.isfinite(each)), None)
        if wrong is not None:
            raise ValueError(f"{option} of {what} holds {wrong}: it must be finite")
        if option in OF_NAMES and not isinstance(value, str):
            other = next((each for each in _leaves(value) if not isinstance(each, str)), None)
            if other is not None:
                raise ValueError(f"{option} holds {other!r}: name modules by text, such as 'q_proj'")
        if option == "trainable_token_indices" and any(isinstance(each, int) and each < 0 for each in _leaves(value)):
            raise ValueError(f"{option}={value!r:.80} holds a negative number: tokens are counted from 0")


def _set_options(config: Any) -> dict[str, Any]:
    """The options that differ from their defaults."""
    kind: Any = type(config)
    given: Mapping[str, Any] = config if isinstance(config, Mapping) else vars(config)
    if isinstance(config, Mapping):
        kinds = cast(Any, PEFT_TYPE_TO_CONFIG_MAPPING)
        named = config.get("peft_type")
        if not isinstance(named, str) or named not in kinds:
            return {"peft_type": named}
        kind = kinds[named]
    defaults = {}
    for field in dataclasses.fields(kind):
        make = field.default_factory
        defaults[field.name] = field.default if make is dataclasses.MISSING else make()
    known = (name for name in defaults if name in given and name not in OF_PEFT)
    return {name: given[name] for name in known if given[name] != defaults[name]}


def _speaks_of(text: str, option: str, value: Any) -> bool:
    words = [option, *(str(each) for each in _leaves(value) if each is not None and not isinstance(each, bool))]
    return any(re.search(rf"(?<![\w.]){re.escape(word)}(?![\w.])", text) for word in words if word)


def _leaves(value: Any) -> Iterator[Any]:
    """The values in lists, sets and mappings, at any depth; keys too."""
    if isinstance(value, Mapping):
        yield from value
        value = value.values()
    elif isinstance(value, str) or not isinstance(value, list | tuple | set | frozenset):
        yield value
        return
    for each in value:
        yield from _leaves(each)
