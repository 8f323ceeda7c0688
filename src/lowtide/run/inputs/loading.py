"""What a user hands a trainer, made ready: config, model and tokenizer."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast

from torch import nn
from transformers import PreTrainedTokenizerBase, TrainingArguments

from lowtide.data.cache.cached_map import with_end_token
from lowtide.data.encode.chat import adopt_chat_template
from lowtide.engine.forward import causal_model, embedding_weight
from lowtide.engine.heads.head import Head
from lowtide.engine.heads.language_model import LanguageModel
from lowtide.engine.heads.value import STEP_SEPARATOR, TURNS_READ
from lowtide.engine.weights.complete_weights import base_of_adapters, load_adapters
from lowtide.engine.weights.labels import name_labels
from lowtide.engine.weights.loading import check_tokenizer, load_model, load_tokenizer
from lowtide.engine.weights.model_init import config_init, model_init
from lowtide.engine.weights.new_model import begins_at_random
from lowtide.engine.weights.places import check_model_place
from lowtide.engine.weights.sharded.widening import load_waiting, waits
from lowtide.option_values import check_ranges
from lowtide.run.optimizers import OPTIMIZERS
from lowtide.run.options.training import TrainingConfig, default_of
from lowtide.run.streamed_weights import loaded_on_host

logger = logging.getLogger(__name__)

Config = TypeVar("Config", bound=TrainingConfig)


def config_of(kind: type[Config], args: TrainingArguments | None, model: Any, title: str) -> Config:
    """The options as the trainer's own kind; what a config of another kind does not have gets its default."""
    if isinstance(args, kind):
        check_ranges(args, leave=args.refused)
        return args
    if args is None:
        name = model_name(model) or "model"
        return kind(output_dir=f"{name.split('/')[-1]}-{title}")
    if isinstance(args, TrainingConfig):
        raise ValueError(
            f"args is a {type(args).__name__}, the config of another trainer: this one takes a {kind.__name__}"
        )
    return _of_another_kind(kind, args)


def _of_another_kind(kind: type[Config], args: TrainingArguments) -> Config:
    """The options of a plain `TrainingArguments`, or of another library's config, by their names."""
    own = {each.name for each in dataclasses.fields(kind) if each.init}
    given = {each.name: getattr(args, each.name) for each in dataclasses.fields(args) if each.init}
    defaults = {each.name: default_of(type(args), each.name) for each in dataclasses.fields(args) if each.init}
    unread = sorted(name for name, value in given.items() if name not in own and value != defaults[name])
    if unread:
        logger.warning(
            f"args is a {type(args).__name__}, whose {', '.join(unread)} {kind.__name__} does not have: they have no "
            f"effect. Make a lowtide.{kind.__name__} to see which of its options are alike"
        )
    return kind(**{name: value for name, value in given.items() if name in own})


def model_name(model: Any) -> str:
    """A model's hub name or path; empty if it has none."""
    return model if isinstance(model, str) else causal_model(model).config.name_or_path or ""


def load_inputs(
    model: Any,
    args: TrainingConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    quantization_config: Any,
    *,
    has_adapters: bool,
    head: type[Head] = LanguageModel,
    needs_tokenizer: bool = True,
    labels: Sequence[str] = (),
) -> tuple[nn.Module, PreTrainedTokenizerBase | None, Any]:
    """The model, its tokenizer, and the processor that this is a part of, loaded where they are given by name.

    Args:
        has_adapters: whether adapters will be put on the model, which leave its embeddings as they are.
        head: what is read off the model's hidden states.
        needs_tokenizer: whether rows are to be prepared.
        labels: those that a head of labels is to have, as far as they are known.

    Raises:
        ValueError: they cannot be loaded, or do not belong together.
    """
    init = model_init(
        cast(dict, args.model_init_kwargs),
        trust_remote_code=args.trust_remote_code,
        quantization_config=quantization_config,
    )
    _check_not_split(model, init)
    if args.padding_free:  # attention without padding is lowtide's; the start-up report says which backend runs
        init.pop("attn_implementation", None)
    if not isinstance(model, str):
        if args.model_init_kwargs:
            names = ", ".join(args.model_init_kwargs)
            logger.warning(f"model_init_kwargs ({names}) have no effect: the model that was passed is loaded already")
        if quantization_config:
            raise ValueError(
                "quantization_config came with a model that is loaded already: pass the model's name, or drop it"
            )
    name = model_name(model)
    if isinstance(model, str):
        check_model_place(model)
    if tokenizer is None and needs_tokenizer:
        if not name:
            raise ValueError("a model without a name needs its tokenizer: pass it as `processing_class`")
        tokenizer = load_tokenizer(name, **config_init(init))
    processing_class: Any = tokenizer
    if isinstance(model, str):
        model = _loaded(model, args, init, has_adapters=has_adapters, head=head, labels=labels)
    elif labels:
        name_labels(causal_model(model), labels)
    if tokenizer is not None:
        tokenizer = cast(PreTrainedTokenizerBase, getattr(tokenizer, "tokenizer", tokenizer))  # a processor's
        end = getattr(args, "eos_token", None)
        if end is not None:
            _end_with(end, tokenizer, model)
        template = getattr(args, "chat_template_path", None)
        if template is not None:
            _adopt_template(template, tokenizer, model, has_adapters=has_adapters)
        check_tokenizer(tokenizer, embedding_weight(model).shape[0])
    return model, tokenizer, processing_class


def _loaded(name: str, args: TrainingConfig, init: dict[str, Any], *, has_adapters: bool, **how: Any) -> nn.Module:
    """A model by its name; a folder of adapters is put on its base, and goes on being trained.

    Args:
        init: the arguments that it is loaded with.
        has_adapters: whether others will be put on it.
        how: head and labels, as of `load_inputs`.
    """
    late = not has_adapters and not begins_at_random(name) and _may_wait(args, how["head"]) and waits(name, init)
    base = None if has_adapters else base_of_adapters(name)
    load = load_waiting if late else load_model
    model = load(base or name, **how, **loaded_on_host(init, args))
    return model if base is None else load_adapters(model, name, is_trainable=True)


def _check_not_split(model: Any, init: Mapping[str, Any]) -> None:
    """Refuses a model that transformers splits over ranks as it loads it: here ranks first hold the same weights."""
    asked = next((name for name in ("tp_plan", "tp_size", "distributed_config", "device_mesh") if init.get(name)), None)
    came = not isinstance(model, str) and getattr(causal_model(model), "is_distributed_loading_by_transformers", False)
    if asked or came:
        how = f"model_init_kwargs: {asked}={init[asked]!r} has" if asked else "the model came split: its loader had"
        raise ValueError(
            f"{how} transformers split the model over ranks as it is loaded, and lowtide splits a whole one itself, by "
            "the same plan: load it without, and set parallelism_config={'tp_size': 2}, or another number of ranks"
        )


def _may_wait(args: TrainingConfig, head: type[Head]) -> bool:
    """Whether nothing looks at weights before they are cut, and nothing is made in their dtype."""
    new = head.new_module is not None or head.added_module is not None
    reads = args.optim in OPTIMIZERS or getattr(args, "chat_template_path", None) is not None
    return args.sharding.cuts_files and not new and not reads and not args.fsdp_split_vocabulary


def _adopt_template(path: str, tokenizer: PreTrainedTokenizerBase, model: nn.Module, *, has_adapters: bool) -> None:
    """The chat template of another tokenizer, with the tokens that it writes: they get embeddings of their own."""
    added = adopt_chat_template(tokenizer, path)
    inner = causal_model(model)
    if added and has_adapters:
        raise ValueError(
            f"chat_template_path={path!r} brings {len(added)} new tokens ({added[0]!r}, ...), whose embeddings "
            "adapters would leave untrained: use a .jinja file that writes known tokens, or train all weights"
        )
    if added and len(tokenizer) > embedding_weight(model).shape[0]:
        inner.resize_token_embeddings(len(tokenizer))
    inner.config.get_text_config().eos_token_id = tokenizer.eos_token_id


def _end_with(end: str, tokenizer: PreTrainedTokenizerBase, model: nn.Module) -> None:
    """The token that ends a text, also for what is saved: generation stops at it, beside those that it stopped at."""
    tokenizer.eos_token = with_end_token(tokenizer, end).eos_token
    inner = causal_model(model)
    inner.config.get_text_config().eos_token_id = number = tokenizer.eos_token_id
    generation = getattr(inner, "generation_config", None)
    if generation is not None:
        known = generation.eos_token_id
        earlier = known if isinstance(known, list) else [known]
        generation.eos_token_id = [number, *(each for each in earlier if each not in (None, number))]


def stop_ids(model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens at which generation stops: the tokenizer's end token, and those of the model's generation config."""
    return stop_ids_of(getattr(causal_model(model), "generation_config", None), tokenizer)


def stop_ids_of(config: Any, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The same of a generation config; None if there is none."""
    known = getattr(config, "eos_token_id", None)
    found = [tokenizer.eos_token_id, *(known if isinstance(known, list) else [known])]
    return list(dict.fromkeys(cast(int, each) for each in found if each is not None))


def note_turns(model: Any, tokenizer: PreTrainedTokenizerBase | None, args: Any) -> None:
    """Has a reward model's config say how answers are taken: what reads the model later takes them alike, for the last
    token is another one where a template writes more behind the end of a turn."""
    if tokenizer is not None:
        noted = {"turns": args.turns, "thought_end": args.thought_end, "stop_ids": stop_ids(model, tokenizer)}
        setattr(model.config, TURNS_READ, noted)


def note_separator(model: Any, args: Any) -> None:
    """Has a process reward model's config say what stands behind each step, for what reads the model later."""
    setattr(model.config, TURNS_READ, {STEP_SEPARATOR: args.step_separator})


def set_padding(model: Any, tokenizer: PreTrainedTokenizerBase | None, args: Any) -> None:
    """Tells model and tokenizer the token that rows are padded with: without it the model runs a row at a time, and
    with another than the tokenizer's it would read at padding.

    Raises:
        ValueError: the tokenizer does not have it.
    """
    if tokenizer is None:
        return
    token = args.pad_token or tokenizer.pad_token or getattr(args, "eos_token", None) or tokenizer.eos_token
    if token is None:
        return
    if token not in tokenizer.get_vocab():
        raise ValueError(
            f"pad_token {token!r} is not in the tokenizer's vocabulary: give a token of it, or leave it out"
        )
    tokenizer.pad_token = token
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
