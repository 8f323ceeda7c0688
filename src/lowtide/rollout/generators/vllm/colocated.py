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
from lowtide.rollout.generators.vllm.label import Label, StaleWeights
from lowtide.rollout.generators.vllm.turns import Turn, WrittenTurn, check_answer, check_length, write_all
from lowtide.rollout.generators.vllm.weights import MAX_BUCKET_BYTES, Copies, buckets


class VLLMColocatedGenerator:
    """Writes completions by an engine in this process.

    Args:
        engine: `lowtide.rollout.generators.vllm.engine.Engine`.
        sleeps: it gives its memory back after each batch, whereby its weights are lost.
        bucket_bytes: of the weights that are merged at a time.
    """

    def __init__(self, engine: Any, *, sleeps: bool = False, bucket_bytes: int = MAX_BUCKET_BYTES) -> None:
        self.engine: Engine = engine
        self.sleeps, self.bucket_bytes = sleeps, bucket_bytes
        self.run = uuid.uuid4().hex
        self.label: Label | None = None
        self._copies, self._asleep, self._count = Copies(), False, 0
        if sleeps:
            self._sleep()

    def sync(self, model: nn.Module, version: int) -> None:
        """As of `HoldsWeights`."""
        if self.label is not None and self.label.version == version and self._copies.current(model):
            return
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
            raise StaleWeights("the colocated vLLM holds stale weights: the model has changed since `sync` copied them")
        check_length(requests, sampling, self.engine.max_model_length, "raise vllm_max_model_length")
        vocabulary = embedding_weight(model).shape[0]

        def write(turns: Sequence[Turn], how: Sampling) -> list[WrittenTurn]:
            found = self.engine.write([(turns, how, None)])[0]
            check_answer(turns, found, vocabulary, "the colocated vLLM")
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
