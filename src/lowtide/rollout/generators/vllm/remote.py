"""vLLM in a server's process, which is spoken to by HTTP: nothing of vLLM is needed here."""

from __future__ import annotations

import collections
import logging
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from lowtide.engine.forward import causal_model, embedding_weight
from lowtide.ranks.shards import is_sharded
from lowtide.ranks.world import distributed
from lowtide.rollout.generators.generator import Completion, Reply, Request, Sampling
from lowtide.rollout.generators.vllm.backends import backend_at
from lowtide.rollout.generators.vllm.facts import SHAPES, Facts
from lowtide.rollout.generators.vllm.http import Calls, Refused, ServerError
from lowtide.rollout.generators.vllm.label import Label, StaleWeights
from lowtide.rollout.generators.vllm.limits import Limits
from lowtide.rollout.generators.vllm.turns import Turn, WrittenTurn, check_answer, check_length, write_all
from lowtide.rollout.generators.vllm.weights import MAX_BUCKET_BYTES, Copies, buckets, to_bytes

logger = logging.getLogger(__name__)

T = TypeVar("T")


class VLLMServerGenerator:
    """Writes completions by a server, which gets the weights by buckets.

    Of several ranks the first sends them, and all ask for completions of their own. Where weights are sharded, a layer
    at a time is whole while it is sent.

    Args:
        url: of the server.
        model: that is trained.
        timeout: seconds that each wait may take: for the server to answer at all, for a bucket, for a batch.
        regex: what completions must match.
        bucket_bytes: of the weights that travel at a time.
        limits: of the server once it is there.

    Raises:
        ServerError: no server answers.
        ValueError: it serves another model, or cannot be trained with; says why.
    """

    def __init__(
        self,
        url: str,
        model: nn.Module,
        *,
        timeout: float = 240.0,
        regex: str | None = None,
        bucket_bytes: int = MAX_BUCKET_BYTES,
        limits: Limits = Limits(),  # noqa: B008  # it is frozen
    ) -> None:
        self.calls = Calls(url, timeout)
        self.bucket_bytes, self.limits = bucket_bytes, limits
        self.calls.wait("/health")
        self.backend = backend_at(self.calls, regex, limits.max_inflight_tasks)
        self.facts = self.backend.facts()
        check_model(self.facts, model, f"at {self.calls.url}")
        self.run = _same_on_all_ranks(uuid.uuid4().hex)
        self.label: Label | None = None
        self._copies, self._count = Copies(), 0

    @property
    def whose(self) -> str:
        """The server, for messages."""
        return f"the vLLM server at {self.calls.url}"

    def sync(self, model: nn.Module, version: int) -> None:
        """As of `HoldsWeights`: the first rank sends, the others see it in what is written for them."""
        if self.label is not None and self.label.version == version and self._copies.current(model):
            return
        before, self.label = self.label, None
        label = Label(self.run, version, self._count + 1)
        sends = not distributed() or dist.get_rank() == 0
        if sends or is_sharded(model):
            # A copy failed, or the server was started again: a part would not make it whole.
            lost = sends and (before is None or self._again(self.backend.label) != asdict(before))
            if _said_by_first(lost, model):
                self._copies.forget()
            if sends:
                tries = 1 if is_sharded(model) else self.tries  # the other ranks' part of it cannot be made again
                self._again(lambda: self._send(model, label), tries=tries)
            else:
                collections.deque(self._copies.lacking(model), maxlen=0)  # its shards are wanted for what is sent
        if not sends:
            self._await(label)
            self._copies.took_all(model)
        self._count, self.label = label.copy, label

    def _sending(self) -> Calls:
        """The calls of a copy of the weights."""
        seconds = self.limits.weight_sync_timeout
        return self.calls if seconds is None else self.calls.within(seconds, "weight_sync_timeout").ending()

    def _send(self, model: nn.Module, label: Label) -> None:
        backend = self.backend.by(self._sending())
        try:
            backend.begin(label)
            number = 0
            most = self.bucket_bytes // backend.most
            for number, bucket in enumerate(buckets(self._copies.lacking(model), most), start=1):  # noqa: B007
                backend.send(label, to_bytes(bucket))
            backend.end(label, number)
        except ServerError:
            self._copies.forget()  # what the server has of them is not known
            raise

    @property
    def tries(self) -> int:
        """How often the server is asked for something before that has failed."""
        return self.limits.retries + 1

    def _again(self, work: Callable[[], T], failures: type[Exception] = ServerError, tries: int | None = None) -> T:
        """What the server is asked for, again where it fails; what it writes is the same, for seeds say what it draws.

        Args:
            failures: beside those of the server.

        Raises:
            ServerError: it failed each time, or refused.
            ValueError: likewise, where that is among the failures; or it holds other weights.
        """
        left = self.tries if tries is None else tries
        while True:
            left -= 1
            try:
                return work()
            except (ServerError, failures) as error:
                refused = isinstance(error, Refused) and error.status < 500
                if not left or refused or isinstance(error, StaleWeights):
                    raise
                logger.warning(
                    f"{error}. It is asked again in {self.limits.pause:g} seconds ({self.tries - left} of "
                    f"vllm_server_retries={self.limits.retries})"
                )
                time.sleep(self.limits.pause)

    def _await(self, label: Label) -> None:
        """Until the first rank has sent the weights.

        Raises:
            ServerError: it has not within the time.
        """
        calls = self._sending()
        until = time.monotonic() + calls.timeout * self.tries + self.limits.pause * self.limits.retries
        while self._again(self.backend.label) != asdict(label):
            if time.monotonic() > until:
                raise ServerError(
                    f"{self.whose} did not get the weights of step {label.version} from the first rank within "
                    f"{self.tries} times {calls.option}={calls.timeout:g} seconds: see what that rank says"
                )
            time.sleep(0.1)

    def generate(
        self, model: nn.Module, requests: Sequence[Request], sampling: Sampling, reply: Reply | None = None
    ) -> list[list[Completion]]:
        """The completions of each request, in their order.

        Raises:
            ServerError: the server went away, or takes too long.
            StaleWeights: it wrote by other weights than the model's.
            ValueError: a request cannot be written, or what came back does not fit it.
        """
        label = self.label
        if label is None:
            raise StaleWeights(f"{self.whose} never got the weights of this run: `sync` copies them")
        check_length(
            requests, sampling, self.facts.max_model_length, "start the server with a larger --max_model_length"
        )
        vocabulary = embedding_weight(model).shape[0]
        backend = self.backend.by(self.calls.within(self.limits.request_timeout, "request_timeout"))

        def write(turns: Sequence[Turn], how: Sampling) -> list[WrittenTurn]:
            held, found = backend.write(turns, how, asdict(label))
            label.check(held, self.whose)
            check_answer(turns, found, vocabulary, self.whose)
            return found

        def write_or_again(turns: Sequence[Turn], how: Sampling) -> list[WrittenTurn]:
            return self._again(lambda: write(turns, how), ValueError)

        return write_all(write_or_again, requests, sampling, reply)


def check_model(facts: Facts, model: nn.Module, where: str) -> None:
    """Refuses vLLM with another model. Its name may differ: a folder here is a hub's name there.

    Raises:
        ValueError: says in what they differ.
    """
    config: Any = causal_model(model).config.get_text_config()
    for name in SHAPES:
        here, there = getattr(config, name, None), facts.shapes.get(name)
        if here is not None and there is not None and here != there:
            raise ValueError(
                f"the vLLM {where} serves another model than the one that is trained: {facts.model} has a "
                f"{name} of {there}, {causal_model(model).config.name_or_path or 'this one'} of {here}"
            )


def _said_by_first(here: bool, model: nn.Module) -> bool:
    """What the first rank finds, where all ranks ask."""
    if not is_sharded(model):
        return here
    flag = torch.tensor(float(here), device=next(model.parameters()).device)
    dist.broadcast(flag, src=0)
    return bool(flag)


def _same_on_all_ranks(run: str) -> str:
    if not distributed():
        return run
    told = [run]
    dist.broadcast_object_list(told)
    return told[0]
