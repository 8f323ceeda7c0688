"""What preparing a dataset depends on."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, get_args

from lowtide.data.batches.packing import Strategy
from lowtide.data.batches.shared_rounds import Sharing
from lowtide.data.encode.truncation import Truncation, TruncationMode
from lowtide.data.formats.preferences import SIDES
from lowtide.data.formats.reading import ChatSample, Sample, TextSample, TokenSample

logger = logging.getLogger(__name__)

Turns = Literal["as_generated", "whole"]
SPLITTING = ("bfd_split", "wrapped")
"""The packing strategies that keep the overflow of a row in further pieces."""


@dataclass(frozen=True, kw_only=True)
class TokenOptions:
    """What preparing rows of any kind depends on, under TRL's names where it has them."""

    chat_template: str | None = None
    """A Jinja template that replaces the tokenizer's own."""
    eos_token: str | None = None
    """The token that ends a text, in place of the tokenizer's own."""
    max_length: int | None = 1024
    """The most tokens in a row (of preferences: in a prompt and one completion). None is no limit."""
    truncation_mode: TruncationMode = "keep_start"
    """Which end of a row `max_length` keeps."""
    max_prompt_length: int | None = None
    """The most tokens of a prompt; its end is kept."""
    max_completion_length: int | None = None
    """The most tokens of a completion; its start is kept."""
    vocab_size: int | None = None
    """How many token ids the model knows; ids beyond are refused. None: as many as the tokenizer has."""
    num_proc: int | None = None
    """How many processes prepare a dataset; None is this one alone. Does not change the result."""
    source: str | None = None
    """What error messages call the dataset: a file, say. Does not change the result."""
    contents_in_parts: bool = False
    """Whether the chat template is given contents in parts, as those of vision-language models read them."""
    fingerprint: str = ""
    """Anything else that the result depends on, such as state that a formatting function reads from elsewhere."""

    def __post_init__(self) -> None:
        assert self.truncation  # checks the limits

    @property
    def truncation(self) -> Truncation:
        return Truncation(
            max_length=self.max_length,
            mode=self.truncation_mode,
            max_prompt_length=self.max_prompt_length,
            max_completion_length=self.max_completion_length,
        )


@dataclass(frozen=True, kw_only=True)
class TurnOptions(TokenOptions):
    """How turns of the assistant are taken."""

    turns: Turns = "as_generated"
    """Whether the assistant's turns are taken as they are generated, each with the context that it would be given, or
    as the whole conversation has them."""
    thought_end: str | None = None
    """What ends a thought that a prompt opens and the template never writes. None: such turns are refused."""
    stop_ids: tuple[int, ...] = ()
    """Tokens at which generation stops, beside the tokenizer's end token."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.turns not in get_args(Turns):
            raise ValueError(f"turns is {self.turns!r}; it must be one of {', '.join(get_args(Turns))}.")


@dataclass(frozen=True, kw_only=True)
class PreferenceOptions(TurnOptions):
    """The options of `prepare_pairs` and `prepare_unpaired`."""

    sides: Sequence[str] = SIDES
    """Of pairs, the columns of completions: the chosen and the rejected one, and others."""


@dataclass(frozen=True, kw_only=True)
class PrepareOptions(TurnOptions):
    """The options of `prepare`. When packing, `max_length` is also the capacity of a bin."""

    own_token: ClassVar[bool] = False
    """Whether labels are predicted at their own tokens, and not at the token before."""

    dataset_text_field: str = "text"
    """The column that holds the text of plain-text rows."""
    formatting_func: Callable[[Mapping[str, Any]], Any] | None = None
    """Called with one row, returns its text or its messages."""
    assistant_only_loss: bool = False
    """Score only what the assistant says; for conversations. `turns` and its like are read with it, and of rows with a
    prompt and a completion where the completion alone is scored."""
    roles_to_train: Sequence[str] | None = None
    """The roles of the messages that are scored. None: the assistant."""
    train_on_last_turn_only: bool = False
    """Score only the last of these messages."""
    prefix_sharing: bool = True
    """Whether rounds of a conversation go on from what they have in common, which is there once."""
    last_turn_only: bool = False
    """Score only the last message of a conversation: it is the completion, and what stands before it the prompt."""
    completion_only_loss: bool | None = None
    """Score only completions. None: where rows have a prompt and a completion, or a `completion_mask`."""
    packing_strategy: Strategy = "bfd"
    """How rows are put into bins when packing."""
    shuffle: bool = False
    """Shuffle the rows, before packing and after."""
    seed: int = 42
    """The seed of the shuffle."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.packing_strategy not in get_args(Strategy):
            raise ValueError(
                f"packing_strategy is {self.packing_strategy!r}; it must be one of {', '.join(get_args(Strategy))}."
            )
        if self.completion_only_loss and self.formatting_func is not None:
            raise ValueError(
                "completion_only_loss=True and formatting_func exclude each other: a formatted row is one text, "
                "with no completion of its own. Drop one, or make 'prompt' and 'completion' columns beforehand."
            )

    def check_for(self, first: Sample, source: str) -> None:
        """Refuse options that could have no effect on the rows of a dataset, of which `first` is one."""
        if isinstance(first, TokenSample):
            has_labels = first.labels is not None
            has_completion, has_assistant = first.completion_mask is not None, first.assistant_masks is not None
        else:
            has_labels = False
            has_assistant = isinstance(first, ChatSample)
            has_completion = (first.prompt if isinstance(first, TextSample) else first.prompt_messages) is not None
        what = f"and each row of {source} is a {first.kind}"
        if self.assistant_only_loss and not (has_assistant or has_labels):
            raise ValueError(f"assistant_only_loss=True needs conversations, {what}. Switch it off.")
        if self.completion_only_loss and not (has_completion or has_labels or self.assistant_only_loss):
            way_out = ", or use assistant_only_loss=True." if has_assistant else "."
            raise ValueError(
                f"completion_only_loss=True needs 'prompt' and 'completion', {what}. Switch it off{way_out}"
            )
        if self.completion_only_loss and self.assistant_only_loss and not (has_completion or has_labels):
            logger.warning(
                "completion_only_loss=True has no effect on %s, whose rows have no prompt of their own: what the "
                "assistant says is scored, as assistant_only_loss=True asks for.",
                source,
            )
        if self.truncation.limits_parts and not has_completion:
            raise ValueError(
                f"max_prompt_length and max_completion_length need 'prompt' and 'completion', {what}. Use max_length."
            )

    def truncation_for(self, *, packing: bool) -> Truncation:
        """The limits on a row, which leave its overflow to a packing strategy that keeps it."""
        keeps_overflow = packing and self.packing_strategy in SPLITTING
        return replace(self.truncation, max_length=None) if keeps_overflow else self.truncation

    def sharing_for(self, *, packing: bool) -> Sharing | None:
        """How the rounds of a conversation are laid; whole for a packing strategy that cuts rows anywhere."""
        if not self.prefix_sharing or (packing and self.packing_strategy in SPLITTING):
            return None
        return Sharing(self.max_length if packing else None)


@dataclass(frozen=True, kw_only=True)
class TagOptions(TokenOptions):
    """The options of `prepare_tags`."""

    labels: tuple[str, ...] = ()
    """All labels, in the order of the model's numbers."""
    text_column_name: str | None = None
    """The column of the words. None: as `lowtide.data.formats.tagged` finds it; likewise `label_column_name`."""
    label_column_name: str | None = None
    label_all_tokens: bool = False
    """Whether a word's pieces after its first are scored too."""
    stride: int | None = None
    """Tokens that neighbouring windows of a long row share. None: a quarter of what a window holds."""
    long_rows: str = "windows"
    """What becomes of rows longer than `max_length`: "windows" or "cut"."""


@dataclass(frozen=True, kw_only=True)
class SourceTargetOptions(TokenOptions):
    """The options of `prepare_pairs_of_texts`."""

    source_column: str | None = None
    """The column of the sources. None: as `lowtide.data.formats.source_target` finds it; likewise `target_column`."""
    target_column: str | None = None
    max_source_length: int | None = None
    """The most tokens of a source; its first ones are kept, and the special ones that end it. None is no limit;
    likewise `max_target_length`."""
    max_target_length: int | None = None
    source_prefix: str | None = None
    """Text before each source."""
    source_lang: str | None = None
    """The language of sources, as the rows or the tokenizer have it; likewise `target_lang`."""
    target_lang: str | None = None

    @property
    def languages(self) -> tuple[str, str] | None:
        """Of sources and of targets, where they are named."""
        return None if self.source_lang is None or self.target_lang is None else (self.source_lang, self.target_lang)


@dataclass(frozen=True, kw_only=True)
class LabelOptions(TokenOptions):
    """The options of `prepare_labelled`."""

    labels: tuple[str, ...] = ()
    """All labels, in the order of the model's numbers."""
    problem: str = ""
    """Of which kind they are, as transformers' `problem_type` names it."""
    text_column_names: tuple[str, ...] | None = None
    """The column of the text, or the columns of two. None: as `lowtide.data.formats.labelled` finds them; likewise
    `label_column_name`."""
    label_column_name: str | None = None
