"""The Language Model Evaluation Harness (lm-eval) on the ragged engine: each context is computed once for all choices.

Everything that decides what is asked (encoding, windows, truncation from the left, chat templates) is lm-eval's own:
the class is its Hugging Face backend with two methods replaced. A question with four choices costs that backend four
padded rows; here it is a segment for the context and one for each choice, without padding, and the head is computed at
the choices' tokens alone.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text

from lowtide.engine.forward import embedding_weight, inference, score
from lowtide.engine.heads.head import Scores
from lowtide.engine.probe import Probe
from lowtide.ops.logits.logit_rows import Want
from lowtide.ragged import RaggedBatch
from lowtide.rollout.generators.generator import Request, Sampling
from lowtide.score_rules import IGNORE

DRAWN_BY = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Settings of a task's generation that are followed."""


class Asked(NamedTuple):
    """The choices of one context."""

    context: tuple[int, ...]
    choices: list[tuple[int, Sequence[int]]]
    """The number of each request, and the tokens to score."""

    @property
    def tokens(self) -> int:
        """That are computed."""
        return len(self.context) + sum(len(choice) for _, choice in self.choices)


class RaggedLM(HFLM):
    """A model that the engine was installed in, as lm-eval knows models.

    Args:
        model: prepared by `engine.probe.probe`.
        found: what the probe found: whether segments and prefixes work.
        generator: writes what a task asks to be written.
        tokens_per_batch: the most tokens of a forward; a context that has more choices than fit is computed again.
        options: of `HFLM`.
    """

    def __init__(
        self, model: Any, tokenizer: Any, found: Probe, generator: Any, tokens_per_batch: int, **options: Any
    ) -> None:
        super().__init__(pretrained=model, tokenizer=tokenizer, batch_size=1, **options)
        self.found, self.generator, self.tokens_per_batch = found, generator, tokens_per_batch
        self.computed_tokens = 0
        # A context stands before each of its choices, which come one after the other.
        self.tok_encode = functools.lru_cache(maxsize=8)(super().tok_encode)

    # -- log-probs -----------------------------------------------------------------------------------------------------

    def _loglikelihood_tokens(
        self, requests: Any, disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """For each (texts, context, continuation) the continuation's log-probability in nats, and whether it is what
        greedy decoding writes."""
        found: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        for asked in _in_batches(self._grouped(requests), self.tokens_per_batch):
            for number, answer in self._scored(asked):
                found[number] = answer
        return found

    def _grouped(self, requests: Any) -> list[Asked]:
        """Requests by their contexts, cut from the left as lm-eval does."""
        groups: dict[tuple[int, ...], Asked] = {}
        for number, (_, context, continuation) in enumerate(requests):
            whole = [*context, *continuation][-(self.max_length + 1) :]
            kept = tuple(whole[: len(whole) - len(continuation)])
            groups.setdefault(kept, Asked(kept, [])).choices.append((number, continuation))
        if not self.found.shares_prefixes:
            return [Asked(group.context, [choice]) for group in groups.values() for choice in group.choices]
        return list(groups.values())

    def _scored(self, batch: Sequence[Asked]) -> Iterator[tuple[int, tuple[float, bool]]]:
        segments: list[list[int]] = []
        labels: list[list[int]] = []
        prefix, rows, numbers = list[int](), list[int](), list[int | None]()
        for row, asked in enumerate(batch):
            context = list(asked.context)
            if self.found.shares_prefixes:
                first = len(segments)
                parts = [(None, context, [IGNORE] * len(context), -1)]
                parts += [(number, list(choice), list(choice), first) for number, choice in asked.choices]
            else:
                parts = [
                    (number, [*context, *choice], [*[IGNORE] * len(context), *choice], -1)
                    for number, choice in asked.choices
                ]
            for number, tokens, label, before in parts:
                segments.append(tokens)
                labels.append(label)
                prefix.append(before)
                rows.append(row)
                numbers.append(number)
        ragged = RaggedBatch.from_segments(segments, labels, prefix=prefix, row=rows)
        self.computed_tokens += ragged.tokens
        ragged = ragged.to(embedding_weight(self.model).device)
        scores = Scores(ragged.score_index, ragged.score_target, want=Want(top1=True))
        with inference(self.model):
            stats = score(self.model, ragged, scores, padding_free=self.found.isolated).stats
        logprobs, greedy = stats["logprobs"].double().cpu(), stats["top1"].bool().cpu()
        for number, part in zip(numbers, ragged.segments, strict=True):
            if number is not None:
                own = slice(part.score_start, part.score_stop)
                yield number, (float(logprobs[own].sum()), bool(greedy[own].all()))

    # -- texts ---------------------------------------------------------------------------------------------------------

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """What greedy or sampled decoding writes after each context, up to the texts that the task ends it with.

        Raises:
            ValueError: a task asks for settings of generation that are not known here.
        """
        eos = self.tok_decode(self.eot_token_id, skip_special_tokens=False)
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(number)
        written: dict[int, str] = {}
        for numbers in groups.values():
            given = dict(normalize_gen_kwargs(requests[numbers[0]].args[1], self.max_gen_toks))
            until = handle_stop_sequences(given.pop("until", None), eos=eos)
            sampling = self._sampling(given, until)
            room = self.max_length - sampling.max_new_tokens
            if room < 1:
                raise ValueError(
                    f"a task writes {sampling.max_new_tokens:,} tokens, and the model was made for "
                    f"{self.max_length:,}: give --max_length"
                )
            contexts = [self.tok_encode(requests[number].args[0], left_truncate_len=room) for number in numbers]
            self.generator.tokenizer = self.tokenizer
            asked = [Request(context, seed=number) for number, context in zip(numbers, contexts, strict=True)]
            for number, [completion] in zip(numbers, self.generator.generate(self.model, asked, sampling), strict=True):
                text = self.tok_decode(completion.token_ids)
                written[number] = postprocess_generated_text(generation=text, stop=until, think_end_token=None)
        return [written[number] for number in range(len(requests))]

    def _sampling(self, given: dict[str, Any], until: Sequence[str]) -> Sampling:
        most, draws = given.pop("max_gen_toks"), given.pop("do_sample", None)
        drawn: dict[str, Any] = {"temperature": 1.0 if draws else 0.0}
        drawn |= {name: given.pop(name) for name in DRAWN_BY if given.get(name) is not None}
        if draws is False:
            drawn = {"temperature": 0.0}
        if given:
            raise ValueError(
                f"a task generates with {', '.join(given)}, which is not known here: of a task's generation_kwargs, "
                f"{', '.join((*DRAWN_BY, 'do_sample', 'until', 'max_gen_toks'))} are followed"
            )
        return Sampling(most, **drawn, stop_ids=(self.eot_token_id,), stop_strings=tuple(until))


def _in_batches(groups: Sequence[Asked], most: int) -> Iterator[list[Asked]]:
    """Groups of at most so many tokens together, long ones first. A context with more choices than fit comes several
    times; what is above the limit alone comes by itself."""
    batch, tokens = list[Asked](), 0
    for group in (part for asked in sorted(groups, key=lambda each: -each.tokens) for part in _parts(asked, most)):
        if batch and tokens + group.tokens > most:
            yield batch
            batch, tokens = [], 0
        batch.append(group)
        tokens += group.tokens
    if batch:
        yield batch


def _parts(asked: Asked, most: int) -> Iterator[Asked]:
    part, tokens = list[tuple[int, Sequence[int]]](), len(asked.context)
    for choice in asked.choices:
        if part and tokens + len(choice[1]) > most:
            yield Asked(asked.context, part)
            part, tokens = [], len(asked.context)
        part.append(choice)
        tokens += len(choice[1])
    yield Asked(asked.context, part)
