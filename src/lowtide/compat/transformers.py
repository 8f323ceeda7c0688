"""What the project takes from the inside of transformers, and which hooks of its Trainer `lowtide.trainers` overrides.

Overridden methods stay with the subclasses of `Trainer`; `HOOKS` and `USED` list them, so that
`tests/compat/test_transformers.py` can tell when transformers moves one.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import dis
import functools
import importlib
import inspect
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor, nn
from transformers import HfArgumentParser, PreTrainedConfig, masking_utils
from transformers.integrations import moe
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.vision_utils import (
    get_vision_cu_seqlens,
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
    get_vision_window_index,
)

# -- models and their configs -------------------------------------------------------------------------------------


def attention_implementation(config: Any) -> str | None:
    """The name of the attention function that a model's layers look up. There is no public reader of it."""
    return getattr(config, "_attn_implementation", None)


def set_attention(config: Any, name: str) -> None:
    """Sets it for a part of a model. The public `set_attn_implementation` takes every name with "flash" in it for a
    kernel of the hub."""
    config._attn_implementation_internal = name


def find_packed_rows_where(wanted: Callable[[], bool]) -> None:
    """Lets transformers look for packed rows among the positions only where masks are wanted. It does in every forward
    without a mask, and waits for the device to read what it found, whatever the attention function makes of it."""
    found = masking_utils.find_packed_sequence_indices

    @functools.wraps(found)
    def asked(*args: Any, **kwargs: Any) -> Tensor | None:
        return found(*args, **kwargs) if wanted() else None

    masking_utils.find_packed_sequence_indices = asked


def declare_tied(model: nn.Module, tied: dict[str, str]) -> None:
    """Tells `save_pretrained` of weights that are the same ones as others; it refuses those that it does not know of.

    Args:
        tied: by the name that is left out, the one that is saved.
    """
    whole: Any = model
    whole._tied_weights_keys = {**(whole._tied_weights_keys or {}), **tied}
    whole.all_tied_weights_keys = {**(getattr(whole, "all_tied_weights_keys", None) or {}), **tied}


def kept_wide(model: nn.Module) -> set[str]:
    """Names of modules that a model keeps in float32, and casts its activations to the dtype of (T5's `wo`)."""
    kept: Any = model
    return {*(kept._keep_in_fp32_modules or ()), *(kept._keep_in_fp32_modules_strict or ())}


def names_not_saved(model: nn.Module) -> set[str]:
    """The names of a model's `state_dict` that `save_pretrained` leaves out."""
    return set(getattr(model, "_keys_to_ignore_on_save", None) or ())


def loads(auto_class: Any, config: Any) -> bool:
    """Whether an auto class has a model class for a config, of transformers or in the code that comes with it."""
    return type(config) in auto_class._model_mapping or auto_class.__name__ in (getattr(config, "auto_map", None) or {})


def has_loaded_adapters(model: nn.Module) -> bool:
    """Whether `from_pretrained` put adapters into a model because its folder has some."""
    return bool(getattr(model, "_hf_peft_config_loaded", False))


def note_loaded_adapters(model: nn.Module) -> None:
    """Notes that adapters were put into a model, as `from_pretrained` does."""
    model._hf_peft_config_loaded = True  # type: ignore[assignment]


def load_balancing_loss(model: nn.Module, router_logits: Any, experts: int, chosen: int, mask: Any) -> Tensor:
    """The auxiliary loss of a mixture of experts, by the function of the model's own file, which is no part of an API.

    Args:
        model: one that `balances_experts`.
        router_logits: of each layer, [tokens, experts].
        experts: of a layer.
        chosen: experts for each token.
        mask: [rows, longest], or None where all tokens are real.
    """
    function = _balancing_function(model)
    assert function is not None
    return function(router_logits, experts, chosen, mask)


def balances_experts(model: nn.Module) -> bool:
    """Whether transformers has a load-balancing loss for a model, and the model has experts that it is of: many configs
    say `output_router_logits` of a model without (llama4, Doge's dense form)."""
    return _balancing_function(model) is not None and any(isinstance(m, _routers(model)) for m in model.modules())


def _balancing_function(model: nn.Module) -> Callable[..., Tensor] | None:
    """None also for one that reads routers of another form (Doge's product keys)."""
    files: list[Any] = [
        sys.modules[kind.__module__] for kind in type(model).__mro__
    ]  # a sharded model's class is torch's
    functions = (getattr(each, "load_balancing_loss_func", None) for each in files)
    found = next((each for each in functions if each is not None), None)
    if found is None or [*inspect.signature(found).parameters] != BALANCED:
        return None
    return found


BALANCED = ["gate_logits", "num_experts", "top_k", "attention_mask"]
"""The parameters of `load_balancing_loss_func`."""


def _routers(model: nn.Module) -> tuple[type, ...]:
    """The classes whose outputs transformers records as `router_logits`."""
    tables = (getattr(m, "_can_record_outputs", None) or {} for m in model.modules())
    recorded = (each for table in tables for each in _listed(table.get("router_logits")))
    return tuple({getattr(each, "target_class", each) for each in recorded})


def _listed(value: Any) -> list[Any]:
    return [] if value is None else value if isinstance(value, list) else [value]


# -- rotary embeddings that depend on the length of the row -------------------------------------------------------

BY_LENGTH = ("dynamic", "longrope")
"""Kinds of rotary embeddings whose frequencies are others for longer rows. A decorator of transformers takes the length
of a row from the longest position of a forward, and sets the module's frequencies for all of its rows."""


def rotary_kinds(module: nn.Module) -> dict[str | None, str]:
    """The kinds of `BY_LENGTH` among what a module makes, by kind of layer (None: of all); empty for other modules."""
    kinds = getattr(module, "rope_type", None)
    kinds = kinds if isinstance(kinds, dict) else {None: kinds}
    return {layers: kind for layers, kind in kinds.items() if kind in BY_LENGTH}


def rotary_limit(module: Any, layers: str | None) -> int:
    """The longest row that has the frequencies of short ones."""
    if rotary_kinds(module)[layers] == "dynamic":
        return int(module.original_max_seq_len)
    return int(_rotary_options(module, layers)["original_max_position_embeddings"])


def rotary_table(module: nn.Module, length: int, layers: str | None) -> int:
    """Tells rows that have other frequencies apart: the same for rows of equal ones."""
    limit = rotary_limit(module, layers)
    by_factor = rotary_kinds(module)[layers] == "dynamic"
    return max(length, limit) if by_factor else limit + (length > limit)


def rotary_of_length(
    module: Any, length: int, x: Tensor, position_ids: Int[Tensor, "... tokens"], layers: str | None
) -> Any:
    """What a module makes for rows of a length, by its class's forward without the decorator.

    Args:
        module: one that `rotary_kinds` has kinds of.
        x: its dtype and device are those of what is made.
        position_ids: those that are wanted, of rows of this length.
    """
    name = "inv_freq" if layers is None else f"{layers}_inv_freq"
    before = getattr(module, name)
    with torch.no_grad():
        setattr(module, name, _rotary_frequencies(module, length, x.device, layers).to(x.device))
        try:
            return inspect.unwrap(type(module).forward)(module, x, position_ids, *([] if layers is None else [layers]))
        finally:
            setattr(module, name, before)


def _rotary_options(module: Any, layers: str | None) -> dict[str, Any]:
    options = module.config.rope_parameters
    return options if layers is None else options[layers]


def _rotary_frequencies(module: Any, length: int, device: torch.device, layers: str | None) -> Tensor:
    """[frequencies] of rows of a length; the module's own, of a new one, for short ones."""
    kind, limit = rotary_kinds(module)[layers], rotary_limit(module, layers)
    usual: Tensor = getattr(module, "original_inv_freq" if layers is None else f"{layers}_original_inv_freq")
    if length <= limit:
        return usual
    given = {} if layers is None else {"layer_type": layers}
    if kind == "dynamic":  # a tensor, as the decorator has it: a number would be computed with in float64
        return ROPE_INIT_FUNCTIONS[kind](module.config, device, seq_len=torch.tensor(length), **given)[0]
    return ROPE_INIT_FUNCTIONS[kind](module.config, device, seq_len=limit + 1, **given)[0].to(usual.dtype)


@contextlib.contextmanager
def rotary_limits_lowered(model: nn.Module, limit: int) -> Iterator[None]:
    """While it lasts, rows above a limit have the frequencies of long ones, in the model's own forward too: so a proof
    needs no row of thousands of tokens."""
    found = [(module, layers, kind) for module in model.modules() for layers, kind in rotary_kinds(module).items()]
    changed: list[tuple[Any, str, Any]] = []

    def lower(owner: Any, name: str) -> None:
        held = owner if isinstance(owner, dict) else vars(owner)
        if name in held:
            changed.append((held, name, held[name]))
            held[name] = limit

    for module, layers, kind in found:
        if kind == "longrope":
            lower(module.config, "original_max_position_embeddings")  # some configs write it over the other again
            lower(_rotary_options(module, layers), "original_max_position_embeddings")
        else:
            for owner, name in ((module, "original_max_seq_len"), (module.config, "max_position_embeddings")):
                lower(owner, name)
            _forget_rows(module, layers)
    try:
        yield
    finally:
        for held, name, before in reversed(changed):
            held[name] = before
        for module, layers, kind in found:
            if kind == "dynamic":
                _forget_rows(module, layers)


def _forget_rows(module: Any, layers: str | None) -> None:
    """Sets a module back to what it was before it saw a row: the decorator keeps the longest of them."""
    prefix = "" if layers is None else f"{layers}_"
    setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)
    setattr(module, f"{prefix}inv_freq", getattr(module, f"{prefix}original_inv_freq"))


# -- vision towers ------------------------------------------------------------------------------------------------


PACKS_PATCHES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
"""Model types whose vision tower takes the patches of all images end to end, and all that `packed_layout` works out."""


def packed_layout(tower: Any, grid: Int[Tensor, "images 3"]) -> dict[str, Any]:
    """What the vision tower of a model type of `PACKS_PATCHES` works out from the sizes of images, as its arguments:
    else it reads them off the device.

    Args:
        grid: patches of each image in time, height and width.
    """
    config = tower.config
    bounds = {"cu_seqlens": get_vision_cu_seqlens(grid)}
    found: dict[str, Any] = {"position_ids": get_vision_position_ids(grid, config.spatial_merge_size), **bounds}
    found["max_seqlen"] = int(bounds["cu_seqlens"].diff().max())
    if getattr(config, "fullatt_block_indexes", None) is not None:
        sizes = config.spatial_merge_size, config.window_size, config.patch_size
        found["window_index"], found["cu_window_seqlens"] = get_vision_window_index(grid, *sizes)
        found["max_window_seqlen"] = int(found["cu_window_seqlens"].diff().max())
    if (side := getattr(tower, "num_grid_per_side", None)) is not None:
        found["interp_indices"], found["interp_weights"] = get_vision_interpolation_indices_and_weights(
            grid,
            num_grid_per_side=side,
            mode=tower.interpolation_mode,
            align_corners=tower.interpolation_align_corners,
            spatial_merge_size=config.spatial_merge_size,
        )
    return found


PREFIX_MODELS = ("paligemma", "pi0")
"""Model types that were trained to attend in both directions within a prompt, which their processor marks."""


def attends_both_ways(config: Any) -> bool:
    """Whether the image tokens of a model type that is known attend to each other in both directions: its forward makes
    masks of what the processor says of each token."""
    text = config.get_text_config()
    return config.model_type in ("gemma3", "shieldgemma2", "molmo2") or (
        getattr(text, "use_bidirectional_attention", None) == "vision"
    )


def attends_both_ways_in_prompts(config: Any) -> bool:
    """Whether a model attends in both directions within a prompt (a prefix language model)."""
    return config.model_type in PREFIX_MODELS or bool(getattr(config.get_text_config(), "prefix_lm", False))


# -- gradient checkpointing ---------------------------------------------------------------------------------------


def checkpointed_layers(model: nn.Module) -> list[GradientCheckpointingLayer]:
    """The layers that transformers can checkpoint, in order."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def checkpoint_by(layer: Any, function: Callable[..., Any]) -> None:
    """Sets the function that runs a layer's forward where it is checkpointed.

    `gradient_checkpointing_enable` sets one for all layers, and knows neither policies nor every second layer.
    """
    layer._gradient_checkpointing_func = function


def run_checkpointed(layer: Any, forward: Callable[..., Any], *args: Any) -> Any:
    """Runs a forward by the function that checkpoints a layer: for one that is compiled."""
    return layer._gradient_checkpointing_func(forward, *args)


CACHES = ("past_key_values", "cache", "cache_params")
"""The arguments of layers that hold what they keep of earlier tokens: 5.24 calls the first `cache`."""


def holds_cache(kwargs: Mapping[str, Any]) -> bool:
    """Whether the arguments of a layer have what is kept of earlier tokens."""
    return any(kwargs.get(name) is not None for name in CACHES)


WRAPPER = "forward_with_checkpointing"
"""What transformers calls the function that it wraps around the forward of a layer that can be checkpointed."""


def plain_forward(layer: nn.Module) -> Callable[..., Any]:
    """The forward of a layer's class without that wrapper, which no graph of the compiler could pass."""
    forward = type(layer).forward
    while forward.__code__.co_name == WRAPPER:
        forward = forward.__wrapped__  # type: ignore[attr-defined]
    return forward


# -- options ------------------------------------------------------------------------------------------------------


def dict_fields(config: Any) -> list[str]:
    """The options of a class of `TrainingArguments` that may be given as JSON: a subclass extends them in its own
    `_VALID_DICT_FIELDS`."""
    return config._VALID_DICT_FIELDS


def state_of(config: Any) -> dict[str, Any]:
    """What `TrainingArguments` hold, without what they keep of the process: its device, and accelerate's state."""
    kept = {name: value for name, value in vars(config).items() if name != "_setup_devices"}
    return kept | {"distributed_state": None, "deepspeed_plugin": None}


def place_on(config: Any, device: torch.device) -> None:
    """Has `TrainingArguments` say that they are on a device, without starting accelerate's state for it."""
    vars(config)["_setup_devices"] = device


class FieldParser(HfArgumentParser):
    """`HfArgumentParser`, whose subclass may change how a field becomes an option: `add_field`.

    The parser has no public place for that; it calls a private method for each field.
    """

    def _parse_dataclass_field(self, parser: argparse.ArgumentParser, field: dataclasses.Field) -> None:  # type: ignore[override]
        self.add_field(parser, field)

    def add_field(self, parser: argparse.ArgumentParser, field: dataclasses.Field) -> None:
        """Adds the option of a field to a parser."""
        super()._parse_dataclass_field(parser, field)


# -- the Trainer --------------------------------------------------------------------------------------------------


class Hook(NamedTuple):
    """A method of `transformers.Trainer` that a class of `lowtide.trainers` overrides."""

    name: str
    parameters: tuple[str, ...] | None
    """As the Trainer has them, without `self`; None where ours takes any."""
    called_by: str
    """The method of the Trainer that calls it at the place where ours is needed."""
    reason: str


HOOKS = (
    Hook("_set_signature_columns_if_needed", (), "_remove_unused_columns", "rows are token ids, not text columns"),
    Hook("get_batch_samples", ("epoch_iterator", "num_batches", "device"), "_run_epoch", "a step is one batch"),
    Hook("training_step", ("model", "inputs", "num_items_in_batch"), "_run_epoch", "the step is lowtide's"),
    Hook("_clip_grad_norm", ("model",), "_run_epoch", "gradients are checked before they are clipped"),
    Hook("_determine_best_metric", ("metrics", "trial"), "_maybe_log_save_evaluate", "a metric may not be there"),
    Hook("_get_grad_norm", ("model", "grad_norm"), "_run_epoch", "gradients may be gone before they are all there"),
    Hook("_track_num_input_tokens", ("inputs",), "_run_epoch", "ragged batches have no padded shape to count"),
    Hook("floating_point_ops", ("inputs",), "_run_epoch", "ragged batches have no padded shape to count"),
    Hook(
        "_run_epoch",
        (
            *("model", "epoch", "train_dataloader", "steps_in_epoch", "num_update_steps_per_epoch", "trial"),
            *("ignore_keys_for_eval", "start_time", "resume_from_checkpoint", "epochs_trained"),
            "steps_trained_in_current_epoch",
        ),
        "_inner_training_loop",
        "an epoch's order is set in every sampler, skipped batches included",
    ),
    Hook(
        "_init_training_state",
        (
            *("max_steps", "num_update_steps_per_epoch", "num_train_epochs", "resume_from_checkpoint"),
            "trial",
        ),
        "_inner_training_loop",
        "a run that is complete does not train on",
    ),
    Hook("_get_train_sampler", ("train_dataset",), "get_train_dataloader", "the order is repeatable on any ranks"),
    Hook(
        "_get_eval_sampler", ("eval_dataset",), "get_eval_dataloader", "completions of a prompt are rows of their own"
    ),
    Hook("get_train_dataloader", (), "_inner_training_loop", "rows are collated once their completions are written"),
    Hook("get_eval_dataloader", ("eval_dataset",), "evaluate", "rows are collated once their completions are written"),
    Hook("get_test_dataloader", ("test_dataset",), "predict", "the rows of a stream are counted over ranks"),
    Hook(
        "_get_dataloader",
        ("dataset", "description", "batch_size", "sampler_fn", "is_training", "dataloader_key"),
        "get_eval_dataloader",
        "a batch of prompts is a window of completions",
    ),
    Hook("create_accelerator_and_postprocess", (), "__init__", "accelerate wraps and moves less than usual"),
    Hook("create_optimizer", ("model",), "create_optimizer_and_scheduler", "optimizers of lowtide's own"),
    Hook("get_optimizer_cls_and_kwargs", ("args", "model"), "create_optimizer", "optimizers of lowtide's own"),
    Hook(
        "create_scheduler",
        ("num_training_steps", "optimizer"),
        "create_optimizer_and_scheduler",
        "a decay may be a share of all steps",
    ),
    Hook("compute_loss", ("model", "inputs", "return_outputs", "num_items_in_batch"), "prediction_step", "own losses"),
    Hook(
        "prediction_step",
        ("model", "inputs", "prediction_loss_only", "ignore_keys"),
        "evaluation_loop",
        "own losses",
    ),
    Hook(
        "evaluation_loop",
        ("dataloader", "description", "prediction_loss_only", "ignore_keys", "metric_key_prefix"),
        "evaluate",
        "evaluation never builds logits",
    ),
    Hook("get_total_train_batch_size", ("args",), "set_initial_training_values", "ranks that split sequences are one"),
    Hook("log", ("logs", "start_time"), "_maybe_log_save_evaluate", "metrics since the last log"),
    Hook(
        "_maybe_log_save_evaluate",
        (
            *("tr_loss", "grad_norm", "model", "trial", "epoch", "ignore_keys_for_eval", "start_time"),
            "learning_rate",
        ),
        "_run_epoch",
        "a run that was told to stop saves and ends after a step",
    ),
    Hook(
        "_save_checkpoint", ("model", "trial"), "_maybe_log_save_evaluate", "a checkpoint appears whole or not at all"
    ),
    Hook("_push_from_checkpoint", ("checkpoint_folder",), "_save_checkpoint", "pushed once the folder has its name"),
    Hook("save_model", ("output_dir", "_internal_call"), "_save_checkpoint", "errors of writing are said plainly"),
    Hook("_save_optimizer_and_scheduler", ("output_dir",), "_save_checkpoint", "a reference that is kept is saved"),
    Hook("_load_optimizer_and_scheduler", ("checkpoint",), "_prepare_for_training", "states are checked first"),
    Hook("_load_from_checkpoint", ("resume_from_checkpoint", "model"), "train", "loads converted names as well"),
    Hook(
        "_finalize_training",
        ("trial", "num_train_samples", "start_time"),
        "_inner_training_loop",
        "only checkpoints that a run wrote are deleted",
    ),
    Hook("_load_best_model", (), "_finalize_training", "the best checkpoint is checked first"),
    Hook("_load_rng_state", ("checkpoint",), "_run_epoch", "a checkpoint may lack a rank's random state"),
    Hook("create_model_card", None, "push_to_hub", "the model card is lowtide's"),
)
"""Every method of the Trainer that `lowtide.trainers.hooks` overrides, but its public entry points `train`, `evaluate`
and `predict`."""


@contextlib.contextmanager
def no_checkpoints_deleted() -> Iterator[None]:
    """While it lasts, the Trainer finds no checkpoints to delete at the end of training: it would delete folders of
    such a name that no run wrote, with all that is in them."""
    from transformers import trainer as module

    trainer: Any = module
    given = trainer.sort_checkpoints
    trainer.sort_checkpoints = lambda *_, **__: []
    try:
        yield
    finally:
        trainer.sort_checkpoints = given


USED = {
    "_wrap_model": "an evaluation outside of training gets the model as the Trainer's would",
    "_save": "the weights of a sharded model are gathered first",
    "_get_output_dir": "a checkpoint is written under another name, and then gets its own",
    "_get_collator_with_removed_columns": "extra columns are left to the collator that was passed",
    "_signature_columns": "the columns that are kept, which the Trainer reads off the model's forward",
    "_train_batch_size": "rows for each device, which automatic batch sizes change",
    "_created_lr_scheduler": "tells a schedule that was passed from the Trainer's own",
}
"""Private names of the Trainer that `lowtide.trainers` reads, calls or sets on itself, and why."""


def made_own_schedule(trainer: Any) -> bool:
    """Whether the Trainer made the learning-rate schedule, and it was not passed."""
    return trainer._created_lr_scheduler


# -- layers that carry a state --------------------------------------------------------------------------------------


@functools.cache
def rebound_forward(
    kind: type[nn.Module], functions: tuple[tuple[str, Callable[..., Any]], ...]
) -> Callable[..., Any] | None:
    """A class's own forward, for which some functions of its module are others; the module stays as it is.

    Recurrent layers of transformers call what mixes tokens by functions of their file, to which they pass the keyword
    arguments that they do not know (5.18 to 5.23). Decorators around the forward are left out: they fire accelerate's
    hooks of weights that wait elsewhere.

    Args:
        functions: each with the name that the forward calls it by.

    Returns:
        None where the forward calls none of them.
    """
    return _rebound(inspect.unwrap(kind.forward), functions)


def classes_of_family(config: PreTrainedConfig) -> list[type[nn.Module]]:
    """The classes of modules in the file of a config's models; none where it is not beside that of the config."""
    try:
        file = importlib.import_module(type(config).__module__.replace("configuration_", "modeling_"))
    except ImportError:
        return []
    found = (each for each in vars(file).values() if getattr(each, "__module__", None) == file.__name__)
    return [each for each in found if isinstance(each, type) and issubclass(each, nn.Module)]


@functools.cache
def drops_keywords(kind: type[nn.Module]) -> bool:
    """Whether a class's forward takes an attention mask and any keyword arguments, and reads none of the latter: what
    its own parts should be told has to come to them as the mask (Mamba, Falcon-Mamba, Jamba; 5.18 to 5.23)."""
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    if code is None or not code.co_flags & inspect.CO_VARKEYWORDS or "attention_mask" not in code.co_varnames:
        return False
    named = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)
    keywords = code.co_varnames[named]
    read = (each.argval for each in dis.get_instructions(code) if each.opname.startswith("LOAD"))
    return not any(keywords in (each if isinstance(each, tuple) else (each,)) for each in read)


def _rebound(own: Any, functions: tuple[tuple[str, Callable[..., Any]], ...]) -> Callable[..., Any] | None:
    """The same code, for which some of the functions that it calls by their names are others; None without any."""
    called = {name: function for name, function in functions if name in own.__code__.co_names}
    if not called:
        return None
    rebound = types.FunctionType(
        own.__code__, {**own.__globals__, **called}, own.__name__, own.__defaults__, own.__closure__
    )
    rebound.__kwdefaults__ = own.__kwdefaults__
    return rebound


# -- experts ----------------------------------------------------------------------------------------------------------

GROUPED = "grouped_mm"
"""The implementation of experts that takes their products in groups of tokens, and the name of its function."""


def has_stacks(module: Any) -> bool:
    """Whether a module is the experts of a mixture, whose stacks of weights can be multiplied by groups of tokens."""
    return hasattr(module, "is_transposed") and hasattr(module, "has_gate")


def stack_names(experts: Any) -> tuple[str, str]:
    """The names of experts' two stacks of weights."""
    return "gate_up_proj" if experts.has_gate else "up_proj", "down_proj"


def are_two_products(experts: Any) -> bool:
    """Whether a module is whole experts of which each is a product, a gate or an activation, and a product."""
    return has_stacks(experts) and not experts.has_post_expert_norm and not experts._is_expert_parallel


def between_products(experts: Any, x: Tensor) -> Tensor:
    """What is between the two products of experts, of what came of the first."""
    return experts._apply_gate(x) if experts.has_gate else experts.act_fn(x)


def run_in_groups(experts: Any) -> bool:
    """Whether a module is the experts of a mixture whose stacks of weights are multiplied by groups of tokens."""
    return has_stacks(experts) and experts_implementation(experts.config) == GROUPED


def experts_implementation(config: Any) -> str | None:
    """The name of the function that computes a model's experts; the public reader is a method of models."""
    return getattr(config, "_experts_implementation", None)


def grouped_product(x: Tensor, stack: Tensor, ends: Tensor, bias: Tensor | None = None, *, transposed: bool) -> Tensor:
    """Rows that lie in groups, each times the matrix of its group.

    Args:
        x: [rows, in], sorted by group.
        stack: [groups, out, in], or [groups, in, out] if `transposed`.
        ends: [groups], where the rows of each end.
        bias: [rows, out].
    """
    return moe._grouped_linear(x, stack, ends, bias=bias, is_transposed=transposed)


@functools.cache
def grouped_experts(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The forward of experts in groups of tokens, whose products with a stack of weights are taken by a function.

    Args:
        product: of rows, stack, ends of groups, `bias` and `is_transposed`; the stack is what the experts have under
            the name of their weight.

    Returns:
        A function of the experts, [tokens, hidden], and [tokens, chosen] each for indices and weights of experts.
    """
    found = _rebound(moe.grouped_mm_experts_forward, (("_grouped_linear", product),))
    assert found is not None
    return found
