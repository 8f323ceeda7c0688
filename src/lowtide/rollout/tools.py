"""Tools: functions that the policy calls in the middle of a completion, and reads the results of.

A tool is described to the policy by its signature and docstring (transformers' `get_json_schema`). What it returns, and
what it raises, is given back as text: a wrong call is something for the policy to learn from, and no reason to stop.
The wording is TRL 1.16's, since the policy reads it. Answers are in the order of the calls; TRL puts those of async
tools last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers.utils.chat_template_utils import get_json_schema

from lowtide.parsing import parse_json
from lowtide.rollout.calls import Caller, CallTimedOut, drop_unawaited, name_of
from lowtide.rollout.readable import readable
from lowtide.users_functions import stopping_nobody, words_of

Tool = Callable[..., Any]
Schema = dict[str, Any]
FUNCTION = "function"
"""The one type of tool calls that there is."""


@dataclass(frozen=True)
class Answer:
    """What one tool call gave."""

    name: str
    content: str
    failed: bool = False
    """Whether it raised, took too long, or could not be called."""

    @property
    def message(self) -> dict[str, Any]:
        """The turn that the policy reads."""
        return {"role": "tool", "name": self.name, "content": self.content}


def tools_by_name(tools: Sequence[Tool]) -> dict[str, Tool]:
    """Some tools by the names that the policy calls them.

    Raises:
        ValueError: one is no function, or two have the same name.
    """
    named: dict[str, Tool] = {}
    for tool in tools:
        if not callable(tool) or not hasattr(tool, "__name__"):
            raise ValueError(f"tools has a {type(tool).__name__}, and a tool is a function with a name and a docstring")
        if tool.__name__ in named:
            raise ValueError(f"two tools are called {tool.__name__!r}, and the policy knows them by name: rename one")
        named[tool.__name__] = tool
    return named


def tool_schemas(tools: Sequence[Tool]) -> list[Schema]:
    """How chat templates describe some tools.

    Raises:
        ValueError: a tool lacks type hints, or a docstring that describes its arguments; names it and them.
    """
    return [_schema(tool) for tool in tools]


def _schema(tool: Tool) -> Schema:
    try:
        return get_json_schema(tool)
    except Exception as error:
        raise ValueError(
            f"tool {name_of(tool)!r} cannot be described to the policy: {error} A tool needs a type hint for each "
            "argument, and a docstring with an Args section that describes each"
        ) from error


def answer_calls(calls: Sequence[Any], tools: Mapping[str, Tool], caller: Caller) -> list[Answer]:
    """The answers to the tool calls of one turn, in their order; async tools run together.

    Args:
        calls: as chat templates take them, `{"type": "function", "function": {"name": ..., "arguments": {...}}}`.
        tools: what can be called.
        caller: gives each its time.
    """
    names: list[str] = []
    started: list[Any] = []
    try:
        for call in calls:
            name, result = _start(call, tools, caller)
            names.append(name)
            started.append(result)
    except BaseException:
        drop_unawaited(started)
        raise
    results = caller.finish(started)
    return [_answer(name, result, caller) for name, result in zip(names, results, strict=True)]


def _start(call: Any, tools: Mapping[str, Tool], caller: Caller) -> tuple[str, Any]:
    """The name of the called tool, and what it returns, or the exception that came of it."""
    name = "unknown"
    try:
        if not isinstance(call, Mapping):
            raise ValueError("A tool call must be a dict.")
        function = call.get("function", call)
        kind = call.get("type", FUNCTION)
        name = readable(str((function if isinstance(function, Mapping) else call).get("name", name)))
        if kind != FUNCTION:
            raise ValueError(f"Unsupported tool call type: {kind}")
        if name not in tools:
            raise ValueError(f"Tool {name} not found.")
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            arguments = parse_json(arguments)
        return name, caller.start(tools[name], **readable(arguments))
    except Exception as error:
        return name, error


def _answer(name: str, result: Any, caller: Caller) -> Answer:
    if isinstance(result, CallTimedOut):
        return Answer(name, str({"error": f"No result within {caller.timeout:g} seconds."}), failed=True)
    if isinstance(result, Exception):
        return _failed(name, result)
    if isinstance(result, BaseException):  # a cancelled task
        return Answer(name, str({"error": type(result).__name__}), failed=True)
    try:
        with stopping_nobody():
            return Answer(name, str(readable(text_of_result(result, name))))
    except Exception as error:
        return _failed(name, error)


def _failed(name: str, error: Exception) -> Answer:
    """The answer to a call that raised."""
    return Answer(name, str({"error": readable(words_of(error))}), failed=True)


def text_of_result(result: Any, name: str) -> str:
    """What a tool or an environment returned, as the policy reads it.

    Raises:
        ValueError: it is an image, or what else is no text.
    """
    parts = result if isinstance(result, list) and result else []
    if not parts or not all(isinstance(part, Mapping) and "type" in part for part in parts):
        return str(result)
    kinds = sorted({str(part["type"]) for part in parts} - {"text"})
    if kinds:
        raise ValueError(f"{name!r} returned a part of type {kinds[0]!r}, and text models are trained here")
    return "".join(str(part.get("text", "")) for part in parts)
