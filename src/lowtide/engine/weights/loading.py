"""Models and tokenizers from a name or path, with adapters on them; and what their weights take."""

from __future__ import annotations

import copy
import logging
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoProcessor,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from lowtide.compat.peft import gradients_are_noted, own_targets, refused_modules
from lowtide.compat.transformers import has_loaded_adapters
from lowtide.engine.heads import check_type
from lowtide.engine.heads.head import Head
from lowtide.engine.heads.language_model import WITH_IMAGES, LanguageModel
from lowtide.engine.virtual_tokens import EMBEDDED, IN_LAYERS, kind_of_prompt
from lowtide.engine.weights.adapter_errors import check_values, options_named
from lowtide.engine.weights.complete_weights import base_of_adapters, load_complete
from lowtide.engine.weights.labels import label_values
from lowtide.engine.weights.load_errors import check_layers, check_quantization, one_line, unknown_type
from lowtide.engine.weights.model_init import CODE, CONFIG, config_init
from lowtide.engine.weights.new_model import begins_at_random, new_model
from lowtide.engine.weights.places import check_config_file, check_model_place
from lowtide.engine.weights.quantized import check_torchao, is_quantized
from lowtide.engine.weights.sharded.shard_files import shards_in
from lowtide.ops.layers.stacks import expert_stacks, shapes_of_stacks
from lowtide.process.ways_out import in_python

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "auto": "auto"}


def load_model(
    name: str,
    *,
    trust_remote_code: bool = False,
    head: type[Head] = LanguageModel,
    labels: Sequence[str] = (),
    **init: Any,
) -> PreTrainedModel:
    """A model by hub name or path, in float32 unless `dtype` says otherwise.

    Args:
        head: what it is loaded with, and for; a value head is new where the weights have none.
        labels: those that a head of labels is to have; a model that has them all keeps its own.

    Raises:
        ValueError: the dtype is unknown, there is no such model, its files lack weights or cannot be read, or it
            cannot be quantized so; names what was asked for.
    """
    check_model_place(name)
    if shards_in(Path(name)) and not [*Path(name).glob("model*.safetensors")]:
        raise ValueError(
            f"model {name!r} is in a file a rank, as a sharded run saved it: `lowtide merge --checkpoint {name} "
            "--output_dir NEW` makes one model of it"
        )
    dtype = init.pop("dtype", init.pop("torch_dtype", "float32"))
    if isinstance(dtype, str):
        if dtype not in DTYPES:
            raise ValueError(f"model_init_kwargs: dtype {dtype!r} is not one of {', '.join(DTYPES)}")
        dtype = DTYPES[dtype]
    if hasattr(init.get("quantization_config"), "get_apply_tensor_subclass"):
        placed = torch.cuda.is_available() and init.get("device_map") not in (None, "cpu")
        trial_dtype = dtype if isinstance(dtype, torch.dtype) else torch.bfloat16
        check_torchao(init["quantization_config"], trial_dtype, torch.device("cuda" if placed else "cpu"))
    try:
        saved = saved_config(name, {CODE: trust_remote_code, **init})
        check_type(head, saved, name)
        values = label_values(saved, labels) if labels else {}
        init = {**head.config_values, **values, "dtype": dtype, "trust_remote_code": trust_remote_code, **init}
        if begins_at_random(name):
            return new_model(name, head, init)
        return load_complete(head.loader(saved), name, new_head=head.new_module is not None, **init)
    except OSError as error:
        raise ValueError(f"model {name!r} cannot be loaded: {_first_line(error)}") from error


def saved_config(name: str, init: Mapping[str, Any]) -> PretrainedConfig | None:
    """Of a model, loaded with the arguments of `model_init`; None of a folder of adapters."""
    check_config_file(Path(name))
    try:
        found = init.get(CONFIG) or AutoConfig.from_pretrained(name, **config_init(init))
    except RecursionError:
        raise ValueError(f"the config of model {name!r} is nested too deeply to be read") from None
    except (OSError, ValueError) as error:
        if (unknown := unknown_type(name, error)) is not None:
            raise unknown from error
        return None
    except Exception as error:  # what it holds is of other kinds than it should be
        raise ValueError(
            f"the config of model {name!r} cannot be read: {type(error).__name__}: {one_line(error)}"
        ) from error
    check_layers(found, name)
    check_quantization(found, name)
    return found


def said_problem(model: Any, init: Mapping[str, Any]) -> str | None:
    """What a model's config says that labels are; of a model that is there also that one label alone is a value, as
    transformers reads it.

    Args:
        model: or its name, of which the config is read.
        init: the arguments that it is loaded with, as `model_init` gives them.
    """
    if isinstance(model, str):
        return init.get("problem_type") or getattr(saved_config(model, init), "problem_type", None)
    config: Any = model.config
    return config.problem_type or ("regression" if config.num_labels == 1 else None)


def load_tokenizer(name: str, *, trust_remote_code: bool = False, revision: str | None = None) -> Any:
    """The tokenizer of a model, by hub name or path; of a vision-language model its processor; of a folder of adapters
    that was saved without one, as PEFT saves it, the tokenizer of the model that they were trained on.

    Raises:
        ValueError: there is none; says how to pass one.
    """
    how: dict[str, Any] = {"trust_remote_code": trust_remote_code, "revision": revision or "main"}
    saved_without = os.path.isdir(name) and not any(Path(name).glob("*token*"))
    if saved_without and (base := base_of_adapters(name)) is not None:
        name = base
    config = saved_config(name, how)
    try:
        if getattr(config, "model_type", None) in WITH_IMAGES:
            return AutoProcessor.from_pretrained(name, **how)
        made = AutoTokenizer.from_pretrained(name, **how)
        if _is_made_up(made, name):
            raise ValueError("there is no vocabulary")
        if getattr(made, "is_fast", False):
            made("a")  # a vocabulary without what stands for unknown words fails
        return made
    except (MemoryError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # among them what files that hold no tokenizer lead to, and Rust's panics
        raise ValueError(
            f"no tokenizer at {name!r}: save one beside the model{in_python(', or pass it as `processing_class`')} "
            f"({'' if isinstance(error, OSError | ValueError) else type(error).__name__ + ': '}{_first_line(error)})"
        ) from error


def _is_made_up(tokenizer: PreTrainedTokenizerBase, name: str) -> bool:
    """Whether transformers made a tokenizer of special tokens alone out of a folder that has none."""
    only_special = len(tokenizer.get_vocab()) <= len(tokenizer.all_special_ids)
    return only_special and not any(Path(name).glob("*token*")) and not any(Path(name).glob("*vocab*"))


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0]


def adapt(
    model: nn.Module,
    peft_config: Any,
    *,
    gradient_checkpointing: bool,
    checkpointing_kwargs: Mapping[str, Any] | None = None,
) -> nn.Module:
    """The model with the adapters of a PEFT configuration, the rest of it frozen.

    Adapters are in float32 over half-precision and quantized bases (PEFT's `autocast_adapter_dtype`). The base stays
    as it is stored: PEFT's `prepare_model_for_kbit_training` would copy every parameter that is not quantized to
    float32, embedding and head of vocab x hidden among them, and widen the activations behind each norm. Norms compute
    in float32 inside in any case, and their frozen weights lose nothing in the dtype that they were loaded in.

    Args:
        checkpointing_kwargs: of `torch.utils.checkpoint.checkpoint`; with `use_reentrant`, which passes a gradient on
            only to inputs that require one, the embedding's output is made to.

    Raises:
        ValueError: the model has adapters already, these are virtual tokens, or PEFT cannot make them.
    """
    from peft import get_peft_model

    if has_adapters(model):
        raise ValueError(
            "the model has adapters already, and new ones are asked for: merge them first (`lowtide merge`), or leave "
            f"use_peft{in_python(' or `peft_config`')} out to train those that are there"
        )
    check_adapters(peft_config)
    base = cast(PreTrainedModel, model)
    with shapes_of_stacks(base):
        peft_config = _without_refused(_with_targets(_with_experts(peft_config, base), base), base)
        if gradient_checkpointing and (checkpointing_kwargs or {}).get("use_reentrant"):
            base.enable_input_require_grads()
        _warn_of_unmatched(peft_config, base)
        _warn_of_values(peft_config, base)
        with options_named(peft_config, base):
            adapted = get_peft_model(base, copy.copy(peft_config))  # the caller's own stays as it is
        if getattr(peft_config, "target_modules", None) == "all-linear":
            _tell_of_frozen_experts(adapted)
    tell_of_whole_experts(adapted)
    return adapted


def _warn_of_unmatched(peft_config: Any, model: nn.Module) -> None:
    """Names the modules and parameters to adapt that are not there, which PEFT passes over where others are."""
    there = {
        "target_modules": ("module", [f".{name}" for name, _ in model.named_modules()]),
        "target_parameters": ("parameter", [f".{name}" for name, _ in model.named_parameters()]),
    }
    given = {option: getattr(peft_config, option, None) for option in there}
    asked = [
        (option, each) for option, names in given.items() if not isinstance(names, str) for each in sorted(names or ())
    ]
    missing = [(option, each) for option, each in asked if not any(n.endswith(f".{each}") for n in there[option][1])]
    if len(missing) == len(asked) and not isinstance(given["target_modules"], str):
        return  # PEFT refuses to adapt nothing
    for option, (what, _) in there.items():
        if names := [repr(each) for kind, each in missing if kind == option]:
            logger.warning(
                f"{option} names {', '.join(names)}, and {type(model).__name__} has no such {what}: no adapter is made "
                "for it"
            )


def _warn_of_values(peft_config: Any, model: PreTrainedModel) -> None:
    """Says what is unwise in the values of a configuration, which PEFT takes without a word."""
    layers = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    chosen = getattr(peft_config, "layers_to_transform", None)
    beyond = [] if layers is None or not isinstance(chosen, list) else [n for n in chosen if not 0 <= n < layers]
    start = getattr(peft_config, "init_lora_weights", None)
    dropout = getattr(peft_config, "lora_dropout", None)
    found = {
        f"layers_to_transform names {', '.join(map(str, beyond))}, and {type(model).__name__} has {layers} layers, "
        "from 0 on: no adapter is made for it": beyond,
        "lora_dropout=1 leaves adapters nothing of their input, so that none learns: set it below 1": dropout == 1,
        "num_virtual_tokens=0 puts nothing before a row, so that nothing is learned: set it above 0": (
            getattr(peft_config, "num_virtual_tokens", None) == 0
        ),
        "init_lora_weights='eva' needs the activations of some rows, which are not computed here: the adapters start "
        "as those of init_lora_weights=True. For EVA's start, pass a model from peft.get_peft_model on "
        "which peft.initialize_lora_eva_weights was called": start == "eva",
        "init_lora_weights='lora_ga' needs the gradients of some rows, which are not computed here: the adapters start "
        "as those of init_lora_weights=True. For LoRA-GA's start, call PEFT's preprocess_loraga on the "
        "model first": start == "lora_ga" and not gradients_are_noted(model),
        "an AdaLoraConfig trains at its first ranks (init_r) to the end, since ranks are not moved between layers here "
        "(update_and_allocate): take a LoraConfig of that rank": (getattr(peft_config, "peft_type", None) == "ADALORA"),
    }
    for text, is_so in found.items():
        if is_so:
            logger.warning(text)


WITH_EXPERTS = "all-linear-experts"
"""What `target_modules` may be beside what PEFT knows: all linear layers, and the stacks of routed experts' weights."""


def _with_experts(peft_config: Any, model: nn.Module) -> Any:
    """The configuration in PEFT's words, where it asks for routed experts too."""
    if getattr(peft_config, "target_modules", None) != WITH_EXPERTS:
        return peft_config
    ends = sorted({_end_of(name) for name in expert_stacks(dict(model.named_parameters()))})
    if not ends:
        logger.warning(
            f"{in_python('', 'lora_')}target_modules={WITH_EXPERTS!r}: {type(model).__name__} has no routed experts "
            "whose weights are stacks, so that it is 'all-linear'"
        )
    elif getattr(peft_config, "lora_dropout", 0):
        raise ValueError(
            f"{in_python('', 'lora_')}target_modules={WITH_EXPERTS!r} adapts stacks of experts' weights, which PEFT "
            f"does without dropout alone: set lora_dropout=0 (it is {peft_config.lora_dropout})"
        )
    peft_config = copy.copy(peft_config)
    peft_config.target_modules = "all-linear"
    peft_config.target_parameters = [*(peft_config.target_parameters or ()), *ends] or None
    return peft_config


def _end_of(name: str) -> str:
    """The end of a stack's name, which the other layers' have too."""
    return f"experts.{name.rpartition('.experts.')[2]}"


def _tell_of_frozen_experts(adapted: nn.Module) -> None:
    """Says which experts "all-linear" leaves out: their weights are stacked in a parameter, which is no linear layer.
    PEFT finds those of some model types all the same."""
    with_adapters = {
        f"{name}.{module.parameter_name}".replace(".base_layer", "")
        for name, module in adapted.named_modules()
        if hasattr(module, "parameter_name")
    }
    weights = {name.replace(".base_layer", ""): p for name, p in adapted.named_parameters() if not p.requires_grad}
    left = [name for name in expert_stacks(weights) if name not in with_adapters and ".original_module." not in name]
    if left:
        ends = sorted({_end_of(name) for name in left})
        share = sum(weights[name].numel() for name in left) / sum(p.numel() for p in weights.values())
        logger.warning(
            f"target_modules='all-linear' leaves routed experts frozen, {share:.0%} of the weights: {', '.join(ends)} "
            f"are stacks and no linear layers. To train them too, set {in_python('', 'lora_')}target_parameters={ends} "
            f"or {in_python('', 'lora_')}target_modules={WITH_EXPERTS!r}"
        )


def tell_of_whole_experts(model: nn.Module) -> None:
    """Says which experts of a quantized model are not: bitsandbytes in 8 bits and torchao, of which NVFP4 is, quantize
    linear layers alone, and some families' experts are not multiplied in groups."""
    weights = dict(model.named_parameters())
    whole = expert_stacks(weights)
    if whole and any(is_quantized(each) for each in weights.values()):
        ends = ", ".join(sorted({_end_of(name.replace(".base_layer", "")) for name in whole}))
        share = sum(weights[name].nbytes for name in whole) / sum(each.nbytes for each in weights.values())
        logger.warning(
            f"the weights of routed experts are not quantized: {ends} are stacks and no linear layers, and stay in "
            f"{str(weights[whole[0]].dtype).removeprefix('torch.')}, {share:.0%} of what all weights take. Where that "
            "is too much, base_weights=stream brings in a layer of them at a time"
        )


ASKED_BY_PEFT = {"classifier", "score"}
"""Modules that PEFT itself trains whole, of which a classifier has one."""


def check_trained_whole(peft_config: Any, model: nn.Module) -> None:
    """Refuses modules that are to be trained whole and are not there, which PEFT passes over.

    Raises:
        ValueError: names them.
    """
    check_values(peft_config)
    option = in_python("modules_to_save", "lora_modules_to_save")
    if isinstance(getattr(peft_config, "modules_to_save", None), str):
        raise ValueError(f"{option}={peft_config.modules_to_save!r} must be a list of names")
    modules = [name for name, _ in model.named_modules()]
    asked = set(getattr(peft_config, "modules_to_save", None) or ()) - ASKED_BY_PEFT
    missing = sorted(each for each in asked if not any(name.endswith(each) for name in modules))
    if missing:
        raise ValueError(
            f"{option} names {', '.join(map(repr, missing))}, and {type(model).__name__} has no such module: "
            "take the end of a module's name, lm_head or embed_tokens say"
        )


def _with_targets(peft_config: Any, model: PreTrainedModel) -> Any:
    """The configuration with the modules that it adapts: PEFT's own choice, or all linear layers where it has none, but
    for experts, of which there are too many."""
    found = own_targets(peft_config, model.config.model_type)
    if found == ():
        return peft_config
    if found is None:
        found = _outside_experts(model) or "all-linear"
        which = "all linear layers" if found == "all-linear" else "linear layers outside of experts"
        logger.info(
            f"no {in_python('', 'lora_')}target_modules are named, and PEFT has no choice for "
            f"{model.config.model_type}: {which} get adapters ({in_python('', 'lora_')}target_modules={found!r})"
        )
    peft_config = copy.copy(peft_config)
    peft_config.target_modules = found if isinstance(found, str) else set(found)
    return peft_config


def _without_refused(peft_config: Any, model: PreTrainedModel) -> Any:
    """The configuration without the layers that PEFT refuses, where all linear ones are asked for."""
    if getattr(peft_config, "target_modules", None) != "all-linear":
        return peft_config
    refused, excluded = refused_modules(peft_config, model), getattr(peft_config, "exclude_modules", None) or ()
    if not refused or isinstance(excluded, str):
        return peft_config
    logger.info(
        f"all linear layers get adapters but for {', '.join(refused)}, which PEFT refuses for {model.config.model_type}"
    )
    peft_config = copy.copy(peft_config)
    peft_config.exclude_modules = [*excluded, *refused]
    return peft_config


def _outside_experts(model: PreTrainedModel) -> list[str]:
    """The linear layers of a mixture of experts, by the ends of their names, but for those beside experts and the head;
    empty of a model without experts."""
    mixtures = [name for name, module in model.named_modules() if hasattr(module, "experts")]
    head = model.get_output_embeddings()
    ends: dict[bool, set[str]] = {True: set(), False: set()}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and module is not head:
            ends[name.startswith(tuple(f"{each}." for each in mixtures))].add(name.rpartition(".")[2])
    return sorted(ends[False] - ends[True]) if mixtures else []


def check_adapters(*configs: Any) -> None:
    """Refuses PEFT configurations of virtual tokens that need more than the rows, with numbers that are not finite,
    that name no modules, name them by an expression that is none, or list tokens twice.

    Raises:
        ValueError: naming the configuration, and what to take.
    """
    for config in configs:
        check_values(config)
        if kind_of_prompt(config) not in (None, *EMBEDDED, *IN_LAYERS):
            raise ValueError(
                f"{type(config).__name__} puts virtual tokens before each row by what is known of its task: take "
                "PromptTuningConfig, PromptEncoderConfig or PrefixTuningConfig, or LoraConfig and its kin"
            )
        named = getattr(config, "target_modules", None)
        if named is not None and not named and not getattr(config, "target_parameters", None):
            raise ValueError(
                "target_modules names no modules, so that nothing would be adapted: name some, or leave it out for "
                "those that PEFT adapts by default"
            )
        _check_expressions(config)
        _check_tokens(config)


def _check_expressions(config: Any) -> None:
    """Refuses names of modules that are to be regular expressions and are none."""
    for option in ("target_modules", "exclude_modules", "rank_pattern", "alpha_pattern"):
        given = getattr(config, option, None)
        for each in [given] if isinstance(given, str) else given if isinstance(given, Mapping) else ():
            try:
                re.compile(each)
            except re.error as error:
                raise ValueError(f"{option}: {each!r} is no regular expression ({error}): mend it") from error


def _check_tokens(config: Any) -> None:
    """Refuses tokens that are listed twice, each time with a row of their own, of which only one would be read."""
    for option in ("trainable_token_indices", "token_indices", "alora_invocation_tokens"):
        given = getattr(config, option, None)
        for listed in given.values() if isinstance(given, Mapping) else () if given is None else [given]:
            if not listed:
                raise ValueError(f"{option} lists no token: name some, or leave it out")
            twice = sorted({token for token in listed if listed.count(token) > 1})
            if twice and option != "alora_invocation_tokens":  # which are a text, in its order
                raise ValueError(f"{option} lists {', '.join(map(str, twice))} more than once: list each token once")


def has_adapters(model: nn.Module) -> bool:
    """Whether there are adapters on a model: of PEFT, or of transformers, which reads a folder of them as a model."""
    return hasattr(model, "disable_adapter") or has_loaded_adapters(model)


def release_file(model: nn.Module) -> None:
    """Lets go of the file that a quantized model on a CPU was loaded from.

    What is not quantized, the embedding above all, still maps it, which keeps all of it resident.
    """
    on_cpu = getattr(model, "device", torch.device("cpu")).type == "cpu"
    if on_cpu and (getattr(model, "is_loaded_in_4bit", False) or getattr(model, "is_loaded_in_8bit", False)):
        for weight in model.parameters():
            if weight.is_floating_point():
                weight.data = weight.data.clone()


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, vocab: int) -> None:
    """Refuses a tokenizer whose ids the model has no embedding for.

    Raises:
        ValueError: naming both sizes and the way out.
    """
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if largest >= vocab:
        raise ValueError(
            f"the tokenizer knows ids up to {largest}, the model only {vocab} embeddings: they do not belong "
            f"together, or {in_python('call', 'save the model after')} model.resize_token_embeddings({largest + 1})"
        )
