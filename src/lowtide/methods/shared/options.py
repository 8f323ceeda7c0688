"""Options that several methods share, each written once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from lowtide.option import COUNT, NOT_NEGATIVE, SHARE, Group, option
from lowtide.option_values import in_float32

if TYPE_CHECKING:
    from lowtide.objectives.named import LossTable  # which imports torch


@dataclass(kw_only=True)
class TurnOptions:
    """Of the methods that take turns of conversations as they are generated."""

    turns: str = option(
        "as_generated",
        "Each turn that is learned in the context that it would be generated in, or the whole conversation as one row. "
        "In SFT: of rows with a prompt, and with `assistant_only_loss`.",
        choices=["as_generated", "whole"],
    )
    thought_end: str | None = option(
        None,
        "Where the prompt opens a thought that the template never writes (DeepSeek): what ends it before the answer, "
        "such as '\\n</think>\\n\\n'.",
    )

    def check_turns(self) -> None:
        """Refuses the end of a thought where whole conversations are taken.

        Raises:
            ValueError: naming the options and the way out.
        """
        if self.thought_end is not None and self.turns == "whole":
            raise ValueError(
                f"thought_end={self.thought_end!r} requires turns='as_generated': set that, or leave thought_end out"
            )


@dataclass(kw_only=True)
class CompletionOptions(TurnOptions):
    """Of the methods over prompts and completions, under TRL's names and with its defaults."""

    learning_rate: float = option(1e-6, "The initial learning rate.")
    dataset_num_proc: int | None = option(None, "Processes that prepare the dataset.", NOT_NEGATIVE)
    max_length: int | None = option(1024, "Most tokens of a prompt with a completion. None is no limit.", COUNT)
    truncation_mode: str = option(
        "keep_start", "Which end of a row `max_length` keeps.", choices=["keep_start", "keep_end"]
    )
    max_prompt_length: int | None = option(None, "Most tokens of a prompt; its end is kept.", COUNT)
    max_completion_length: int | None = option(None, "Most tokens of a completion; its start is kept.", COUNT)
    prefix_sharing: bool = option(
        True, "Compute a prompt once for all its completions. False repeats it; the numbers are equal."
    )
    disable_dropout: bool = option(True, "Train without dropout, so that policy and reference are comparable.")
    router_aux_loss_coef: float | None = option(
        None,
        "Weight of a mixture of experts' load-balancing loss. None takes the model's own; 0 leaves it out.",
        NOT_NEGATIVE,
    )
    token_metrics: bool = option(True, "Log `entropy` and `mean_token_accuracy`; off, they cost nothing.")


@dataclass(kw_only=True)
class TransformersDefaults:
    """Of the tasks that people bring from transformers' own Trainer: its values, where TRL's are others."""

    learning_rate: float = option(5e-5, "The initial learning rate.")
    gradient_checkpointing: bool = option(
        False, "Recompute activations in backward: about a third slower, for a fraction of their memory."
    )


@dataclass(kw_only=True)
class TaskLength(TransformersDefaults):
    """Of the tasks of encoders whose scripts in transformers call the most tokens of a row `max_seq_length`."""

    max_length: int | None = option(512, "Most tokens of a row. None is no limit.", COUNT)
    max_seq_length: int | None = option(None, "The name of `max_length` in transformers' scripts.", COUNT)

    def take_max_seq_length(self) -> None:
        """Has `max_length` say what either of the two names does.

        Raises:
            ValueError: both are set, to different numbers.
        """
        if self.max_seq_length is None:
            return
        if self.max_length not in (512, self.max_seq_length):
            raise ValueError(
                f"{type(self).__name__}: max_length={self.max_length} and its other name max_seq_length="
                f"{self.max_seq_length} contradict each other: keep max_length"
            )
        self.max_length, self.max_seq_length = self.max_seq_length, None


@dataclass(kw_only=True)
class VisionOptions:
    """Of the methods whose rows may show images."""

    freeze_vision_tower: bool = option(
        False, "Leave the vision tower of a vision-language model as it is; its projector is trained."
    )


class Following(NamedTuple):
    """How a reference follows the policy."""

    share: float
    """How far it moves: 1 makes it the policy, and 0 leaves it."""
    steps: int
    """Optimizer steps between two such moves."""
    option: str
    """What asks for it, as messages name it."""


@dataclass(kw_only=True)
class StoredReference:
    """Of the methods that may have a reference: how it is stored."""

    group: ClassVar[Group] = Group.REFERENCE

    ref_model_storage: str = option(
        "same",
        "What a frozen reference takes: the policy's dtype, 8 or 4 bits (not exact), or host memory (slower).",
        choices=["same", "8bit", "4bit", "cpu"],
    )

    @property
    def compares(self) -> bool:
        """Whether there is a reference under these options."""
        return True

    @property
    def following(self) -> Following | None:
        """How the reference follows the policy; None where it stays as it is."""
        return None

    @property
    def follows(self) -> bool:
        """Whether the reference moves."""
        return self.following is not None

    @property
    def is_live(self) -> bool:
        """Whether the reference is the policy as it is in each step, on other prompts."""
        return False


@dataclass(kw_only=True)
class FollowedReference(StoredReference):
    """Of the methods whose reference may move."""

    group: ClassVar[Group] = Group.REFERENCE

    sync_ref_model: bool = option(False, "Move the reference towards the policy as training goes on (TR-DPO).")
    ref_model_mixup_alpha: float = option(
        0.6, "How far it moves: 1 makes it the policy, and 0 leaves it (arXiv 2404.09656).", SHARE
    )
    ref_model_sync_steps: int = option(512, "Optimizer steps between two such moves.", COUNT)

    @property
    def following(self) -> Following | None:
        if not self.sync_ref_model:
            return None
        return Following(self.ref_model_mixup_alpha, self.ref_model_sync_steps, "sync_ref_model=True")


@dataclass(kw_only=True)
class TeacherOptions(StoredReference):
    """Of the methods whose reference is a teacher, under TRL's names."""

    group: ClassVar[Group] = Group.REFERENCE

    teacher_model_name_or_path: str | None = option(
        None,
        "The teacher: a folder, or a name on the hub. None: the trainer's `teacher_model`, else the model without its "
        "adapters.",
    )
    teacher_model_revision: str | None = option(None, "Branch, tag or commit of a teacher on the hub.")
    teacher_model_init_kwargs: dict | str | None = option(
        None, "Arguments of `from_pretrained` for the teacher; its dtype is the student's where they name none."
    )

    @property
    def own_tokens(self) -> bool:
        """Whether the teacher has a vocabulary of its own, and reads the same text in tokens of that."""
        return False


@dataclass(kw_only=True)
class ReferenceOptions(FollowedReference):
    """Of the methods that compare the policy with a reference on rows that are known before training."""

    group: ClassVar[Group] = Group.REFERENCE

    precompute_ref_log_probs: bool = option(
        False, "Compute the reference's log-probabilities before training, and keep no reference."
    )
    precompute_ref_batch_size: int | None = option(
        None, "Rows at a time while they are computed. None: `per_device_train_batch_size`.", COUNT
    )

    def check_reference(self) -> None:
        """Refuses what cannot work together.

        Raises:
            ValueError: naming the options and the way out.
        """
        if self.sync_ref_model and self.precompute_ref_log_probs:
            raise ValueError(
                "sync_ref_model=True moves the reference, and precompute_ref_log_probs=True takes its "
                "log-probabilities once, before training: set one of them back to False"
            )
        if self.precompute_ref_batch_size is not None and not self.precompute_ref_log_probs:
            raise ValueError(
                f"precompute_ref_batch_size={self.precompute_ref_batch_size} requires "
                "precompute_ref_log_probs=True: set that, or leave this out"
            )
        if self.ref_model_storage != "same":
            for name in ("sync_ref_model", "precompute_ref_log_probs"):
                if getattr(self, name):
                    raise ValueError(
                        f"ref_model_storage={self.ref_model_storage!r} requires a frozen reference, and "
                        f"{name}=True leaves none: leave one of them out"
                    )


def check_read(options: Any, names: Iterable[str], losses: LossTable[Any], chosen: Iterable[str]) -> None:
    """Refuses options that are set and that none of the chosen losses reads; what is 0 or None asks for nothing.

    Args:
        options: a dataclass of options.
        names: the options that only some losses read.
        losses: the table of losses, whose entries say what they read.
        chosen: the losses of this run, as far as they are in the table.

    Raises:
        ValueError: naming the option and the losses that read it.
    """
    defaults = {each.name: each.default for each in fields(options)}
    chosen = list(chosen)
    entries = losses.chosen(chosen).values()
    for name in names:
        value, readers = getattr(options, name), sorted(key for key, loss in losses.items() if name in loss.reads)
        if value and value != defaults[name] and not any(name in loss.reads for loss in entries):
            raise ValueError(
                f"{name}={value!r} would have no effect, since loss_type={', '.join(chosen)} does not read it: "
                f"choose a loss that does ({', '.join(readers)}), or set {name} back to {defaults[name]!r}"
            )


def check_whole_vocabulary(options: Any, why: str) -> None:
    """Refuses a vocabulary that is split over ranks.

    Args:
        why: what needs it whole, as a clause that begins with the option.

    Raises:
        ValueError: naming the options and the way out.
    """
    sharding: Any = getattr(options, "sharding", None)
    if getattr(options, "fsdp_split_vocabulary", False) or getattr(sharding, "tensor_parallel", 1) > 1:
        raise ValueError(f"{why}, and the vocabulary is split over ranks: leave fsdp_split_vocabulary and tp_size out")


def zeros(options: Any, *names: str) -> set[str]:
    """`name=value` for each of some options that is 0 in float32, or a list of zeros: a term of the loss that they
    multiply has no gradient (`TrainingConfig.without_gradient`)."""
    values = {name: getattr(options, name) for name in names}
    numbers = {name: value if isinstance(value, list) else [value] for name, value in values.items()}
    return {
        f"{name}={values[name]}"
        for name, each in numbers.items()
        if each and all(n is not None and in_float32(n) == 0 for n in each)
    }


def flipped_labels(options: Any) -> list[str]:
    """Says that so much smoothing leaves no preference, or turns it around, where the loss reads it."""
    smoothing = options.label_smoothing
    if smoothing < 0.5:
        return []
    what = "either completion is as good" if smoothing == 0.5 else "the rejected completion is preferred"
    return [f"label_smoothing={smoothing} says that {what}: set it below 0.5"]
