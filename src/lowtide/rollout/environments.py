"""Environments under TRL 1.16's interface: what a completion acts on, by methods that the policy calls as tools.

An environment is an object with a method `reset(**row)`, called before each completion with its dataset row; what it
returns is added to the last message of the prompt. Each of its other public methods is a tool. A method `get_reward()`
makes a column of rewards. Objects are made once and used again by later rollouts.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lowtide.data.formats.conversation import Message
from lowtide.rollout.readable import readable
from lowtide.rollout.tools import Schema, Tool, tool_schemas, tools_by_name
from lowtide.spelling import nearest
from lowtide.users_functions import stopping_nobody

RESET, GET_REWARD = "reset", "get_reward"
CHOICE = "environment"
"""The column that says which environment a row has, where there are several."""


class Environments:
    """The environments of a run, and the tools that each gives.

    Args:
        factory: makes an environment; or several such by name, of which a row's column `environment` chooses.
        tools: functions that can be called in each of them beside its methods.

    Raises:
        ValueError: an environment has no `reset`, or a tool that cannot be described.
    """

    def __init__(self, factory: Callable[[], Any] | Mapping[str, Callable[[], Any]], tools: Sequence[Tool] = ()):
        self.by_name = isinstance(factory, Mapping)
        self._factories: dict[str | None, Callable[[], Any]] = {}
        self._factories.update(factory if isinstance(factory, Mapping) else {None: factory})
        if not self._factories:
            raise ValueError("environment_factory is an empty dict: give at least one environment, or leave it out")
        self._tools = list(tools)
        self._made: dict[str | None, list[Any]] = {}
        self._schemas: dict[str | None, list[Schema]] = {}
        for name, make in self._factories.items():
            if not callable(make):
                raise ValueError(
                    f"environment_factory is a {type(make).__name__}, and must make an environment: a class"
                )
            first = _made(make, name)
            if not inspect.isfunction(getattr(type(first), RESET, None)):
                raise ValueError(
                    f"the environment {type(first).__name__} has no method reset, which begins a completion"
                )
            self._made[name] = [first]
            self._schemas[name] = tool_schemas(list(self.tools_of(first).values()))

    @property
    def has_tools(self) -> bool:
        """Whether any of them has a tool."""
        return any(self._schemas.values())

    def schemas(self, row: Mapping[str, Any]) -> list[Schema]:
        """How the tools of a row's environment are described."""
        return self._schemas[self._name(row)]

    def tools_of(self, environment: Any) -> dict[str, Tool]:
        """What can be called in one environment, by name."""
        members = inspect.getmembers(type(environment), predicate=inspect.isfunction)
        own = [name for name, _ in members if name not in (RESET, GET_REWARD) and not name.startswith("_")]
        return tools_by_name([*self._tools, *(getattr(environment, name) for name in own)])

    def take(self, rows: Sequence[Mapping[str, Any]]) -> list[Any]:
        """An environment for each completion, by its row; those of earlier rollouts come first.

        Raises:
            ValueError: a row names an environment that there is not.
        """
        taken: dict[str | None, int] = {}
        environments = []
        for row in rows:
            name = self._name(row)
            made, place = self._made[name], taken.get(name, 0)
            if place == len(made):
                made.append(_made(self._factories[name], name))
            environments.append(made[place])
            taken[name] = place + 1
        return environments

    def reset(self, environment: Any, row: Mapping[str, Any], prompt: list[Message]) -> list[Message]:
        """A completion's prompt after its environment began, which may have added to it.

        Raises:
            ValueError: `reset` raised; names the environment.
        """
        given = {name: value for name, value in row.items() if not (self.by_name and name == CHOICE)}
        try:
            with stopping_nobody():
                seen: Any = readable(environment.reset(**given))
        except Exception as error:
            raise ValueError(
                f"reset of the environment {type(environment).__name__} raised {type(error).__name__}: {error}. It "
                f"gets the columns of a row by name ({', '.join(given)})"
            ) from error
        if seen is None:
            return prompt
        if not isinstance(seen, str | list):
            raise ValueError(
                f"reset of the environment {type(environment).__name__} returned a {type(seen).__name__}: what it adds "
                "to the prompt must be a text or a list of parts, or None"
            )
        return [*prompt[:-1], {**prompt[-1], "content": _joined(prompt[-1]["content"], seen)}]

    def rewards(self) -> dict[str, Callable[..., Any]]:
        """The rewards that environments give themselves, one function a class, by the class's name."""
        kinds = {type(made[0]) for made in self._made.values()}
        found = sorted((kind for kind in kinds if hasattr(kind, GET_REWARD)), key=lambda kind: kind.__name__)
        return {kind.__name__: own_reward(kind) for kind in found}

    def _name(self, row: Mapping[str, Any]) -> str | None:
        if not self.by_name:
            return None
        name = row.get(CHOICE)
        if name not in self._factories:
            known = [str(each) for each in self._factories]
            raise ValueError(
                f"a row's column {CHOICE!r} is {name!r}, and environment_factory has {', '.join(known)}"
                f"{nearest(str(name), known)}"
            )
        return name


def _made(make: Callable[[], Any], name: str | None) -> Any:
    """An environment of a factory.

    Raises:
        ValueError: the factory raised; names it.
    """
    try:
        with stopping_nobody():
            return make()
    except Exception as error:
        which = getattr(make, "__name__", type(make).__name__) if name is None else repr(name)
        raise ValueError(f"environment_factory raised {type(error).__name__} as it made {which}: {error}") from error


def _joined(content: Any, seen: Any) -> Any:
    """A message's content with what an environment adds: a text where both are, else a list of parts."""
    if isinstance(content, str) and isinstance(seen, str):
        return content + seen
    parts = ([{"type": "text", "text": each}] if isinstance(each, str) else each for each in (content, seen))
    return [part for each in parts for part in each]


def own_reward(kind: type) -> Callable[..., Any]:
    """The reward function of the environments of one class, None for those of others."""
    if inspect.iscoroutinefunction(getattr(kind, GET_REWARD)):

        async def later(environments: Sequence[Any]) -> list[Any]:
            async def one(environment: Any) -> Any:
                return await environment.get_reward() if type(environment) is kind else None

            return list(await asyncio.gather(*map(one, environments)))

        return later

    def now(environments: Sequence[Any]) -> list[Any]:
        return [each.get_reward() if type(each) is kind else None for each in environments]

    return now
