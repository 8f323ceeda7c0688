"""A user's own method in the place of a built-in one, by its path: `lowtide my_module.MY_METHOD --model M ...`.

What stands at the path is a `Method`. It goes by its path wherever built-in ones go by their names: in run files, on
other processes and in predictions. What is declared is checked here, and what its loss gives at each call: a mean in
place of a sum, say, would be divided twice, and nothing would tell.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor

from lowtide.engine.heads.head import Head
from lowtide.methods.method import Method, Objective, OwnLoss, RowObjective, TokenObjective
from lowtide.methods.shared.rows import RowLayout
from lowtide.objectives.outcome import Counts, Outcome
from lowtide.ops.logits.linear_logprobs import ScoreLoss, TokenStats
from lowtide.users_functions import called_for_user, find_named


@functools.cache
def own_method(path: str) -> Method:
    """The method that is declared at a path; its name is the path.

    Raises:
        ValueError: there is none, or something else, or what it declares cannot work.
    """
    found = find_named(path, "method")
    if not isinstance(found, Method):
        raise ValueError(
            f"method {path!r} is of type {type(found).__name__}, and no declaration, which is a Method of "
            "lowtide.methods.method"
        )
    _check_options(found.options, path)
    kinds = (("rows", found.rows, RowLayout, isinstance), ("head", found.head, Head, _is_subclass))
    for name, value, kind, of_kind in kinds:
        if not of_kind(value, kind):
            raise ValueError(f"method {path!r}: {name}={value!r} is no {kind.__name__} of {kind.__module__}")
    _check_objective(found, path)
    return dataclasses.replace(found, name=path, objective=_checked_objective(found.objective, path))


def _is_subclass(value: Any, kind: type) -> bool:
    return isinstance(value, type) and issubclass(value, kind)


def _check_options(options: Any, path: str) -> None:
    """Refuses options that a config, the command line or the docs could not take."""
    name = getattr(options, "__name__", repr(options))
    if not isinstance(options, type) or "__dataclass_fields__" not in vars(options):
        raise ValueError(f"method {path!r}: its options {name} are no dataclass: write @dataclass(kw_only=True) above")
    for field in dataclasses.fields(options):
        if field.init and not field.metadata.get("help"):
            raise ValueError(
                f"method {path!r}: {name}.{field.name} has no sentence that documents it: declare it as "
                'option(DEFAULT, "What it does.") of lowtide.option'
            )
    if not callable(getattr(options, "check", None)):
        raise ValueError(f"method {path!r}: {name} has no method `check`, which refuses what cannot work")


def _check_objective(method: Method, path: str) -> None:
    """Refuses a function that cannot be called as objectives are."""
    given = {"aux_coefficient": 0.0} | ({"labels": None} if method.rows.labelled else {})
    try:
        inspect.signature(method.objective).bind(None, **given)
    except TypeError as error:
        raise ValueError(
            f"method {path!r}: its objective is called as objective(options, {', '.join(f'{n}=...' for n in given)}): "
            f"{error}"
        ) from error


def _checked_objective(function: Callable[..., Objective], path: str) -> Callable[..., Objective]:
    def objective(options: Any, **given: Any) -> Objective:
        with called_for_user("method", function):
            made = function(options, **given)
        if isinstance(made, TokenObjective):
            return dataclasses.replace(made, loss=_checked_token_loss(made.loss, path))
        if isinstance(made, RowObjective):
            return dataclasses.replace(made, loss=_checked_row_loss(made.loss, path))
        if isinstance(made, OwnLoss):
            return made
        raise ValueError(
            f"method {path!r}: its objective gave a {type(made).__name__}, and no TokenObjective or RowObjective"
        )

    return objective


def _checked_token_loss(function: ScoreLoss, path: str) -> ScoreLoss:
    def loss(stats: TokenStats) -> Tensor:
        with called_for_user("method", function):
            found = function(stats)
        wanted = stats.logprobs.shape
        if not isinstance(found, Tensor) or found.shape != wanted or not found.is_floating_point():
            raise ValueError(
                f"method {path!r}: its loss gave {_said(found)}, and a loss of tokens gives a number for each, without "
                f"a mean: a tensor of floating point {[*wanted]}"
            )
        return found

    return loss


def _checked_row_loss(function: Callable[[Any, Counts], Outcome], path: str) -> Callable[[Any, Counts], Outcome]:
    def loss(known: Any, counts: Counts) -> Outcome:
        with called_for_user("method", function):
            found = function(known, counts)
        value = getattr(found, "loss", None)
        if (
            not isinstance(found, Outcome)
            or not isinstance(value, Tensor)
            or value.ndim
            or not value.is_floating_point()
        ):
            raise ValueError(
                f"method {path!r}: its loss gave {_said(found if value is None else value)}, and a loss of rows gives "
                "an Outcome whose loss is a scalar of floating point: a sum over its rows, divided by what was counted"
            )
        return found

    return loss


def _said(found: Any) -> str:
    if not isinstance(found, Tensor):
        return f"a {type(found).__name__}"
    return f"a tensor of {str(found.dtype).removeprefix('torch.')} {[*found.shape]}"
