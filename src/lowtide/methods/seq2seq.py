"""Sequence to sequence: the likelihood of a target, given the source that an encoder reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from lowtide.data.batches.collate import PairCollator
from lowtide.data.batches.images import ImageReader
from lowtide.data.source_target import SourceTargetOptions, prepare_pairs_of_texts
from lowtide.engine.heads.sequence_to_sequence import SequenceToSequence
from lowtide.methods.method import Method
from lowtide.methods.shared.likelihood import likelihood
from lowtide.methods.shared.options import TransformersDefaults
from lowtide.methods.shared.paper import Paper
from lowtide.methods.shared.perplexity import with_perplexity
from lowtide.methods.shared.rows import Preparation, Prepared, RowLayout
from lowtide.option import COUNT, NOT_NEGATIVE, option
from lowtide.score_rules import ScoreRule, ShiftedRight

OF_GENERATION = ("generation_max_length", "generation_num_beams", "generation_config")


@dataclass(kw_only=True)
class Seq2SeqOptions(TransformersDefaults):
    """The options of sequence to sequence, under the names of transformers' `Seq2SeqTrainingArguments`,
    `run_summarization.py` and `run_translation.py`."""

    # data
    source_column: str | None = option(None, "Column of the sources. None: `source`, `text`, `document` and others.")
    target_column: str | None = option(None, "Column of the targets. None: `target`, `summary` and others.")
    source_lang: str | None = option(None, "Language of the sources, as rows and tokenizer have it.")
    target_lang: str | None = option(None, "Language of the targets, as rows and tokenizer have it.")
    source_prefix: str | None = option(None, "Text before each source, such as T5's 'summarize: '.")
    max_source_length: int | None = option(1024, "Most tokens of a source. None is no limit.", COUNT)
    max_target_length: int | None = option(128, "Most tokens of a target. None is no limit.", COUNT)
    dataset_num_proc: int | None = option(None, "Processes that prepare the dataset.", NOT_NEGATIVE)
    # objective
    label_smoothing_factor: float = option(0.0, "Share of the uniform distribution in each target.")
    token_metrics: bool = option(True, "Log `entropy` and `mean_token_accuracy`; off, they cost nothing.")
    # evaluation
    predict_with_generate: bool = option(
        False, "Have evaluations write targets with `generate`, for `compute_metrics` and `generation_metrics`."
    )
    generation_max_length: int | None = option(
        None, "Most tokens that are written. None: as the model's generation config says.", COUNT
    )
    generation_num_beams: int | None = option(
        None, "Beams of the search. None: as the model's generation config says.", COUNT
    )
    generation_config: str | None = option(
        None, "A file, a folder or a model's name, whose generation config becomes the model's."
    )
    forced_bos_token: str | None = option(
        None, "The token that a written target begins with, such as the language's of mBART."
    )
    generation_metrics: list[str] | None = option(
        None, "Of written targets: 'rouge', 'sacrebleu' or others of the package `evaluate`."
    )
    sortish_sampler: bool = option(False, "Of transformers: rows of like lengths together.")

    without_effect: ClassVar[Mapping[str, str]] = {
        "sortish_sampler": "it puts rows of like lengths together to pad less, and batches have no padding",
    }

    def check(self) -> None:
        """Refuses what cannot work, naming the option and the way out.

        Raises:
            ValueError: an option has no such value, or requires another one.
        """
        if (self.source_lang is None) != (self.target_lang is None):
            given, missing = (
                ("source_lang", "target_lang") if self.target_lang is None else ("target_lang", "source_lang")
            )
            raise ValueError(f"{given}={getattr(self, given)!r} requires {missing}: name both languages")
        if not self.predict_with_generate:
            for name in (*OF_GENERATION[:2], "generation_metrics"):
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"{name}={getattr(self, name)!r} requires predict_with_generate=True: without it nothing is "
                        "written"
                    )


class SourcesAndTargets(RowLayout):
    """A source and its target: a segment each, of which the encoder reads the first and the decoder the second."""

    completions = 0
    parts = ("source_ids", "target_ids")
    collates_alone = (
        "sources and targets are laid end to end without padding, so that there is nothing for it to do: leave it out"
    )

    def prepare(self, dataset: Any, how: Preparation, name: str) -> Prepared:
        options = how.options
        names = ["source_column", "target_column", "source_lang", "target_lang", "source_prefix"]
        names += ["max_source_length", "max_target_length"]
        wanted = SourceTargetOptions(
            **{each: getattr(options, each) for each in names},
            max_length=None,
            vocab_size=how.vocab_size,
            num_proc=options.dataset_num_proc,
        )
        training = name == "train"
        rows = options.per_device_train_batch_size if training else options.per_device_eval_batch_size
        return prepare_pairs_of_texts(dataset, how.tokenizer, wanted, batch_size=rows, name=name)

    def collator(
        self, options: Any, *, sharing: bool, score_rule: ScoreRule, reader: ImageReader | None = None
    ) -> Callable:
        assert isinstance(score_rule, ShiftedRight), "only an encoder-decoder is trained"
        return PairCollator(score_rule)

    def values(self) -> tuple[str, ...]:
        return self.parts


PAPER = Paper(
    "raffel2020exploring",
    "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer",
    ("Colin Raffel", "Noam Shazeer", "Adam Roberts", "Katherine Lee", "Sharan Narang"),
    2020,
    "1910.10683",
)
METHOD = Method(
    "seq2seq",
    "sequence to sequence",
    Seq2SeqOptions,
    SourcesAndTargets(),
    likelihood,
    PAPER,
    head=SequenceToSequence,
    derived_metrics=with_perplexity,
    generates=True,
)
