"""What a server has of the policy: its weights merged with their adapters, or those of the base once and then adapters
alone, each version of which has a name of its own.

Of several ranks the first sends, and the others see in what the server holds that it has. Where weights are sharded, a
layer at a time is whole while it is sent, for which all ranks are needed.
"""

from __future__ import annotations

import collections
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import TypeVar

import torch.distributed as dist
from torch import nn

from lowtide.engine.forward import embedding_weight
from lowtide.ranks.shards import is_sharded
from lowtide.ranks.world import distributed, objects_of_all_ranks
from lowtide.rollout.generators.vllm.adapters import adapter_file, why_merged
from lowtide.rollout.generators.vllm.backends import LowtideServer, VLLMServe
from lowtide.rollout.generators.vllm.facts import Facts
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
from lowtide.rollout.generators.vllm.http import Calls, ServerError
from lowtide.rollout.generators.vllm.label import Label
from lowtide.rollout.generators.vllm.limits import Limits
from lowtide.rollout.generators.vllm.retries import asked_again
from lowtide.rollout.generators.vllm.turns import Turn, WrittenTurn, check_answer
from lowtide.rollout.generators.vllm.weights import Copies, Mark, buckets, is_adapter, marks_of, to_bytes

T = TypeVar("T")


class CopiedWeights:
    """The copy of a policy that a server has.

    Args:
        model: the policy.
        facts: of the server.
        bucket_bytes: of weights that travel at a time.
        padding_free: whether the policy computes without padding.
        computes_in: the dtype that it computes in; None: that of its embedding.

    Attributes:
        merged: why adapters travel merged; None where they travel alone.
        label: of the weights that it has; None while it has none, or not all of them.
    """

    def __init__(
        self,
        backend: LowtideServer | VLLMServe,
        model: nn.Module,
        facts: Facts,
        limits: Limits,
        *,
        bucket_bytes: int,
        padding_free: bool,
        computes_in: str | None,
    ) -> None:
        self.backend, self.facts, self.limits, self.computes_in = backend, facts, limits, computes_in
        self.bucket_bytes, self.padding_free = bucket_bytes, padding_free
        self.merged = why_merged(model, facts.adapters)
        self.run = objects_of_all_ranks(uuid.uuid4().hex)[0]
        self.label: Label | None = None
        self._weights = Copies(adapted=self.merged is not None)
        self._adapter: dict[str, Mark] | None = None
        self._held: list[Label] = []
        self._count = 0
        self._thread = threading.get_ident()  # that trains

    def sync(self, model: nn.Module, version: int) -> None:
        """As of `HoldsWeights`; now and then checks that the server writes by what it was sent.

        Raises:
            ServerError: it cannot be reached, or does not answer in time.
            StaleWeights: it writes by other weights, though it was sent all of them again.
        """
        if self.label is not None and self.label.version == version and self._is_current(model):
            return
        self._bring(model, version)
        if is_due(self._count, self.limits.checked_every):
            self._check_or_bring_again(model, version)

    @property
    def can_bring_again(self) -> bool:
        """Whether a server that was started again can be sent what it had, as completions are written: the thread that
        trains writes them, so that the policy stands still, and no other rank writes by the copy."""
        return threading.get_ident() == self._thread and not distributed()

    def bring_again(self, model: nn.Module) -> Label:
        """Sends all weights anew, checked if any are, and returns their label. Raises as `sync`."""
        assert self.label is not None
        version = self.label.version
        self._bring_all(model, version)
        if self.limits.checked_every:
            self._check_or_bring_again(model, version)
        assert self.label is not None
        return self.label

    def _check_or_bring_again(self, model: nn.Module, version: int) -> None:
        check_or_bring_again(lambda: self.check(model), lambda: self._bring_all(model, version), "sent")

    def _bring_all(self, model: nn.Module, version: int) -> None:
        self.label = None
        self._bring(model, version)

    def check(self, model: nn.Module) -> None:
        """Compares what the server writes with what the policy says of it.

        Raises:
            StaleWeights: it writes by other weights.
        """
        if not (_is_first() or is_sharded(model)):
            return
        label, vocabulary = self.label, embedding_weight(model).shape[0]
        assert label is not None
        turns = turns_of(vocabulary, self.facts.max_model_length, label.copy)
        asked = self._again(lambda: self._written(turns, label, vocabulary)) if _is_first() else None
        written = objects_of_all_ranks(asked)[0] if is_sharded(model) else asked
        assert written is not None
        most = far(self.computes_in or dtype_of(model), "" if is_rounded(model) else self.facts.dtype)
        what = f"{self.backend.whose} does not write by the weights after step {label.version} that it was sent"
        check_written(model, turns, written, most=most, padding_free=self.padding_free, what=what)

    def _written(self, turns: Sequence[Turn], label: Label, vocabulary: int) -> list[WrittenTurn]:
        backend, found = self.backend.by(self._calls()), []
        for turn in turns:  # one after the other, so that none waits in a batch with the other
            held, written = backend.write([turn], HOW, asdict(label))
            label.check(held, self.backend.whose)
            check_answer([turn], written, vocabulary, self.backend.whose)
            found += written
        return found

    # -- sending -------------------------------------------------------------------------------------------------

    def _is_current(self, model: nn.Module) -> bool:
        """Whether nothing was written to the policy since it was sent."""
        return self._weights.current(model) and (self.merged is not None or self._adapter == _adapter_marks(model))

    def _forget(self) -> None:
        """What the server has is not known any more."""
        self._weights.forget()
        self._adapter = None

    def _bring(self, model: nn.Module, version: int) -> None:
        before, self.label = self.label, None
        label = Label(self.run, version, self._count + 1, adapter=self.merged is None)
        sends = _is_first()
        if sends or is_sharded(model):
            # A copy failed, or the server was started again: a part would not make it whole.
            lost = sends and (before is None or asdict(before) not in self._again(self.backend.labels))
            if objects_of_all_ranks(lost)[0] if is_sharded(model) else lost:
                self._forget()
            if sends:
                tries = 1 if is_sharded(model) else None  # the other ranks' part of it cannot be made again
                asked_again(lambda: self._send(model, label), self.limits, tries=tries)
            else:
                collections.deque(self._weights.lacking(model), maxlen=0)  # its shards are wanted for what is sent
        if not sends:
            self._await(label)
            self._weights.took_all(model)
        self._adapter = _adapter_marks(model)
        self._count, self.label = label.copy, label

    def _calls(self) -> Calls:
        """The calls of a copy of the weights."""
        calls, seconds = self.backend.calls, self.limits.weight_sync_timeout
        return calls if seconds is None else calls.within(seconds, "weight_sync_timeout").ending()

    def _send(self, model: nn.Module, label: Label) -> None:
        backend = self.backend.by(self._calls())
        try:
            if not label.adapter or not self._weights.current(model):
                self._send_weights(backend, model, replace(label, adapter=False))
            if label.adapter:
                while len(self._held) >= min(self.limits.adapters_held, self.facts.adapters.count):
                    backend.drop_adapter(self._held.pop(0))
                backend.send_adapter(label, adapter_file(model, label))
                self._held.append(label)
        except ServerError:
            self._forget()  # what the server has of them is not known
            raise

    def _send_weights(self, backend: LowtideServer | VLLMServe, model: nn.Module, label: Label) -> None:
        backend.begin(label)
        self._held, number = [], 0
        most = self.bucket_bytes // backend.most
        for number, bucket in enumerate(buckets(self._weights.lacking(model), most), start=1):  # noqa: B007
            backend.send(label, to_bytes(bucket))
        backend.end(label, number)

    def _again(self, work: Callable[[], T]) -> T:
        return asked_again(work, self.limits)

    def _await(self, label: Label) -> None:
        """Until the first rank has sent the weights.

        Raises:
            ServerError: it has not within the time.
        """
        calls, limits = self._calls(), self.limits
        until = time.monotonic() + calls.timeout * (limits.retries + 1) + limits.pause * limits.retries
        while asdict(label) not in self._again(self.backend.labels):
            if time.monotonic() > until:
                raise ServerError(
                    f"{self.backend.whose} did not get the weights of step {label.version} from the first rank within "
                    f"{limits.retries + 1} times {calls.option}={calls.timeout:g} seconds: see what that rank says"
                )
            time.sleep(0.1)


def _adapter_marks(model: nn.Module) -> dict[str, Mark]:
    return marks_of(model, is_adapter)


def _is_first() -> bool:
    """Whether this rank sends."""
    return not distributed() or dist.get_rank() == 0
