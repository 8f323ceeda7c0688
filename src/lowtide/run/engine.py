"""What every trainer does to a model before the first step: the engine, proved; the precision, refused or known."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from lowtide.compat.peft import merged_adapters
from lowtide.compat.torch import FakeTensor, let_go
from lowtide.compat.transformers import (
    attends_both_ways,
    attends_both_ways_in_prompts,
    attention_implementation,
    balances_experts,
)
from lowtide.data.batches.images import ImageReader
from lowtide.engine.forward import causal_model, compute_in, embedding_weight, install
from lowtide.engine.heads import head_of
from lowtide.engine.image_proof import ImageProof, ShownRow
from lowtide.engine.layers.rotary import kinds_by_length, rows_alike
from lowtide.engine.over_ranks.splitting import split_over
from lowtide.engine.probe import Probe, attention_backends, mixing_kernels, probe
from lowtide.engine.virtual_tokens import IN_LAYERS, kind_of_prompt, prompt_config
from lowtide.engine.weights.loading import check_adapters, has_adapters, release_file
from lowtide.engine.weights.quantized import check_sendable
from lowtide.engine.weights.sharded.fully_shard import shard_model
from lowtide.engine.weights.sharded.stages import cut_into_stages
from lowtide.engine.weights.sharded.zero import partition_model
from lowtide.memory.allocators.host_heap import settle_heap
from lowtide.memory.allocators.out_of_memory import is_out_of_memory
from lowtide.memory.weights.streaming import stream_of
from lowtide.ops.target import kind_of
from lowtide.process.ways_out import in_python
from lowtide.ranks.pipeline import Pipeline
from lowtide.ranks.sequence import SequenceParallel
from lowtide.ranks.sharding import Sharding
from lowtide.ranks.shards import is_gathered
from lowtide.ranks.world import worst_of_ranks
from lowtide.run.inputs.images import rows_to_prove
from lowtide.run.optimizers import OPTIMIZERS, check_own_optimizer, check_sharded
from lowtide.run.options.deepspeed import sized
from lowtide.run.options.training import TrainingConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Engine:
    """How the model will run, and why."""

    padding_free: bool
    reason: str
    found: Probe
    computed_in: torch.dtype | None = None
    """What autocast takes products in; None for the dtype of the weights."""
    attention: str = ""
    """What attention runs on, where another implementation was asked for and is not used."""
    mixing: str = ""
    """What recurrent layers and short convolutions run on, where kernels of other libraries could compute them."""
    sequences: str = ""
    """How sequences are split over ranks; empty where they are not."""
    images: Sequence[ShownRow] = ()
    """The rows with images that the model was proved with, where rows show any."""


def install_engine(model: nn.Module, args: TrainingConfig, reader: ImageReader | None = None) -> Engine:
    """Installs the engine and proves it on the model itself.

    Args:
        reader: makes images ready, where rows show any.

    Raises:
        ValueError: the model's head is not understood, its adapters are virtual tokens or need padded rows, or its
            gradients would be of a dtype that cannot be trained so; or its sequences cannot be split over ranks.
    """
    _check_precision(model, args)
    if args.optim in OPTIMIZERS:
        check_own_optimizer(model)
    if args.sharding.shards > 1 or args.sharding.tensor_parallel > 1:
        check_sharded(model, args)
    adapters = cast(Any, getattr(model, "peft_config", {})).values()
    check_adapters(*adapters)
    _check_prompts(model, args)
    inner = causal_model(model)
    if not inner.supports_gradient_checkpointing:
        _switch_off_checkpointing(args, f"transformers has none for model type {inner.config.model_type}")
    if inner.config.is_encoder_decoder:
        _check_pairs(args)
    if args.padding_free:
        _check_rows_alone(adapters)
    mixed = computed_in(args)
    engine = replace(_proved(model, args, reader), computed_in=mixed)
    _warn_of_packing(args, engine)
    compute_in(model, mixed)
    engine = replace(engine, attention=_other_attention(model, args, engine), mixing=_mixing(model, args, engine))
    if args.sharding.pipeline_parallel > 1:
        cut_into_stages(model, Pipeline.of_size(args.sharding.pipeline_parallel), args.device)
        check_stage(model)
    return replace(engine, sequences=_split_sequences(model, args.sharding.sequence_parallel))


def _warn_of_packing(args: TrainingConfig, engine: Engine) -> None:
    """Says that packing saves nothing on the padded path, where each text of a packed row is a row again."""
    asked = [name for name in ("packing", "eval_packing") if getattr(args, name, False)]
    if asked and not engine.padding_free:
        logger.warning(
            f"{asked[0]}=True saves no memory in a run that pads ({engine.reason}): each text of a packed row is "
            "run as a padded row of its own. The numbers are the same. Leave packing out, or run without padding"
        )


def check_stage(model: nn.Module) -> None:
    """Refuses stages of which one has nothing to train; all ranks ask together."""
    if worst_of_ranks(not any(p.requires_grad for p in model.parameters()), embedding_weight(model).device):
        raise ValueError(
            "pipeline_parallel_size: the layers of a rank have nothing to train, and its optimizer would have no "
            "parameters: train some in each layer (`target_modules`), or leave pipeline_parallel_size out"
        )


def _split_sequences(model: nn.Module, ranks: int) -> str:
    """Has so many ranks split the tokens of batches; says so, for a report."""
    if ranks == 1:
        return ""
    copied = split_over(model, SequenceParallel.of_size(ranks))
    text = f"the tokens of a batch over {ranks} ranks, which exchange attention heads (Ulysses)"
    return f"{text}; {copied}" if copied else text


def _check_prompts(model: nn.Module, args: TrainingConfig) -> None:
    """Refuses, or mends, what virtual tokens cannot go with."""
    prompt = prompt_config(model)
    if prompt is None:
        return
    title = type(prompt).__name__
    head = head_of(causal_model(model))
    if not head.virtual_tokens:
        raise ValueError(f"{title} puts virtual tokens before each row, which {head.models} are not trained with here")
    if kind_of_prompt(prompt) in IN_LAYERS:
        _switch_off_checkpointing(args, f"it drops keys and values, where {title} puts its vectors")


def _switch_off_checkpointing(args: TrainingConfig, why: str) -> None:
    """Turns gradient checkpointing off where the default chose it.

    Raises:
        ValueError: it was asked for; `why` completes the sentence.
    """
    if not args.gradient_checkpointing:
        return
    if "gradient_checkpointing" in args.requested:
        raise ValueError(
            f"gradient_checkpointing=True cannot be followed, since {why}: set gradient_checkpointing=False"
        )
    logger.warning(f"gradient_checkpointing is off, since {why}")
    for name in ("gradient_checkpointing", "activation_checkpointing"):
        if hasattr(args, name):
            setattr(args, name, False)


def _check_pairs(args: TrainingConfig) -> None:
    """Refuses what is built for one sequence of layers, and an encoder-decoder has two.

    Raises:
        ValueError: names the option, and what to do.
    """
    instead = "leave it out; ranks may have rows of their own, with whole weights or sharded by fsdp=True"
    refused = {
        "sp_size or cp_size, which splits the tokens of a batch": args.sharding.sequence_parallel > 1,
        "tp_size, which splits each layer": args.sharding.tensor_parallel > 1,
        "pipeline_parallel_size, which splits the layers": args.sharding.pipeline_parallel > 1,
        "fsdp_split_vocabulary, which splits the embedding": args.fsdp_split_vocabulary,
    }
    for what, asked in refused.items():
        if asked:
            raise ValueError(f"{what}, is not built for encoder-decoders: {instead}")
    if args.neftune_noise_alpha:
        raise ValueError(
            f"neftune_noise_alpha={args.neftune_noise_alpha} puts noise on one embedding, and encoder and decoder have "
            "one each: leave it out"
        )


def computed_in(args: TrainingConfig) -> torch.dtype | None:
    """What autocast takes products in; None for the dtype of the weights."""
    return torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None


def _other_attention(model: nn.Module, args: TrainingConfig, engine: Engine) -> str:
    """A sentence where an attention implementation was asked for and is not used; empty elsewhere."""
    if args.asked_attention is None or not args.padding_free or isinstance(next(model.parameters()), FakeTensor):
        return ""
    runs_on = " and ".join(attention_backends(model)) if engine.padding_free else _implementation(model)
    return (
        f"{runs_on}. {args.asked_attention!r} is not used: it is for padding_free=False; without padding lowtide "
        "chooses by device and model, and keeps rows apart with each"
    )


def _mixing(model: nn.Module, args: TrainingConfig, engine: Engine) -> str:
    """Which kernels of other libraries compute recurrent layers and short convolutions, and why others do not; empty
    where none could."""
    if not engine.padding_free or args.device.type != "cuda" or isinstance(next(model.parameters()), FakeTensor):
        return ""
    asked = mixing_kernels(model)
    used = [f"{kernel}, proved" for kernel, reason in asked.items() if reason is None]
    left = [f"torch in the place of {kernel}, which {reason}" for kernel, reason in asked.items() if reason is not None]
    return "; ".join([*used, *left])


def _implementation(model: nn.Module) -> str:
    return attention_implementation(causal_model(model).config) or "eager"


def _check_rows_alone(adapters: Iterable[Any]) -> None:
    """Refuses adapters that look for tokens in a row, which without padding holds several segments."""
    if any(getattr(each, "alora_invocation_tokens", None) for each in adapters):
        raise ValueError(
            "adapters with `alora_invocation_tokens` begin where those tokens stand in each padded row, and without "
            "padding a row holds several texts: set padding_free=False with them"
        )


def _check_precision(model: nn.Module, args: TrainingConfig) -> None:
    """Refuses weights that the options cannot train, for the dtype that they are stored in."""
    if args.fp16 and kind_of(args.device) == "cpu":
        raise ValueError("fp16=True needs a GPU, whose losses are scaled: leave it out, or take bf16=True on this CPU")
    half = [name for name, p in model.named_parameters() if p.requires_grad and p.dtype == torch.float16]
    if half and (args.fp16 or args.optim in OPTIMIZERS):
        why = "fp16=True scales its losses" if args.fp16 else f"optim={args.optim!r} trains float32 or bfloat16"
        raise ValueError(
            f"{why}, and {len(half)} trained parameters are stored in float16 ({half[0]}, ...): load the model with "
            "dtype float32 (and fp16=True for float16 compute) or bfloat16"
        )
    if half:
        logger.warning(
            f"{len(half)} trained parameters are stored in float16 ({half[0]}, ...), in which small updates are lost "
            "and large values overflow: better load the model with dtype float32 (and fp16=True for float16 compute) "
            "or bfloat16"
        )
    narrow = [name for name, p in model.named_parameters() if p.requires_grad and p.dtype == torch.bfloat16]
    if args.fp16 and (narrow or args.optim in OPTIMIZERS):
        which = narrow[0] if narrow else f"optim={args.optim!r}"
        raise ValueError(
            f"fp16=True scales its losses, and gradients in bfloat16 ({which}) cannot be scaled back: take bf16=True, "
            "or weights in float32"
        )


def check_trained(model: nn.Module) -> None:
    """Refuses a model with nothing to train, or whose adapters no forward goes through.

    Raises:
        ValueError: says how to load adapters that are to be trained on.
    """
    if any(parameter.requires_grad for parameter in model.parameters()):
        if has_adapters(model) and (merged := merged_adapters(model)):
            raise ValueError(
                f"the adapters of the model ({', '.join(merged)}) are merged into its weights, and training them would "
                "change nothing: call its unmerge_adapter() before, or merge_and_unload() to train the model itself"
            )
        return
    by_hand = in_python(", or pass a `peft_config`, or call requires_grad_(True) on what is to train")
    remedy = f"set use_peft=True{by_hand}"
    if has_adapters(model):
        remedy = (
            "its adapters were loaded for use only: load them with PeftModel.from_pretrained(base_model, folder, "
            "is_trainable=True), and pass that as `model`"
        )
    raise ValueError(f"the model has nothing to train, since every parameter is frozen: {remedy}")


def check_causal(model: PreTrainedModel) -> None:
    """Refuses a model that attends in both directions within a prompt: here each token sees those before it alone.

    Raises:
        ValueError: names the model type.
    """
    if attends_both_ways_in_prompts(model.config):
        optional = hasattr(model.config.get_text_config(), "prefix_lm")
        raise ValueError(
            f"model type {model.config.model_type} attends in both directions within a prompt (a prefix language "
            "model), and lowtide trains models in which a token sees those before it alone: "
            + ("set prefix_lm=False in its config to train it so" if optional else "take another model")
        )


def _proved(model: nn.Module, args: TrainingConfig, reader: ImageReader | None) -> Engine:
    """The engine in a model, and what running two tiny segments, and rows with images, through it says."""
    prompt = prompt_config(model)
    ragged = args.padding_free and prompt is None
    if isinstance(next(model.parameters()), FakeTensor):
        ragged = ragged and (reader is None or not attends_both_ways(causal_model(model).config))
        install(model, padding_free=ragged)
        return Engine(ragged, "not proved: there are no values", Probe(0.0, 0.0, 0.0, 0.0, 1.0, 1.0))
    if stream_of(model) is None:
        release_file(causal_model(model))
    _place(model, args)
    settle_heap(model, gathers=args.sharding.by_deepspeed or is_gathered(model))
    inner = causal_model(model)
    implementation = _implementation(inner)
    images = () if reader is None else rows_to_prove(reader)
    shown = ImageProof(model, images) if images else None
    found = probe(model, ragged=prompt is None)
    of_images = None if shown is None or not (ragged and found.isolated) else shown.why_not_ragged(model)
    let_go(model)
    if ragged and found.isolated and of_images is None:
        return Engine(True, "segments proved isolated on this model", found, images=images)
    if found.error is not None and is_out_of_memory(found.error):
        raise found.error  # it says nothing of the model
    install(model, padding_free=False)
    inner.set_attn_implementation(implementation)
    if (other := head_of(inner).beside(inner)) is not None:
        other.set_attn_implementation(implementation)
    if shown is not None:
        shown.check_padded(model)
    if not args.padding_free:
        return Engine(False, "padding_free=False", found)
    if prompt is not None:
        reason = f"{type(prompt).__name__} puts {prompt.num_virtual_tokens} virtual tokens before each padded row"
        logger.warning(f"running padded: {reason}")
        return Engine(False, reason, found)
    reason = f"model type {inner.config.model_type} {_why_padded(found)}"
    if of_images is not None:
        reason = f"rows show images, and of model type {inner.config.model_type} {of_images}"
    logger.warning(f"running padded: {reason}")
    return Engine(False, reason, found)


def _why_padded(found: Probe) -> str:
    if found.error is not None:
        text = str(found.error).strip().split("\n")[0]
        return f"cannot run segments that are laid end to end ({type(found.error).__name__}: {text})"
    if not found.attends:
        return "has an attention of its own, in which segments that are laid end to end see each other"
    if found.leak > found.leak_tolerance:
        return f"lets segments see each other when they are laid end to end (log-probs move by {found.leak:.2g})"
    return f"gives other numbers for segments that are laid end to end (log-probs differ by {found.ragged_error:.2g})"


def _place(model: nn.Module, args: TrainingConfig) -> None:
    """Moves the model, or its shard, to where it will run, to be proved there; one that is placed already stays."""
    inner = causal_model(model)
    if args.sharding.pipeline_parallel > 1:
        return  # cut from the host, once it is proved there
    if args.sharding.cuts_weights:
        cut(model, args)
        return
    if args.sharding.by_deepspeed:
        check_sendable(model)
        _take_dtype(model, zero_config(model, args))
    placed = getattr(inner, "hf_device_map", None) is not None or getattr(inner, "is_quantized", False)
    if args.place_model_on_device is not False and not placed:  # None is the Trainer's own word for yes
        model.to(args.device)


def _take_dtype(model: nn.Module, config: Mapping[str, Any]) -> None:
    """The weights in the dtype that DeepSpeed computes in, which keeps float32 ones beside bfloat16 ones by itself.

    Raises:
        ValueError: weights are in bfloat16 and the config computes in float32.
    """
    if config.get("bf16", {}).get("enabled"):
        for parameter in model.parameters():
            if parameter.dtype == torch.float32:
                parameter.data = parameter.data.to(torch.bfloat16)
        return
    narrow = next((name for name, p in model.named_parameters() if p.requires_grad and p.dtype != torch.float32), None)
    if narrow is not None:
        raise ValueError(
            f"{narrow} is no float32 weight, and the DeepSpeed config trains in float32: set bf16=True and "
            '"bf16": {"enabled": "auto"} in the config, which keeps float32 weights beside, or load float32 weights'
        )


def cut(model: nn.Module, args: TrainingConfig, *, split_vocabulary: bool = True) -> None:
    """Leaves on each rank its part of a model's weights, and its rows of the vocabulary where options say so.

    Args:
        split_vocabulary: False where they are not to, as of a teacher beside a head that is whole.
    """
    if not args.sharding.by_deepspeed:
        split_vocabulary = split_vocabulary and args.fsdp_split_vocabulary
        shard_model(model, args.sharding, args.device, split_vocabulary=split_vocabulary)
        return
    config = zero_config(model, args)
    _take_dtype(model, config)
    partition_model(model, config, args.device)


def zero_config(model: nn.Module, args: TrainingConfig) -> dict[str, Any]:
    """DeepSpeed's config for a model, whose width some of its sizes go by."""
    assert args.zero_config is not None
    return sized(args.zero_config, causal_model(model).config.get_text_config().hidden_size)


def check_prefixes(engine: Engine, model: nn.Module, args: TrainingConfig, *, rounds: bool = False) -> bool:
    """Whether prompts, or what `rounds` of a conversation have in common, are computed once: where it is wanted, and
    the model was proved to be able to.

    On the padded path rows are repeated whole in any case.
    """
    wanted = bool(getattr(args, "prefix_sharing", False))
    if not wanted or not engine.padding_free:
        return wanted
    what, row = ("what rounds have in common is", "rounds") if rounds else ("prompts are", "completions")
    alike = rows_alike(causal_model(model))
    if prompts_unlike(model, args):
        kind = kinds_by_length(causal_model(model))[0]
        logger.warning(
            f"{what} repeated: this model's rotary embeddings ({kind}) are others for rows above {alike:,} "
            f"tokens, and {row} of both kinds may begin alike; if options cut rows to as many (max_length, or "
            f"max_prompt_length and max_completion_length), {what} computed once"
        )
        return False
    if not engine.found.shares_prefixes:
        logger.warning(
            f"{what} repeated: this model's log-probs after a shared prompt differ by "
            f"{engine.found.prefix_error:.2g} nats from those after its own"
        )
    return engine.found.shares_prefixes


def prompts_unlike(model: nn.Module, args: Any) -> bool:
    """Whether rows that begin alike may have other rotary embeddings, as their lengths say."""
    alike, longest = rows_alike(causal_model(model)), _longest_row(args)
    return alike is not None and (longest is None or longest > alike)


def _longest_row(args: Any) -> int | None:
    """The most tokens of a row, where options limit them."""
    limit = getattr(args, "max_length", None)
    if limit is not None:
        return limit
    prompt, completion = (getattr(args, name, None) for name in ("max_prompt_length", "max_completion_length"))
    return None if prompt is None or completion is None else prompt + completion


def router_coefficient(model: PreTrainedModel, wanted: float | None, sharding: Sharding) -> float:
    """The weight of the load-balancing loss: the option's, or the model's own where there is such a loss.

    Raises:
        ValueError: the option weighs a loss that cannot be computed.
    """
    config = model.config.get_text_config()
    balances = balances_experts(model)
    inherited = float(getattr(config, "router_aux_loss_coef", 0.0) or 0.0) if balances else 0.0
    weight = inherited if wanted is None else wanted
    if not weight:
        return 0.0
    if sharding.pipeline_parallel > 1:
        why = "of the experts of all layers together, which pipeline_parallel_size splits"
        if wanted is not None:
            raise ValueError(f"router_aux_loss_coef={weight:g} weighs a loss {why}: set router_aux_loss_coef=0")
        logger.warning(
            "the load-balancing loss of the experts is left out: the model's config has "
            f"router_aux_loss_coef={weight:g}, and the loss is {why}"
        )
        return 0.0
    if not balances:
        raise ValueError(
            f"router_aux_loss_coef={weight:g} needs a mixture of experts for which transformers has a load-balancing "
            f"loss; model type {config.model_type} has none: leave it out"
        )
    return weight


def disable_dropout(model: nn.Module) -> None:
    """Sets every dropout of a model to 0, those that attention reads off its config or modules too."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "dropout", "attn_dropout", "resid_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
