"""Reward functions that users write: called as TRL calls them, and what they return checked number by number.

A reward that is NaN, missing or one too few turns into advantages of NaN, or moves every later reward to another
completion. So each is refused where it arises, with the function's name and the completion's row.
"""

from __future__ import annotations

import inspect
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from lowtide.rollout.calls import Caller, CallTimedOut, drop_unawaited
from lowtide.rollout.rewards.beside import LoggedWrongly
from lowtide.rollout.rewards.completed import Completed
from lowtide.rollout.rewards.steps import Column, places_of
from lowtide.spelling import nearest
from lowtide.users_functions import stopping_nobody, words_of

BLAME_SECONDS = 10.0
"""How long a function that raised is called again, completion by completion, to find the one that it raises on."""
LINE = 300
"""Characters of an error that a message repeats."""
SHOWN_VALUE = 80
"""Characters of a wrong reward in a message."""


def nothing(*_: Any) -> None:
    """In place of `log_extra` and `log_metric` where nobody logs."""


class FunctionReward:
    """A reward function, sync or async, as a column of rewards.

    Args:
        function: called with keyword arguments alone: all that there are if it takes `**kwargs`, else those that it
            names.
        name: for messages and logs.
    """

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        self.function, self.name = function, name
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError):  # a function in C may not tell
            self._all, self._names, self._needed = True, frozenset(), []
            return
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        named = [each for each in parameters if each.kind in kinds]
        self._all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)
        self._names = frozenset(each.name for each in named)
        self._needed = [each.name for each in named if each.default is inspect.Parameter.empty]

    def start(self, completed: Completed, extras: Mapping[str, Any], caller: Caller) -> Any:
        """What the function returns, for `Caller.finish`.

        Raises:
            ValueError: it wants an argument that there is not, it raised, or it did not return within the time.
        """
        arguments = self._arguments(completed, extras)
        try:
            return caller.start(self.function, **arguments)
        except Exception as error:
            raise self.failed(error, completed, extras, caller) from error

    def _arguments(self, completed: Completed, extras: Mapping[str, Any]) -> dict[str, Any]:
        known = {**completed.arguments(), **extras}
        for name in self._needed:
            if name not in known:
                raise ValueError(
                    f"reward function {self.name!r} takes an argument {name!r}, which is no column of the dataset "
                    f"(known are {', '.join(known)}{nearest(name, known)}): rename the column or the argument"
                )
        return known if self._all else {name: value for name, value in known.items() if name in self._names}

    def failed(
        self, error: BaseException, completed: Completed, extras: Mapping[str, Any], caller: Caller
    ) -> ValueError:
        """What to say of a function that raised, or that gave nothing within its time."""
        if isinstance(error, CallTimedOut):
            return ValueError(
                f"reward function {self.name!r} gave no rewards within reward_timeout={caller.timeout:g} seconds, for "
                f"{len(completed)} completions from {completed.where(0)} on. Give what it waits for a time limit of "
                "its own, and return None for a completion that it cannot score; or raise reward_timeout"
            )
        if isinstance(error, LoggedWrongly):
            return ValueError(f"reward function {self.name!r}: {error}")
        text = f"{type(error).__name__}: {words_of(error)}"[:LINE]
        number = self._culprit(error, completed, extras, caller)
        where = "which it does for no completion alone" if number is None else f"for {completed.where(number)}"
        return ValueError(
            f"reward function {self.name!r} raised {text}, {where}. It may return None for a completion that it cannot "
            "score"
        )

    def _culprit(
        self, error: BaseException, completed: Completed, extras: Mapping[str, Any], caller: Caller
    ) -> int | None:
        """The first completion for which the function raises the same when it is called for that one alone."""
        if len(completed) == 1:
            return 0
        silent = {**extras, "log_extra": nothing, "log_metric": nothing}
        end = time.monotonic() + BLAME_SECONDS
        for number in range(len(completed)):
            left = end - time.monotonic()
            if left <= 0:
                return None
            try:
                limited = caller.within(min(left, caller.timeout or left))
                limited.call(self.function, **self._arguments(completed.alone(number), silent))
            except CallTimedOut:
                return None
            except Exception as again:
                if type(again) is type(error):
                    return number
        return None

    def read(self, result: Any, completed: Completed) -> Column:
        """What the function returned as numbers, NaN for each None.

        Raises:
            ValueError: it is not one finite number, None, or rewards of steps a completion.
        """
        wanted = (
            "It must return a list of one number a completion, None where it does not apply, or (token, reward) pairs "
            "in its place"
        )
        if isinstance(result, str | Mapping) or not hasattr(result, "__len__") or not hasattr(result, "__getitem__"):
            raise ValueError(f"reward function {self.name!r} returned a {type(result).__name__}. {wanted}")
        try:
            with stopping_nobody():
                count, values = len(result), list(itertools.islice(result, len(completed)))
        except Exception as error:
            raise ValueError(
                f"reward function {self.name!r} returned a {type(result).__name__}, reading which raised "
                f"{type(error).__name__}: {words_of(error)}. {wanted}"
            ) from error
        if not count == len(values) == len(completed):
            raise ValueError(
                f"reward function {self.name!r} returned {count} rewards for {len(completed)} completions. {wanted}"
            )
        return Column.of([self._one(each, number, completed) for number, each in enumerate(values)])

    def _one(self, value: Any, number: int, completed: Completed) -> float | list[tuple[int, float]]:
        """The reward of a completion, or those of its steps."""
        if not isinstance(value, list | tuple | Mapping):
            return self._number(value, number, completed)
        try:
            pairs = list(places_of(value, completed, number))
        except ValueError as error:
            raise ValueError(f"reward function {self.name!r}, {completed.where(number)}: {error}") from None
        return [(place, self._number(each, number, completed)) for place, each in pairs]

    def _number(self, value: Any, number: int, completed: Completed) -> float:
        if value is None:
            return math.nan
        try:
            if isinstance(value, str):
                raise TypeError
            found = float(value)
        except Exception:  # of a class of the user's, it may raise anything
            found, shown = math.nan, words_of(value, repr)[:SHOWN_VALUE]
        else:
            shown = f"{found:g}"
        if not abs(found) <= torch.finfo(torch.float32).max:
            raise ValueError(
                f"reward function {self.name!r} returned {shown} for {completed.where(number)}. A reward is a finite "
                "number (of float32), or None where the function does not apply"
            )
        return found


def call_functions(
    functions: Sequence[FunctionReward], completed: Completed, extras: Mapping[str, Any], caller: Caller
) -> list[Column]:
    """The rewards of each function: sync ones one after the other, then async ones together.

    Raises:
        ValueError: names the function, and the completion where it can be told.
    """
    started: list[Any] = []
    try:
        for each in functions:
            started.append(each.start(completed, extras, caller))
    except BaseException:
        drop_unawaited(started)
        raise
    results = caller.finish(started)
    for each, result in zip(functions, results, strict=True):
        if isinstance(result, BaseException):
            raise each.failed(result, completed, extras, caller) from result
    return [each.read(result, completed) for each, result in zip(functions, results, strict=True)]
