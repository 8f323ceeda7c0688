"""The world in which every memory technique meets every trainer, and what is counted there.

A run trains for some steps and tells its losses, its weights, and how often the parts of the model were passed. It is
compared with the run that lacks one technique and is the same in all else. `cell` is one technique in one trainer, and
fails if that does not do what the table of techniques says of it: `test_matrix.py` goes by it, and so does
`python -m tests.exactness`, which writes `docs/matrix.md`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import save_model
from torch import Tensor, nn
from transformers import PreTrainedModel, PrinterCallback

import lowtide
from lowtide.compat.transformers import checkpointed_layers
from lowtide.engine.forward import causal_model
from lowtide.engine.heads import language_model, next_token, replaced_tokens
from lowtide.engine.weights.quantized import is_quantized
from lowtide.memory import table
from lowtide.memory.activations.checkpointing import POLICIES
from lowtide.memory.activations.offloading import ActivationOffload
from lowtide.memory.kernels.float8_products import in_8_bits
from lowtide.memory.optimizers.compressed_adamw import CompressedAdamW
from lowtide.memory.optimizers.optimizer_in_backward import OptimizerInBackward
from lowtide.memory.table import TECHNIQUES
from lowtide.memory.technique import Technique
from lowtide.memory.weights.streaming import stream_of
from lowtide.ops.layers.float8 import stored
from lowtide.ops.logits import linear_logprobs
from lowtide.ops.logits.across_vocabularies import LEAST
from lowtide.ops.logits.linear_logprobs import TokenStats
from lowtide.ops.mapped import is_mapped
from lowtide.ops.recurrence.recurrence import RECOMPUTED
from tests.support.matrix.matrix_models import (
    JOINED,
    REWARDED,
    ROWS,
    TAUGHT,
    WRITING,
    build,
    parts,
    rows,
    tokenizer,
)
from tests.support.references import divergences
from tests.support.runs.on_a_cpu import ON_A_CPU

STEPS = 5
BATCH = 8
"""Rows of a step; with gradient accumulation they come in several."""

COMMON: dict[str, Any] = {
    "per_device_train_batch_size": BATCH,
    "max_steps": STEPS,
    "learning_rate": 2e-3,
    "lr_scheduler_type": "constant",
    "train_sampling_strategy": "sequential",
    **ON_A_CPU,
    "gradient_checkpointing": False,
    "rehearsal": False,
}
"""Of every run: nothing is switched on but what always is, and padding-free batches."""

ONE_ROLLOUT = {
    "per_device_train_batch_size": ROWS,  # completions, two for each of `BATCH` prompts
    "num_generations": 2,
    "max_completion_length": 24,
    "shuffle_dataset": False,
}
OF_KIND: dict[str, dict[str, Any]] = {
    "GRPO": {**ONE_ROLLOUT, "num_iterations": STEPS, "learning_rate": 3e-4, "epsilon": 0.5, "beta": 0.1},
    "RLOO": {**ONE_ROLLOUT, "num_iterations": STEPS, "learning_rate": 2e-4, "epsilon": 0.5, "beta": 0.1},
    "OnlineDPO": {"max_completion_length": 24, "shuffle_dataset": False, "learning_rate": 1e-3},
    "PPO": {**ONE_ROLLOUT, "num_ppo_epochs": STEPS, "learning_rate": 2e-4, "cliprange": 0.5, "vf_coef": 1.0},
    "GKD": {"lmbda": 0.0},
    "TPO": {"learning_rate": 1e-3},
    "PRM": {"learning_rate": 5e-4},
    "GMPO": {**ONE_ROLLOUT, "num_iterations": STEPS, "learning_rate": 3e-4, "beta": 0.1},
    "A2PO": {**ONE_ROLLOUT, "num_value_samples": 2, "beta2": 0.1},
    "Distillation": ONE_ROLLOUT,
    "IWOPD": {**ONE_ROLLOUT, "num_iterations": STEPS},
    "SDFT": {**ONE_ROLLOUT, "num_iterations": STEPS},
    "SDPO": {**ONE_ROLLOUT, "num_iterations": STEPS, "distillation_mode": "full_logits", "distillation_alpha": 0.5},
    "GOLD": {"lmbda": 0.0, "use_uld_loss": True, "uld_use_hybrid_loss": True},
    "Pretrain": {"packing": False, "packing_strategy": "bfd", "shuffle_dataset": False, "warmup_steps": 0},
    "MaskedLM": {"mlm_probability": 0.3},
    "ReplacedTokenDetection": {"mlm_probability": 0.3, "generator_size": 0.5, "discriminator_weight": 5.0},
}
"""Options of every run of a trainer.

The loss of GRPO, RLOO, GMPO and PPO is about 0 on each new rollout, whatever was learned before. All steps therefore
learn from one rollout, on which the loss falls, and few ratios reach the clipping range. The loss of the others falls
on new rollouts too: each of their steps has its own.
"""
WITHOUT_FUNCTION = ("SDFT", "SDPO")
"""Trainers that take no `rollout_func`, which write by one here all the same."""

LOW_RANK = {"optim_target_modules": "all-linear", "optim_args": "rank=16,update_proj_gap=2,scale=2"}
FIRST: dict[str, dict[str, Any]] = {
    "checkpointing that keeps attention": {"gradient_checkpointing": True},
    "checkpointing that keeps products": {"gradient_checkpointing": True},
    "checkpointing of recurrences alone": {"gradient_checkpointing": True},
    "checkpointing of every k-th layer": {"gradient_checkpointing": True},
    "packing": {"max_length": 52},
    "compiled layers": {"torch_compile_backend": "eager"},  # the graphs, without the time of a compiler
    "compiled layers within an activation budget": {"torch_compile_backend": "aot_eager"},
    "GaLore": LOW_RANK,
    "APOLLO": LOW_RANK,
}
"""What a technique needs beside its own options; its plain run does without."""

WIDE = {"intermediate_size": 160}


class Adapters(LoraConfig):
    """Those of all linear layers; a known run is told from others by the object."""

    __hash__ = object.__hash__


ADAPTERS = {"peft_config": Adapters(r=8, lora_alpha=16, target_modules="all-linear")}
SMALL_ADAPTERS = LoraConfig(r=4, target_modules="all-linear")
FROM_FILES = {"from_files": True}
"""A model that is given by its folder, with adapters on it."""
PLAIN: dict[str, dict[str, Any]] = {
    "checkpointing of recurrences alone": {"recurrent": True},
    # moments of fewer than 4,096 elements stay in 32 bits
    "8-bit AdamW (torchao)": WIDE,
    "4-bit AdamW (torchao)": WIDE,
    "8-bit AdamW (bitsandbytes)": WIDE,
    "FlashAdamW": WIDE,
    "LoRA-FA": ADAPTERS,
    "optimizer in backward": {"max_grad_norm": 0.0},
    "padding-free batches": {"padding_free": False},
    "prefix sharing": {"prefix_sharing": False},
    "streamed base weights": FROM_FILES,
    "FP8 base weights": ADAPTERS,
    "NVFP4 base weights": ADAPTERS,
    "FP8 products": {"bf16": True},
    "packing": {"per_device_train_batch_size": ROWS},
}
"""Options of the plain run of a technique, and of its model; those that the technique does not set itself are of both
runs. All rows are in one batch where they are packed, since a batch counts bins then."""


ROUNDING = 2e-5
"""Relative distance of losses and of the norms of weights up to which runs are equal. Up to 4e-6 is seen, and 1.5e-5 of
an adapter that began at zero: AdamW makes a whole step of a gradient that is almost rounding."""
BITWISE = {
    "gradient checkpointing",
    "checkpointing that keeps attention",
    "checkpointing that keeps products",
    "checkpointing of every k-th layer",
    "activation offloading",
    "optimizer in backward",
    "rehearsal",
}
"""The techniques that change no bit; the other exact ones add up in another order."""
CHANGES = {
    (kind, "packing"): "masks are drawn of bins, with the same probabilities"
    for kind in ("MaskedLM", "ReplacedTokenDetection")
}
"""What a technique changes in one trainer, where it does not in others."""
FEWER_BITS = ("FP8 base weights", "NVFP4 base weights")
EXCLUDED: Mapping[frozenset[str], str] = {
    **{
        frozenset({other, compiled}): "cannot work here: it replaces what"
        for other in ("tiled MLP", "attention heads in turn")
        for compiled in ("compiled layers", "compiled layers within an activation budget")
    },
    **{
        frozenset({"fused layers", other}): reason
        for other, reason in (
            *((name, "replaces what") for name in ("tiled MLP", "attention heads in turn", "compiled layers")),
            ("compiled layers within an activation budget", "replaces what"),
            ("activation offloading", "takes nothing: checkpoint"),
            ("streamed base weights", "come for a layer's own forward"),
            ("streamed trained weights", "come for a layer's own forward"),
            ("bfloat16 mixed precision", "products in 16 bits"),
            *((name, "products in 16 bits") for name in TECHNIQUES if name in ("compressed AdamW", "FlashAdamW")),
            *((name, "products in 16 bits") for name in TECHNIQUES if "stochastic rounding" in name),
        )
    },
    **{
        frozenset({streamed, compiled}): "compiled layers hold the weights"
        for streamed in ("streamed base weights", "streamed trained weights")
        for compiled in ("compiled layers", "compiled layers within an activation budget")
    },
    **{
        frozenset({name, "compiled layers within an activation budget"}): "both say what a compiled layer keeps"
        for name in TECHNIQUES
        if name.startswith(("checkpointing that keeps", "checkpointing of every"))
    },
    frozenset({"streamed base weights", "bfloat16 mixed precision"}): "would be a resident copy",
    frozenset({"streamed base weights", "streamed trained weights"}): "are frozen",
    **{
        frozenset({adapted, name}): "are frozen"
        for adapted in ("streamed base weights", *FEWER_BITS)
        for name in TECHNIQUES
        if "stochastic rounding" in name or name in ("compressed AdamW", "FlashAdamW")
    },
    **{
        frozenset({"streamed trained weights", technique.name}): "number by number"
        for technique in TECHNIQUES.values()
        if technique.options.keys() == {"optim"}
    },
    frozenset({"streamed trained weights", "LoRA-FA"}): "are frozen",
    **{frozenset({"streamed trained weights", form}): "are frozen" for form in FEWER_BITS},
    **{frozenset({"attention heads in turn", form}): "is quantized and cannot be cut" for form in FEWER_BITS},
    frozenset({"NVFP4 base weights", "fused layers"}): "neither a plain matrix",
    **{frozenset({"FP8 products", form}): "no layer has a trained matrix" for form in (*FEWER_BITS, "LoRA-FA")},
    frozenset({"FP8 products", "streamed base weights"}): "would be a resident copy",
    frozenset({"FP8 products", "fused layers"}): "products in 16 bits",
    frozenset({"FP8 products", "compiled layers"}): "compiled layers replace",
    frozenset({"FP8 products", "compiled layers within an activation budget"}): "compiled layers replace",
}
"""Pairs that are refused, with the reason."""
BAND, FOUR_BITS, OTHER_OPTIMIZER = 0.03, 0.1, 0.3
"""How far the last loss may be from the plain run's, as a share of the fall from its first to its last: where numbers
are rounded, where they are to 4 bits, and with another optimizer."""
BANDS = {"Muon": 0.9, "LoRA-FA": 0.6, "FP8 base weights": 0.3, "NVFP4 base weights": 0.9}
"""The same for one whose first steps are a fifth as long as AdamW's, for one that trains half of the adapters, and for
two that begin at another loss."""
OF_ONE = {("ReplacedTokenDetection", "packing"): 0.3, ("IWOPD", "Adafactor"): 0.4}
"""The same of one technique in one trainer: where other masks are learned from, and what is drawn in their places; and
of a loss that falls without end, as far as steps go."""


@dataclass
class Run:
    """What came out of a training, and what the model was put through."""

    trainer: Any
    losses: list[float] = field(default_factory=list)
    forwards: list[int] = field(default_factory=list)
    """Tokens of each forward."""
    graphs: int = 0
    """Forwards that backward follows."""
    layers: list[int] = field(default_factory=list)
    """Passages of each layer's first module; recomputation passes again."""
    activations: int = 0
    """Passages of the first layer's activation function."""
    projections: int = 0
    """Passages of the projection to keys of the first layer, where that has one."""
    dtypes: set[torch.dtype] = field(default_factory=set)
    """Of what comes out of it."""
    heads: int = 0
    """Passages of the fused head."""
    compiled: bool = False
    """Whether all layers were, for the last step."""
    fused: bool = False
    """Whether all layers were, for the last step."""
    liger: bool = False
    """Whether the norms had Liger's forward then."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    offload: ActivationOffload | None = None


# -- the parts ---------------------------------------------------------------------------------------------------


@functools.cache
def saved(kind: str, intermediate_size: int, seed: int = 0) -> str:
    """The folder of the model. A model's own `save_pretrained` writes on the first of several ranks alone."""
    made = folder() / f"{kind}-{intermediate_size}-{seed}"
    model = teacher(kind) if seed else build(kind, intermediate_size)
    model.config.save_pretrained(made)
    save_model(model, str(made / "model.safetensors"), metadata={"format": "pt"})
    return str(made)


def write(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """A `rollout_func`: of a prompt's two completions, the chosen and the rejected one of DPO's rows."""
    known = {row["prompt"]: (row["chosen"], row["rejected"]) for row in rows("DPO")}
    texts = [known[prompt][number % 2] for number, prompt in enumerate(prompts)]
    ids = tokenizer()(texts)["input_ids"]
    return {
        "prompt_ids": tokenizer()(prompts)["input_ids"],
        "completion_ids": [[*each, tokenizer().eos_token_id] for each in ids],
        "logprobs": None,
    }


def is_answer(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """A reward function: 1 for the chosen completion, else 0."""
    return [float(text == right) for text, right in zip(completions, answer, strict=True)]


def beside(kind: str, *, from_files: bool = False) -> dict[str, Any]:
    """Further arguments of a trainer: what rewards the completions that are written in every run, or a teacher."""
    found: dict[str, Any] = {"reward_funcs": is_answer} if kind in REWARDED else {}
    if kind in TAUGHT:
        found["teacher_model"] = saved(kind, 64, seed=1) if from_files else teacher(kind)
    return found | ({"rollout_func": write} if kind in WRITING and kind not in WITHOUT_FUNCTION else {})


def teacher(kind: str) -> PreTrainedModel:
    return build(kind, 64, seed=1, vocab_size=len(tokenizer(JOINED)) if kind == "GOLD" else None)


@functools.cache
def teacher_tokenizer() -> str:
    """The folder of the one whose tokens are a teacher's own."""
    made = folder() / "teacher tokenizer"
    tokenizer(JOINED).save_pretrained(made)
    return str(made)


@functools.cache
def folder() -> Path:
    """For what trainers write."""
    made = tempfile.TemporaryDirectory(prefix="lowtide-matrix-")
    folder.kept = made  # type: ignore[attr-defined]
    return Path(made.name)


class Watched:
    """Mixed into a trainer: rows are prepared once for all runs, and losses are kept as they are."""

    prepared: dict[tuple[Any, ...], Any] = {}  # noqa: RUF012

    def prepare(self, dataset: Any, name: str) -> Any:
        self.run = Run(self)
        args: Any = self.args  # type: ignore[attr-defined]
        key = type(self).__name__, getattr(args, "packing", False), getattr(args, "max_length", None)
        if key not in Watched.prepared:
            # KTO draws mismatched completions from the rows of a batch, which accumulation shall not change.
            batch = mock.patch.object(args, "per_device_train_batch_size", BATCH)
            with batch, mock.patch("datasets.config.HF_DATASETS_CACHE", str(folder())):
                Watched.prepared[key] = super().prepare(dataset, name)  # type: ignore[misc]
        return Watched.prepared[key]

    def training_step(self, model: nn.Module, inputs: Any, *args: Any) -> Tensor:
        loss = super().training_step(model, inputs, *args)  # type: ignore[misc]
        if inputs is not None:
            self.run.losses.append(loss.item())
            inner = causal_model(model)
            layers: Any = checkpointed_layers(inner)
            first, _ = parts(inner)
            self.run.compiled = all(hasattr(layer, "compiled_here") for layer in layers)
            self.run.fused = all("fused_layers" in layer.forward.__module__ for layer in layers)
            named = (dict(layer.named_modules()) for layer in layers)
            norms = [each[first].forward.__module__ for each in named if first in each]
            self.run.liger = bool(norms) and all("liger" in each for each in norms)
        return loss


class SmallOffload(ActivationOffload):
    """Offloads what is small too, and can be found again."""

    last: SmallOffload

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs, min_bytes=1024)
        SmallOffload.last = self


@functools.cache
def classes(kind: str) -> tuple[type, type]:
    """The watched trainer, and its config."""
    own = getattr(lowtide, f"{kind}Trainer")
    return type(f"Watched{kind}", (Watched, own), {}), getattr(lowtide, f"{kind}Config")


def make(
    kind: str,
    *,
    model: PreTrainedModel | None = None,
    peft_config: Any = None,
    data_collator: Any = None,
    arguments: Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    """A trainer on the rows of its kind, by default of all weights of the tiny Llama.

    Args:
        arguments: of the trainer, in place of the completions and rewards of `beside`.
    """
    trainer_class, config_class = classes(kind)
    options = {"output_dir": str(folder()), **COMMON, **OF_KIND.get(kind, {}), **options}
    if options.get("use_uld_loss"):
        options = {"teacher_tokenizer_name_or_path": teacher_tokenizer(), **options}
    width = options.pop("intermediate_size", 64)
    options["per_device_train_batch_size"] //= options.get("gradient_accumulation_steps", 1)
    from_files, recurrent = options.pop("from_files", False), options.pop("recurrent", False)
    given: Any = model
    if model is None:
        given = saved(kind, width) if from_files else build(kind, width, recurrent=recurrent)
    with mock.patch.object(table, "ActivationOffload", SmallOffload):
        made = trainer_class(
            model=given,
            args=config_class(**options),
            data_collator=data_collator,
            train_dataset=rows(kind),
            eval_dataset=rows(kind).select(range(4)) if "eval_strategy" in options else None,
            processing_class=tokenizer(),
            peft_config=copy.deepcopy(peft_config)
            or (LoraConfig(r=4, target_modules="all-linear") if from_files else None),
            **(beside(kind, from_files=from_files) if arguments is None else arguments),
        )
    if kind in WITHOUT_FUNCTION and arguments is None:
        made.rollout_func = write
    if options.get("activation_offloading"):
        made.run.offload = SmallOffload.last
    made.remove_callback(PrinterCallback)
    return made


def watched(trainer: Any) -> Run:
    """A training, with what there is to see of it."""
    with watching(trainer.run, causal_model(trainer.model)):
        trainer.train()
    trained = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
    trainer.run.weights = {name: p.detach().to("cpu", copy=True) for name, p in trained.items()}
    return trainer.run


@contextlib.contextmanager
def watching(run: Run, model: Any) -> Iterator[None]:
    """Counts what passes the parts of a model."""

    first_of_two: list[int] = []

    def embedded(_module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        tokens = inputs[0].numel()
        if embeds_twice(model) and not first_of_two:
            first_of_two.append(tokens)
            return
        before = first_of_two.pop() if first_of_two else 0
        run.forwards.append(tokens + before if model.config.is_encoder_decoder else tokens)
        run.graphs += torch.is_grad_enabled()

    def passed(number: int) -> Callable[..., None]:
        def pass_by(_module: nn.Module, _inputs: Any) -> None:
            run.layers[number] += 1

        return pass_by

    @torch.compiler.disable  # a graph of an earlier run would add to that run's set
    def activated(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
        run.activations += 1
        run.dtypes.add(output.dtype)

    def projected(_module: nn.Module, _inputs: Any) -> None:
        run.projections += 1

    chunks = linear_logprobs.ChunkedHead.chunks

    def counted(self: Any, *args: Any) -> Any:
        run.heads += 1
        return chunks(self, *args)

    layers: Any = checkpointed_layers(model)
    run.layers = run.layers or [0] * len(layers)
    first, activation = parts(model)
    with contextlib.ExitStack() as stack:
        stack.callback(model.get_input_embeddings().register_forward_pre_hook(embedded).remove)
        stack.enter_context(mock.patch.object(linear_logprobs.ChunkedHead, "chunks", counted))
        if (
            run.trainer.args.fused_layers is True
        ):  # it passes no module, and leaves layers alone whose modules have hooks
            yield
            return
        stack.callback(layers[0].get_submodule(activation).register_forward_hook(activated).remove)
        if hasattr(layers[0], "self_attn"):
            stack.callback(layers[0].self_attn.k_proj.register_forward_pre_hook(projected).remove)
        for number, layer in enumerate(layers):
            stack.callback(layer.get_submodule(first).register_forward_pre_hook(passed(number)).remove)
        yield


def embeds_twice(model: Any) -> bool:
    """Whether a forward embeds twice by one module: sources and targets, or masked texts and what a generator made."""
    return model.config.is_encoder_decoder or hasattr(model, replaced_tokens.GENERATOR)


# -- without the fused head ----------------------------------------------------------------------------------------


def dense_distribution(terms: Any, index: Any, projection: Any, bias: Tensor | None = None) -> Tensor:
    """[scores, vocab]: log-probabilities of all tokens."""
    logits = torch.stack([x[index] @ weight.T for x, weight in terms]).sum(0).float()
    logits = logits * projection.scale
    return torch.log_softmax((logits if bias is None else logits + bias) / projection.temperature, dim=-1)


def dense_logprobs(
    terms: Any, index: Tensor, target: Tensor, *, want: Any, projection: Any, bias: Tensor | None = None, **_: Any
) -> TokenStats:
    """`linear_logprobs` by all the logits."""
    logprobs = dense_distribution(terms, index, projection, bias)
    chosen = logprobs.gather(-1, target[:, None])[:, 0]
    return TokenStats(
        chosen,
        -(logprobs.exp() * logprobs).sum(-1) if want.entropies else None,
        logprobs.mean(-1) if want.mean_logprobs else None,
        logprobs.argmax(-1) == target if want.top1 else None,
    )


def dense_loss(
    terms: Any,
    index: Tensor,
    target: Tensor,
    loss: Any,
    *,
    factor: Any,
    teacher: Any = None,
    old: Any = None,
    **more: Any,
) -> Any:
    """`linear_loss` by all the logits."""
    stats = replace(dense_logprobs(terms, index, target, **more), old=old)
    if teacher is None:
        return (factor * loss(stats)).sum(), stats
    log_q = dense_distribution(terms, index, more["projection"])
    log_p = dense_distribution(teacher.terms, slice(None), teacher.projection)
    if teacher.across is not None:
        apart = across_distances(stats.logprobs, log_q, log_p, teacher)
        stats = replace(stats, logprobs=stats.logprobs.detach(), divergences=apart)
        return (factor * loss(stats)).sum(), stats
    if teacher.support is not None:
        likeliest = log_q.topk(min(teacher.support.tokens, log_q.shape[1])).indices
        log_q, log_p = log_q.gather(1, likeliest), log_p.gather(1, likeliest)
    stats = replace(stats, divergences=divergences.dense(log_q, log_p, teacher.beta))
    return (factor * loss(stats)).sum(), stats


def across_distances(logprobs: Tensor, log_q: Tensor, log_p: Tensor, teacher: Any) -> Tensor:
    """How far spans of text are apart over two vocabularies; 0 at the other scores of spans."""
    base, theirs, _ = teacher.spans
    own = (
        log_q
        + torch.stack(
            [
                sum(
                    (logprobs[n].clamp(min=LEAST) for n in range(len(base)) if base[n] == place - n != 0),
                    log_q.new_zeros(()),
                )
                for place in range(len(base))
            ]
        )[:, None]
    )
    apart = teacher.across.distances(own, log_p + theirs[:, None])
    return apart.where(base == 0, 0.0)


def dense_read(
    terms: Any, index: Tensor, read: Any, *, projection: Any, bias: Tensor | None = None, **_: Any
) -> Tensor:
    """`read_logits` of all the logits."""
    return read(dense_distribution(terms, index, projection, bias), slice(None))


@contextlib.contextmanager
def dense_head() -> Iterator[None]:
    with (
        mock.patch.multiple(language_model, linear_logprobs=dense_logprobs, linear_loss=dense_loss),
        mock.patch.object(next_token, "read_logits", dense_read),
    ):
        yield


# -- a technique in a trainer --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """What came of a technique in a trainer."""

    word: str
    why: str = ""


def cell(kind: str, technique: Technique) -> Cell:
    """Trains with a technique and without, and compares.

    Raises:
        AssertionError: the numbers, or what the technique did, are not what the table of techniques says.
    """
    if not has_options(kind, technique):
        return Cell("no such option")
    try:
        made = make(kind, **with_it(technique))
    except ValueError as error:
        return _refusal(technique, str(error))
    idle = technique.idle(made.site) or NOTHING_TO_DO.get((kind, technique.name))
    with uncompiled(technique):
        run = watched(made)
    plain = without_it(kind, technique)
    changes = CHANGES.get((kind, technique.name), technique.changes)
    if changes is None or idle is not None:
        check_equal(run, plain, bits=technique.name in BITWISE or idle is not None)
    else:
        check_near(run, plain, technique, band=OF_ONE.get((kind, technique.name)))
    if idle is not None:
        return Cell("no-op", idle)
    check(ACTED[technique.name](run, plain), f"{technique.name} did nothing")
    if changes is not None:
        return Cell("not exact", changes)
    return Cell("exact", "bit by bit" if technique.name in BITWISE else "to rounding")


def has_options(kind: str, technique: Technique) -> bool:
    return set(technique.options) <= {each.name for each in fields(classes(kind)[1])}


def with_it(technique: Technique) -> dict[str, Any]:
    """The options of a run with a technique."""
    return {**PLAIN.get(technique.name, {}), **FIRST.get(technique.name, {}), **technique.options}


def without_it(kind: str, *techniques: Technique, **more: Any) -> Run:
    """The plain run of some techniques."""
    for technique in techniques:
        more |= PLAIN.get(technique.name, {})
    return known_run(kind, TECHNIQUES["fused head"] in techniques, tuple(sorted(more.items())))


@functools.cache
def known_run(kind: str, dense: bool, options: tuple[tuple[str, Any], ...]) -> Run:
    with dense_head() if dense else contextlib.nullcontext():
        return watched(make(kind, **dict(options)))


def _refusal(technique: Technique, text: str) -> Cell:
    """The cell of a trainer that would not be made."""
    start, _, reason = text.partition(" cannot work here: ")
    for option, value in technique.options.items():
        if text.startswith(f"{option}={value!r} "):  # by the check of options
            return Cell("refused", text.removeprefix(f"{option}={value!r} ").partition(": ")[0])
    check(start.startswith(f"{technique.name} (") and bool(reason), f"the refusal names no technique: {text}")
    if reason.startswith("it needs "):
        check(not installed(technique), f"it is there: {reason}")
        return Cell(f"needs {', '.join(technique.needs)}")
    return Cell("refused", reason)


def installed(technique: Technique) -> bool:
    """Whether the packages that a technique needs are there."""
    return all(find_spec(package) is not None for package in technique.needs)


def check(holds: bool, otherwise: str) -> None:
    if not holds:
        raise AssertionError(otherwise)


def distance(run: Run, other: Run) -> tuple[float, float]:
    """How far apart two runs are, relatively: the most of any loss, and of the norm of any weight but biases of keys.

    A softmax does not see those: their gradients are rounding alone, of which AdamW makes steps. Losses that are not
    all positive, as those of policy gradients, are compared relative to the run's largest.
    """
    check(len(run.losses) == len(other.losses) > 0, "they took different numbers of steps")
    sizes = [abs(loss) for loss in other.losses]
    if min(other.losses) <= 0:
        sizes = [max(sizes)] * len(sizes)
    losses = max(abs(a - b) / size for a, b, size in zip(run.losses, other.losses, sizes, strict=True))
    both = {name: w for name, w in other.weights.items() if name in run.weights}  # some techniques freeze others
    compared = {name: w for name, w in both.items() if not name.endswith("key.bias")}
    weights = max(float((run.weights[n].float() - w.float()).norm() / w.norm()) for n, w in compared.items())
    return losses, weights


def check_equal(run: Run, other: Run, *, bits: bool, within: float = ROUNDING) -> None:
    """Losses and weights are equal, bit by bit or to rounding."""
    losses, weights = distance(run, other)
    most = 0.0 if bits else within
    check(losses <= most, f"the losses are {losses:.1e} apart: {run.losses}, {other.losses}")
    check(weights <= most, f"the weights are {weights:.1e} apart")


def check_near(run: Run, plain: Run, *techniques: Technique, band: float | None = None) -> None:
    """The last loss lies near that of the plain run, and weights are other ones."""
    band = band or sum(BANDS.get(each.name) or _band(each.changes or "") for each in techniques)
    apart, fall = abs(run.losses[-1] - plain.losses[-1]), plain.losses[0] - plain.losses[-1]
    check(fall > 0, "the plain run learns nothing")
    check(apart <= band * fall, f"last losses {apart / fall:.1%} of the fall apart: {run.losses}, {plain.losses}")
    check(distance(run, plain)[1] > 2.5 * ROUNDING, "the weights are those of the plain run")


def _band(changes: str) -> float:
    return OTHER_OPTIMIZER if "another optimizer" in changes else FOUR_BITS if "4 bits" in changes else BAND


def uncompiled(*techniques: Technique) -> Any:
    """torchao compiles an optimizer's step, for each shape: here it runs as it is written."""
    compiles = any("torchao" in technique.needs for technique in techniques)
    return torch.compiler.set_stance("force_eager") if compiles else contextlib.nullcontext()


# -- what each technique is seen by --------------------------------------------------------------------------------


def _policy(name: str) -> Callable[[Run, Run], bool]:
    def kept(run: Run, plain: Run) -> bool:
        layers: Any = checkpointed_layers(run.trainer.model)
        functions = [layer._gradient_checkpointing_func for layer in layers]
        return _recomputed(run, plain) and all(
            function.keywords["context_fn"].args[0] == POLICIES[name] for function in functions
        )

    return kept


def _recomputed(run: Run, plain: Run) -> bool:
    return run.layers == [len(run.forwards) + run.graphs] * len(run.layers)


def _offloaded(run: Run, plain: Run) -> bool:
    assert run.offload is not None
    return run.offload.peak_offloaded_bytes > 0 and run.offload.offloaded_bytes == 0


def _in_backward(run: Run, plain: Run) -> bool:
    steps = run.trainer.runner.in_backward.steps
    return isinstance(steps, OptimizerInBackward) and steps.started


def _streams(run: Run) -> bool:
    """Whether the weights of the model lie in files, from which they come; where a GPU trains, in pinned memory."""
    stream = stream_of(run.trainer.model)
    return stream is not None and all(is_mapped(weight) or weight.is_pinned() for weight in stream.weights)


def _streams_the_frozen(run: Run) -> bool:
    """Whether it is all of them, but for heads of one number and biases that are no layer's; those of layers alone
    where what others hold stays on the device."""
    stream = stream_of(run.trainer.model)
    parts = ".layers." if stream.store.layers_only else ""
    held = run.trainer.model.named_parameters()
    frozen = {id(p): p.numel() for name, p in held if not p.requires_grad and parts in name}
    streamed = {id(weight) for weight in stream.weights}
    return streamed <= frozen.keys() and sum(frozen[other] for other in frozen.keys() - streamed) < 300


def _compressed(remainder: str, moment_bits: int = 32) -> Callable[[Run, Run], bool]:
    def stepped(run: Run, plain: Run) -> bool:
        optimizer = run.trainer.optimizer.optimizer
        if {group["moment_bits"] for group in optimizer.param_groups} != {moment_bits}:
            return False
        dtypes = {weight.dtype for weight in run.weights.values()}
        kept = {group["remainder"] for group in optimizer.param_groups}
        return isinstance(optimizer, CompressedAdamW) and kept == {remainder} and dtypes == {torch.bfloat16}

    return stepped


def _compiled_layers(run: Run, plain: Run) -> bool:
    """Whether layers were compiled for the time of training; graphs of one model serve the next. Beside torchao nothing
    is compiled in tests (see `uncompiled`), and layers are only made ready for it."""
    frames = torch._dynamo.utils.counters["frames"]["ok"]
    eager = run.trainer.args.optim in ("adamw_torch_8bit", "adamw_torch_4bit")
    return (frames > 0 or eager) and run.compiled and not plain.compiled


def _keeps(wanted: Callable[[Any], bool]) -> Callable[[Run, Run], bool]:
    """Whether the optimizer keeps states of a kind, of some parameters at least."""
    return lambda run, plain: any(wanted(state) for state in run.trainer.optimizer.optimizer.state.values())


def _is_companded(state: Mapping[str, Any]) -> bool:
    return state["exp_avg"].dtype == torch.int8


ACTED: Mapping[str, Callable[[Run, Run], bool]] = {
    "gradient checkpointing": _recomputed,
    "checkpointing that keeps attention": _policy("attention"),
    "checkpointing that keeps products": _policy("matmul"),
    "checkpointing of recurrences alone": lambda run, plain: (
        run.layers == [len(run.forwards)] * len(run.layers)
        and [getattr(each, RECOMPUTED, None) for each in run.trainer.model.modules()].count(True) == 1
    ),
    "checkpointing of every k-th layer": lambda run, plain: (
        run.layers == [len(run.forwards) + run.graphs, len(run.forwards)] * (len(run.layers) // 2)
    ),
    "activation offloading": _offloaded,
    "fused head": lambda run, plain: run.heads > 0 == plain.heads,
    "tiled MLP": lambda run, plain: run.activations > 2 * plain.activations,
    "attention heads in turn": lambda run, plain: run.projections > 2 * plain.projections,
    "optimizer in backward": _in_backward,
    "streamed base weights": lambda run, plain: _streams(run) and _streams_the_frozen(run),
    "streamed trained weights": lambda run, plain: _streams(run) and _in_backward(run, plain),
    "FP8 base weights": lambda run, plain: any(stored(module) for module in run.trainer.model.modules()),
    "FP8 products": lambda run, plain: any(map(in_8_bits, run.trainer.model.modules())),
    "NVFP4 base weights": lambda run, plain: any(map(is_quantized, run.trainer.model.parameters())),
    "optimizer in backward, two passes": lambda run, plain: _in_backward(run, plain) and run.graphs >= 2 * plain.graphs,
    "compressed AdamW": _compressed("exact"),
    "bfloat16 AdamW with stochastic rounding": _compressed("stochastic"),
    "bfloat16 AdamW with stochastic rounding and 8-bit moments": _compressed("stochastic", 8),
    "FlashAdamW": lambda run, plain: _compressed("8bit", 8)(run, plain) and _keeps(_is_companded)(run, plain),
    "Muon": _keeps(lambda state: "momentum_buffer" in state),
    "LoRA-FA": lambda run, plain: {name for name in plain.weights if "lora_A" not in name} == run.weights.keys(),
    "compiled layers within an activation budget": _compiled_layers,
    "compiled layers": _compiled_layers,
    "Adafactor": lambda run, plain: type(run.trainer.optimizer.optimizer).__name__ == "Adafactor",
    "8-bit AdamW (torchao)": _keeps(lambda state: type(state["exp_avg"]).__name__ == "OptimState8bit"),
    "4-bit AdamW (torchao)": _keeps(lambda state: type(state["exp_avg"]).__name__ == "OptimState4bit"),
    "8-bit AdamW (bitsandbytes)": _keeps(lambda state: state["state1"].dtype == torch.uint8),
    "paged AdamW": lambda run, plain: run.trainer.optimizer.optimizer.is_paged,
    "Lion": _keeps(lambda state: "state1" in state and "state2" not in state),
    "optimizer states in host memory": _keeps(lambda state: state["exp_avg"].device.type == "cpu"),
    "liger kernels": lambda run, plain: run.liger and not plain.liger,
    "fused layers": lambda run, plain: run.fused and not plain.fused,
    "GaLore": _keeps(lambda state: "projector" in state),
    "APOLLO": _keeps(lambda state: "projector" in state),
    "bfloat16 mixed precision": lambda run, plain: run.dtypes == {torch.bfloat16} != plain.dtypes,
    "padding-free batches": lambda run, plain: max(run.forwards) < max(plain.forwards),
    "packing": lambda run, plain: len(run.trainer.train_dataset) < len(plain.trainer.train_dataset),
    "prefix sharing": lambda run, plain: max(run.forwards) < max(plain.forwards),
    "token budget": lambda run, plain: max(run.forwards) <= 64 < min(plain.forwards),
    "gradient accumulation": lambda run, plain: run.graphs >= 2 * plain.graphs,
    "rehearsal": lambda run, plain: len(run.forwards) > len(plain.forwards) and run.trainer.rehearsed_bytes > 0,
}
"""By technique, whether it did in a run what it is for, so that equal numbers say something."""


EVERY_OTHER = "a layer that is not checkpointed keeps everything: what is checkpointed is seen by the other's check"
BY_ITSELF = "a fused layer computes again by itself, where no module is passed"
SEVERAL = "gradients of several micro-batches are kept to the end of the step"
CANNOT_ACT: Mapping[tuple[str, str], str] = {
    **{(name, "fused layers"): BY_ITSELF for name in TECHNIQUES if "checkpointing" in name},
    ("bfloat16 mixed precision", "FP8 products"): "products in 8 bits are of runs that have it anyway",
    **{(name, "checkpointing of every k-th layer"): EVERY_OTHER for name in TECHNIQUES if "checkpointing" in name},
    **{
        (name, other): SEVERAL
        for name in ("optimizer in backward", "optimizer in backward, two passes", "streamed trained weights")
        for other in ("token budget", "gradient accumulation")
    },
}
"""By a technique and another beside it, why the first does not do what it does alone."""
NOTHING_TO_DO: Mapping[tuple[str, str], str] = {
    (kind, "prefix sharing"): "only rounds of turns='as_generated' have tokens in common"
    for kind in ("SFT", "GKD", "GOLD")
}
"""By a trainer and a technique, why it does nothing with the rows here."""


# -- pairs -----------------------------------------------------------------------------------------------------------

ON_A_GPU = {"optimizer states in host memory", "liger kernels"}
"""What does nothing on a CPU."""
PAIR_STEPS = 2
HALF = 2**-8
"""Rounding of bfloat16, by which runs in it may differ where sums are formed in another order."""


def pairs(kind: str) -> Iterator[tuple[str, str]]:
    """The names of all techniques two by two that a trainer runs together on any machine.

    Left out are what always is (the fused head), what does nothing on a CPU or needs a package that is not there, two
    values of one option, what wants another model, another way to step beside base weights that are streamed or in
    fewer bits (a few adapters alone are stepped there), and streamed trained weights beside a reference, which is
    refused.
    """
    alone = [
        each
        for each in TECHNIQUES.values()
        if each.name in ACTED and each.name not in ON_A_GPU and each.options and installed(each)
        if has_options(kind, each) and "recurrent" not in PLAIN.get(each.name, {})
    ]
    for first, second in itertools.combinations(alone, 2):
        options, more = with_it(first), with_it(second)
        names, lossy = {first.name, second.name}, [each for each in (first, second) if each.changes is not None]
        adapted = "streamed base weights" in names or (
            names & {*FEWER_BITS} and any("optim" in each.options for each in lossy)
        )
        if adapted and lossy and frozenset(names) not in EXCLUDED:
            continue
        if "streamed trained weights" in names and kind != "SFT":
            continue
        if all(more.get(name, value) == value for name, value in options.items()):
            yield first.name, second.name


def check_pair(kind: str, first: Technique, second: Technique) -> None:
    """Two exact techniques together give the plain numbers; a lossy one gives the same with an exact one as alone; and
    both do what they are for.

    Raises:
        AssertionError: they do not.
    """
    options = {**with_it(first), **with_it(second), "max_steps": PAIR_STEPS}
    reason = EXCLUDED.get(frozenset({first.name, second.name}))
    if reason is not None:
        with pytest.raises(ValueError, match=reason):
            make(kind, **options)
        return
    with uncompiled(first, second):
        run = watched(make(kind, **options))
    plain = without_it(kind, first, second, max_steps=PAIR_STEPS)
    for technique, other in ((first, second), (second, first)):
        if (technique.name, other.name) not in CANNOT_ACT and (kind, technique.name) not in NOTHING_TO_DO:
            check(ACTED[technique.name](run, plain), f"{technique.name} did nothing beside {other.name}")
    lossy = [each for each in (first, second) if each.changes is not None]
    exact = [each for each in (first, second) if each.changes is None]
    if not lossy:
        check_equal(run, plain, bits={first.name, second.name} <= BITWISE)
        return
    check_near(run, plain, *lossy)
    if exact:
        single = {**PLAIN.get(exact[0].name, {}), **with_it(lossy[0]), "max_steps": PAIR_STEPS}
        with uncompiled(*lossy):
            alone = known_run(kind, False, tuple(sorted(single.items())))
        halves = torch.bfloat16 in alone.dtypes or lossy[0].name == "Muon"  # it makes gradients orthogonal in bfloat16
        within = HALF if halves else ROUNDING
        within = 2 * HALF if lossy[0].name == "FP8 products" else within  # other sums, and so other numbers of 8 bits
        check_equal(run, alone, bits=exact[0].name in BITWISE, within=within)
