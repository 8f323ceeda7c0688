"""vLLM in a server's process, which is spoken to by HTTP: nothing of vLLM is needed here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from torch import nn

from lowtide.engine.forward import causal_model, embedding_weight
from lowtide.rollout.generators.generator import Completion, Reply, Request, Sampling
from lowtide.rollout.generators.vllm.backends import backend_at
from lowtide.rollout.generators.vllm.copied import CopiedWeights
from lowtide.rollout.generators.vllm.facts import SHAPES, Facts
from lowtide.rollout.generators.vllm.http import Calls
from lowtide.rollout.generators.vllm.label import Label, StaleWeights
from lowtide.rollout.generators.vllm.limits import Limits
from lowtide.rollout.generators.vllm.retries import asked_again
from lowtide.rollout.generators.vllm.turns import Turn, WrittenTurn, check_answer, check_length, write_all
from lowtide.rollout.generators.vllm.weights import MAX_BUCKET_BYTES


class VLLMServerGenerator:
    """Writes completions by a server, which has a copy of the weights.

    Of several ranks the first sends it, and all ask for completions of their own.

    Args:
        url: of the server.
        model: that is trained.
        timeout: seconds that each wait may take: for the server to answer at all, for a bucket, for a batch.
        regex: what completions must match.
        bucket_bytes: of the weights that travel at a time.
        limits: of the server once it is there.
        padding_free: whether the model computes without padding.
        computes_in: the dtype that it computes in; None: that of its embedding.

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
        padding_free: bool = True,
        computes_in: str | None = None,
    ) -> None:
        self.calls, self.limits = Calls(url, timeout), limits
        self.calls.wait("/health")
        self.backend = backend_at(self.calls, regex, limits.max_inflight_tasks)
        self.facts = self.backend.facts()
        check_model(self.facts, model, f"at {self.calls.url}")
        how: dict[str, Any] = {"padding_free": padding_free, "computes_in": computes_in}
        self.copied = CopiedWeights(self.backend, model, self.facts, limits, bucket_bytes=bucket_bytes, **how)

    @property
    def run(self) -> str:
        """The name of this run."""
        return self.copied.run

    @property
    def label(self) -> Label | None:
        """Of the weights that the server has."""
        return self.copied.label

    @property
    def whose(self) -> str:
        """The server, for messages."""
        return self.backend.whose

    def sync(self, model: nn.Module, version: int) -> None:
        """As of `HoldsWeights`: the first rank sends, the others see it in what is written for them."""
        self.copied.sync(model, version)

    def generate(
        self, model: nn.Module, requests: Sequence[Request], sampling: Sampling, reply: Reply | None = None
    ) -> list[list[Completion]]:
        """The completions of each request, in their order.

        Raises:
            ServerError: the server went away, or takes too long.
            StaleWeights: it wrote by other weights than the model's.
            ValueError: a request cannot be written, or what came back does not fit it.
        """
        if self.label is None:
            raise StaleWeights(f"{self.whose} never got the weights of this run: `sync` copies them")
        label: Label = self.label
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

        def bring_weights() -> None:
            nonlocal label
            label = self.copied.bring_again(model)

        bring = bring_weights if self.copied.can_bring_again else None

        def write_or_again(turns: Sequence[Turn], how: Sampling) -> list[WrittenTurn]:
            return asked_again(lambda: write(turns, how), self.limits, ValueError, bring_weights=bring)

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
