"""The options that all trainers share, on top of `transformers.TrainingArguments`, with TRL's names and defaults."""

from __future__ import annotations

import copy
import functools
import logging
import os
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar, cast

import torch
from accelerate import PartialState
from transformers import TrainingArguments
from transformers.training_args import OptimizerNames

from lowtide.compat.torch import set_timeout_of_new_groups
from lowtide.compat.transformers import dict_fields
from lowtide.engine.attention import NAME
from lowtide.memory.options import MemoryOptions
from lowtide.methods import METHODS
from lowtide.option import COUNT, NOT_NEGATIVE, Group, Range, option
from lowtide.option_values import take_values
from lowtide.ranks.failures import meeting
from lowtide.ranks.sharding import Sharding
from lowtide.ranks.world import is_on, launched
from lowtide.renamed import is_off, replaced
from lowtide.run.optimizers import NAMES, check_optimizer_name
from lowtide.run.options.deepspeed import asked_bf16, checked_config
from lowtide.run.options.inherited_checks import check_inherited
from lowtide.run.options.inherited_groups import INHERITED_GROUPS
from lowtide.run.options.inherited_ranges import INHERITED_RANGES
from lowtide.run.options.secrets import without_secrets
from lowtide.run.options.sharding import OF_ENGINES, engines_hidden, sharding_of
from lowtide.run.options.without_effect import WITHOUT_EFFECT
from lowtide.spelling import nearest

REFUSED: dict[str, str] = {
    "include_for_metrics": "`compute_metrics` gets token ids and log-probs; there are no inputs or losses to include",
    "batch_eval_metrics": "`compute_metrics` is called once, over the whole evaluation set",
}
"""Options that would train something else than was asked for, and why; refused when they are set."""

logger = logging.getLogger(__name__)
Made = TypeVar("Made")


class TakesWhatIsOff(type):
    """Makes a config without the options that it does not have, where they are given only to be off."""

    def __call__(cls: Callable[..., Made], *args: Any, **kwargs: Any) -> Made:
        own = {each.name for each in fields(cast(Any, cls))}
        given = {name: value for name, value in kwargs.items() if name in own or not asks_for_nothing(name, value)}
        return type.__call__(cast(Any, cls), *args, **given)


@dataclass
class TrainingConfig(MemoryOptions, TrainingArguments, metaclass=TakesWhatIsOff):
    """What every lowtide trainer takes. Fields not listed here are those of `transformers.TrainingArguments`.

    Raises:
        ValueError: at construction, where an option cannot work: the cause, the option, the way out.
    """

    _VALID_DICT_FIELDS: ClassVar[list[str]] = [*dict_fields(TrainingArguments), "model_init_kwargs"]

    refused: ClassVar[dict[str, str]] = REFUSED
    """Options that this config has from `TrainingArguments` and refuses, and why."""
    inherited_ranges: ClassVar[dict[str, Range]] = INHERITED_RANGES
    inherited_groups: ClassVar[dict[str, Group]] = INHERITED_GROUPS
    inherited_literals: ClassVar[dict[str, tuple[bool, ...]]] = {"fsdp": (True, False)}
    without_effect: ClassVar[dict[str, str]] = WITHOUT_EFFECT
    """Options that are accepted and change nothing, and why."""

    model_init_kwargs: dict | str | None = option(
        None, "Arguments of `from_pretrained`, where the model is given by name; `dtype` is float32 if left out."
    )
    trust_remote_code: bool = option(False, "Run Python code that comes with a model or tokenizer.", group=Group.DATA)
    padding_free: bool = option(
        True, "Run batches without padding. False runs the padded path, with equal numbers.", group=Group.MEMORY
    )
    fsdp_split_vocabulary: bool = option(
        False,
        "With fsdp, never gather head and embedding: each rank keeps its rows, and hidden states travel in their "
        "place. Saves a whole head and its gradient, for more traffic where scores are many; same numbers.",
        group=Group.DEVICES,
    )
    resume_without_states: bool = option(
        False,
        "Resume from a checkpoint without optimizer, scheduler or random states, or with another optimizer's: these "
        "start anew.",
        group=Group.SAVING,
    )
    stop_grace: float = option(
        30.0,
        "Seconds that a run has after SIGTERM to finish its step and write a checkpoint; 0: SIGTERM ends it at once.",
        NOT_NEGATIVE,
        group=Group.SAVING,
    )
    memory_report: str | None = option(
        None, "JSON file to write peak, states, speed and ledger to after training.", group=Group.MEMORY
    )

    parallelism_config: dict | None = option(
        None, "accelerate's ParallelismConfig, or its sizes: dp_replicate_size, dp_shard_size, sp_size or cp_size."
    )
    pipeline_parallel_size: int = option(
        1,
        "Ranks that the layers of the model are split between; each holds its own part of weights and states.",
        COUNT,
        group=Group.DEVICES,
    )

    # other defaults than TrainingArguments'
    learning_rate: float = option(2e-5, "The initial learning rate.")
    logging_steps: float = option(10, "Log every so many steps; below 1 it is a share of all steps.")
    gradient_checkpointing: bool = option(
        True, "Recompute activations in backward: about a quarter slower, for a fraction of their memory."
    )
    optim: str = option(
        "adamw_torch_fused",
        "The optimizer: lowtide's AdamW in bfloat16, compressed, rounded stochastically or in 5 bytes a parameter; "
        "Muon; LoRA-FA; or one of transformers'.",
        choices=[*NAMES, *(name.value for name in OptimizerNames if name.value not in NAMES)],
    )
    bf16: bool | None = option(
        None, "bfloat16 mixed precision. None: on a GPU that has it, if fp16 is not set; on a CPU float32."
    )
    # TRL's, accepted for the scripts that set them
    pad_to_multiple_of: int | str | None = option(None, "Without effect: batches have no padding.", COUNT)
    pad_token: str | None = option(None, "Without effect: batches have no padding.")

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Refuses options that there are not, before `__init__` would in fewer words.

        Raises:
            TypeError: naming the option, the nearest one, and the method that has it.
        """
        own = {each.name for each in fields(cls) if each.init}
        for name in kwargs:
            if name not in own:
                said = whose(name) or replaced(name) or nearest(name, own)
                raise TypeError(f"{cls.__name__} has no option {name!r}{said}")
        made = super().__new__(cls)
        positional = (each.name for each in fields(cls) if each.init and not each.kw_only)
        vars(made)["_requested"] = {**dict(zip(positional, args, strict=False)), **kwargs}
        return made

    def __repr__(self) -> str:
        """What differs from the defaults: what was given, and what was set since. Access tokens are left out."""
        now, as_made = self.to_dict(), self.__dict__.get("_as_made", {})
        defaults = {each.name: default_of(type(self), each.name) for each in fields(self) if each.name in now}
        told = {name for name, value in self.requested.items() if name in now and value != defaults[name]}
        told |= {name for name, value in as_made.items() if getattr(self, name) != value}
        shown = [f"{name}={now[name]!r}" for name in defaults if name in told and now[name] != defaults[name]]
        return f"{type(self).__name__}({', '.join(shown)})"

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled, as into `training_args.bin`: access tokens are not."""
        return without_secrets(self.__dict__)

    def __copy__(self) -> Self:
        """A copy in this process keeps access tokens."""
        made = object.__new__(type(self))
        vars(made).update(self.__dict__)
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        made = object.__new__(type(self))
        vars(made).update(copy.deepcopy(self.__dict__, memo))
        return made

    def to_dict(self) -> dict[str, Any]:
        """As transformers', which trackers log and which hides tokens, those in `model_init_kwargs` too."""
        return without_secrets(super().to_dict())

    @property
    def asked_attention(self) -> str | None:
        """The attention implementation of transformers that is asked for; without padding it is not the one used."""
        asked = cast(dict, self.model_init_kwargs or {}).get("attn_implementation")
        return None if asked == NAME else asked

    @property
    def sharding(self) -> Sharding:
        """How the run is spread over ranks, from `fsdp` and its like."""
        return self.__dict__.get("_sharding", Sharding())

    @property
    def zero_config(self) -> dict[str, Any] | None:
        """DeepSpeed's config, filled in, where its engine steps; None elsewhere."""
        return self.__dict__.get("_zero_config")

    @property
    def data_ranks(self) -> int:
        """Ranks that see different rows; those that compute the same ones together count as one."""
        return self.world_size // self.sharding.same_rows

    @property
    def data_rank(self) -> int:
        """The number of this rank, or of its group, among these."""
        return self.process_index // self.sharding.same_rows

    @property
    def requested(self) -> dict[str, Any]:
        """The options that were set by hand. Where all were, by a parser say, those that differ from the defaults."""
        whole = {each.name for each in fields(TrainingArguments) if each.init}
        given: dict[str, Any] = self.__dict__.get("_requested", {})
        if not whole <= given.keys():
            return dict(given)
        return {name: value for name, value in given.items() if value != default_of(type(self), name)}

    @functools.cached_property
    def _setup_devices(self) -> torch.device:
        """As `TrainingArguments` does, which gives `ddp_timeout` to the first process group of GPUs alone: one that is
        made on a CPU gets it here, and those that are made later.

        Raises:
            RankFailed: not all ranks came.
            ValueError: the backend cannot start as this process was started.
        """
        on_cpu = self.use_cpu or is_on("ACCELERATE_USE_CPU")
        if torch.distributed.is_available():
            set_timeout_of_new_groups(self.ddp_timeout_delta)
        with meeting(self.ddp_timeout):
            try:
                if on_cpu and not torch.distributed.is_initialized():
                    PartialState(cpu=True, backend=self.ddp_backend, timeout=self.ddp_timeout_delta)
                return super()._setup_devices
            except ValueError as error:
                if self.ddp_backend is None or torch.distributed.is_initialized():
                    raise
                raise ValueError(
                    f"ddp_backend={self.ddp_backend!r} did not start ({error}): leave it out where one process trains, "
                    "and start several with torchrun"
                ) from None

    def check(self) -> None:
        """The method's own checks; its options class has them."""

    def without_gradient(self) -> list[set[str]]:
        """For each term of the loss, `option=value` of those that leave it without gradient; a method's options class
        may say so of its own."""
        return [set()]

    def settle(self) -> None:
        """Sets what follows from other options and the ranks; a method's options class may have such."""

    def respell(self) -> None:
        """Takes other spellings of values, before all are checked; a method's options class may have some."""

    def _check_split_vocabulary(self) -> None:
        """Refuses to split what is not sharded, or not over all ranks. One process ignores it with `fsdp`."""
        sharding = self.sharding
        if not self.fsdp_split_vocabulary or (sharding.kind == "none" and self.fsdp):
            return
        reason = (
            "requires fsdp=True" if sharding.kind != "fsdp2"
            else "is not built for copies of shards (HSDP)" if sharding.hybrid
            else "is not built for weights in the host's memory" if sharding.offload_weights
            else "is done by tp_size already" if sharding.tensor_parallel > 1
            else None
        )  # fmt: skip
        if reason is not None:
            raise ValueError(f"fsdp_split_vocabulary=True {reason}, and the run is spread as {sharding}: leave it out")

    def _check_stages(self) -> None:
        """Refuses what the stages of a pipeline cannot go with."""
        others = {
            "padding_free": (not self.padding_free, "runs padded, and hidden states between ranks have no padding"),
            "fp16": (self.fp16, "scales losses, which is not built for stages: take bf16=True"),
            "memory_budget": (self.memory_budget is not None, "predicts no stages: set the options by hand"),
        }
        for name, (is_set, why) in others.items():
            if self.sharding.pipeline_parallel > 1 and is_set:
                raise ValueError(
                    f"pipeline_parallel_size={self.pipeline_parallel_size} does not go with "
                    f"{name}={getattr(self, name)!r}, which {why}; or leave pipeline_parallel_size out"
                )

    def _check_saving(self) -> None:
        """Refuses a report into a folder; parts of a model where no rank holds rows, and to push them, which others
        could not load."""
        if self.memory_report and (what := _why_no_file(Path(self.memory_report))):
            raise ValueError(f"memory_report={self.memory_report!r} {what}: name a file")
        sharding = self.sharding
        split = {"tp_size": sharding.tensor_parallel, "pipeline_parallel_size": sharding.pipeline_parallel}
        for name, size in split.items():
            if size > 1 and not sharding.gather_on_save:
                raise ValueError(
                    f"SHARDED_STATE_DICT has each rank save its rows of weights, and with {name}={size} ranks hold "
                    f"other parts: leave it out, or {name}"
                )
        if self.push_to_hub and sharding.cuts_weights and not sharding.gather_on_save:
            raise ValueError(
                "push_to_hub=True pushes what is saved, and each rank is to save its part of the model "
                "(SHARDED_STATE_DICT, or stage3_gather_16bit_weights_on_model_save false): leave one of them out, or "
                "push what `lowtide merge` makes of the parts"
            )

    def _cap_processes(self) -> None:
        """Prepares a dataset in no more processes than run at once."""
        asked = getattr(self, "dataset_num_proc", None)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        if asked is not None and asked > cores:
            logger.warning(f"dataset_num_proc={asked} is set to {cores}, the cores that this process may run on")
            vars(self).update(dataset_num_proc=cores)
        elif asked == 0:
            logger.warning("dataset_num_proc=0 is taken for None: the dataset is prepared in this process")

    def _check_refused(self) -> None:
        """Refuses what would train something else; what is empty asks for nothing."""
        known = {field.name for field in fields(self)}
        for name, reason in self.refused.items():
            if name not in known:
                continue
            value, default = getattr(self, name), default_of(type(self), name)
            if value and value != default:
                raise ValueError(f"{type(self).__name__}: {name}={value!r} is refused: {reason}")
            setattr(self, name, default)

    def __post_init__(self) -> None:
        self.respell()
        take_values(self, leave={*self.refused, *OF_ENGINES})
        vars(self)["_sharding"] = sharding_of(self)
        if self.output_dir is not None and not self.output_dir.strip():
            raise ValueError(f"output_dir={self.output_dir!r} must be the path of a folder")
        self.check()
        check_inherited(self)
        self._cap_processes()
        if self.pad_to_multiple_of == "auto":
            self.pad_to_multiple_of = None
        self._check_refused()
        check_optimizer_name(str(getattr(self.optim, "value", self.optim)))
        if self.bf16 is None:
            asked = asked_bf16(self)
            self.bf16 = not self.fp16 and has_bf16(self.use_cpu) if asked is None else asked
        if self.gradient_checkpointing and self.gradient_checkpointing_kwargs is None:
            self.gradient_checkpointing_kwargs = {"use_reentrant": False}
        # Newer versions of transformers call these activation_checkpointing*, and warn of the names that TRL has.
        for old in ("gradient_checkpointing", "gradient_checkpointing_kwargs"):
            new = old.replace("gradient", "activation")
            if getattr(self, new, old) is None:
                setattr(self, new, getattr(self, old))
        self.dataloader_pin_memory &= torch.cuda.is_available()
        own = self.optim if self.optim in NAMES else None
        if own is not None:
            self.optim = "adamw_torch_fused"  # transformers knows its own names alone
        self._check_split_vocabulary()
        self._check_stages()
        self._check_saving()
        with engines_hidden(self):
            super().__post_init__()
        self.optim = own or self.optim
        self.settle()
        if self.n_gpu > 1:
            logger.warning(
                f"this process sees {self.n_gpu} GPUs and trains on the first of them: start with "
                f"`torchrun --nproc_per_node {self.n_gpu}` to train on all"
            )
            self._n_gpu = 1  # or the Trainer would put a copy of the model on each in each step
        self.check_memory(self.max_grad_norm)
        vars(self)["_as_made"] = {each.name: getattr(self, each.name) for each in fields(self) if each.init}
        if self.sharding.by_deepspeed:
            vars(self).update(_zero_config=checked_config(self, launched()), rehearsal=False)
        if not self.eval_do_concat_batches:
            raise ValueError(
                f"{type(self).__name__}: eval_do_concat_batches=False is refused: batches are cut anew by their "
                "tokens, and `compute_metrics` gets one array of the whole dataset"
            )
        if not self.average_tokens_across_devices and self.data_ranks > 1:
            raise ValueError(
                f"{type(self).__name__}: average_tokens_across_devices=False is refused: every scored token counts "
                "the same on whatever rank it falls"
            )
        # A stream's rows are dealt out, not cut from one batch made on the first rank.
        accelerator: Any = self.accelerator_config
        if accelerator.dispatch_batches:
            logger.warning("dispatch_batches=True has no effect: each rank reads its own rows")
        accelerator.dispatch_batches = False


def default_of(config: type, name: str) -> Any:
    """The default of an option, as it is before a config has filled others in from it."""
    found = next(each for each in fields(config) if each.name == name)
    return found.default if found.default_factory is MISSING else found.default_factory()


def asks_for_nothing(name: str, value: Any) -> bool:
    """Whether an option that a config does not have is known, of another method or of an older version, and is off."""
    return is_off(value) and bool(whose(name) or replaced(name))


def whose(name: str) -> str:
    """`: it is of ...`, the methods that have an option of this name; empty if there is none."""
    methods = [title for title, each in METHODS.items() if name in {field.name for field in fields(each.options)}]
    return f": it is of {', '.join(methods)}" if methods else ""


def has_bf16(use_cpu: bool) -> bool:
    """Whether bfloat16 mixed precision is the default: on a GPU that multiplies in it. A CPU stays exact."""
    return not use_cpu and torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)


def _why_no_file(path: Path) -> str:
    """Why no file can be written at a path; empty where one can."""
    above = next((each for each in path.parents if each.exists()), path)
    try:
        if path.is_dir():
            return "is a folder"
    except OSError as error:
        return f"cannot be a file ({error.strerror})"
    return f"is below the file {str(above)!r}" if above.is_file() else ""
