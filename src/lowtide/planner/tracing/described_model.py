"""A model made from its description, with as many layers as are traced; and whether those stand for all of them.

A trace of few layers is repeated to the model's depth. That holds where the layers in the middle have the same
parameters, adapters included, and it fails for adapters on some layers only (`layers_to_transform`, names or ranks by
layer) and for configs that mix kinds of layers. So the whole model is made as well, on torch's `meta` device, where it
takes no memory, and its layers are compared with those that are traced.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import get_hf_file_metadata, hf_hub_url
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, StrictDataclassError
from torch import Tensor, nn
from transformers import AutoConfig, PretrainedConfig
from transformers.initialization import no_init_weights

from lowtide.compat.peft import without_bitsandbytes
from lowtide.engine.adapters import add_adapter_of
from lowtide.engine.heads import check_type
from lowtide.engine.heads.head import Head
from lowtide.engine.heads.language_model import LanguageModel
from lowtide.engine.weights.complete_weights import base_of_adapters
from lowtide.engine.weights.load_errors import check_layers, one_line
from lowtide.engine.weights.loading import adapt
from lowtide.planner.tracing.following import stack_of
from lowtide.planner.tracing.substitutes.four_bit import store_in_four_bits
from lowtide.planner.tracing.unroll import MIDDLE, TRACED_LAYERS

PATHS = ("./", "../", "/", "~")
"""How names of models begin that are no names on the hub."""
Form = list[tuple[str, torch.Size, torch.dtype, bool]]
"""Of each parameter of a layer: its name there, its shape and dtype, and whether it is trained."""
_known: dict[str, bool] = {}
"""By description, whether the layers are alike: a plan asks again for each trace."""


def config_of_model(model: str | PretrainedConfig, **options: Any) -> PretrainedConfig:
    """A model's config.

    Raises:
        ValueError: there is none under this name.
    """
    if not isinstance(model, str):
        return model
    if (base := base_of_adapters(model)) is not None:
        return config_of_model(base, **options)
    there = os.path.exists(model)
    if not there and model.startswith(PATHS):
        raise ValueError(
            f"model {model!r} is a path, and there is no such folder: {Path(model).expanduser().absolute()}"
        )
    unreached = "" if there else _why_unreached(model, options.get("revision"))
    try:
        found = AutoConfig.from_pretrained(model, **options, **({"local_files_only": True} if unreached else {}))
        check_layers(found, model)
        return found
    except (OSError, ValueError, StrictDataclassError) as error:
        reason = one_line(error)
        if unreached:
            reason = f"it is not in the cache, and the hub cannot be reached ({unreached})"
        raise ValueError(f"model {model!r} has no config that can be read: {reason}") from error


def with_adapters_of(model: Any, inputs: Any) -> Any:
    """What a run is made of, with the adapters of the folder that its model names: they were trained before."""
    if not isinstance(model, str) or inputs.get("peft_config") is not None or base_of_adapters(model) is None:
        return inputs
    from peft import PeftConfig

    adapters = PeftConfig.from_pretrained(model)
    adapters.inference_mode = False  # as it was saved
    return {**inputs, "peft_config": adapters, "adapters_trained": True}


def _why_unreached(name: str, revision: str | None) -> str:
    """Why the hub does not answer, which is asked once: transformers itself asks for half a minute before it looks into
    the cache. Empty where it answers; a name that it refuses is transformers' to explain."""
    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json", revision=revision))
    except (HfHubHTTPError, HFValidationError):
        return ""
    except Exception as error:  # what the hub's client raises is of one HTTP library or another
        return str(error).strip().split("\n")[0] or type(error).__name__
    return ""


@dataclass(frozen=True)
class DescribedModel:
    """What a model is made from."""

    config: PretrainedConfig
    dtype: torch.dtype
    """Of the weights."""
    head: type[Head] = LanguageModel
    """What is read off its hidden states."""
    quantization_config: Any = None
    peft_config: Any = None
    """As the method puts it on the model; None without adapters."""
    beside: type[Head] | None = None
    """The head that has an adapter of its own beside these."""

    @property
    def layers(self) -> int:
        """How many there are."""
        return self.config.get_text_config().num_hidden_layers

    @property
    def kinds(self) -> int:
        """After how many layers their kinds repeat, as of attention: sliding, full, sliding, full."""
        kinds = getattr(self.config.get_text_config(), "layer_types", None) or [None]
        return next(turn for turn in range(1, len(kinds) + 1) if kinds == (kinds[:turn] * len(kinds))[: len(kinds)])

    def of_layers(self, layers: int) -> nn.Module:
        """The model with so many layers, on the CPU, without adapters; the trainer puts them on.

        As it is loaded, a weight is made once, in the form that it is stored in: neither a head that is tied to the
        embedding nor a weight that is quantized is ever there beside what takes its place.
        """
        with torch.device("meta"):
            model = self._made(layers)
        return materialized(model)

    def on_meta(self, layers: int) -> nn.Module:
        """The model with so many layers and its adapters, which takes no memory.

        Raises:
            ValueError: the adapters find no place in it; as PEFT says it.
        """
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the run itself will give those that concern it
            model = self._made(layers)
            if self.peft_config is None:
                return model
            with without_bitsandbytes():
                adapted = adapt(model, copy.deepcopy(self.peft_config), gradient_checkpointing=False)
            if self.beside is not None:
                add_adapter_of(adapted, self.beside)
            return adapted

    def layers_alike(self) -> bool:
        """Whether a trace of `TRACED_LAYERS` layers has the parameters of all of them.

        Raises:
            ValueError: the adapters find no place in the model.
        """
        adapters = None if self.peft_config is None else sorted(self.peft_config.to_dict().items())
        key = repr((self.config.to_json_string(use_diff=False), self.dtype, self.head.__name__, adapters, self.beside))
        if key not in _known:
            _known[key] = self._found_alike()
        return _known[key]

    def _found_alike(self) -> bool:
        whole = _forms(self.on_meta(self.layers), self.layers)
        if len(whole) != self.layers:
            return False
        try:
            few = _forms(self.on_meta(TRACED_LAYERS), TRACED_LAYERS)
        except (ValueError, IndexError):  # adapters on layers that are not among the few
            return False
        after = TRACED_LAYERS - MIDDLE - 1
        middle = whole[MIDDLE : self.layers - after]
        ends = [*whole[:MIDDLE], *whole[self.layers - after :]]
        return all(each == few[MIDDLE] for each in middle) and ends == [*few[:MIDDLE], *few[MIDDLE + 1 :]]

    def _made(self, layers: int) -> nn.Module:
        config = copy.deepcopy(self.config)
        vars(config).pop("quantization_config", None)
        text = config.get_text_config()
        text.num_hidden_layers = layers
        for name in ("layer_types", "mlp_layer_types", "no_rope_layers"):
            kept = getattr(text, name, None)
            if isinstance(kept, list) and len(kept) > layers:  # a config may count those of its own layers by itself
                setattr(text, name, kept[:layers])
        for name, value in self.head.config_values.items():
            setattr(config, name, value)
        check_type(self.head, config, config.name_or_path or config.model_type)
        with no_init_weights():  # some draw again until all values are in a range, which has no end without values
            model = self.head.loader(config).from_config(config, dtype=self.dtype)
        model.tie_weights()  # else part of what was left out
        if self.quantization_config is not None:
            store_in_four_bits(model, self.quantization_config)
        return model


def _forms(model: nn.Module, layers: int) -> list[Form]:
    """By layer; empty where the model's layers are not so many."""
    return [_form(layer.named_parameters()) for layer in stack_of(model, layers) or ()]


def _form(parameters: Iterable[tuple[str, Tensor]]) -> Form:
    return [(name, tensor.shape, tensor.dtype, tensor.requires_grad) for name, tensor in parameters]


def materialized(model: nn.Module) -> nn.Module:
    """A model of the meta device, on the CPU; tensors that are shared stay so."""
    made: dict[int, Any] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in made:
                empty = torch.empty_like(parameter, device="cpu")
                made[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            setattr(module, name, made[id(parameter)])
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty_like(buffer, device="cpu"))
    return model
