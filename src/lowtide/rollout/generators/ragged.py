"""lowtide's own generator: completions of unlike lengths without padding, on the attention that training uses.

A prompt is computed once, with the images that it shows, and its keys and values are held once, for all completions
that are asked of it. In each step
all completions write a token; those that end leave at once, and their places are taken by further prompts as long as
the budget lasts. What is held is `P + G * R` tokens of keys and values for a prompt of P tokens and G completions of R.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from lowtide.engine.forward import causal_model, embedding_weight, inference, read_next
from lowtide.engine.vision import position_rule
from lowtide.engine.weights.generation_copy import GenerationCopy
from lowtide.ops.counter_random import stream_key
from lowtide.ragged import SegmentImage, sent
from lowtide.rollout.generators.cache import Group, KeyStore, padded_tokens
from lowtide.rollout.generators.decoding import Decoder, Pace, Row, Written, leave_now, pace_on, written
from lowtide.rollout.generators.generator import Completion, Finish, Heard, Lengths, Reply, Request, Sampling
from lowtide.rollout.generators.plans import PromptPlan, RepliesPlan
from lowtide.rollout.generators.policy import check_requests, not_finite
from lowtide.rollout.generators.stops import Stops
from lowtide.rollout.generators.support import why_not


class RaggedGenerator:
    """Writes completions with a model that `engine.forward.install` has prepared.

    Args:
        tokenizer: of transformers; needed for stop strings alone.
        tokens_per_generation_batch: the most tokens whose keys and values are held at once. A prompt counts once, and
            each of its completions with `max_new_tokens`. None holds all requests at once.
        lengths: for benchmarks, which compare generators on completions of the same lengths: the most tokens of each
            completion, where that is below `max_new_tokens`.
        pace: how often the host looks at what is written; by default as suits the device. It changes no token.
        copy: of the weights, made for each call to write by; None writes by the weights themselves.
    """

    def __init__(
        self,
        tokenizer: Any = None,
        tokens_per_generation_batch: int | None = None,
        lengths: Lengths | None = None,
        pace: Pace | None = None,
        copy: GenerationCopy | None = None,
    ):
        self.tokenizer, self.budget, self.lengths, self.pace = tokenizer, tokens_per_generation_batch, lengths, pace
        self.copy = copy
        self._served: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def generate(
        self,
        model: nn.Module,
        requests: Sequence[Request],
        sampling: Sampling,
        reply: Reply | None = None,
        heard: Heard | None = None,
    ) -> list[list[Completion]]:
        """The completions of each request, in their order.

        Args:
            reply: what is returned to a completion that has come to a stop; its keys stay held meanwhile.
            heard: is told each token as it is written, and may end a turn.

        Raises:
            ValueError: the model cannot be served, or a request cannot be written; says which and why.
            FloatingPointError: the logits are not finite.
        """
        inner = causal_model(model)
        if inner not in self._served:
            if reason := why_not(model):
                raise ValueError(
                    f"the ragged generator cannot serve {type(inner).__name__}, which {reason}: "
                    "use `TransformersGenerator`"
                )
            self._served.add(inner)
        check_requests(model, requests, sampling)
        self._check_budget(requests, sampling)
        pace = self.pace or pace_on(embedding_weight(model).device)
        if heard is not None:
            pace = replace(pace, steps=1)
        run = _Run(model, requests, sampling, Stops(sampling, self.tokenizer), pace)
        run.budget, run.reply, run.heard, run.lengths = self.budget, reply, heard, self.lengths
        with inference(model), nullcontext() if self.copy is None else self.copy.standing_in(model):
            run.finish()
        return run.completions

    def _check_budget(self, requests: Sequence[Request], sampling: Sampling) -> None:
        if self.budget is None:
            return
        for number, request in enumerate(requests):
            tokens = len(request.prompt_ids) + request.count * request.room(sampling)
            if tokens > self.budget:
                raise ValueError(
                    f"request {number} alone needs {tokens:,} tokens of keys and values (a prompt of "
                    f"{len(request.prompt_ids):,} and {request.count} x {request.room(sampling):,} of completions), "
                    f"above `tokens_per_generation_batch` of {self.budget:,}: raise it, or ask for fewer or shorter "
                    "completions"
                )


class _Run:
    """One call of `generate`."""

    budget: int | None = None
    reply: Reply | None = None
    heard: Heard | None = None
    lengths: Lengths | None = None

    def __init__(self, model: nn.Module, requests: Sequence[Request], sampling: Sampling, stops: Stops, pace: Pace):
        self.model, self.requests, self.sampling, self.stops = model, requests, sampling, stops
        self.device = embedding_weight(model).device
        self.store = KeyStore(sampling.max_new_tokens, self.device, pace.fewest)
        self.waiting = deque(range(len(requests)))
        self.completions: list[list[Completion]] = [[] for _ in requests]
        shows_images = any(request.images for request in requests)
        self.position_rule = position_rule(model) if shows_images else None
        self.axes = 0 if self.position_rule is None else len(self.position_rule.positions(1, ()))
        """Of positions, where they are counted on several."""
        self.pace, self.decoder = pace, Decoder(model, sampling, self.store, pace, self.axes)

    @property
    def rows(self) -> list[Row]:
        """Those whose keys are held, in the order of their keys."""
        return cast("list[Row]", self.store.lines)

    def finish(self) -> None:
        """Writes everything."""
        while self.waiting or self.rows:
            self._enter()
            self._take_replies()
            self._step()

    # -- forwards -----------------------------------------------------------------------------------------------

    def _enter(self) -> None:
        """Runs as many of the waiting prompts as the budget has places for, and draws their first tokens."""
        groups = self._admitted()
        if not groups:
            return
        plan = PromptPlan(self.store, self.store.admit(groups), self.position_rule)
        rows = [cast(Row, line) for group in plan.groups for line in group.lines]
        counts = [len(group.lines) for group in plan.groups]
        ends = [part.stop - 1 for part in plan.batch.segments]
        index = [end for end, count in zip(ends, counts, strict=True) for _ in range(count)]
        images = [image for group in plan.groups for image in group.images]
        self._write(rows, self._forward(plan.batch.token_ids, plan, rows, self._tensor(index), images))

    def _take_replies(self) -> None:
        """Runs what was returned to completions, and draws what follows."""
        while rows := [row for row in self.rows if row.replied]:
            plan = RepliesPlan(self.store, [(row, len(row.pending)) for row in rows], self.axes)
            tokens = [token for row in rows for token in row.pending]
            ends = torch.tensor([len(row.pending) for row in rows]).cumsum(0) - 1
            self._write(rows, self._forward(self._tensor(tokens), plan, rows, ends.to(self.device)))

    def _step(self) -> None:
        """Draws tokens for each completion, as many as are drawn before the host looks."""
        rows = list(self.rows)
        if rows:
            self._write(rows, self.decoder.write(rows))

    def _forward(
        self, token_ids: Tensor, plan: Any, rows: Sequence[Row], index: Tensor, images: Sequence[SegmentImage] = ()
    ) -> list[Written]:
        """A token of each row."""
        streams = self.decoder.streams(rows)

        def read(logits: Tensor, span: slice) -> Tensor:
            return self.decoder.draw(logits, streams[span], look=True)

        found = read_next(self.model, token_ids, plan, index, read, images)
        return written(found[..., None], [1] * len(rows))

    def _tensor(self, numbers: Any) -> Tensor:
        return sent(torch.tensor(numbers, dtype=torch.long), self.device)

    # -- prompts that enter -------------------------------------------------------------------------------------

    def _admitted(self) -> list[Group]:
        """The prompts that enter now, with their completions; requests with the same prompt share one."""
        groups: dict[Hashable, Group] = {}
        lines, lengths = 0, []
        while self.waiting:
            request = self.requests[self.waiting[0]]
            prompt = tuple(request.prompt_ids)
            known = (prompt, *(image.key for image in request.images))
            if self.budget is not None:
                if known not in groups:
                    lengths.append(len(prompt))
                if self._reserved(lines + request.count) + padded_tokens(lengths) > self.budget:
                    break
            lines += request.count
            number = self.waiting.popleft()
            group = groups.setdefault(known, self._group(prompt, request.images))
            rows = [self._row(group, number, place) for place in range(request.count)]
            self.completions[number] = [row.completion for row in rows]
            group.lines.extend(rows)
        return list(groups.values())

    def _group(self, prompt: tuple[int, ...], images: Sequence[SegmentImage]) -> Group:
        if self.position_rule is None:
            return Group(prompt, images=tuple(images))
        place = len(prompt)
        following = int(self.position_rule.positions(place + 1, images)[0, -1])
        return Group(prompt, images=tuple(images), shift=following - place)

    def _reserved(self, more: int) -> int:
        """Tokens reserved for what is being written and for so many more completions, without further prompts."""
        prompts = sum(max(len(group.prompt) for group in block) * len(block) for block in self.store.blocks)
        return prompts + (len(self.store.lines) + more) * self.sampling.max_new_tokens

    def _row(self, group: Group, request: int, number: int) -> Row:
        most = self.requests[request].room(self.sampling)
        if self.lengths is not None:
            most = min(most, self.lengths(request, number))
        key = stream_key(self.requests[request].seed, number)
        return Row(group, request=request, number=number, key=key, most=most)

    # -- what was written ---------------------------------------------------------------------------------------

    def _write(self, rows: Sequence[Row], found: Sequence[Written]) -> None:
        """Appends tokens to completions; those that have ended leave."""
        for row, each in zip(rows, found, strict=True):
            if not row.ended:
                self._append(row, each)
        ended = [row for row in self.rows if row.ended]
        if leave_now(len(ended), len(self.rows), self.pace):
            self.store.remove(ended)

    def _append(self, row: Row, found: Written) -> None:
        """Appends tokens to a completion up to where it ends, or is replied to."""
        for token, logprob, plain in zip(*found, strict=True):
            if not math.isfinite(plain):
                raise not_finite(row.request, row.number, len(row.completion.token_ids))
            row.completion.append([token], [logprob], [plain], written=True)
            row.held += len(row.pending)
            row.pending = [token]
            told = self.heard is not None and bool(self.heard(row.request, row.number, token))
            finish = self._finish(row, told)
            if finish is not None:
                row.completion.finish, row.ended = finish, True
            if row.ended or row.replied:
                return

    def _finish(self, row: Row, told: bool) -> Finish | None:
        """Why a completion is over; None where it goes on, with what was returned to it if it has come to a stop.

        Args:
            told: whether `heard` ends the turn here.
        """
        completion = row.completion
        left = row.most - len(completion.token_ids)
        if not told and not self.stops.at_end(completion.token_ids, row.turn):
            return None if left > 0 else "length"
        if self.reply is None or left == 0:
            return "stop"
        reply = self.reply(row.request, row.number, completion)
        if reply is None:
            return "stop"
        tokens = [int(token) for token in reply][:left]
        completion.append(tokens, [0.0] * len(tokens), [0.0] * len(tokens), written=False)
        row.pending += tokens
        row.turn = len(completion.token_ids)
        self.decoder.replied = True
        return "length" if len(tokens) == left else None
