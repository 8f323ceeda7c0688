"""Masked language modelling: tokens of a text are hidden, and predicted from both sides."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from transformers import PreTrainedTokenizerBase

from lowtide.data.batches.collate import MaskedCollator
from lowtide.data.batches.images import ImageReader
from lowtide.data.batches.masking import ONE_TOKEN, Masking, geometric, harmonic
from lowtide.data.encode.masked import MaskedEncoder, MaskedOptions
from lowtide.data.prepare import prepare
from lowtide.engine.heads.masked_language_model import MaskedLanguageModel
from lowtide.methods.method import Method
from lowtide.methods.shared.beginning import BeginningOptions
from lowtide.methods.shared.likelihood import likelihood
from lowtide.methods.shared.options import TransformersDefaults
from lowtide.methods.shared.paper import Paper
from lowtide.methods.shared.perplexity import with_perplexity
from lowtide.methods.shared.rows import Preparation, Prepared, RowLayout
from lowtide.option import COUNT, NOT_NEGATIVE, SHARE, option
from lowtide.process.ways_out import in_python
from lowtide.score_rules import ScoreRule

logger = logging.getLogger(__name__)
DRAWN = ("mlm_probability", "mask_replace_prob", "random_replace_prob", "whole_word_mask", "masking")
"""The options that masks are drawn by."""
LONGEST = {"tokens": 1, "spans": 10, "ngrams": 3}
"""The longest run of each kind of masks, as in the papers."""


@dataclass(kw_only=True)
class MaskedLMOptions(BeginningOptions, TransformersDefaults):
    """The options of masked language modelling, under the names of transformers' collator and with its defaults."""

    # data
    dataset_text_field: str = option("text", "Column that holds the text of plain-text rows.")
    dataset_num_proc: int | None = option(None, "Processes that prepare the dataset.", NOT_NEGATIVE)
    max_length: int | None = option(512, "Most tokens of a row, and the capacity of a bin. None is no limit.", COUNT)
    shuffle_dataset: bool = option(False, "Shuffle the rows once, before they are packed.")
    packing: bool = option(False, "Put several rows into one bin of `max_length` tokens; they never see each other.")
    packing_strategy: str = option(
        "bfd",
        "How rows are put into bins: best fit decreasing with overflow cut (bfd) or kept (bfd_split), or end to end.",
        choices=["bfd", "bfd_split", "wrapped"],
    )
    eval_packing: bool | None = option(None, "Pack the evaluation set. None does as `packing`.")
    # masks
    mlm_probability: float = option(0.15, "Share of the tokens that are masked, and predicted.", SHARE)
    mask_replace_prob: float = option(0.8, "Share of the masked tokens that the mask token replaces.", SHARE)
    random_replace_prob: float = option(0.1, "Share that random tokens replace. The others stay.", SHARE)
    whole_word_mask: bool = option(False, "Mask whole words: all tokens of a word, or none.")
    masking: str = option(
        "tokens",
        "What is masked: single tokens; spans of geometric lengths (arXiv 1907.10529); n-grams (arXiv 1909.11942). "
        "With `whole_word_mask` each is of words.",
        choices=[*LONGEST],
    )
    max_span_length: int | None = option(
        None, "Most tokens, or words, of a span or n-gram. None: 10 of a span, 3 of an n-gram.", COUNT
    )
    span_geometric_p: float = option(0.2, "Of the lengths of spans: the probability to end at each token.", SHARE)
    # objective
    label_smoothing_factor: float = option(0.0, "Share of the uniform distribution in each target.")
    token_metrics: bool = option(True, "Log `entropy` and `mean_token_accuracy`; off, they cost nothing.")

    def check(self) -> None:
        """Refuses what cannot work, naming the option and the way out.

        Raises:
            ValueError: an option has no such value, or two options exclude each other.
        """
        self.check_beginning()
        if not self.mlm_probability:
            raise ValueError("mlm_probability=0.0 masks nothing, so there is nothing to learn: the usual share is 0.15")
        if self.mask_replace_prob + self.random_replace_prob > 1 + 1e-9:
            raise ValueError(
                f"mask_replace_prob={self.mask_replace_prob} and random_replace_prob={self.random_replace_prob} are "
                "shares of the masked tokens and come to more than 1: lower one"
            )
        if self.masking == "tokens" and self.max_span_length is not None:
            raise ValueError(
                f"max_span_length={self.max_span_length} requires masking='spans' or 'ngrams'; masking is 'tokens'"
            )
        if self.masking != "spans" and self.span_geometric_p not in (0, 0.2):
            raise ValueError(
                f"span_geometric_p={self.span_geometric_p} requires masking='spans'; masking is {self.masking!r}"
            )
        if self.masking == "spans" and not self.span_geometric_p:
            raise ValueError("span_geometric_p=0.0 gives spans no end: set it above 0")
        if self.packing and self.max_length is None:
            raise ValueError("packing=True needs max_length, the capacity of a bin: set it to a number of tokens")

    @property
    def run_lengths(self) -> tuple[float, ...]:
        """The probabilities of the lengths of masked runs, from 1 on."""
        longest = self.max_span_length or LONGEST[self.masking]
        if self.masking == "tokens":
            return ONE_TOKEN
        return harmonic(longest) if self.masking == "ngrams" else geometric(self.span_geometric_p, longest)


class MaskedTexts(RowLayout):
    """Texts of which tokens are masked: one segment a row, or several in a packed one."""

    completions = 0
    collates_alone = (
        "masks are drawn of each row in each epoch by the options mlm_probability, mask_replace_prob, "
        "random_replace_prob, whole_word_mask and masking: set these in place of a collator's"
    )

    def prepare(self, dataset: Any, how: Preparation, name: str) -> Prepared:
        options, training = how.options, name == "train"
        masked = {"input_ids", "labels"} <= {*(dataset.column_names or [])}
        if masked:
            _warn_of_masks(options)
        else:
            _check_mask_token(how.tokenizer, options)
        data_options = MaskedOptions(
            dataset_text_field=options.dataset_text_field,
            max_length=options.max_length,
            packing_strategy=options.packing_strategy,
            shuffle=training and options.shuffle_dataset,
            seed=options.seed,
            words=options.whole_word_mask,
            vocab_size=how.vocab_size,
            num_proc=options.dataset_num_proc,
        )
        return prepare(
            dataset,
            how.tokenizer,
            data_options,
            batch_size=options.per_device_train_batch_size,
            packing=options.packing if training or options.eval_packing is None else options.eval_packing,
            name=name,
            encoder_of=MaskedEncoder,
        )

    def collator(
        self, options: Any, *, sharing: bool, score_rule: ScoreRule, reader: ImageReader | None = None
    ) -> Callable:
        return MaskedCollator(score_rule)

    def values(self) -> tuple[str, ...]:
        return ("number", "words")

    def bin_tokens(self, options: Any) -> int | None:
        return options.max_length if options.packing else None

    def drawing(
        self,
        options: Any,
        tokenizer: PreTrainedTokenizerBase | None,
        vocab_size: int,
        reader: ImageReader | None = None,
    ) -> Masking:
        vocabulary = vocab_size if tokenizer is None else min(len(tokenizer), vocab_size)
        special = set() if tokenizer is None else {*tokenizer.all_special_ids}
        return Masking(
            probability=options.mlm_probability,
            mask_token=getattr(tokenizer, "mask_token_id", None) or 0,
            vocabulary=vocabulary,
            special=tuple(sorted(token for token in special if token < vocabulary)),
            mask_share=options.mask_replace_prob,
            random_share=options.random_replace_prob,
            lengths=options.run_lengths,
            as_one=options.masking != "tokens",
            seed=options.seed if options.data_seed is None else options.data_seed,
        )


def _warn_of_masks(options: Any) -> None:
    """Says which options would draw masks of rows that bring theirs."""
    plain = {each.name: each.default for each in fields(options)}
    chosen = [f"{name}={getattr(options, name)!r}" for name in DRAWN if getattr(options, name) != plain[name]]
    if chosen:
        logger.warning(
            f"{', '.join(chosen)} has no effect on rows that bring labels: these say what is masked already. Leave the "
            "column labels out, and masks are drawn anew in each epoch"
        )


BY_HAND = (
    "name one of its vocabulary (tokenizer.mask_token = ...), add one (tokenizer.add_special_tokens({'mask_token': "
    "'[MASK]'}), model.resize_token_embeddings(len(tokenizer)))"
)
"""How a script gives a tokenizer a mask token."""


def _check_mask_token(tokenizer: PreTrainedTokenizerBase, options: Any) -> None:
    """Refuses a tokenizer without the token that masks are made of.

    Raises:
        ValueError: says how to add one.
    """
    if tokenizer.mask_token_id is None and options.mask_replace_prob:
        raise ValueError(
            f"the tokenizer ({type(tokenizer).__name__}) has no mask token, which would stand in the place of masked "
            f"tokens: {in_python(BY_HAND, 'save it with one (mask_token)')}, or set mask_replace_prob=0"
        )


PAPER = Paper(
    "devlin2018bert",
    "BERT: Pre-training of Deep Bidirectional Transformers for Language Understanding",
    ("Jacob Devlin", "Ming-Wei Chang", "Kenton Lee", "Kristina Toutanova"),
    2018,
    "1810.04805",
)
METHOD = Method(
    "masked-lm",
    "masked language modelling",
    MaskedLMOptions,
    MaskedTexts(),
    likelihood,
    PAPER,
    head=MaskedLanguageModel,
    derived_metrics=with_perplexity,
)
