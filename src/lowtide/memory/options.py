"""The options of the memory techniques, which every trainer takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from lowtide.memory.activations.chain_storage import DEVICE, HOST
from lowtide.memory.activations.checkpointing import OUTSIDE_RECURRENCES, POLICIES
from lowtide.option import COUNT, Group, Range, option

TWO_PASS = "two_pass"
"""The value of `optimizer_in_backward` that clips exactly."""

FLOAT8, NVFP4 = "float8", "nvfp4"
"""The values of `base_dtype`."""

OTHER_WORDS = {"offload": "activation_offloading=True", "selective": "checkpointing_policy='matmul'"}
"""What others have among the arguments of checkpoints, and what it is here."""
OF_TORCH = ("use_reentrant", "preserve_rng_state", "determinism_check", "debug", "early_stop", "context_fn")


@dataclass(kw_only=True)
class MemoryOptions:
    """When and where bytes live; none of these changes a number, unless its help says so."""

    group: ClassVar[Group] = Group.MEMORY

    memory_budget: str | None = option(
        None, "Choose exact settings that fit so much memory ('24GiB', or 'auto' for what is free); yours stay as set."
    )
    tokens_per_microbatch: int | None = option(
        None,
        "Token budget: the most tokens that one forward sees. The batch of a step is cut to fit; same numbers.",
        COUNT,
    )
    checkpointing_policy: str = option(
        "full",
        "What a checkpointed layer keeps: nothing, attention outputs, matrix products too, or all but what recurrences "
        "compute inside.",
        choices=[*POLICIES, OUTSIDE_RECURRENCES],
    )  # fmt: skip
    checkpointing_every: float = option(
        1, "Checkpoint one layer in so many (1.5: two of three); the others keep their activations.", Range(least=1)
    )
    activation_offloading: bool = option(
        False, "Keep what backward needs in host memory (from a GPU) or in a file (from a CPU) until it is needed."
    )
    activation_offloading_dir: str | None = option(
        None, "Folder of that file, on a disk; by default the system's for temporary files, or the output folder."
    )
    activation_offloading_max_bytes: int | None = option(
        None, "The most that is away at a time. None: no limit.", COUNT
    )
    activation_memory_budget: float | None = option(
        None,
        "With torch_compile: share of a layer's activations that compiled graphs keep; the rest is computed again.",
        Range(above=0, most=1),
    )
    chain_storage: str = option(
        DEVICE,
        "Where keys and values of a row above tokens_per_microbatch wait between its pieces: on the device, or in host "
        "memory (a file for a CPU).",
        choices=[DEVICE, HOST],
    )
    mlp_tile_tokens: int | None = option(None, "Tokens that an MLP sees at a time, for long rows. None: all.", COUNT)
    attention_head_chunks: int | None = option(
        None, "Groups of heads that attention computes one after the other, for long rows. None: all at once.", COUNT
    )
    fused_layers: bool | None = option(
        None,
        "Run each decoder layer as one function, with a backward of its own and, on a GPU, Triton kernels: fewer "
        "operations, less kept. For layers of Llama's form. None: on a GPU, and in float32 on a CPU, where "
        "they can be.",
    )
    techniques: list[str] | None = option(
        None,
        "Memory techniques of your own, each by its path, my_module.MY_TECHNIQUE, or by an entry point's name of the "
        "group lowtide.techniques.",
    )
    optimizer_in_backward: bool | str = option(
        False,
        "Step each parameter as its gradient arrives, and free that. 'two_pass' clips exactly, at twice the time.",
    )
    optimizer_states_on_host: bool = option(False, "Keep the optimizer's states in host memory, for a GPU.")
    base_weights: str = option(
        "resident",
        "Where weights that are not trained are: 'stream' leaves them in the model's safetensors files (from a GPU, in "
        "host memory; quantized ones, on a CPU, in a temporary file), and brings in a layer at a time. Needs adapters, "
        "or a reference or teacher of its own.",
        choices=["resident", "stream"],
    )
    base_dtype: str | None = option(
        None,
        "Store the frozen weights of layers in fewer bits: 'float8' with a scale a row, multiplied in 8 bits in "
        "bfloat16 runs (half the bytes, faster products from Ada on); 'nvfp4' in 4 bits (an experiment; torchao). Not "
        "exact. Needs LoRA.",
        choices=[FLOAT8, NVFP4],
    )
    float8_products: bool = option(
        False,
        "Take the products of layers' trained weights in 8 bits in bfloat16 runs, forward and for the gradient at "
        "their input: up to twice as fast from Ada on, for large models. Not exact.",
    )
    trained_weights: str = option(
        "resident",
        "Where all weights are that are trained: 'stream' keeps them and the optimizer's states in a temporary file in "
        "output_dir (from a GPU, those of layers in host memory), and brings in a layer at a time. Needs "
        "optimizer_in_backward, and saves most with one micro-batch a step.",
        choices=["resident", "stream"],
    )
    rehearsal: bool = option(
        True, "Before the first step, run the heaviest micro-batch once, so that what will not fit fails at once."
    )
    use_liger_loss: bool | None = option(None, "An older name of the fused head, which is always on.")

    def check_memory(self, max_grad_norm: float) -> None:
        """Refuses what cannot work together; what transformers has other words for is said in these from here on.

        Raises:
            ValueError: naming the options and the way out.
        """
        self._take_checkpointing_kwargs()
        self._check_streamed()
        if self.techniques:
            from lowtide.memory.own import own_technique

            self.techniques = [self.techniques] if isinstance(self.techniques, str) else self.techniques
            for name in self.techniques:
                own_technique(name)
        for name in ("activation_offloading_dir", "activation_offloading_max_bytes"):
            if getattr(self, name) is not None and not self.activation_offloading:
                raise ValueError(f"{name} requires activation_offloading=True: set that, or leave this out")
        if self.activation_memory_budget is not None and not getattr(self, "torch_compile", False):
            raise ValueError(
                f"activation_memory_budget={self.activation_memory_budget:g} is a share of what compiled graphs keep, "
                "and torch_compile is off: set torch_compile=True, or leave it out"
            )
        self._check_what_layers_keep()
        if self.optimizer_in_backward not in (False, True, TWO_PASS):
            raise ValueError(
                f"optimizer_in_backward={self.optimizer_in_backward!r} must be true, false or {TWO_PASS!r}"
            )
        if self.optimizer_in_backward is True and max_grad_norm:
            raise ValueError(
                f"optimizer_in_backward=True steps a parameter before the norm of all gradients is known, which "
                f"max_grad_norm={max_grad_norm} clips by: set max_grad_norm=0 to train without clipping, or "
                f"optimizer_in_backward={TWO_PASS!r}, which takes the norm in a pass of its own"
            )
        if self.optimizer_in_backward == TWO_PASS and not max_grad_norm:
            raise ValueError(
                f"optimizer_in_backward={TWO_PASS!r} takes a pass for the norm, which max_grad_norm=0 does not clip "
                "by: set optimizer_in_backward=True"
            )

    def _check_what_layers_keep(self) -> None:
        """Refuses two answers to what of a layer is kept for backward."""
        if self.activation_memory_budget is None or not getattr(self, "gradient_checkpointing", False):
            return
        for name, plain in (("checkpointing_policy", "full"), ("checkpointing_every", 1)):
            if getattr(self, name) != plain:
                raise ValueError(
                    f"activation_memory_budget={self.activation_memory_budget:g} and {name}={getattr(self, name)!r} "
                    "both say what a compiled layer keeps: leave one of them out"
                )

    def _check_streamed(self) -> None:
        """Refuses weights in files where weights are cut, or stepped all at once."""
        sharding: Any = getattr(self, "sharding", None)
        if self.trained_weights == "stream" and not self.optimizer_in_backward:
            raise ValueError(
                "trained_weights='stream' steps each layer in backward while it is resident: set "
                f"optimizer_in_backward={TWO_PASS!r}, which clips exactly, or optimizer_in_backward=True with "
                "max_grad_norm=0"
            )
        if self.base_weights != "stream" or sharding is None:
            return
        if sharding.cuts_weights or sharding.by_deepspeed or sharding.pipeline_parallel > 1:
            raise ValueError(
                f"base_weights='stream' has each rank read whole layers, and the run is spread as {sharding}, which "
                "cuts weights: leave one of them out"
            )

    def _take_checkpointing_kwargs(self) -> None:
        """transformers has `every_n_layers` and `offload` among what it passes on to torch, and TRL `selective`."""
        given: Any = getattr(self, "gradient_checkpointing_kwargs", None)
        kwargs = dict(given or {})
        every = kwargs.pop("every_n_layers", None)
        for name, here in OTHER_WORDS.items():
            if kwargs.pop(name, False):
                raise ValueError(f"{name!r} in gradient_checkpointing_kwargs is {here} here: set that in its place")
        if unknown := kwargs.keys() - OF_TORCH:
            raise ValueError(
                f"{min(unknown)!r} in gradient_checkpointing_kwargs is none of {', '.join(OF_TORCH)}, which "
                "torch.utils.checkpoint takes: leave it out"
            )
        if every is None:
            return
        if self.checkpointing_every not in (1, every):
            raise ValueError(
                f"checkpointing_every={self.checkpointing_every:g} and every_n_layers={every} in "
                "gradient_checkpointing_kwargs are two words for one thing: leave the latter out"
            )
        self.checkpointing_every = every
        for name in ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"):
            setattr(self, name, kwargs)
