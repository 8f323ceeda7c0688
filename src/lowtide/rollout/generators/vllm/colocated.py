"""vLLM in the process that trains. Each rank has an engine of its own, and writes its own completions.

While the policy is trained the engine may sleep (`vllm_enable_sleep_mode`): it gives the memory of weights and cache
back. Before the next batch it takes that of the weights again, they are copied, and then it takes that of the cache.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from torch import nn

from lowtide.engine.forward import embedding_weight
from lowtide.memory.allocators.out_of_memory import free_caches
from lowtide.rollout.generators.generator import Completion, Reply, Request, Sampling
from lowtide.rollout.generators.vllm.engine import Engine
from lowtide.rollout.generators.vllm.fingerprint import (
    HOW,
    check_or_bring_again,
    check_written,
    dtype_of,
    far,
    is_due,
    is_rounded,
    turns_of,
)
from lowtide.rollout.generators.vllm.label import Label, StaleWeights
from lowtide.rollout.generators.vllm.turns import Turn, WrittenTurn, check_answer, check_length, write_all
from lowtide.rollout.generators.vllm.weights import MAX_BUCKET_BYTES, Copies, buckets

WHOSE = "the colocated vLLM"


class VLLMColocatedGenerator:
    """Writes completions by an engine in this process.

    Args:
        engine: `lowtide.rollout.generators.vllm.engine.Engine`.
        sleeps: it gives its memory back after each batch, whereby its weights are lost.
        bucket_bytes: of the weights that are merged at a time.
        checked_every: copies of the weights between two checks that it writes by them, beginning with the first one;
            0: none.
        padding_free: whether the policy computes without padding.
        computes_in: the dtype that it computes in; None: that of its embedding.
    """

    def __init__(
        self,
        engine: Any,
        *,
        sleeps: bool = False,
        bucket_bytes: int = MAX_BUCKET_BYTES,
        checked_every: int = 0,
        padding_free: bool = True,
        computes_in: str | None = None,
    ) -> None:
        self.engine: Engine = engine
        self.sleeps, self.bucket_bytes, self.checked_every = sleeps, bucket_bytes, checked_every
        self.padding_free, self.computes_in = padding_free, computes_in
        self.run = uuid.uuid4().hex
        self.label: Label | None = None
        self._copies, self._asleep, self._count = Copies(), False, 0
        if sleeps:
            self._sleep()

    def sync(self, model: nn.Module, version: int) -> None:
        """As of `HoldsWeights`; now and then checks that the engine writes by what it was given.

        Raises:
            StaleWeights: it writes by other weights, though it was given all of them again.
        """
        if self.label is not None and self.label.version == version and self._copies.current(model):
            return
        self._bring(model, version)
        if is_due(self._count, self.checked_every):
            check_or_bring_again(lambda: self.check(model), lambda: self._bring_all(model, version), "copied")

    def _bring_all(self, model: nn.Module, version: int) -> None:
        self.label = None
        self._bring(model, version)

    def check(self, model: nn.Module) -> None:
        """Compares what the engine writes with what the policy says of it.

        Raises:
            StaleWeights: it writes by other weights.
        """
        assert self.label is not None
        vocabulary, facts = embedding_weight(model).shape[0], self.engine.facts
        turns, written = turns_of(vocabulary, facts.max_model_length, self.label.copy), []
        for turn in turns:  # one after the other, so that none waits in a batch with the other
            written += self.engine.write([([turn], HOW, None)])[0]
        check_answer(turns, written, vocabulary, WHOSE)
        most = far(self.computes_in or dtype_of(model), "" if is_rounded(model) else facts.dtype)
        what = f"{WHOSE} does not write by the weights after step {self.label.version} that were copied to it"
        check_written(model, turns, written, most=most, padding_free=self.padding_free, what=what)

    def _bring(self, model: nn.Module, version: int) -> None:
        if self.label is None:
            self._copies.forget()
        label, self.label = Label(self.run, version, self._count + 1), None
        if self._asleep:
            free_caches()
            self.engine.wake("weights")
        self.engine.begin()
        for bucket in buckets(self._copies.lacking(model), self.bucket_bytes, cut=False):
            self.engine.load({piece.name: piece.rows for piece in bucket})
        self.engine.end()
        if self._asleep:
            self.engine.wake("kv_cache")
            self._asleep = False
        self._count, self.label = label.copy, label

    def generate(
        self, model: nn.Module, requests: Sequence[Request], sampling: Sampling, reply: Reply | None = None
    ) -> list[list[Completion]]:
        """The completions of each request, in their order.

        Raises:
            StaleWeights: the model was written to since its weights were copied, or they never were.
            ValueError: a request cannot be written.
        """
        if self.label is None or not self._copies.current(model):
            raise StaleWeights(f"{WHOSE} holds stale weights: the model has changed since `sync` copied them")
        check_length(requests, sampling, self.engine.max_model_length, "raise vllm_max_model_length")
        vocabulary = embedding_weight(model).shape[0]

        def write(turns: Sequence[Turn], how: Sampling) -> list[WrittenTurn]:
            found = self.engine.write([(turns, how, None)])[0]
            check_answer(turns, found, vocabulary, WHOSE)
            return found

        try:
            return write_all(write, requests, sampling, reply)
        finally:
            if self.sleeps:
                self._sleep()

    def _sleep(self) -> None:
        self.engine.sleep()
        self._asleep, self.label = True, None
        self._copies.forget()
