"""Completions of several turns: the policy calls tools, reads their answers, and goes on writing.

`ToolUse` is a run's: tools, environments and limits. `Conversations` is one rollout's: it makes the requests of a
generator, is the `Reply` that the generator asks when a completion ends at a stop, and keeps what was said as messages,
which is how reward functions get it. A completion whose template writes earlier turns otherwise goes on in a request of
its own, behind what the template writes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from lowtide.compat.templates.jinja import TEMPLATE_FAILURES
from lowtide.data.formats.conversation import Message
from lowtide.ops.counter_random import stream_key
from lowtide.ranks.group import RankGroup
from lowtide.rollout.calls import Caller
from lowtide.rollout.environments import Environments
from lowtide.rollout.generators.generator import Completion, Request
from lowtide.rollout.tools import Schema, Tool, answer_calls, tool_schemas, tools_by_name
from lowtide.rollout.turns import Turns

T = TypeVar("T")
Write = Callable[[Sequence[Request], "Conversations"], Sequence[Sequence[Completion]]]
"""Has a generator write completions of requests, with conversations as its `Reply`."""
NO_PROMPT: list[Message] = [{"role": "user", "content": ""}]
"""The prompt of a row without one, which its environment writes."""


@dataclass
class Conversation:
    """One completion and what came before it."""

    prompt: list[Message]
    """With what its environment added."""
    prompt_ids: list[int]
    row: Mapping[str, Any]
    schemas: list[Schema]
    tools: Mapping[str, Tool]
    environment: Any = None
    messages: list[Message] = field(default_factory=list)
    """What followed the prompt: turns of the assistant and of tools."""
    calls: int = 0
    """Tool calls that were answered."""
    failures: int = 0
    """Those of them whose answer is an error."""
    rounds: int = 0
    """Turns whose calls were answered."""
    context: list[int] = field(default_factory=list)
    """The tokens behind which it is written now: the prompt's, or those of a later context."""
    following: list[int] | None = None
    """The context in which it goes on; None where it goes on in this one, or is over."""
    read: int = 0
    """Tokens behind the context that `messages` stand for."""
    used: int = 0
    """Tokens that were written and answered in earlier contexts."""
    completion: Completion | None = None
    """What was written in them."""

    def __post_init__(self) -> None:
        self.context = self.prompt_ids


class ToolUse:
    """Tools and environments of a run, under TRL 1.16's names.

    Args:
        turns: how the policy's tokenizer writes conversations.
        tools: functions that every completion can call.
        environment_factory: makes an environment for a completion; or several by name (see `Environments`).
        max_tool_calling_iterations: turns of a completion whose calls are answered; None for no limit.
        timeout: seconds that a tool may take before the policy reads that it took too long; None for no limit.
        ranks: those that write the same tokens together. All of them call tools and environments, which may answer each
            otherwise: what the first was answered is what all go on with.

    Raises:
        ValueError: a tool cannot be described, an environment has no `reset`, or the chat template has no tools.
    """

    def __init__(
        self,
        turns: Turns,
        *,
        tools: Sequence[Tool] | None = None,
        environment_factory: Callable[[], Any] | Mapping[str, Callable[[], Any]] | None = None,
        max_tool_calling_iterations: int | None = None,
        timeout: float | None = None,
        ranks: RankGroup | None = None,
    ) -> None:
        if max_tool_calling_iterations is not None and max_tool_calling_iterations < 0:
            raise ValueError(f"max_tool_calling_iterations={max_tool_calling_iterations} must be at least 0, or None")
        self.turns, self.caller = turns, Caller(timeout)
        self.most_rounds, self.ranks = max_tool_calling_iterations, ranks
        self.tools = tools_by_name(tools or ())
        self.schemas = tool_schemas(list(self.tools.values()))
        self.environments: Environments | None = None
        if environment_factory is not None:
            self.environments = Environments(environment_factory, list(self.tools.values()))
        if self.tools or (self.environments is not None and self.environments.has_tools):
            turns.try_tools()

    def agreed(self, own: T) -> T:
        """What ranks that write together go on with."""
        return own if self.ranks is None else self.ranks.of_first(own)

    def rewards(self) -> dict[str, Callable[..., Any]]:
        """The rewards that environments give themselves, by name: columns for `Rewards.add`."""
        return self.environments.rewards() if self.environments is not None else {}

    def start(
        self,
        rows: Sequence[Mapping[str, Any]],
        *,
        max_completion_length: int,
    ) -> Conversations:
        """Begins a rollout: a conversation for each row, whose environment is reset.

        Args:
            rows: one for each completion, a prompt's completions side by side.
            max_completion_length: most tokens of a completion, tools' answers counted.

        Raises:
            ValueError: a prompt is no conversation or cannot be rendered, or an environment's `reset` raised.
        """
        used = self.environments.take(rows) if self.environments is not None else [None] * len(rows)
        begun: list[Conversation] = []
        for number, (row, environment) in enumerate(zip(rows, used, strict=True)):
            try:
                begun.append(self._begin(row, environment, begun))
            except TEMPLATE_FAILURES as error:
                raise ValueError(f"row {number} (the first is 0): {error}") from error
        return Conversations(self, begun, max_completion_length)

    def _begin(self, row: Mapping[str, Any], environment: Any, begun: Sequence[Conversation]) -> Conversation:
        prompt = row.get("prompt", None if self.environments is None else NO_PROMPT)
        if isinstance(prompt, str) or not prompt:
            raise ValueError("tools and environments need conversations, and the prompt is a text, empty or missing")
        tools, schemas = self.tools, self.schemas
        if self.environments is not None:
            tools, schemas = self.environments.tools_of(environment), self.environments.schemas(row)
            prompt = self.agreed(self.environments.reset(environment, row, list(prompt)))
        last = begun[-1] if begun else None
        if last is not None and last.prompt == prompt and last.schemas is schemas:
            ids = last.prompt_ids
        else:
            ids = self.turns.encode(prompt, schemas)
        return Conversation(list(prompt), ids, row, schemas, tools, environment)


class Conversations:
    """The conversations of one rollout; called as a generator's `Reply`."""

    def __init__(self, use: ToolUse, conversations: list[Conversation], most: int) -> None:
        self.use, self.all, self._most = use, conversations, most
        self._going = conversations
        """Those that are written now, in the order of their requests."""

    def __len__(self) -> int:
        return len(self.all)

    @property
    def environments(self) -> list[Any] | None:
        """Of each completion, as reward functions get them."""
        return None if self.use.environments is None else [each.environment for each in self.all]

    def write(
        self, seeds: Sequence[int], write: Write, *, on_any_rank: Callable[[bool], bool] = bool
    ) -> list[Completion]:
        """The completions in the order of the rows.

        Args:
            seeds: one for each completion, no two alike.
            write: has a generator write.
            on_any_rank: whether something holds on any of the ranks that have to write equally often.
        """
        while True:
            completions = self.finish(write(self.requests(seeds), self))
            if not on_any_rank(bool(self._going)):
                return completions

    def requests(self, seeds: Sequence[int]) -> list[Request]:
        """What to ask a generator for: one request for each that goes on, so that what is drawn depends on no
        neighbour.

        Args:
            seeds: one for each completion, no two alike.
        """
        going = {id(each) for each in self._going}
        pairs = zip(self.all, seeds, strict=True)
        return [self._request(one, seed) for one, seed in pairs if id(one) in going]

    def _request(self, one: Conversation, seed: int) -> Request:
        if one.completion is None:
            return Request(one.context, 1, seed)
        seed = stream_key(seed, 1 + len(one.completion.restarts))
        return Request(one.context, 1, seed, most=self._most - one.used)

    def __call__(self, request: int, number: int, completion: Completion) -> list[int] | None:
        """The tokens of the tools' answers and of the next turn's header; None where the completion is over."""
        one = self._going[request]
        turn = self._read(one, completion.token_ids)
        calls = turn.get("tool_calls") if turn is not None else None
        if not calls or one.rounds == self.use.most_rounds:
            return None
        answers = self.use.agreed(answer_calls(calls, one.tools, self.use.caller))
        one.rounds += 1
        one.calls += len(answers)
        one.failures += sum(answer.failed for answer in answers)
        messages = [answer.message for answer in answers]
        ended = completion.token_ids[-1] in self.use.turns.end_ids
        suffix = self.use.turns.after_tools(messages, ended=ended)
        tokens = len(completion.token_ids) + len(suffix)
        following = self.use.turns.context([*one.prompt, *one.messages, *messages], one.schemas)
        if one.used + tokens + (following is not None) > self._most:
            return None  # the answers would not fit, and are left out of the conversation
        one.messages += messages
        if following is None:
            one.read = tokens
            return suffix
        one.following, one.used = following, one.used + tokens
        return None

    def finish(self, generated: Sequence[Sequence[Completion]]) -> list[Completion]:
        """The completions so far in the order of the rows, after what was cut off in the middle of a turn is read too.

        Args:
            generated: what the generator gave for `requests`.
        """
        written = [completion for group in generated for completion in group]
        for one, completion in zip(self._going, written, strict=True):
            self._read(one, completion.token_ids)
            if one.completion is None:
                one.completion = completion
            else:
                one.completion.restart(one.context, completion)
        self._going = [each for each in self._going if each.following is not None]
        for one in self._going:
            one.context, one.following, one.read = one.following or [], None, 0
        return [one.completion for one in self.all if one.completion is not None]

    def _read(self, one: Conversation, token_ids: Sequence[int]) -> Message | None:
        """Adds the turn that the policy wrote last; None where there is no new one."""
        ids = token_ids[one.read :]
        if not ids:
            return None
        turn = self.use.turns.read(ids, [*one.context, *token_ids[: one.read]], one.schemas)
        one.messages.append(turn)
        one.read = len(token_ids)
        return turn
