"""Models loaded from their weights alone: what `from_pretrained` would fill in at random is refused, with its names.

transformers draws a weight that a model's files do not hold from its initial distribution, prints a table, and goes on.
Such a model trains, and its numbers look like those of a bad learning rate. Here only what is meant to be new may be:
a reward model's head over the weights of a language model, and what `ignore_mismatched_sizes=True` asks for. Both are
said.
"""

from __future__ import annotations

import contextlib
import logging
import re
import warnings
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from peft import PeftConfig
from safetensors import safe_open
from transformers import PreTrainedModel

from lowtide.compat.bitsandbytes import stacks_in_4_bits
from lowtide.compat.transformers import note_loaded_adapters
from lowtide.compat.transformers_loading import telling_what_was_read
from lowtide.engine.heads.value import TURNS_FILE, TURNS_READ
from lowtide.engine.virtual_tokens import kind_of_prompt
from lowtide.engine.weights.adapter_errors import check_values, options_named
from lowtide.engine.weights.load_errors import arguments_named, to_install
from lowtide.engine.weights.places import named_base
from lowtide.engine.weights.weight_files import broken_files_named, read_json, stored_as_whole_numbers
from lowtide.ops.layers.stacks import shapes_of_stacks
from lowtide.ops.mapped import FilePages

logger = logging.getLogger(__name__)

ADAPTER_CONFIG, MODEL_CONFIG = "adapter_config.json", "config.json"
NEW = "_lowtide_new_weights"
"""The attribute of a model that names its weights that began with random values."""
LAST_LAYER = re.compile(r"model\.(score|classifier|classifier\.out_proj)\.weight$")
"""The names of the layer that gives logits of labels, in the files of adapters."""
SHOWN = 4
"""Names in a message."""
JOINED = re.compile(r"on tensors destined for (\S+)\. Ckpt contains")
"""How transformers names a weight that it joins from several of the files'."""


def load_complete(kind: Any, name: str, *, new_head: bool = False, **init: Any) -> PreTrainedModel:
    """`kind.from_pretrained(name, **init)`, all of whose weights come from files.

    Args:
        kind: a class of transformers with `from_pretrained`.
        name: a folder or a name on the hub. A folder of adapters is put on the model that it names.
        new_head: whether weights outside of the model's body may be new: the head of a reward model.

    Raises:
        ValueError: weights are missing or of another shape; or a file cannot be read. Names the weights, or the file.
    """
    base = base_of_adapters(name)
    if base is not None:
        model = load_complete(kind, base, new_head=new_head, **init)
        _put_adapters(name, model)
        return model
    with (
        quiet_report(name),
        broken_files_named(name),
        arguments_named(name, init),
        telling_what_was_read(FilePages().let_go),
        stacks_in_4_bits() if init.get("quantization_config") is not None else contextlib.nullcontext(),
    ):
        model, found = kind.from_pretrained(
            name, **{**init, "output_loading_info": True, "ignore_mismatched_sizes": True}
        )
    _check_found(name, model, found, new_head=new_head, accepts=bool(init.get("ignore_mismatched_sizes")))
    _check_stored(name, model)
    return model


def _check_found(name: str, model: Any, found: dict[str, Any], *, new_head: bool, accepts: bool) -> None:
    """Refuses weights that were drawn at random, but for those that are meant to be; says which these are."""
    body = f"{model.base_model_prefix}."
    of_body = new_head and type(model).__name__ not in (getattr(model.config, "architectures", None) or ())
    pooler = f"{body}pooler."  # a part of the head, which language models do without
    outside = (key for key in found["missing_keys"] if not key.startswith(body) or key.startswith(pooler))
    new = sorted(outside if of_body else ())
    missing = sorted(set(found["missing_keys"]) - set(new))
    if missing:
        raise ValueError(
            f"model {name!r} is incomplete: its files hold no {some_of(missing)}, which would be trained from random "
            f"values. Copy or download the whole folder again, or save it again with all weights of a "
            f"{type(model).__name__}"
        )
    shapes = sorted((key, tuple(stored), tuple(own)) for key, stored, own in found["mismatched_keys"])
    if shapes and not accepts:
        listed = [f"{key} (stored {stored}, the model's {own})" for key, stored, own in shapes]
        raise ValueError(
            f"model {name!r} does not fit its config.json: {some_of(listed)}, which would be trained from random "
            "values. Correct config.json, or set ignore_mismatched_sizes=True in model_init_kwargs to have them new"
        )
    unused = sorted(key for key in found["unexpected_keys"] if not new_head or key.startswith(body))
    if unused:
        logger.warning(f"model {name!r}: {type(model).__name__} has no place for {some_of(unused)}, which are not used")
    new += [key for key, _, _ in shapes]
    vars(model)[NEW] = tuple(new)
    if new:
        logger.warning(f"model {name!r}: {some_of(new)} is new: it begins with random values")


def _check_stored(name: str, model: Any) -> None:
    """Refuses weights that files hold as whole numbers, as quantized ones, where the config says nothing of that."""
    if getattr(model, "hf_quantizer", None) is not None:
        return
    own = dict(model.named_parameters())
    whole = [key for key in stored_as_whole_numbers(name) if key in own and own[key].is_floating_point()]
    if whole:
        raise ValueError(
            f"model {name!r}: {some_of(whole)} is stored as whole numbers, and its config.json says no "
            "quantization_config that tells what they stand for: save it again with weights of a floating-point dtype"
        )


def new_modules(model: Any) -> list[str]:
    """The modules of a loaded model that began with random values, by their names in the model or in its body."""
    names = (name.removeprefix(f"{model.base_model_prefix}.") for name in vars(model).get(NEW, ()))
    return sorted({name.split(".")[0] for name in names})


def some_of(names: Collection[str]) -> str:
    """The first few of some names, and how many more there are."""
    first = ", ".join(list(names)[:SHOWN])
    return first if len(names) <= SHOWN else f"{first} and {len(names) - SHOWN:,} more"


# -- adapters ----------------------------------------------------------------------------------------------------------


def base_of_adapters(name: str) -> str | None:
    """The model that a folder of adapters was trained on; None for the folder of a model."""
    config = Path(name, ADAPTER_CONFIG)
    if not config.is_file() or Path(name, MODEL_CONFIG).is_file():
        return None
    base = named_base(read_json(config), config)
    if base is None:
        raise ValueError(f"{config} does not say which model its adapters were trained on (base_model_name_or_path)")
    if Path(base).resolve() == Path(name).resolve():
        raise ValueError(f"{config} names its own folder as the model that its adapters were trained on")
    check_no_adapters(base, str(config))
    check_package_of(name)
    return base


def check_no_adapters(base: str, by: str) -> None:
    """Refuses a folder of adapters in the place of the model that others are put on: they would be put on twice, or in
    the place of those.

    Args:
        by: what names it.
    """
    if Path(base, ADAPTER_CONFIG).is_file() and not Path(base, MODEL_CONFIG).is_file():
        raise ValueError(
            f"{by} names {base!r} as the model, which is a folder of adapters itself: name the model that those were "
            "trained on, or merge them into it first (lowtide merge)"
        )


def check_package_of(name: str) -> None:
    """Refuses a folder of adapters of a kind whose package is not installed, before weights are loaded.

    Raises:
        ValueError: names the package and how to install it.
    """
    if not Path(name, ADAPTER_CONFIG).is_file():
        return
    try:
        PeftConfig.from_pretrained(name)
    except ImportError as error:
        raise ValueError(
            f"the adapters in {name!r} need a package that is not installed: {to_install(error)}"
        ) from error
    except Exception:  # what else is wrong with the folder is said as it is loaded
        return


def _put_adapters(name: str, model: PreTrainedModel) -> None:
    """Puts a folder's adapters into a model, all of whose weights come from the folder.

    PEFT reads them: transformers' own reader knows some kinds (DoRA, AdaLoRA, VeRA) by other names or not at all.

    Raises:
        ValueError: as `load_adapters`, or they are no part of the model's layers.
    """
    kind = kind_of_prompt(load_adapters(model, name).active_peft_config)
    if kind is not None:
        raise ValueError(
            f"the adapters in {name!r} are virtual tokens ({kind}), which stand before the rows that PEFT's model gets "
            "and are in no layer of the model: load them by peft.PeftModel.from_pretrained"
        )
    note_loaded_adapters(model)


@contextlib.contextmanager
def _adapters_named(name: str, model: PreTrainedModel) -> Iterator[None]:
    """Around PEFT's loading of a folder of adapters: a failure names the file or the option at fault.

    Raises:
        ValueError: the folder has no weights or a configuration with values that are none, or PEFT failed.
    """
    folder = Path(name)
    if folder.is_dir() and not any(folder.glob("adapter_model*")):
        raise ValueError(f"the folder of adapters {name!r} holds no adapter_model.safetensors: copy the whole folder")
    config = read_json(folder / ADAPTER_CONFIG) if (folder / ADAPTER_CONFIG).is_file() else {}
    check_values(config)
    with options_named(config, model, name), broken_files_named(name):
        yield


def check_adapter_keys(name: str, missing: Collection[str], unexpected: Collection[str]) -> None:
    """Refuses adapters that were not loaded whole.

    Raises:
        ValueError: weights are missing from the folder `name`, or the model has no place for some of its weights.
    """
    if missing:
        raise ValueError(
            f"the adapters in {name!r} are incomplete: their files hold no {some_of(sorted(missing))}, which would "
            "keep initial values. Copy the whole folder again"
        )
    if unexpected:
        raise ValueError(
            f"the adapters in {name!r} do not belong to this model, which has no place for "
            f"{some_of(sorted(unexpected))}: name the model that they were trained on"
        )


def labels_of_adapter(folder: Path) -> int | None:
    """How many labels the head gives that was trained whole beside adapters; None where there is none."""
    for path in sorted(folder.glob("adapter_model*.safetensors")):
        with broken_files_named(str(folder)), safe_open(str(path), "pt") as file:  # type: ignore[no-untyped-call]
            found = next((name for name in file.keys() if LAST_LAYER.search(name)), None)  # noqa: SIM118
            if found is not None:
                return file.get_slice(found).get_shape()[0]
    return None


def load_adapters(base: PreTrainedModel, folder: str, *, is_trainable: bool = False) -> Any:
    """A folder's adapters on a model, all of whose weights come from the folder; to be trained, or for use alone.

    Raises:
        ValueError: a file cannot be read, or the adapters were not loaded whole.
    """
    from peft import PeftModel

    with _adapters_named(folder, base), shapes_of_stacks(base), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Found missing adapter keys")  # refused below, with their names
        model = PeftModel.from_pretrained(base, folder, is_trainable=is_trainable)
        found = model.load_adapter(folder, str(model.active_adapter), is_trainable=is_trainable)
    if kind_of_prompt(model.active_peft_config) is None:  # of virtual tokens PEFT itself looks for the weights
        check_adapter_keys(folder, found.missing_keys, found.unexpected_keys)
    if (noted := Path(folder, TURNS_FILE)).is_file():
        setattr(base.config, TURNS_READ, read_json(noted))
    return model


# -- transformers' own words -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def quiet_report(name: str) -> Iterator[None]:
    """Keeps transformers' table of missing and unused weights from the log: it is said here in a line.

    Where loading fails the table is shown, since the error speaks of it.

    Raises:
        ValueError: weights that a layer joins, such as those of experts, do not go together; names them.
    """
    sources, kept = [logging.getLogger(f"transformers.{each}") for each in ("modeling_utils", "integrations.peft")], []

    def is_other(record: logging.LogRecord) -> bool:
        is_report = "LOAD REPORT" in str(record.msg)
        if is_report:
            kept.append(record)
        return not is_report

    for source in sources:
        source.addFilter(is_other)
    try:
        yield
    except Exception as error:
        for source in sources:
            source.removeFilter(is_other)
        joined = sorted({found for record in kept for found in JOINED.findall(record.getMessage())})
        if joined:
            raise ValueError(
                f"model {name!r} is incomplete: {some_of(joined)} cannot be joined of what its files hold, some of "
                "which is missing or of another shape. Copy or download the whole folder again"
            ) from error
        for record in kept:
            logging.getLogger(record.name).handle(record)
        raise
    finally:
        for source in sources:
            source.removeFilter(is_other)
