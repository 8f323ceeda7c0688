"""Supervised fine-tuning: the log-likelihood of the scored tokens of texts, conversations or completions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lowtide.methods.method import Method, TokenObjective
from lowtide.methods.shared.likelihood import likelihood
from lowtide.methods.shared.options import TurnOptions, VisionOptions
from lowtide.methods.shared.rows import Texts
from lowtide.objectives.sft import LOSSES
from lowtide.option import COUNT, NOT_NEGATIVE, PATH, option
from lowtide.option_values import check_flags


@dataclass(kw_only=True)
class TextOptions:
    """Of the methods over texts, conversations, or prompts with a completion, under TRL's names and with its
    defaults."""

    # data
    dataset_text_field: str = option("text", "Column that holds the text of plain-text rows.")
    dataset_kwargs: dict | str | None = option(
        None, "Only {'skip_prepare_dataset': true}: rows are `input_ids` and `labels` already, used as they are."
    )
    dataset_num_proc: int | None = option(None, "Processes that prepare the dataset.", NOT_NEGATIVE)
    chat_template_path: str | None = option(
        None,
        "Chat template: a Jinja file, a tokenizer's folder or hub name, or a built-in one, such as chatml.",
    )
    eos_token: str | None = option(None, "Token that ends a text, in place of the tokenizer's own.")
    max_length: int | None = option(1024, "Most tokens of a row, and the capacity of a bin. None is no limit.", COUNT)
    max_seq_length: int | None = option(None, "The older name of `max_length`.", COUNT)
    truncation_mode: str = option(
        "keep_start", "Which end of a row `max_length` keeps.", choices=["keep_start", "keep_end"]
    )
    max_prompt_length: int | None = option(None, "Most tokens of a prompt; its end is kept.", COUNT)
    max_completion_length: int | None = option(None, "Most tokens of a completion; its start is kept.", COUNT)
    prefix_sharing: bool = option(
        True,
        "Compute what the rounds of a conversation have in common once. False repeats it; the numbers are equal.",
    )
    shuffle_dataset: bool = option(False, "Shuffle the rows once, before they are packed.")
    packing: bool = option(False, "Put several rows into one bin of `max_length` tokens; they never see each other.")
    packing_strategy: str = option(
        "bfd",
        "How rows are put into bins: best fit decreasing with overflow cut (bfd) or kept (bfd_split), or end to end.",
        choices=["bfd", "bfd_split", "wrapped"],
    )
    eval_packing: bool | None = option(None, "Pack the evaluation set. None does as `packing`.")
    # objective
    completion_only_loss: bool | None = option(
        None, "Score only completions. None: where rows have a prompt and a completion."
    )
    assistant_only_loss: bool = option(False, "Score only what the assistant says.")
    router_aux_loss_coef: float | None = option(
        None,
        "Weight of a mixture of experts' load-balancing loss. None takes the model's own; 0 leaves it out.",
        NOT_NEGATIVE,
    )
    token_metrics: bool = option(True, "Log `entropy` and `mean_token_accuracy`; off, they cost nothing.")

    def check_texts(self) -> None:
        """Refuses what cannot work, naming the option and the way out.

        Raises:
            ValueError: two options exclude each other, or one has an older name with another value.
        """
        if self.max_seq_length is not None:
            if self.max_length not in (1024, self.max_seq_length):
                raise ValueError(
                    f"{type(self).__name__}: max_length={self.max_length} and its older name max_seq_length="
                    f"{self.max_seq_length} contradict each other: keep max_length"
                )
            self.max_length, self.max_seq_length = self.max_seq_length, None
        if isinstance(self.dataset_kwargs, Mapping) and set(self.dataset_kwargs) - {"skip_prepare_dataset"}:
            raise ValueError(
                f"dataset_kwargs has {sorted(set(self.dataset_kwargs) - {'skip_prepare_dataset'})}: "
                "its only key is 'skip_prepare_dataset'"
            )
        check_flags("dataset_kwargs", self.dataset_kwargs, ["skip_prepare_dataset"])
        if self.packing and self.max_length is None:
            raise ValueError("packing=True needs max_length, the capacity of a bin: set it to a number of tokens")
        if self.packing and self.truncation_mode == "keep_end" and self.packing_strategy != "bfd":
            raise ValueError(
                f"packing_strategy={self.packing_strategy!r} cuts nothing away, so truncation_mode='keep_end' "
                "would be without effect: leave it at 'keep_start', or pack with 'bfd'"
            )

    @property
    def skips_preparation(self) -> bool:
        return isinstance(self.dataset_kwargs, Mapping) and bool(self.dataset_kwargs.get("skip_prepare_dataset"))


@dataclass(kw_only=True)
class SFTOptions(TextOptions, TurnOptions, VisionOptions):
    """The options of supervised fine-tuning, under TRL's names and with its defaults."""

    loss_type: str = option(
        "nll",
        "Negative log-likelihood, or dynamic fine-tuning (arXiv 2508.05629). TRL's chunked_nll is nll.",
        choices=[*LOSSES, "chunked_nll", PATH],
    )
    roles_to_train: list[str] | None = option(
        None, "With `assistant_only_loss`: the roles of the messages that are scored. None is the assistant's."
    )
    train_on_last_turn_only: bool = option(
        False, "With `assistant_only_loss`: score only the last of the assistant's messages."
    )
    label_smoothing_factor: float = option(0.0, "Share of the uniform distribution in each target.")

    def check(self) -> None:
        """Refuses what cannot work, naming the option and the way out.

        Raises:
            ValueError: an option has no such value, or two options exclude each other.
        """
        self.check_texts()
        self.check_turns()
        if self.loss_type == "chunked_nll":  # TRL's older name of the same
            self.loss_type = "nll"
        LOSSES.chosen([self.loss_type])  # a user's own is found now, or never
        if not self.assistant_only_loss:
            for name in ("roles_to_train", "train_on_last_turn_only"):
                if getattr(self, name):
                    raise ValueError(
                        f"{name}={getattr(self, name)!r} requires assistant_only_loss=True, which scores messages: set "
                        "it, or leave the option out"
                    )
        if self.label_smoothing_factor and self.loss_type != "nll":
            raise ValueError(
                f"label_smoothing_factor={self.label_smoothing_factor} smooths the targets of loss_type='nll'; "
                f"loss_type={self.loss_type!r} has no smoothed form: set one of the two back"
            )


def objective(options: SFTOptions, *, aux_coefficient: float = 0.0) -> TokenObjective:
    """The loss of the options, and what it and the metrics need to know of each token."""
    return likelihood(options, plain=LOSSES[options.loss_type], aux_coefficient=aux_coefficient)


METHOD = Method("sft", "supervised fine-tuning", SFTOptions, Texts(), objective, own_loss=True)
