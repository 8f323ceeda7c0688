"""The trainer of a method that learns from a teacher, on completions that the student or the teacher may write.

Who writes is drawn for each micro-batch, and what is written from random numbers of its own, both keyed by the seed and
the micro-batch's place in the run: a run that resumes sees the same.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from lowtide.data.batches.masking import EVALUATION
from lowtide.data.batches.prompted import completed, prompt_images, prompts_of
from lowtide.data.teacher_logprobs import Answers, Asked, WrittenFacts, texts_of, write_answers
from lowtide.engine.forward import same_rows_of, sequence_of, vocabulary
from lowtide.engine.reference import ReferenceModel
from lowtide.methods.taught.gkd import GKDOptions
from lowtide.ragged import RaggedBatch, Shown
from lowtide.rollout.generators.generator import Completion, Request
from lowtide.run.writing import Writer, check_writes_after_images, make_generator, seed_of
from lowtide.step.rank_sync import RankSync
from lowtide.trainers.method import by_name
from lowtide.trainers.reference import ReferenceTrainer
from lowtide.trainers.references.across import Reader
from lowtide.trainers.references.ahead import scored_ahead


class TaughtTrainer(ReferenceTrainer):
    """A trainer of a method with a teacher; the arguments are `MethodTrainer`'s."""

    def __init__(self, *positional: Any, **named: Any) -> None:
        super().__init__(*positional, **named)
        self.options = cast(GKDOptions, self.args)
        self.written_by: dict[str, str] = {}
        self.student_writes = self._writer("the student", None) if self.options.lmbda > 0 else None
        teaches = self.options.seq_kd and self.options.lmbda < 1
        self.teacher_writes = self._writer("the teacher", self.reference) if teaches else None
        tokenizers = self.training_run.tokenizers
        self.reader = self.asked if tokenizers is None else Reader(self.runner, tokenizers, self.options)
        if self.reader is None and self.options.own_tokens:
            raise ValueError(
                "use_uld_loss=True compares with a teacher of other tokens, and the teacher is the student without its "
                "adapters: set teacher_model_name_or_path, or use_uld_loss=False"
            )

    def _writer(self, who: str, teacher: ReferenceModel | None) -> Writer:
        model = self.training_run.model if teacher is None else teacher.model
        padding_free = self.padding_free if teacher is None else teacher.padding_free
        options: Any = self.options
        generator, self.written_by[who] = make_generator(options, model, self.tokenizer, padding_free)
        if self.training_run.shows_images:
            check_writes_after_images(generator)
        reader = self.training_run.reader
        never = () if reader is None else (reader.place,)
        return Writer(options, self.runner, cast(Any, self.tokenizer), generator, teacher, never_ids=never)

    def report_lines(self) -> list[tuple[str, str]]:
        return [*super().report_lines(), *((f"written by {who}", how) for who, how in self.written_by.items())]

    @property
    def deals_rows(self) -> bool:
        """Not where completions are written: the random numbers of each are those of its place in the batch."""
        return self.student_writes is None and self.teacher_writes is None

    def write_teacher_logprobs(self, folder: str | Path, *, top_logprobs: int = 64) -> int:
        """Has the teacher say of the rows of training and evaluation what `teacher_logprobs` reads in other runs, which
        need no teacher then. Gives the number of texts.

        Args:
            folder: a new one.
            top_logprobs: likeliest tokens of a place, of which a run compares as many as its `loss_top_k`.

        Raises:
            ValueError: completions are to be written anew, several ranks are started, the teacher is a folder already,
                or there is something in `folder`.
        """
        options = self.options
        if options.writes:
            raise ValueError(
                "a teacher's log-probabilities are written of the data's completions, and others are written in this "
                "run: set lmbda=0 and seq_kd=False"
            )
        if options.teacher_logprobs is not None or options.own_tokens:
            raise ValueError(
                "the teacher's log-probabilities are written by a teacher with the student's tokens, that is loaded or "
                "served: leave teacher_logprobs and use_uld_loss out"
            )
        if self.args.world_size > 1:
            raise ValueError("a teacher's log-probabilities are written by one process: start one")
        named = options.teacher_model_name_or_path or self.training_run.reference_text
        facts = WrittenFacts(
            named if self.asked is None else self.asked.text, top_logprobs, self.inner_objective.temperature
        )
        sets = [each for each in (self.train_dataset, *by_name(self.eval_dataset).values()) if each is not None]
        batches = (self.as_ragged(rows) for each in sets for rows in self.get_eval_dataloader(each))
        return write_answers(folder, facts, (each for batch in batches for each in self._answers(batch, facts)))

    def _answers(self, batch: RaggedBatch, facts: WrittenFacts) -> Iterator[tuple[Asked, Answers]]:
        """What the teacher says of each text of a batch."""
        texts = texts_of(batch)
        if self.asked is None:
            teacher = self.runner.models().teacher
            scorer = functools.partial(teacher.likeliest, count=facts.top_logprobs, temperature=facts.temperature)
            found = scored_ahead(self.runner, batch, scorer)
            if found is None:
                return
            own, logprobs, tokens = found.float().split([1, facts.top_logprobs, facts.top_logprobs], -1)
            answers = Answers(tokens.long(), logprobs, own[:, 0])
        else:
            answers = self.asked.ask(batch, texts)
        counts = [len(text.places) for text in texts]
        parts = zip(*(each.split(counts) for each in answers), strict=True)
        yield from ((text, Answers(*each)) for text, each in zip(texts, parts, strict=True))

    # -- what is written -----------------------------------------------------------------------------------------

    def drawn(self, batch: RaggedBatch, epoch: int) -> RaggedBatch:
        """The rows of a micro-batch as they are, or with completions that the student or the teacher writes now.

        Evaluation is on the data's completions.
        """
        writer = None if epoch == EVALUATION else self._draw_writer()
        batch = batch if writer is None else self._written(batch, writer)
        return batch if self.reader is None else self.reader.read(batch)

    def _draw_writer(self) -> Writer | None:
        """Who writes the completions of the micro-batch at this place, on all ranks alike; None for the data's own."""
        share = (seed_of(self.args.seed, *self.row_order.place) >> 10) / (1 << 53)
        return self.student_writes if share < self.options.lmbda else self.teacher_writes

    def _written(self, batch: RaggedBatch, writer: Writer) -> RaggedBatch:
        prompts, first = prompts_of(batch), self.args.data_rank * self.args.train_batch_size
        seeds = [seed_of(self.args.seed, *self.row_order.place, first + row) for row in range(len(prompts))]
        reader, images = self.training_run.reader, prompt_images(batch, prompts)
        requests = [Request(*each) for each in zip(prompts, itertools.repeat(1), seeds, images)]
        sync = RankSync("generation", remedy="Set tokens_per_generation_batch, or lower max_new_tokens")
        found: list[Completion] = []
        with sync.local(waited_for=writer.has_a_part), self.phases.during("generate"):
            found = [each for (each,) in writer.write(requests[self._share(len(requests))])]
        sync.meet(self.args.device)
        if (together := same_rows_of(self.training_run.model)) is not None:
            everyones = together.all_objects(found)
            found = everyones[0] if len(found) == len(requests) else [*itertools.chain(*everyones)]
        totals, count = self.runner.totals, len(found)
        totals.add_mean("completions/mean_length", sum(len(each.token_ids) for each in found), count)
        totals.add_mean("completions/clipped_ratio", sum(each.finish == "length" for each in found), count)
        completions = [[*itertools.takewhile(lambda token: token < self.common_tokens, c.token_ids)] for c in found]
        shown = None if reader is None else Shown(images, reader.position_rule)
        end = cast(Any, self.tokenizer).eos_token_id or 0  # stands where nothing else is written
        return completed(prompts, [each or [end] for each in completions], shown)

    def _share(self, rows: int) -> slice:
        """Of so many rows those whose completions this rank has written: a share where ranks split sequences."""
        ranks = sequence_of(self.training_run.model)
        return slice(0, rows) if ranks is None else ranks.share(rows)

    @functools.cached_property
    def common_tokens(self) -> int:
        """Tokens that student and teacher both know: one may have further rows, which pad its vocabulary, and draw one
        of these, however unlikely, before which a completion ends. A teacher with its own tokens reads text, and one
        that is asked has the student's."""
        if self.reader is not None:
            return vocabulary(self.training_run.model)
        return min(vocabulary(self.training_run.model), vocabulary(cast(Any, self.reference).model))

    def rehearsed_batch(self, rows: Any) -> RaggedBatch:
        """What a step is rehearsed on: completions as long as they get."""
        dataset: Any = self.train_dataset
        batch = self.as_ragged(self.data_collator([dataset[row] for row in rows]))
        batch = self.training_run.drawn(batch, self.row_order.place[0])
        return batch if self.reader is None or self.reader is self.asked else self.reader.read(batch)
