"""What the project takes from the inside of PEFT."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast
from unittest.mock import patch

import torch
from torch import Tensor, nn

from lowtide.compat.bitsandbytes import dense_of
from lowtide.compat.torch import children_of, is_traceable_wrapper_subclass, parameters_in


def adapters_switched_off(model: Any) -> bool:
    """Whether this is inside of `disable_adapter` of a model with virtual tokens, which keeps a private flag for it."""
    return bool(getattr(model, "_adapters_disabled", False))


def own_targets(config: Any, model_type: str) -> Any:
    """The modules that PEFT adapts where a configuration names none, by the model's type: None where it knows none and
    would refuse; empty where there is nothing to choose.

    PEFT finds them itself, but loses them on the way for models whose experts it renames (Mixtral, PEFT 0.21).
    """
    from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING

    known = getattr(PEFT_TYPE_TO_TUNER_MAPPING.get(config.peft_type), "target_module_mapping", None)
    named = getattr(config, "target_modules", None) or getattr(config, "target_parameters", None)
    return () if named or not known else known.get(model_type)


def refused_modules(config: Any, model: nn.Module) -> list[str]:
    """The ends of names of linear layers that PEFT refuses to adapt in a model: a Mamba layer's `out_proj`, whose
    weight its fast kernels read themselves."""
    from peft.tuners.tuners_utils import _check_lora_target_modules_mamba

    found = []
    for end in sorted({name.rpartition(".")[2] for name, each in model.named_modules() if isinstance(each, nn.Linear)}):
        try:
            _check_lora_target_modules_mamba(config, model, end)
        except ValueError:
            found.append(end)
    return found


def gradients_are_noted(model: nn.Module) -> bool:
    """Whether PEFT's `preprocess_loraga` was called on a model, which leaves gradients at its layers for LoRA-GA."""
    return any(hasattr(module, "_peft_loraga_grad") for module in model.modules())


def trained_tokens(module: Any) -> Any:
    """PEFT's layer that trains the rows of some tokens of a module (`trainable_token_indices`); None where it has none.

    Its own `weight` is a copy of the whole matrix with these rows in it, which is made anew each time it is asked for.
    """
    layer = getattr(module, "token_adapter", module)
    return layer if hasattr(layer, "trainable_tokens_delta") else None


def under_trained_tokens(module: Any) -> Any:
    """The module whose rows of some tokens are trained; the module itself where none are."""
    layer = trained_tokens(module)
    return module if layer is None else layer.get_base_layer()


def tokens_switched_on(layer: Any) -> list[str]:
    """The adapters whose rows stand in place of the base's in a forward."""
    return (
        [] if layer.disable_adapters or layer.merged else [a for a in layer.active_adapters if a in layer.token_indices]
    )


def rows_of_tokens(layer: Any, adapter: str) -> tuple[list[int], Tensor]:
    """(the tokens, their rows) of an adapter."""
    return list(layer.token_indices[adapter]), layer.trainable_tokens_delta[adapter]


def cast_unless(model: nn.Module, taken: Callable[[nn.Module, Tensor], bool]) -> None:
    """Has the LoRA layers of a model take activations as they come, where `taken` says so of a layer and them.

    Elsewhere PEFT casts them to the adapter's dtype. Variants (DoRA), which compute with what they get, are left alone.
    """

    def cast(self: Any, x: Any, dtype: Any) -> Any:
        takes = isinstance(x, Tensor) and not getattr(self, "lora_variant", None) and taken(self, x)
        return x if takes else type(self)._cast_input_dtype(self, x, dtype)

    for module in model.modules():
        layer: Any = module
        if isinstance(getattr(layer, "lora_A", None), nn.ModuleDict) and hasattr(layer, "_cast_input_dtype"):
            layer._cast_input_dtype = types.MethodType(cast, layer)


def linears_beside_adapters(module: nn.Module) -> Iterator[nn.Linear]:
    """The linear layers below a module, those that have adapters among them; not those that adapters are made of, nor
    what a copy that is trained stands in place of (`modules_to_save`)."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    for name, child in module.named_children():
        if isinstance(child, AuxiliaryTrainingWrapper) or (isinstance(module, BaseTunerLayer) and name != "base_layer"):
            continue
        if type(child) is nn.Linear:
            yield child
        else:
            yield from linears_beside_adapters(child)


def adapters_that_read_weights(model: nn.Module) -> str | None:
    """What adapters of linear layers compute with the weights themselves, by the name of their class; None where all
    are LoRA's, beside a product."""
    from peft.tuners.lora import LoraLayer
    from peft.tuners.tuners_utils import BaseTunerLayer

    for module in model.modules():
        layer: Any = module
        if not isinstance(layer, BaseTunerLayer) or not isinstance(layer.get_base_layer(), nn.Linear):
            continue
        if not isinstance(layer, LoraLayer) or hasattr(layer, "parameter_name"):
            return type(layer).__name__
        if layer.lora_variant:
            return type(next(iter(layer.lora_variant.values()))).__name__
    return None


class PlainLora(NamedTuple):
    """An adapter of a linear layer that is on, and nothing but two matrices, a scale and dropout."""

    first: Tensor
    second: Tensor
    scale: float
    dropout: nn.Module


def has_adapters(module: nn.Module) -> bool:
    """Whether a module is a layer of PEFT around another."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return isinstance(module, BaseTunerLayer)


def is_trained_beside(module: nn.Module) -> bool:
    """Whether a module is PEFT's around one that is trained as a whole beside adapters, or of which rows are."""
    from peft.utils.other import AuxiliaryTrainingWrapper

    return isinstance(module, AuxiliaryTrainingWrapper)


LORA_OF_LINEAR = ("Linear", "Linear4bit")
"""The classes of PEFT's LoRA layers whose adapters are beside a matrix, as it is or in 4 bits."""


def linear_of(module: Any) -> nn.Linear | None:
    """The linear layer that is a module, or that has LoRA there; None where its weight is no plain matrix, nor one in 4
    bits."""
    from peft.tuners.lora import LoraLayer

    adapted = isinstance(module, LoraLayer) and type(module).__name__ in LORA_OF_LINEAR
    base: Any = module.base_layer if adapted else module
    if type(base) is nn.Linear:
        return None if is_traceable_wrapper_subclass(base.weight) else base
    return base if isinstance(base, nn.Linear) and dense_of(base) is not None else None


def plain_lora(module: Any) -> PlainLora | str | None:
    """The adapter that is on in a module of `linear_of`; None where none is; or why it is not plain, as a clause."""
    if not hasattr(module, "lora_A"):
        return None
    if module.disable_adapters:
        return "adapters are merged into its weights" if module.merged else None
    if module.merged:
        return None
    names = [name for name in module.active_adapters if name in module.lora_A]
    if not names:
        return None
    if len(names) > 1:
        return f"{len(names)} adapters are active at once ({', '.join(names)})"
    (name,) = names
    if name in module.lora_variant:
        return f"its adapter is a variant of LoRA ({type(module.lora_variant[name]).__name__})"
    first, second = module.lora_A[name], module.lora_B[name]
    if type(first) is not nn.Linear or type(second) is not nn.Linear or second.bias is not None:
        return "its adapter has more than two matrices"
    return PlainLora(first.weight, second.weight, module.scaling[name], module.lora_dropout[name])


def marks_of_linear(module: Any) -> list[Any]:
    """What `linear_of` and `plain_lora` go by: where each is the same object as before, they say what they said. Past
    `Module.__getattr__`, and in one list, since a fused layer asks in each forward."""
    own: dict[str, Any] = vars(module)
    children: dict[str, Any] = children_of(module)
    base = children.get("base_layer", module)
    found = [base, *parameters_in(base)]
    if "lora_A" not in children:
        return found
    active = own["_active_adapter"]
    found += (own["_disable_adapters"], bool(own["merged_adapters"]))
    found += (active,) if isinstance(active, str) else active
    second, dropouts = children_of(children["lora_B"]), children_of(children["lora_dropout"])
    for name, first in children_of(children["lora_A"]).items():
        dropout: Any = dropouts[name]
        drops = dropout.training and getattr(dropout, "p", 0.0)
        found += (*parameters_in(first), *parameters_in(second[name]), own["scaling"][name], drops)
    return found


class StackLora(NamedTuple):
    """The adapter of a stack of matrices [experts, rows, columns], which adds `left @ right` to it."""

    left: Tensor
    """[experts, rows, rank]; the scale is in it."""
    right: Tensor
    """[experts, rank, columns]."""


def adapted_stacks(model: nn.Module) -> list[Any]:
    """The layers that have adapters of stacks of experts' weights (`target_parameters`): of those around one module,
    each inside the next, the outermost."""
    layers = [module for module in model.modules() if hasattr(module, "parameter_name")]
    inner = [module.base_layer for module in layers]
    return [module for module in layers if not any(module is each for each in inner)]


def stack_loras(layer: Any) -> dict[str, StackLora] | None:
    """By the name of the parameter, the adapters that are on in a layer of `adapted_stacks` and in those inside of it;
    None where one is merged, or has more to it than two factors."""
    found: dict[str, StackLora] = {}
    while hasattr(layer, "parameter_name"):
        names = [] if layer.disable_adapters else [name for name in layer.active_adapters if name in layer.lora_A]
        if layer.merged or len(names) > 1 or layer.num_experts == 1:
            return None
        for name in names:
            first, second = layer.lora_A[name].weight, layer.lora_B[name].weight
            first = first.reshape(layer.num_experts, -1, first.shape[1])
            second = second.reshape(second.shape[0], -1, layer.num_experts).permute(2, 0, 1) * layer.scaling[name]
            swapped = getattr(layer, "_did_swap_in_out_features", False)  # the stack is [experts, out, in]
            found[layer.parameter_name] = StackLora(*((second, first) if swapped else (first.mT, second.mT)))
        layer = layer.base_layer
    return found


@contextlib.contextmanager
def caches_kept(tuner: Any) -> Iterator[None]:
    """A layer's small cache is afterwards as it was: a merge that is only looked at leaves nothing in it (DoRA's
    norm of the weights, for one)."""
    caches: dict[str, Any] | None = getattr(tuner, "_caches", None)
    before = None if caches is None else dict(caches)
    try:
        yield
    finally:
        if before is not None:
            tuner._caches = before


@contextlib.contextmanager
def without_bitsandbytes() -> Iterator[None]:
    """While it lasts, PEFT takes bitsandbytes to be absent, and does not import it to ask whether a layer is of it.

    For models in which no layer is: the import takes a second. Each kind of adapter asks by a name of its own.
    """
    import peft.tuners

    with contextlib.ExitStack() as stack:
        for name in ("is_bnb_available", "is_bnb_4bit_available"):
            for module in [each for key, each in sys.modules.items() if key.startswith(f"{peft.tuners.__name__}.")]:
                if name in vars(module):
                    stack.enter_context(patch.object(module, name, lambda: False))
        yield


@contextlib.contextmanager
def adapter_active(model: nn.Module, name: str) -> Iterator[None]:
    """Has one adapter active in the layers that have it, and none in the others.

    PEFT's `set_adapter` also makes all other adapters untrained, and neither optimizer, hooks nor ranks expect that.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    before: list[tuple[Any, Any]] = []
    for module in model.modules():
        if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
            before.append((module, module._active_adapter))
    try:
        for module, _ in before:
            has_it = isinstance(module, BaseTunerLayer) or name in module._adapters
            module._active_adapter = [name] if has_it else []
        yield
    finally:
        for module, active in before:
            module._active_adapter = active


@contextlib.contextmanager
def same_weights_trained(model: nn.Module) -> Iterator[None]:
    """What is trained stays so, and what is frozen too.

    PEFT makes all adapters but the active one untrained when it sets one, switches adapters on again or loads one, and
    all of the active one trained, parts of it that were frozen (LoRA-FA) among them.
    """
    trained = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        yield
    finally:
        for parameter, was in trained:
            if parameter.requires_grad != was:
                parameter.requires_grad_(was)


def parameters_of_adapters(model: nn.Module) -> set[nn.Parameter]:
    """The parameters that have no effect while adapters are off: those of adapters of every kind, of modules that are
    trained whole beside them, and virtual tokens; not those of the base, such as biases that are trained with it."""
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    found: set[nn.Parameter] = set()
    for module in model.modules():
        if isinstance(module, AuxiliaryTrainingWrapper):
            base = {*module.original_module.parameters()}
            found |= {p for p in module.parameters() if p not in base}
        elif isinstance(module, BaseTunerLayer):
            parts = [getattr(module, name, None) for name in module.adapter_layer_names]
            found |= {p for part in parts if isinstance(part, nn.Module) for p in part.parameters()}
        elif isinstance(module, PeftModel) and isinstance(getattr(module, "prompt_encoder", None), nn.Module):
            found |= {*module.prompt_encoder.parameters()}
    return found


def adapters_are_new(model: nn.Module) -> bool:
    """Whether a model's adapters change nothing yet: each is LoRA whose second matrix is 0, and each module that is
    trained whole is as the base's. Others may be new too, which their numbers do not tell."""
    from peft.tuners.lora import LoraLayer
    from peft.utils.other import ModulesToSaveWrapper

    known: set[nn.Parameter] = set()
    for module in model.modules():
        if isinstance(module, LoraLayer):
            seconds = [*module.lora_B.parameters(), *module.lora_embedding_B.values()]
            if module.lora_variant or any(p.detach().any() for p in seconds):
                return False
            known |= {*seconds, *module.lora_A.parameters(), *module.lora_embedding_A.values()}
        elif isinstance(module, ModulesToSaveWrapper):
            theirs = [*module.original_module.parameters()]
            for own in module.modules_to_save.values():
                if not all(torch.equal(p, q) for p, q in zip(own.parameters(), theirs, strict=True)):
                    return False
                known |= {*own.parameters()}
    return all(p in known for p in parameters_of_adapters(model) if p.requires_grad)


def merged_adapters(model: nn.Module) -> list[str]:
    """The adapters that are merged into the weights of a layer, whose forward then goes through no adapter at all."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    return sorted({name for layer in layers for name in layer.merged_adapters})


def train_beside_adapters(model: Any, name: str) -> None:
    """Trains a module of the base whole beside the adapters that are on it, and saves it with them: what PEFT makes of
    `modules_to_save` as it puts adapters on a model, and has no public name for afterwards."""
    from peft.utils.other import ModulesToSaveWrapper, _set_trainable

    adapter = model.active_adapter
    wrapper = cast(Any, ModulesToSaveWrapper)
    _set_trainable(model, adapter, module_names=[name], inference_mode=False, wrapper_cls=wrapper)
    config = model.peft_config[adapter]
    config.modules_to_save = [*(config.modules_to_save or ()), name]
