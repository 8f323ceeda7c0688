"""How rows of a dataset become token rows, and these a batch: one layout for each kind of rows that methods take."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from transformers import PreTrainedTokenizerBase

from lowtide.data.batches.collate import CompletionCollator, LabelCollator, RaggedCollator, TagCollator
from lowtide.data.batches.completion_rounds import context_tokens
from lowtide.data.batches.images import IMAGES, ImageReader
from lowtide.data.batches.values import DOCUMENT, LABEL, NUMBER, WORDS
from lowtide.data.formats.preferences import SIDES
from lowtide.data.labelled import FoundLabels, LabelOptions, found_labels, prepare_labelled
from lowtide.data.preference import PreferenceOptions, prepare_pairs, prepare_unpaired
from lowtide.data.prepare import PrepareOptions, prepare
from lowtide.data.report.ledger import Ledger
from lowtide.data.report.row_parts import ShownSegment, pair_of, segments_of, singles_of
from lowtide.data.tags import TagOptions, labels_of, prepare_tags
from lowtide.ragged import SECOND_TEXT, RaggedBatch
from lowtide.score_rules import ScoreRule

Drawing = Callable[[RaggedBatch, int], RaggedBatch]
"""From a batch, and the epoch, to the batch with what is drawn of it; the epoch of evaluation is -1."""
Prepared = tuple[Any, Ledger | None]
"""Token rows, and where their tokens came from; no ledger of a stream."""


@dataclass(frozen=True)
class Preparation:
    """What rows are prepared with."""

    tokenizer: PreTrainedTokenizerBase
    options: Any
    """The run's config."""
    vocab_size: int
    """Of the model."""
    formatting_func: Callable | None = None
    """From a row to its text or its messages."""
    labels: Sequence[str] = ()
    """Of the model, for a method whose rows have labels."""
    problem: str | None = None
    """Of the model: what its labels are, as transformers' `problem_type` names it."""
    reader: ImageReader | None = None
    """Makes images ready for a vision-language model; None where text alone is read."""
    stop_ids: tuple[int, ...] = ()
    """Tokens at which the model's generation stops, beside the tokenizer's end token."""


class RowLayout(ABC):
    """From the rows of a dataset to a batch."""

    completions: ClassVar[int]
    """Completions in a row; 0 for texts."""
    formats: ClassVar[bool] = False
    """Whether `formatting_func` is called with each row."""
    collates_alone: ClassVar[str] = ""
    """Why no `data_collator` can take the place of the layout's own, with what to do; empty where one can."""

    parts: ClassVar[tuple[str, ...]] = ()
    """The columns of tokens of a prepared row, where others than those of texts and of prompts with completions."""
    takes_images: ClassVar[bool] = False
    """Whether rows may show images."""
    labelled: ClassVar[bool] = False
    """Whether rows have labels, whose logits the head gives."""

    def shows_images(self, rows: Any) -> bool:
        """Whether prepared rows show images."""
        return IMAGES in (rows.column_names or ())

    def labels(self, dataset: Any, options: Any, *, said: str | None = None) -> tuple[str, ...]:
        """The labels of the rows to train on, which the model needs to have; none where they are not known.

        Args:
            said: what the model's config says that labels are, likewise of `problem`.
        """
        return ()

    def problem(self, dataset: Any, options: Any, *, said: str | None = None) -> str | None:
        """What the labels of the rows to train on are, as transformers' `problem_type` names it; None where it names
        nothing of the kind."""
        return None

    @abstractmethod
    def prepare(self, dataset: Any, how: Preparation, name: str) -> Prepared:
        """Token rows of a `Dataset` or a stream; `name` is "train", or of an evaluation set."""

    def shown(self, row: Any, how: Preparation) -> list[ShownSegment]:
        """What a `Dataset` of one row becomes, for people to look at: its segments, with what limits drop of them.

        Raises:
            ValueError: the row can't be used, or rows of this kind are not shown.
        """
        raise ValueError(f"rows of {type(how.options).__name__} cannot be shown")

    @abstractmethod
    def collator(
        self, options: Any, *, sharing: bool, score_rule: ScoreRule, reader: ImageReader | None = None
    ) -> Callable:
        """From token rows to a `RaggedBatch`.

        Args:
            sharing: whether a prompt is computed once for the completions of its row.
            score_rule: which positions of a completion are scored.
            reader: makes images ready, of a layout that takes them.
        """

    def columns(self, options: Any) -> tuple[str, ...]:
        """The completions of a prepared row, by their columns."""
        return ()

    def values(self) -> tuple[str, ...]:
        """The columns of a prepared row that become values of rows, or of scores."""
        return ()

    def drawing(
        self,
        options: Any,
        tokenizer: PreTrainedTokenizerBase | None,
        vocab_size: int,
        reader: ImageReader | None = None,
    ) -> Drawing | None:
        """What is drawn of each batch anew in each epoch; None where nothing is.

        Args:
            tokenizer: None where token ids do not matter.
            vocab_size: of the model.
            reader: makes images ready, of a layout that takes them.
        """
        return None

    def together(self, options: Any) -> int:
        """Rows of a batch that one prepared row becomes, and that a micro-batch holds together."""
        return 1

    def bin_tokens(self, options: Any) -> int | None:
        """The tokens of a packed row, where rows are packed."""
        return None


class Texts(RowLayout):
    """Texts, conversations, or prompts with a completion: one segment a row, or several in a packed one."""

    completions, formats, takes_images = 0, True, True

    def prepare(self, dataset: Any, how: Preparation, name: str) -> Prepared:
        options, training = how.options, name == "train"
        packing = options.packing if training or options.eval_packing is None else options.eval_packing
        return prepare(
            dataset,
            how.tokenizer,
            self._options(how, shuffle=training and options.shuffle_dataset),
            batch_size=options.per_device_train_batch_size,
            packing=packing,
            name=name,
            reader=how.reader,
        )

    def shown(self, row: Any, how: Preparation) -> list[ShownSegment]:
        return segments_of(row, how.tokenizer, self._options(how, shuffle=False))

    def _options(self, how: Preparation, *, shuffle: bool) -> PrepareOptions:
        own = {each.name for each in dataclasses.fields(PrepareOptions)}
        alike = {name: getattr(how.options, name) for name in own if hasattr(how.options, name)}
        return PrepareOptions(
            **{
                **alike,
                "formatting_func": how.formatting_func,
                "prefix_sharing": getattr(how.options, "prefix_sharing", False),
                "shuffle": shuffle,
                "vocab_size": how.vocab_size,
                "num_proc": how.options.dataset_num_proc,
                "stop_ids": how.stop_ids,
            }
        )

    def collator(
        self, options: Any, *, sharing: bool, score_rule: ScoreRule, reader: ImageReader | None = None
    ) -> Callable:
        return RaggedCollator(score_rule, reader)

    def bin_tokens(self, options: Any) -> int | None:
        return options.max_length if options.packing else None


class Tags(RowLayout):
    """Words with a label each, or tokens with labels: one segment a row, or one for each window of a long row."""

    completions, labelled = 0, True

    def labels(self, dataset: Any, options: Any, *, said: str | None = None) -> tuple[str, ...]:
        if options.tag_names:
            return tuple(options.tag_names)
        columns = dataset.column_names or ()
        if {"input_ids", WORDS, DOCUMENT} <= {*columns}:  # prepared already
            return labels_of(dataset, "input_ids", "labels")
        return labels_of(dataset, options.text_column_name, options.label_column_name)

    def prepare(self, dataset: Any, how: Preparation, name: str) -> Prepared:
        options = how.options
        own = {each.name for each in dataclasses.fields(TagOptions)}
        alike = {each: getattr(options, each) for each in own if hasattr(options, each)}
        wanted = TagOptions(
            **{
                **alike,
                "labels": tuple(how.labels),
                "vocab_size": how.vocab_size,
                "num_proc": options.dataset_num_proc,
            }
        )
        training = name == "train"
        rows = options.per_device_train_batch_size if training else options.per_device_eval_batch_size
        return prepare_tags(dataset, how.tokenizer, wanted, batch_size=rows, name=name)

    def collator(
        self, options: Any, *, sharing: bool, score_rule: ScoreRule, reader: ImageReader | None = None
    ) -> Callable:
        return TagCollator(score_rule)

    def values(self) -> tuple[str, ...]:
        return (WORDS, DOCUMENT)


class LabelledTexts(RowLayout):
    """A text, or a pair of texts, with a label: one segment a row."""

    completions, labelled = 0, True
    collates_alone = "rows become a batch without padding, with the numbers of DataCollatorWithPadding: leave it out"

    def _found(self, dataset: Any, options: Any, said: str | None) -> FoundLabels:
        texts, names = options.text_column_names, options.class_names
        return found_labels(
            dataset,
            tuple(texts) if texts else None,
            options.label_column_name,
            names=tuple(names) if names else None,
            problem=options.problem_type,
            said=said,
        )

    def labels(self, dataset: Any, options: Any, *, said: str | None = None) -> tuple[str, ...]:
        return self._found(dataset, options, said).names

    def problem(self, dataset: Any, options: Any, *, said: str | None = None) -> str | None:
        return self._found(dataset, options, said).problem

    def prepare(self, dataset: Any, how: Preparation, name: str) -> Prepared:
        options = how.options
        texts = options.text_column_names
        wanted = LabelOptions(
            labels=tuple(how.labels),
            problem=how.problem or "",
            text_column_names=tuple(texts) if texts else None,
            label_column_name=options.label_column_name,
            max_length=options.max_length,
            vocab_size=how.vocab_size,
            num_proc=options.dataset_num_proc,
        )
        rows = options.per_device_train_batch_size if name == "train" else options.per_device_eval_batch_size
        return prepare_labelled(dataset, how.tokenizer, wanted, batch_size=rows, name=name)

    def collator(
        self, options: Any, *, sharing: bool, score_rule: ScoreRule, reader: ImageReader | None = None
    ) -> Callable:
        return LabelCollator(score_rule)

    def values(self) -> tuple[str, ...]:
        return (LABEL, NUMBER, SECOND_TEXT)


@dataclass(frozen=True)
class _Completions(RowLayout):
    """A prompt and its completions: a segment each, and the prompt stands before all of them."""

    scores_prompt: bool = False
    """Whether the tokens of the prompt are scored too."""

    def data_options(self, how: Preparation) -> PreferenceOptions:
        """The options of data, as preparation takes them."""
        options = how.options
        own = {each.name for each in dataclasses.fields(PreferenceOptions)}
        alike = {name: getattr(options, name) for name in own if hasattr(options, name)}
        return PreferenceOptions(
            **{
                **alike,
                "num_proc": options.dataset_num_proc,
                "vocab_size": how.vocab_size,
                "stop_ids": how.stop_ids,
            }
        )

    def collator(
        self, options: Any, *, sharing: bool, score_rule: ScoreRule, reader: ImageReader | None = None
    ) -> Callable:
        return CompletionCollator(
            self.columns(options),
            sharing=sharing,
            scores_prompt=self.scores_prompt,
            score_rule=score_rule,
            values=(*self.values(), "number"),
            reader=reader,
            apart=self.apart(options),
        )

    def apart(self, options: Any) -> tuple[str, ...]:
        """Of the columns, the completions that are run in a forward of their own."""
        return ()


@dataclass(frozen=True)
class Pairs(_Completions):
    """A chosen and a rejected completion, and others that a method has beside them (`sides`)."""

    at_end: bool = False
    """Pairs that are compared by a value at the end of each side: a side that does not fit drops its pair, and rows
    may say by how much the chosen one is better."""

    completions, takes_images = 2, True

    def sides(self, options: Any) -> tuple[str, ...]:
        """The columns of completions, the chosen one first and then the rejected one."""
        return SIDES

    def columns(self, options: Any) -> tuple[str, ...]:
        return tuple(f"{name}_ids" for name in self.sides(options))

    def values(self) -> tuple[str, ...]:
        return ("margin",) if self.at_end else ()

    def data_options(self, how: Preparation) -> PreferenceOptions:
        return dataclasses.replace(super().data_options(how), sides=self.sides(how.options))

    def shown(self, row: Any, how: Preparation) -> list[ShownSegment]:
        return pair_of(row, how.tokenizer, self.data_options(how), whole=self.at_end, scores_prompt=self.scores_prompt)

    def prepare(self, dataset: Any, how: Preparation, name: str) -> Prepared:
        rows, ledger = prepare_pairs(
            dataset,
            how.tokenizer,
            self.data_options(how),
            batch_size=how.options.per_device_train_batch_size,
            name=name,
            whole=self.at_end,
            margins=self.at_end,
            reader=how.reader,
        )
        if self.scores_prompt and ledger is not None:  # all but a row's first token, contexts, and places of images
            unscored = context_tokens(rows) + (0 if how.reader is None else how.reader.places(rows, "prompt_ids"))
            ledger = dataclasses.replace(ledger, scored_tokens=ledger.tokens - ledger.rows - unscored)
        return rows, ledger


@dataclass(frozen=True)
class PairsWithReference(Pairs):
    """A chosen and a rejected completion, and a third one, in the column `reference`, that is learned as it is."""

    learned: Callable[[Any], bool] = lambda options: True
    """Whether, under some options, the third one is learned; rows need none where it is not."""

    completions = 3

    def sides(self, options: Any) -> tuple[str, ...]:
        return (*SIDES, "reference") if self.learned(options) else SIDES


@dataclass(frozen=True)
class Singles(_Completions):
    """One completion, desirable or not."""

    mismatched: Callable[[Any], bool] = lambda options: False
    """Whether, under some options, each prompt also comes with another row's completion."""

    completions = 1
    takes_images = True

    def columns(self, options: Any) -> tuple[str, ...]:
        return ("completion_ids", *self.apart(options))

    def apart(self, options: Any) -> tuple[str, ...]:
        return ("kl_completion_ids",) if self.mismatched(options) else ()

    def values(self) -> tuple[str, ...]:
        return ("label",)

    def shown(self, row: Any, how: Preparation) -> list[ShownSegment]:
        return singles_of(row, how.tokenizer, self.data_options(how))

    def prepare(self, dataset: Any, how: Preparation, name: str) -> Prepared:
        options = how.options
        rows = options.per_device_train_batch_size if name == "train" else options.per_device_eval_batch_size
        return prepare_unpaired(
            dataset,
            how.tokenizer,
            self.data_options(how),
            batch_size=rows,
            name=name,
            kl_block=rows if self.mismatched(options) else None,
            reader=how.reader,
        )
