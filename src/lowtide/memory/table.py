"""The table of all memory techniques, which trainers, planner, docs and tests read; a new one is one entry here."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from lowtide.compat.torch import PARTITIONED
from lowtide.memory.activations.attention_heads import install_attention_heads
from lowtide.memory.activations.checkpointing import OUTSIDE_RECURRENCES, set_checkpointing
from lowtide.memory.activations.offloading import ActivationOffload
from lowtide.memory.activations.spill_file import folder_on_a_disk
from lowtide.memory.activations.tiled_mlp import install_tiled_mlp
from lowtide.memory.kernels.compilation_log import watched
from lowtide.memory.kernels.compiling import compile_layers, remove_compilation
from lowtide.memory.kernels.float8_products import multiply_in_float8, trained_linears
from lowtide.memory.kernels.fused_layers import fuse_layers, in_16_bits, why_not_fused
from lowtide.memory.kernels.liger import liger_kernels, why_no_kernels
from lowtide.memory.optimizers.lora_fa import freeze_down_projections, why_no_projections
from lowtide.memory.optimizers.states import IN_BFLOAT16, optimizer_name
from lowtide.memory.options import FLOAT8, NVFP4, TWO_PASS
from lowtide.memory.own import OPTION, own_technique
from lowtide.memory.technique import Choosing, Site, Technique
from lowtide.memory.weights.streaming import stream_of
from lowtide.ops.layers.float8 import multiplies_on
from lowtide.ops.recurrence.recurrence import RECOMPUTED
from lowtide.ops.target import has_triton, kind_of, target_of
from lowtide.process.ways_out import in_python

logger = logging.getLogger(__name__)

PACKAGES = {
    "torchao": "'lowtide[ao]'",
    "bitsandbytes": "'lowtide[bnb]'",
    "galore_torch": "galore-torch",
    "apollo_torch": "apollo-torch",
    "liger_kernel": "'lowtide[liger]'",
}
"""What to install for a package that a technique needs."""
COMPILED = "compiled layers hold the weights that they were compiled with: switch torch_compile off"
COMPILED_TOO = "compiled layers replace what it replaces: switch one of them off"
SEVERAL = "steps of several micro-batches keep their gradients to the end, as they would without it"
LAYERS = ("use_liger_kernel", "torch_compile", "mlp_tile_tokens")
EIGHT = "moments are rounded to 8 bits in blocks (arXiv 2110.02861)"
STATES_AT_HOME = "the states of a model on the CPU are in host memory anyway"
ANOTHER = "another optimizer"
"""The first words of `changes` of an optimizer other than AdamW."""
OPTIMIZER = Choosing("optimizer")
"""Of optimizers that take AdamW's place with its hyperparameters."""
STREAMED = 1.1
"""Seconds of a step whose weights are read a layer at a time from the system's file cache, as a multiple."""
FOUR = "moments are rounded to 4 bits in blocks (arXiv 2309.01507)"


def _checkpointing(site: Site) -> None:
    options = site.options
    kwargs = dict(options.gradient_checkpointing_kwargs or {})
    set_checkpointing(site.model, options.checkpointing_policy, options.checkpointing_every, kwargs)


def _without_checkpointing(site: Site) -> str | None:
    if site.options.gradient_checkpointing:
        return None
    return "it requires gradient_checkpointing=True: switch that on, or leave it out"


def _without_recurrences(site: Site) -> str | None:
    if any(RECOMPUTED in vars(module) for module in site.model.modules()):
        return _without_checkpointing(site)
    return "it computes recurrences again, and the model has none that lowtide computes: take another policy"


def _offloading(site: Site) -> Callable[[], Any]:
    options = site.options
    offload = ActivationOffload(
        site.model,
        site.device,
        folder=options.activation_offloading_dir or folder_on_a_disk(options.output_dir),
        max_host_bytes=options.activation_offloading_max_bytes,
    )
    return offload.around


def _gradients_that_wait(site: Site) -> str | None:
    if site.options.fp16:
        return "the gradients of fp16=True are scaled until backward is over: use bf16=True"
    if site.ranks > 1:
        return f"gradients of {site.ranks} ranks are added up after backward, and each would be stepped before"
    return None


def _compiled_or_tiled(name: str) -> Callable[[Site], str | None]:
    """Three techniques replace what a layer runs, each from the model's own."""

    def others(site: Site) -> str | None:
        working = [each for each in LAYERS if each != "use_liger_kernel" or site.device.type == "cuda"]
        found = [other for other in working if other != name and getattr(site.options, other, None)]
        return f"it replaces what {found[0]} replaces too: switch one of them off" if found else None

    return others


def _heads_refused(site: Site) -> str | None:
    options = site.options
    if options.torch_compile:
        return "it replaces what torch_compile replaces too: switch one of them off"
    if options.sharding.tensor_parallel > 1:
        return "ranks that layers are split between have some heads each already: raise tp_size in its place"
    return None


def _compile_refused(site: Site) -> str | None:
    if site.options.sharding.sequence_parallel > 1:
        return "compiled layers cannot exchange heads between ranks that split sequences: leave one of them off"
    if site.options.sharding.tensor_parallel > 1:
        return "compiled layers cannot exchange between ranks that layers are split between: leave one of them off"
    return _compiled_or_tiled("torch_compile")(site)


def _compiled(site: Site) -> Callable[[], None]:
    options, backend = site.options, site.options.torch_compile_backend
    layers = compile_layers(
        site.model, backend=backend, mode=options.torch_compile_mode, budget=options.activation_memory_budget
    )
    unwatch = watched(site.model, f"{layers} layers with {backend}", quiet=options.disable_tqdm)

    def undo() -> None:
        unwatch()
        remove_compilation(site.model)

    return undo


def _no_partition(site: Site) -> str | None:
    backend = site.options.torch_compile_backend
    if backend in PARTITIONED:
        return None
    return (
        f"torch_compile_backend={backend!r} does not choose what is kept for backward: take 'inductor', or leave "
        "activation_memory_budget out"
    )


def _liger_refused(site: Site) -> str | None:
    if site.options.gradient_checkpointing and site.options.checkpointing_policy == "matmul":
        return "its rotary kernel writes over products that checkpointing_policy='matmul' keeps: take 'attention'"
    return _compiled_or_tiled("use_liger_kernel")(site) or why_no_kernels(site.model)


def _liger(site: Site) -> Callable[[], None]:
    kernels = liger_kernels(site.model)
    if not kernels.applied:
        raise ValueError(f"liger kernels (use_liger_kernel=True) cannot work here: {kernels.reason}")
    return kernels.undo


def _mixed(options: Any) -> torch.dtype | None:
    return torch.bfloat16 if options.bf16 else torch.float16 if options.fp16 else None


def _fusing_refused(site: Site) -> str | None:
    return _why_not_fused(site) if site.options.fused_layers else None


def _fusing_left(site: Site) -> str | None:
    """Why layers run as they were where they are to be fused only where that helps: on a GPU, and on a CPU in float32,
    as it is measured."""
    if site.options.fused_layers:
        return None
    if target_of(next(site.model.parameters())).kind == "cuda":
        return _why_not_fused(site)
    return _why_not_fused(site) if _in_float32(site) else ""


def _in_float32(site: Site) -> bool:
    """Whether a CPU trains and computes in float32 alone."""
    if target_of(next(site.model.parameters())).kind != "cpu" or _mixed(site.options) is not None:
        return False
    return {parameter.dtype for parameter in site.model.parameters()} == {torch.float32}


def _why_not_fused(site: Site) -> str | None:
    options, sharding = site.options, site.options.sharding
    for other in ("mlp_tile_tokens", "attention_head_chunks", "torch_compile", "use_liger_kernel"):
        if getattr(options, other, None):
            return f"it replaces what {other} replaces too: switch one of them off"
    if options.activation_offloading and not (
        options.gradient_checkpointing and options.checkpointing_policy == "full"
    ):
        return (
            "what it keeps of attention lies where activation_offloading takes nothing: checkpoint layers by the "
            "policy 'full'"
        )
    if "stream" in (options.base_weights, options.trained_weights) or stream_of(site.model) is not None:
        return "weights that are streamed come for a layer's own forward: switch one of them off"
    split = (sharding.sequence_parallel, sharding.tensor_parallel, sharding.pipeline_parallel)
    if sharding.by_deepspeed or max(split) > 1:
        return "layers are fused on ranks whose forward sees whole rows and whole weights (fsdp, copies): leave it off"
    target = target_of(next(site.model.parameters()))
    if target.kind == "cuda" and (target.capability < (8, 0) or not (target.planned or has_triton())):
        return "its kernels are Triton's, for GPUs from compute capability 8.0 on: install triton, or leave it off"
    narrow = _mixed(options) is not None or in_16_bits(site.model) or optimizer_name(options) in IN_BFLOAT16
    if target.kind == "cpu" and narrow:
        return "a CPU's products in 16 bits are faster in layers as they are: leave it off"
    return why_not_fused(site.model, _mixed(options))


def _fused(site: Site) -> Callable[[], None] | None:
    """Fuses layers of the model, and with it of what it is compared with: layers that are computed alike agree to the
    last bit where their weights do."""
    undo = ExitStack()
    try:
        undo.callback(fuse_layers(site.model, _mixed(site.options)))
    except ValueError as reason:  # it was fine as the run was made: hooks came since
        logger.warning(f"layers run as they were: {reason}")
        return None
    for model in site.compared():
        if model is not site.model:
            _fuse_compared(replace(site, model=model), undo)
    return undo.close


def _fuse_compared(site: Site, undo: ExitStack) -> None:
    """Fuses what layers can be of a model that another is compared with."""
    if _why_not_fused(site) is None:
        with suppress(ValueError):
            undo.callback(fuse_layers(site.model, _mixed(site.options)))


def _streamed(site: Site) -> Callable[[], Any]:
    stream = stream_of(site.model)
    return nullcontext if stream is None else stream.store.around


def _base_refused(site: Site) -> str | None:
    compares = hasattr(site.options, "ref_model_storage")
    if not compares and all(parameter.requires_grad for parameter in site.model.parameters()):
        remedy = f"set use_peft=True{in_python(' (or pass a `peft_config`)')}, or take trained_weights='stream'"
        return f"all weights are trained: {remedy}"
    return COMPILED if site.options.torch_compile else None


def _products_refused(site: Site) -> str | None:
    options, first = site.options, next(trained_linears(site.model), None)
    if options.sharding.cuts_weights or options.sharding.by_deepspeed or options.sharding.pipeline_parallel > 1:
        return "it is built for whole weights on each rank: leave it out, or fsdp, tp_size and their kin"
    if first is None:
        return "no layer has a trained matrix with sizes that are multiples of 16: take base_dtype='float8' with LoRA"
    if not (options.bf16 or first.weight.dtype == torch.bfloat16):
        return "products in 8 bits give bfloat16: set bf16=True"
    if not multiplies_on(first.weight):
        return "this device multiplies no 8-bit floats; NVIDIA's from compute capability 8.9 on do: leave it out"
    return COMPILED_TOO if options.torch_compile else None


def _trained_refused(site: Site) -> str | None:
    if not all(parameter.requires_grad for parameter in site.model.parameters()):
        return "some weights are frozen: take base_weights='stream', which streams these"
    return COMPILED if site.options.torch_compile else _gradients_that_wait(site)


def _no_vocabulary(site: Site) -> str | None:
    heads = (getattr(module, "get_output_embeddings", None) for module in site.model.modules())
    found = any(head is not None and head() is not None for head in heads)  # of a model that is trained beside, too
    return None if found else "a head of labels has no vocabulary at its end"


def _optimizer(name: str, saves: str, changes: str | None, *values: str, **more: Any) -> Technique:
    """An optimizer that transformers names."""
    changes = f"{ANOTHER} ({changes})" if changes and changes.startswith("arXiv") else changes
    options = {"optim": values[0]}
    return Technique(name, saves, options, ("optimizer",), also=values[1:], changes=changes, **more)


TECHNIQUES: dict[str, Technique] = {
    each.name: each
    for each in (
        Technique(
            "gradient checkpointing",
            "all activations of a layer except its input, for a third more compute",
            {"gradient_checkpointing": True},
            lowers=("activations",), named=False,
            chosen=Choosing("activations", 4 / 3),
        ),
        Technique(
            "checkpointing that keeps attention",
            "activations except attention's outputs, which are slow to compute again for long rows",
            {"checkpointing_policy": "attention"},
            chosen=Choosing("activations", 3.9 / 3),
            refused=_without_checkpointing,
            begin=_checkpointing,
        ),
        Technique(
            "checkpointing that keeps products",
            "activations except the outputs of matrix products and attention: little is computed again",
            {"checkpointing_policy": "matmul"},
            chosen=Choosing("activations", 1.03),
            refused=_without_checkpointing,
            begin=_checkpointing,
        ),
        Technique(
            "checkpointing of recurrences alone",
            "what recurrent layers compute inside their recurrences, several times their inputs",
            {"checkpointing_policy": OUTSIDE_RECURRENCES},
            chosen=Choosing("activations", 1.02),  # less than by keeping products, which recurrences are none of
            refused=_without_recurrences,
            begin=_checkpointing,
        ),
        Technique(
            "checkpointing of every k-th layer",
            "activations of one layer in k",
            {"checkpointing_every": 2},
            is_on=lambda options: options.checkpointing_every > 1,
            chosen=Choosing("activations", 3.5 / 3),
            refused=_without_checkpointing,
            begin=_checkpointing,
        ),
        Technique(
            "activation offloading",
            "activations, moved to host memory (GPU) or to a file (CPU); with checkpointing the layers' inputs",
            {"activation_offloading": True},
            lowers=("activations",),
            around=_offloading,
        ),
        Technique(
            "fused head",
            "logits: scores x vocab never exist",
            {},
            is_on=lambda options: True, idle=_no_vocabulary, named=False,
        ),
        Technique(
            "tiled MLP",
            "the wide inner activations of MLPs, for long rows",
            {"mlp_tile_tokens": 16},
            lowers=("activations",),
            refused=_compiled_or_tiled("mlp_tile_tokens"),
            prepare=lambda site: install_tiled_mlp(site.model, site.options.mlp_tile_tokens),
        ),
        Technique(
            "attention heads in turn",
            "queries, keys, values and outputs of attention: those of a few heads at a time, for long rows",
            {"attention_head_chunks": 2},
            lowers=("activations",),
            refused=_heads_refused,
            prepare=lambda site: install_attention_heads(site.model, site.options.attention_head_chunks),
        ),
        Technique(
            "optimizer in backward",
            "gradients: each is freed as its parameter is stepped; with one micro-batch a step",
            {"optimizer_in_backward": True, "max_grad_norm": 0.0},
            chosen=Choosing("gradients", whole=True),
            lowers=("gradients",),
            refused=_gradients_that_wait,
            remark=SEVERAL,
        ),
        Technique(
            "optimizer in backward, two passes",
            "gradients, with exact clipping by the global norm, at twice the compute",
            {"optimizer_in_backward": TWO_PASS},
            chosen=Choosing("gradients", 2.0, whole=True),
            lowers=("gradients",),
            refused=_gradients_that_wait,
            remark=SEVERAL,
        ),
        Technique(
            "compressed AdamW",
            "a quarter of the states: bfloat16 weights and 16 bits of remainder in place of float32 masters",
            {"optim": "adamw_compressed"},
            chosen=OPTIMIZER,
            lowers=("weights", "gradients"),
            changes="forward and backward run in bfloat16; the trajectory is that of float32 masters, bit by bit",
        ),
        Technique(
            "bfloat16 AdamW with stochastic rounding",
            "float32 masters: weights are bfloat16, rounded up or down at random",
            {"optim": "adamw_stochastic"},
            chosen=OPTIMIZER,
            lowers=("weights", "gradients"),
            changes="weights are rounded at each step, right on average; forward and backward run in bfloat16",
        ),
        Technique(
            "bfloat16 AdamW with stochastic rounding and 8-bit moments",
            "float32 masters and three quarters of the moments: 4 bytes a parameter and its gradient remain",
            {"optim": "adamw_stochastic_8bit"},
            chosen=OPTIMIZER,
            lowers=("weights", "gradients", "optimizer"),
            changes=f"as with stochastic rounding alone, and {EIGHT}",
        ),
        Technique(
            "FlashAdamW",
            "float32 masters and three quarters of the moments: 5 bytes a parameter and its gradient remain",
            {"optim": "adamw_flash"},
            lowers=("weights", "gradients", "optimizer"),
            changes="forward and backward run in bfloat16, masters have 24 bits, and moments are rounded to 8 bits by "
            "companding (arXiv 2602.23349)",
        ),
        _optimizer(
            "Adafactor", "both moments, except a row and a column of the second", "arXiv 1804.04235", "adafactor",
            chosen=OPTIMIZER,
        ),
        _optimizer("Muon", "one of the two moments of the matrices in layers", "arXiv 2502.16982", "muon"),
        Technique(
            "LoRA-FA",
            "activations: a LoRA layer keeps `rank` numbers a token in place of its input; half of the states",
            {"optim": "adamw_lora_fa"},
            lowers=("activations", "gradients", "optimizer"),
            changes="down projections stay as they began, and gradients of the others are projected: another optimizer "
            "(arXiv 2308.03303)",
            refused=lambda site: why_no_projections(site.model),
            prepare=lambda site: freeze_down_projections(site.model),
        ),
        _optimizer(
            "8-bit AdamW (torchao)", "three quarters of the moments", EIGHT, "adamw_torch_8bit", needs=("torchao",),
            chosen=OPTIMIZER,
        ),
        _optimizer(
            "4-bit AdamW (torchao)", "seven eighths of the moments", FOUR, "adamw_torch_4bit", needs=("torchao",),
            chosen=OPTIMIZER,
        ),
        _optimizer(
            "8-bit AdamW (bitsandbytes)", "three quarters of the moments", EIGHT,
            "adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", needs=("bitsandbytes",), chosen=OPTIMIZER,
        ),
        _optimizer(
            "paged AdamW", "peaks: moments move to host memory when the GPU is full; a CPU has nothing to page", None,
            "paged_adamw_32bit", needs=("bitsandbytes",),
        ),
        _optimizer(
            "Lion", "one of the two moments", "arXiv 2302.06675",
            "lion_32bit", "lion_8bit", "paged_lion_32bit", "paged_lion_8bit", needs=("bitsandbytes",),
        ),
        _optimizer(
            "GaLore", "moments: keeps those of a low-rank projection of the gradient", "arXiv 2403.03507",
            "galore_adamw", "galore_adamw_8bit", "galore_adafactor", needs=("galore_torch",),
        ),
        _optimizer(
            "APOLLO", "moments: keeps those of a random low-rank projection", "arXiv 2412.05270",
            "apollo_adamw", needs=("apollo_torch",),
        ),
        Technique(
            "optimizer states in host memory",
            "moments: on the GPU for one parameter at a time",
            {"optimizer_states_on_host": True},
            chosen=Choosing("states", 1.2),
            lowers=("optimizer",),
            idle=lambda site: STATES_AT_HOME if kind_of(site.device) == "cpu" else None,
        ),
        Technique(
            "streamed base weights",
            "weights that are not trained: a layer at a time is resident, the others are in their files or on the host",
            {"base_weights": "stream"},
            chosen=Choosing("precision", STREAMED, last_resort=True),
            lowers=("weights",),
            refused=_base_refused,
            around=_streamed,
        ),
        Technique(
            "FP8 base weights",
            "half of the weights that are not trained; products of bfloat16 runs are in 8 bits, from Ada and Hopper on",
            {"base_dtype": FLOAT8},
            lowers=("weights",),
            changes="frozen weights are rounded to 8 bits, 2.6% of a weight, and in bfloat16 what they multiply too, "
            "3.7% of a product (root mean square)",
        ),
        Technique(
            "NVFP4 base weights",
            "three quarters of the weights that are not trained (an experiment)",
            {"base_dtype": NVFP4},
            lowers=("weights",),
            changes="frozen weights are rounded to 4 bits, 10% of a weight (root mean square)",
            needs=("torchao",),
        ),
        Technique(
            "FP8 products",
            "time: products of trained weights, and copies of these in 16 bits under mixed precision",
            {"float8_products": True},
            changes="both factors of a product are rounded to 8 bits, 3.7% of the product (root mean square)",
            refused=_products_refused,
            prepare=lambda site: multiply_in_float8(site.model),
        ),
        Technique(
            "streamed trained weights",
            "weights and moments, in a file or on the host; a layer's are resident at a time, and all gradients never",
            {"trained_weights": "stream", "optimizer_in_backward": TWO_PASS},
            chosen=Choosing("gradients", STREAMED, whole=True, last_resort=True),
            lowers=("weights", "optimizer"),
            refused=_trained_refused,
            around=_streamed,
        ),
        Technique(
            "bfloat16 mixed precision",
            "half of the outputs of matrix products; weights and moments stay float32, cast weights are added",
            {"bf16": True},
            chosen=Choosing("precision", 0.7),
            lowers=("activations", "head"),
            changes="forward and backward are computed in bfloat16",
        ),
        Technique(
            "liger kernels",
            "activations of norms, rotary embeddings and gates, computed again in fused kernels",
            {"use_liger_kernel": True},
            lowers=("activations",),
            refused=_liger_refused,
            idle=lambda site: None if site.device.type == "cuda" else "liger's kernels are Triton's, for a GPU",
            begin=_liger,
            needs=("liger_kernel",),
        ),
        Technique(
            "fused layers",
            "activations between products, computed again in a decoder layer's own backward",
            {"fused_layers": True},
            is_on=lambda options: getattr(options, "fused_layers", False) is not False,
            lowers=("activations",),
            refused=_fusing_refused,
            idle=_fusing_left,
            begin=_fused,
        ),
        Technique(
            "compiled layers",
            "activations between products, which a compiler computes in one pass",
            {"torch_compile": True},
            lowers=("activations",),
            refused=_compile_refused,
            begin=_compiled,
        ),
        Technique(
            "compiled layers within an activation budget",
            "activations of compiled graphs beyond a share, which are computed again in backward",
            {"torch_compile": True, "activation_memory_budget": 0.5},
            is_on=lambda options: getattr(options, "activation_memory_budget", None) is not None,
            lowers=("activations",),
            refused=_no_partition,
        ),
        Technique(
            "padding-free batches",
            "padding: no token is computed that is not in the data",
            {"padding_free": True},
            lowers=("activations",), named=False,
        ),
        Technique("packing", "rows laid end to end in full bins", {"packing": True}, named=False),
        Technique(
            "prefix sharing",
            "the prompt, computed once for all its completions",
            {"prefix_sharing": True},
            lowers=("activations",), named=False,
        ),
        Technique(
            "token budget",
            "activations: a strict cap on the tokens of a forward",
            {"tokens_per_microbatch": 64},
            lowers=("activations", "head"), named=False,
        ),
        Technique(
            "gradient accumulation",
            "activations: a batch in several forwards; gradients stay in between",
            {"gradient_accumulation_steps": 2},
            is_on=lambda options: options.gradient_accumulation_steps > 1, named=False,
        ),
        Technique(
            "rehearsal",
            "nothing: a run that does not fit fails before the first step",
            {"rehearsal": True},
            named=False,
        ),
    )
}  # fmt: skip
"""By name. Truncation, adapters and quantization are of the data and the model: `max_length`, `peft_config`,
`quantization_config`."""


def active(options: Any) -> list[Technique]:
    """The techniques that a config has on."""
    own = map(own_technique, getattr(options, OPTION, None) or ())
    return [*(technique for technique in TECHNIQUES.values() if technique.on(options)), *own]


class ActiveTechniques:
    """Techniques at a site: by default those that its options have on."""

    def __init__(self, site: Site, techniques: Sequence[Technique] | None = None) -> None:
        self.site, self.techniques = site, active(site.options) if techniques is None else list(techniques)
        self._idle: dict[str, str | None] = {}

    def idle(self, technique: Technique) -> str | None:
        """Why a technique does nothing at the site, as it was when that was first asked: once weights are sharded all
        ranks would have to ask."""
        if technique.name not in self._idle:
            self._idle[technique.name] = technique.idle(self.site)
        return self._idle[technique.name]

    @property
    def _working(self) -> list[Technique]:
        return [technique for technique in self.techniques if self.idle(technique) is None]

    def prepare(self) -> None:
        """Refuses what cannot work at the site, and changes the model for the rest.

        Raises:
            ValueError: naming the technique, its options and the reason.
        """
        for technique in self._working:
            if reason := _missing(technique) or technique.refused(self.site):
                raise ValueError(self._refusal(technique, reason))
        for technique in self._working:
            if technique.prepare is not None:
                try:
                    technique.prepare(self.site)
                except ValueError as error:
                    raise ValueError(self._refusal(technique, error)) from error

    def _refusal(self, technique: Technique, reason: object) -> str:
        settings = ", ".join(f"{name}={getattr(self.site.options, name)!r}" for name in technique.options)
        return f"{technique.name} ({settings}) cannot work here: {reason}"

    def begin(self) -> list[Callable[[], None]]:
        """What is done as training begins; returns what undoes it, to be called in this order."""
        undo = [technique.begin(self.site) for technique in self._working if technique.begin is not None]
        return [each for each in reversed(undo) if each is not None]

    @property
    def fuses(self) -> bool:
        """Whether layers are fused."""
        return any(technique.begin is _fused for technique in self._working)

    @contextmanager
    def comparing(self, models: Iterable[nn.Module]) -> Iterator[None]:
        """While it lasts, models score as what a policy is compared with does in training, before that begins."""
        with ExitStack() as undo:
            for model in models if self.fuses else ():
                _fuse_compared(replace(self.site, model=model), undo)
            yield

    def around(self) -> Callable[[], AbstractContextManager]:
        """What is entered for each forward of the policy."""
        entered = [technique.around(self.site) for technique in self._working if technique.around is not None]

        @contextmanager
        def all_of_them() -> Iterator[None]:
            with ExitStack() as stack:
                for enter in entered:
                    stack.enter_context(enter())
                yield

        return all_of_them if entered else nullcontext


def _missing(technique: Technique) -> str | None:
    missing = [package for package in technique.needs if find_spec(package) is None]
    named = [PACKAGES.get(package, package) for package in missing]
    return f"it needs {', '.join(missing)}: pip install {' '.join(named)}" if missing else None
