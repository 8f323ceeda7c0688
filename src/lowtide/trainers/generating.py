"""The trainer of a method whose evaluations may have the model write targets (`predict_with_generate`).

It is what transformers' `Seq2SeqTrainer` adds to `Trainer`: `compute_metrics` gets the tokens that were written and
those of the targets, and `evaluate` and `predict` take options of `generate`. `generation_metrics` are computed by the
package `evaluate`, without a function of one's own.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import DataCollatorForSeq2Seq, Seq2SeqTrainer

from lowtide.data.batches.values import PLACE
from lowtide.engine.forward import causal_model
from lowtide.engine.heads.head import ScoreOutput
from lowtide.engine.targets import write_targets
from lowtide.process.ways_out import in_python
from lowtide.ragged import RaggedBatch
from lowtide.run.edge import edge
from lowtide.score_rules import IGNORE, ShiftedRight
from lowtide.trainers.evaluation import Predictions, of_all_ranks
from lowtide.trainers.method import MethodTrainer

logger = logging.getLogger(__name__)

METRICS: dict[str, tuple[bool, Callable[[Mapping[str, Any]], dict[str, float]]]] = {
    "rouge": (False, lambda found: {name: float(value) for name, value in found.items()}),
    "bleu": (True, lambda found: {"bleu": float(found["bleu"])}),
    "sacrebleu": (True, lambda found: {"sacrebleu": float(found["score"])}),
    "chrf": (True, lambda found: {"chrf": float(found["score"])}),
    "meteor": (False, lambda found: {"meteor": float(found["meteor"])}),
}
"""By name in the package `evaluate`: whether each prediction has several references, and what is logged of a result."""


class GeneratingTrainer(MethodTrainer):
    """As `MethodTrainer`. With `predict_with_generate=True`, `compute_metrics` gets tokens instead of log-probs:
    `EvalPrediction(predictions=[rows, longest], label_ids=[rows, longest])`, the first padded with the padding token,
    the second with -100."""

    def __init__(self, *positional: Any, **named: Any) -> None:
        self._generation: dict[str, Any] = {}
        super().__init__(*positional, **named)
        with edge("making the trainer"):
            self._check_generation()
            self._set_generation()

    def _arguments(self, positional: tuple, named: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        given, older = super()._arguments(positional, named)
        if type(given["data_collator"]) is DataCollatorForSeq2Seq:
            given["data_collator"] = None
            logger.warning("DataCollatorForSeq2Seq is not used: it pads, and batches have no padding")
        return given, older

    def _check_generation(self) -> None:
        """Refuses what nothing could be written with."""
        args: Any = self.args
        if args.predict_with_generate and (args.sharding.cuts_weights or args.sharding.by_deepspeed):
            raise ValueError(
                "predict_with_generate=True writes on each rank by itself, whose weights lie on all of them: leave it "
                "out, and write with the saved model, or train without fsdp and deepspeed"
            )
        for name in args.generation_metrics or ():
            if name not in METRICS:
                raise ValueError(f"generation_metrics has {name!r}, and there are {', '.join(METRICS)}")
        if args.generation_metrics and find_spec("evaluate") is None:
            raise ValueError(
                f"generation_metrics={args.generation_metrics} requires the package `evaluate`: pip install evaluate "
                f"rouge_score sacrebleu nltk{in_python('; or pass a function as `compute_metrics`')}"
            )

    def _set_generation(self) -> None:
        """The model's generation config as the options have it, which is saved with the model."""
        args: Any = self.args
        model: Any = causal_model(self.model)
        if args.generation_config is not None:
            model.generation_config = Seq2SeqTrainer.load_generation_config(args.generation_config)
        tokenizer: Any = self.tokenizer
        rule = self.training_run.score_rule
        if tokenizer is not None and args.target_lang is not None and hasattr(tokenizer, "tgt_lang"):
            self._start_as_trained(model, tokenizer, rule)
        if args.forced_bos_token is not None:
            known = {} if tokenizer is None else tokenizer.get_vocab()
            if args.forced_bos_token not in known:
                raise ValueError(
                    f"forced_bos_token={args.forced_bos_token!r} is not in the tokenizer's vocabulary: give a token of "
                    "it, such as the one of a language"
                )
            model.generation_config.forced_bos_token_id = known[args.forced_bos_token]

    def _start_as_trained(self, model: Any, tokenizer: Any, rule: Any) -> None:
        """Generation begins with the tokens that targets of the language begin with in training (mBART)."""
        language = tokenizer.get_vocab()[self.args.target_lang]  # type: ignore[attr-defined]
        before = tokenizer.src_lang, tokenizer.tgt_lang
        tokenizer.tgt_lang = self.args.target_lang  # type: ignore[attr-defined]
        target = tokenizer(text_target="a")["input_ids"]
        tokenizer.src_lang, tokenizer.tgt_lang = before
        assert isinstance(rule, ShiftedRight)
        start, first, *_ = rule.tokens(target)
        model.generation_config.decoder_start_token_id = start
        if first == language:
            model.generation_config.forced_bos_token_id = first

    # -- evaluation --------------------------------------------------------------------------------------------------

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
        **generation: Any,
    ) -> dict[str, float]:
        """As `transformers.Seq2SeqTrainer`'s; `generation` are options of `generate`."""
        with self._with(generation):
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    def predict(
        self,
        test_dataset: Any,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "test",
        **generation: Any,
    ) -> Any:
        """As `transformers.Seq2SeqTrainer`'s; `generation` are options of `generate`."""
        with self._with(generation):
            return super().predict(test_dataset, ignore_keys, metric_key_prefix)

    @contextlib.contextmanager
    def _with(self, generation: Mapping[str, Any]) -> Iterator[None]:
        if generation and not self.args.predict_with_generate:  # type: ignore[attr-defined]
            raise ValueError(
                f"{', '.join(generation)}: options of `generate` require predict_with_generate=True in the config"
            )
        before, self._generation = self._generation, {**self._generation, **generation}
        try:
            yield
        finally:
            self._generation = before

    @property
    def generation(self) -> dict[str, Any]:
        """What `generate` is called with."""
        args: Any = self.args
        options = {"num_beams": args.generation_num_beams}
        if self._generation.get("max_new_tokens") is None:
            options["max_length"] = args.generation_max_length
        given = {name: value for name, value in self._generation.items() if value is not None}
        return {name: value for name, value in (options | given).items() if value is not None}

    def predictions(self, wanted: bool, model: nn.Module) -> Any:
        args: Any = self.args
        if not args.predict_with_generate:
            return super().predictions(wanted, model)
        tokenizer: Any = self.tokenizer
        pad = causal_model(model).config.pad_token_id
        return WrittenTargets(
            lambda batch: write_targets(model, batch, **self.generation),
            pad=pad if tokenizer is None or tokenizer.pad_token_id is None else tokenizer.pad_token_id,
            tokenizer=tokenizer,
            metrics=args.generation_metrics or (),
            wanted=wanted,
        )


class WrittenTargets(Predictions):
    """The targets that are written in an evaluation, in host memory.

    Args:
        write: from a batch to tokens, [targets, longest].
        pad: the token behind the end of a target.
        tokenizer: makes texts of them, for metrics.
        metrics: names of `METRICS`.
        wanted: whether `compute_metrics` is to get them.
    """

    def __init__(
        self,
        write: Callable[[RaggedBatch], torch.Tensor],
        *,
        pad: int,
        tokenizer: Any = None,
        metrics: Sequence[str] = (),
        wanted: bool = True,
    ) -> None:
        super().__init__(wanted)
        self.write, self.pad, self.tokenizer, self.named = write, pad, tokenizer, metrics
        self.written: list[list[int]] = []
        self.labels: list[list[int]] = []
        self.order: list[int] = []
        """The places of their rows."""

    def take_in(self, results: list[tuple[RaggedBatch, ScoreOutput]]) -> None:
        if not (self.wanted or self.named):
            return
        for batch, _ in results:
            self.written += self.write(batch).tolist()
            parts, targets = [part for part in batch.segments if part.prefix >= 0], batch.score_target.tolist()
            self.labels += [targets[part.score_start : part.score_stop] for part in parts]
            places = batch.row_values[PLACE].tolist()
            self.order += [places[part.row] for part in parts]

    def metrics(self) -> dict[str, float]:
        """Those of `METRICS` that were asked for."""
        if not self.named:
            return {}
        written, labels = self._of_all_ranks()
        read = self.tokenizer.batch_decode
        texts, references = (
            [text.strip() for text in read(lists, skip_special_tokens=True)] for lists in (written, labels)
        )
        package: Any = importlib.import_module("evaluate")
        found: dict[str, float] = {"written_tokens": sum(map(self._length, written)) / max(len(written), 1)}
        for name in self.named:
            several, logged = METRICS[name]
            given = [[each] for each in references] if several else references
            found |= logged(package.load(name).compute(predictions=texts, references=given))
        return found

    def _length(self, tokens: Sequence[int]) -> int:
        return sum(token != self.pad for token in tokens)

    def gathered(self) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Those of all ranks, [rows, longest] each, or None where nothing is wanted."""
        if not self.wanted:
            return None, None
        written, labels = self._of_all_ranks()
        return (_padded(written, self.pad), _padded(labels, IGNORE)) if written else (None, None)

    def _of_all_ranks(self) -> tuple[list[list[int]], list[list[int]]]:
        """In the order of their rows."""
        places = of_all_ranks(self.order)
        order = sorted(range(len(places)), key=places.__getitem__)
        written, labels = of_all_ranks(self.written), of_all_ranks(self.labels)
        return [written[number] for number in order], [labels[number] for number in order]


def _padded(lists: Sequence[Sequence[int]], pad: int) -> np.ndarray:
    longest = max(map(len, lists))
    return np.array([[*tokens, *[pad] * (longest - len(tokens))] for tokens in lists], dtype=np.int64)
