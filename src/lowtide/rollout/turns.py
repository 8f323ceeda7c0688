"""Conversations of several turns as tokens: prompts, the policy's turns read back, and what follows a tool's answer.

What the policy wrote is never encoded again: a text that was decoded and re-encoded may have other tokens than those
that were sampled, and other log-probabilities. Only what comes after it is rendered, as the difference between a small
conversation with the tools' messages and without them; as in TRL. Where the template leaves out the thoughts of earlier
turns, the policy goes on in the context that the template writes, as it would be served, and each turn is learned from
in the context that it was written in. There TRL goes on with all thoughts.

A turn is read by the tokenizer's `response_template` (transformers' `parse_response`). Without one, calls are expected
in the form of Hermes, Qwen2.5 and Qwen3, any number of `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, and
thoughts within `<think>` and `</think>` at the start. A turn whose calls cannot be read is a text without calls. Where
there are tools a call is rendered and read back first, so that a template of another form is refused and not misread.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from lowtide.compat.templates.jinja import TEMPLATE_FAILURES
from lowtide.data.encode.message_form import MessageForm
from lowtide.data.encode.rounds import thought_of
from lowtide.data.formats.conversation import Message, as_said
from lowtide.parsing import parse_json
from lowtide.process.ways_out import in_python
from lowtide.rollout.readable import readable
from lowtide.rollout.tools import Schema

THOUGHTS = re.compile(r"\s*<think>(.*?)</think>\s*", re.DOTALL)
CALL = re.compile(r"<tool_call>(.*?)</tool_call>\s*", re.DOTALL)
OPENED = "<think>"
TRIAL_CALL = {"type": "function", "function": {"name": "tool_of_trial", "arguments": {"trial_key": "trial_value"}}}
TRIAL_ANSWER = "answer_of_trial"
THOUGHT_OF_TRIAL = "thought_{}_of_trial"
TRIAL_SCHEMA = {
    "type": "function",
    "function": {
        "name": "tool_of_trial",
        "description": "For trial.",
        "parameters": {
            "type": "object",
            "properties": {"trial_key": {"type": "string", "description": "For trial."}},
            "required": ["trial_key"],
        },
    },
}


class Turns:
    """How a tokenizer writes and reads the turns of a conversation.

    Args:
        tokenizer: of the policy.
        template_kwargs: further keywords of the template.
        stop_ids: tokens that end a turn, beside the tokenizer's end token.

    Raises:
        ValueError: there is no template.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        template_kwargs: Mapping[str, Any] | None = None,
        stop_ids: Sequence[int] = (),
    ) -> None:
        if not tokenizer.chat_template:
            raise ValueError("the prompts are conversations, and the tokenizer has no chat template: set one")
        self.tokenizer = tokenizer
        self.template_kwargs = dict(template_kwargs or {})
        own_end: Any = tokenizer.eos_token_id
        self.end_ids: frozenset[int] = frozenset(stop_ids if own_end is None else [*stop_ids, own_end])
        self._ends = [str(tokenizer.decode([number])) for number in sorted(self.end_ids)]
        self._read_by_template = getattr(tokenizer, "response_template", None) is not None
        self._form = MessageForm.of(tokenizer, self.template_kwargs.get("chat_template"))

    # -- writing -----------------------------------------------------------------------------------------------

    def encode(
        self, messages: Sequence[Message], schemas: Sequence[Schema] = (), *, generation_prompt: bool = True
    ) -> list[int]:
        """The tokens of a conversation, and of the header of the policy's turn after it."""
        encoded: Any = self.tokenizer.apply_chat_template(
            self._form([as_said(each) for each in messages]),
            tools=list(schemas) or None,
            add_generation_prompt=generation_prompt,
            tokenize=True,
            return_dict=False,
            **self.template_kwargs,
        )
        return list(encoded)

    def after_tools(self, messages: Sequence[Message], *, ended: bool = True) -> list[int]:
        """The tokens that follow a turn with tool calls: the tools' messages, and the header of the next turn.

        Args:
            messages: the tools', with `name` and `content`.
            ended: whether the turn has a token that ends it; else that token comes first.

        Raises:
            ValueError: the template does not say where the turn ends.
        """
        opening = _opening(messages[0]["name"], {})
        before = self.encode(opening, generation_prompt=False)
        whole = self.encode([*opening, *messages])
        ends = self._end_places(before)
        start = ends[-1] + 1 if ends else len(before)
        if whole[:start] != before[:start]:
            # Written differently where a tool's message follows, as Qwen3 drops empty thoughts: count ends of turns.
            places = self._end_places(whole)
            if not ends or len(places) < len(ends):
                raise ValueError(
                    "the chat template writes a turn differently once a tool's message follows it, and has no token "
                    "that ends a turn: give the tokenizer a chat_template that keeps earlier turns as they are"
                )
            start = places[len(ends) - 1] + 1
        return whole[start - 1 if ends and not ended else start :]

    def context(self, messages: Sequence[Message], schemas: Sequence[Schema] = ()) -> list[int] | None:
        """The tokens of a conversation as the template writes it, where it leaves out what the policy thought in
        earlier turns; None where the tokens that were read and written go on as they are.

        Args:
            messages: the prompt, and turns with what was answered; the last of them is to be answered by the policy.
            schemas: of the tools that it may call.
        """
        thoughts = [n for n, each in enumerate(messages) if each["role"] == "assistant" and thought_of(each)]
        if not thoughts:
            return None
        marked = [
            {**each, "reasoning_content": THOUGHT_OF_TRIAL.format(n)} if n in thoughts else each
            for n, each in enumerate(messages)
        ]
        text = str(self.tokenizer.decode(self.encode(self._with_thoughts(marked), schemas)))
        if all(THOUGHT_OF_TRIAL.format(n) in text for n in thoughts):
            return None
        return self.encode(self._with_thoughts(messages), schemas)

    def _with_thoughts(self, messages: Sequence[Message]) -> list[Message]:
        """Messages whose thoughts stand in their content, for a template that reads no field of them."""
        if self._form.thoughts_read:
            return list(messages)
        return [
            {**each, "content": f"<think>\n{thought}\n</think>\n\n{each.get('content') or ''}"} if thought else each
            for each in messages
            for thought in [thought_of(each) if each["role"] == "assistant" else ""]
        ]

    def _end_places(self, ids: Sequence[int]) -> list[int]:
        return [place for place, token in enumerate(ids) if token in self.end_ids]

    # -- reading -----------------------------------------------------------------------------------------------

    def read(self, ids: Sequence[int], before: Sequence[int], schemas: Sequence[Schema] = ()) -> Message:
        """What the policy wrote, as a message: its `content`, and its `tool_calls` and thoughts where there are some.

        Args:
            ids: what it wrote in this turn.
            before: all tokens before that.
            schemas: of the tools that it may call.
        """
        try:
            if self._read_by_template:
                return self._checked(
                    self.tokenizer.parse_response(list(ids), prefix=list(before), tools=list(schemas) or None)
                )
            if schemas:
                return self._read_calls(ids, before)
        except Exception:  # by whatever code reads a template's form
            pass  # calls that cannot be read are words
        return {"role": "assistant", "content": str(self.tokenizer.decode(list(ids), skip_special_tokens=True))}

    def _checked(self, message: Any) -> Message:
        """A message as transformers reads it, complete and without the token that ends it."""
        if message is None:
            raise ValueError("nothing was read")
        content = message.get("content") or ""
        if isinstance(content, str) and self.tokenizer.eos_token:
            content = content.removesuffix(str(self.tokenizer.eos_token))
        message["content"] = content
        calls = message.get("tool_calls")
        if calls is not None:
            if not isinstance(calls, list):
                raise ValueError("the tool calls are no list")
            message["tool_calls"] = [_checked_call(call) for call in calls]
        return message

    def _read_calls(self, ids: Sequence[int], before: Sequence[int]) -> Message:
        """A message by the default form.

        Raises:
            ValueError: a call is not closed, no JSON, or without a name.
        """
        text = str(self.tokenizer.decode(list(ids)))
        for end in self._ends:
            text = text.split(end)[0]
        if str(self.tokenizer.decode(list(before[-2 * len(OPENED) :]))).rstrip().endswith(OPENED):
            text = OPENED + text
        message: Message = {"role": "assistant"}
        thoughts = THOUGHTS.match(text)
        if thoughts:
            message["reasoning_content"] = thoughts[1].strip()
            text = text[thoughts.end() :]
        calls = [parse_json(each) for each in CALL.findall(text)]
        text = CALL.sub("", text)
        if "<tool_call>" in text:
            raise ValueError("a tool call is not closed")
        message["content"] = text.strip()
        if calls:
            wrapped = [{"type": "function", "function": call} for call in calls]
            message["tool_calls"] = [_checked_call(call) for call in wrapped]
        return message

    # -- the trial ---------------------------------------------------------------------------------------------

    def try_tools(self) -> None:
        """Renders a tool call and its answer, and reads the call back.

        Raises:
            ValueError: the template does not write calls or answers, or writes calls in a form that is not read.
        """
        function: dict[str, Any] = TRIAL_CALL["function"]  # type: ignore[assignment]
        asked = [{"role": "user", "content": "?"}]
        called = _opening(function["name"], function["arguments"])[1]
        answer = {"role": "tool", "name": function["name"], "content": TRIAL_ANSWER}
        try:
            prompt = self.encode(asked, [TRIAL_SCHEMA])
            turn = self._turn(asked, called, prompt)
            suffix = str(self.tokenizer.decode(self.after_tools([answer])))
        except TEMPLATE_FAILURES as error:
            raise ValueError(f"the chat template cannot write tool calls and their answers: {error}") from error
        text = str(self.tokenizer.decode(turn))
        lost = [each for each in (function["name"], "trial_key", "trial_value") if each not in text]
        if lost or TRIAL_ANSWER not in suffix:
            what = "the tools' answers" if not lost else "the name and arguments of tool calls"
            raise ValueError(
                f"the chat template leaves out {what}, which the policy then never sees: give the tokenizer a "
                "chat_template that writes them"
            )
        if self.read(turn, prompt, [TRIAL_SCHEMA]).get("tool_calls") != [TRIAL_CALL]:
            raise ValueError(
                f"the chat template writes a tool call as {text[:200]!r}, which "
                f"{'its response_template' if self._read_by_template else 'the default reader'} does not read as one: "
                f"set {in_python('`tokenizer.response_template`', 'response_template in its tokenizer_config.json')} "
                "to one that does (transformers' guide to response parsing)"
            )

    def _turn(self, asked: list[Message], called: Message, prompt: list[int]) -> list[int]:
        """The tokens of a turn with a tool call, as the policy would write it."""
        try:
            whole = self.encode([*asked, called], [TRIAL_SCHEMA], generation_prompt=False)
        except TypeError:
            function = called["tool_calls"][0]["function"]
            called = _opening(function["name"], json.dumps(function["arguments"]))[1]
            whole = self.encode([*asked, called], [TRIAL_SCHEMA], generation_prompt=False)
        same = next((n for n, (a, b) in enumerate(zip(whole, prompt, strict=False)) if a != b), len(prompt))
        return whole[same:]


def _opening(name: str, arguments: Any) -> list[Message]:
    """A small conversation that ends with a tool call."""
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]


def _checked_call(call: Any) -> dict[str, Any]:
    """A tool call with its name and arguments.

    Raises:
        ValueError: it has no name.
    """
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError("a tool call has no name")
    if function.get("arguments") is None:
        function["arguments"] = {}
    return readable(call)
