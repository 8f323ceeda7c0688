"""What a generator is: prompts in, completions sampled from the policy out.

Three stand behind it: lowtide's own on the ragged engine (`generators.ragged`), transformers' `generate`
(`generators.transformers`), and vLLM (`generators.vllm`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

from torch import nn

from lowtide.ragged import SegmentImage

Finish = Literal["stop", "length"]
"""Why a completion ended: at a stop token or string, or at its most tokens."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn; the defaults draw from the model's own distribution.

    The order is that of transformers: repetition penalty, temperature, top-k, top-p, min-p.
    """

    max_new_tokens: int
    temperature: float = 1.0
    """Divisor of the logits; 0 takes the likeliest token."""
    top_k: int = 0
    """Draw among so many of the likeliest tokens; 0 among all."""
    top_p: float = 1.0
    """Draw among the fewest likeliest tokens whose probabilities add up to this."""
    min_p: float = 0.0
    """Draw among tokens that are at least this times as likely as the likeliest."""
    repetition_penalty: float = 1.0
    """Divides positive logits, and multiplies negative ones, of tokens in the prompt or the completion so far."""
    stop_ids: tuple[int, ...] = ()
    """Tokens that end a completion, and belong to it."""
    stop_strings: tuple[str, ...] = ()
    """Texts that end a completion with the token that completes them."""
    never_ids: tuple[int, ...] = ()
    """Tokens that are not drawn, such as one that stands for an image."""
    unconstrained: bool = False
    """Whether tokens are drawn from all, whatever vLLM is told that completions must match."""
    others: Mapping[str, Any] = field(default_factory=dict)
    """Further settings of transformers' `generate`, which alone reads them."""

    def __post_init__(self) -> None:
        ranges = {
            "max_new_tokens": (self.max_new_tokens >= 1, "at least 1"),
            "temperature": (0 <= self.temperature < math.inf, "0 (the likeliest token) or above"),
            "top_k": (self.top_k >= 0, "0 (all) or above"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1 (all)"),
            "min_p": (0 <= self.min_p <= 1, "between 0 (all) and 1"),
            "repetition_penalty": (0 < self.repetition_penalty < math.inf, "above 0 (1 is none)"),
            "stop_strings": (all(self.stop_strings), "without empty texts, which are found everywhere"),
        }
        for name, (holds, wanted) in ranges.items():
            if not holds:
                raise ValueError(f"`{name}` of Sampling is {getattr(self, name)!r}, but has to be {wanted}")


@dataclass(frozen=True)
class Request:
    """A prompt, and how many completions of it are wanted."""

    prompt_ids: Sequence[int]
    count: int = 1
    seed: int = 0
    """Keys the random numbers of its completions, whatever else is generated beside them."""
    images: Sequence[SegmentImage] = ()
    """Those among the tokens of the prompt, in their order."""
    most: int | None = None
    """Tokens of a completion, where they are to be fewer than those of the sampling."""

    def room(self, sampling: Sampling) -> int:
        """The most tokens of a completion."""
        return sampling.max_new_tokens if self.most is None else min(self.most, sampling.max_new_tokens)


class Restart(NamedTuple):
    """Where a completion goes on in another context, since the chat template writes earlier turns otherwise there."""

    place: int
    """Of the first token that is written in it."""
    context: list[int]
    """All that stands before that token, in place of the prompt and of what was written until then."""


@dataclass
class Completion:
    """What was written after a prompt."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """In nats, of each token under the distribution that it was drawn from: after penalty, temperature and cuts. 0 at
    temperature 0, and for tokens that the policy did not write."""
    plain_logprobs: list[float] = field(default_factory=list)
    """Likewise under the whole distribution at the temperature alone, which is what a policy is scored by. At
    temperature 0, at temperature 1."""
    written: list[bool] = field(default_factory=list)
    """Whether the policy wrote each token; False for what a tool or an environment returned."""
    finish: Finish = "length"
    restarts: list[Restart] = field(default_factory=list)
    """In the order of their places; none where all was written behind the prompt."""

    def before(self, limit: int, end: int) -> Completion:
        """What stands before its first token of `limit` or above; the token `end` where nothing does."""
        count = next((place for place, token in enumerate(self.token_ids) if token >= limit), None)
        if count is None:
            return self
        if count == 0:
            return Completion([end], [math.nan], [math.nan], [True])
        return Completion(
            self.token_ids[:count],
            self.logprobs[:count],
            self.plain_logprobs[:count],
            self.written[:count],
            restarts=[each for each in self.restarts if each.place < count],
        )

    def append(
        self, tokens: Sequence[int], logprobs: Sequence[float], plain: Sequence[float], *, written: bool
    ) -> None:
        """Adds tokens; `written` says whether the policy wrote them."""
        self.token_ids += tokens
        self.logprobs += logprobs
        self.plain_logprobs += plain
        self.written += [written] * len(tokens)

    def behind(self, prompt: Sequence[int], other: Sequence[int]) -> Completion:
        """It with another prompt in its contexts, those that begin with its own."""
        if not self.restarts:
            return self
        start, count = list(prompt), len(prompt)
        moved = [
            Restart(place, [*other, *context[count:]] if context[:count] == start else context)
            for place, context in self.restarts
        ]
        return replace(self, restarts=moved)

    def restart(self, context: Sequence[int], other: Completion) -> None:
        """Adds what was written in another context."""
        self.restarts.append(Restart(len(self.token_ids), list(context)))
        for name in ("token_ids", "logprobs", "plain_logprobs", "written"):
            getattr(self, name).extend(getattr(other, name))
        self.finish = other.finish


Reply = Callable[[int, int, Completion], Sequence[int] | None]
"""Called with (request, number of the completion, the completion so far) when one ends at a stop: the tokens that a
tool or an environment returns, after which the policy goes on writing; None where it is over."""

Heard = Callable[[int, int, int], bool | None]
"""Called with (request, number of the completion, token) for each token as the policy writes it, in its order. Where it
returns True, the policy's turn ends with that token as at a stop: `reply` is asked next."""

Lengths = Callable[[int, int], int]
"""(request, number of the completion) to the most tokens of it."""


class Generator(Protocol):
    """Samples completions from a model."""

    def generate(
        self, model: nn.Module, requests: Sequence[Request], sampling: Sampling, reply: Reply | None = None
    ) -> list[list[Completion]]:
        """The completions of each request, in their order."""
        ...


@runtime_checkable
class HoldsWeights(Protocol):
    """A generator with a copy of the weights."""

    def sync(self, model: nn.Module, version: int) -> None:
        """Copies the weights that have changed since the last copy; afterwards it writes with those of `model`.

        Args:
            version: optimizer steps that they have taken.

        Raises:
            ConnectionError: whoever holds the copy cannot be reached, or does not answer in time.
            ValueError: it holds another model.
        """
        ...
