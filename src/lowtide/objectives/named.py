"""A user's own loss in the place of a built-in one: `loss_type="my_module.my_loss"`.

What stands at the path is a function of what the built-in losses of that table take, or an entry of the table, which
says more (`PairLoss(my_loss, reads={"label_smoothing"})`). What it returns is checked at each call.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from lowtide.users_functions import called_for_user, find_named

Loss = TypeVar("Loss")
NAME = "loss_type"


class LossTable(dict[str, Loss]):
    """The losses of a method by the names that `loss_type` takes; `table[path]` is a user's own."""

    def __init__(
        self,
        losses: Mapping[str, Loss],
        like: Callable[[Any], Tensor],
        entry: Callable[[Callable[..., Tensor]], Loss] | None = None,
    ) -> None:
        """The built-in losses.

        Args:
            like: from the first argument of a loss to a tensor of the shape that it returns.
            entry: makes an entry of a function; None where the entries are functions.
        """
        super().__init__(losses)
        self._like, self._entry = like, entry
        self._found: dict[str, Loss] = {}

    def __missing__(self, path: str) -> Loss:
        """The user's loss at a path.

        Raises:
            ValueError: there is none, or something else.
        """
        if "." not in path:
            raise KeyError(path)
        if path not in self._found:
            self._found[path] = self._named(path)
        return self._found[path]

    def chosen(self, names: Iterable[str]) -> dict[str, Loss]:
        """Those of some losses that are in the table, or a user's."""
        return {name: self[name] for name in names if name in self or "." in name}

    def _named(self, path: str) -> Loss:
        found, kinds = find_named(path, NAME), {type(each) for each in self.values()}
        if self._entry is not None and type(found) in kinds:
            return dataclasses.replace(found, fn=self._checked(path, found.fn))
        if not callable(found):
            raise ValueError(
                f"{NAME} {path!r} is of type {type(found).__name__}, and no function that gives the losses of a batch"
            )
        checked: Any = self._checked(path, cast(Callable[..., Tensor], found))
        return checked if self._entry is None else self._entry(checked)

    def _check_called(self, path: str, function: Callable[..., Tensor]) -> None:
        """Refuses a function that cannot be called as the built-in losses of the table are."""
        built_in: Any = next(iter(self.values()))
        known = inspect.signature(getattr(built_in, "fn", built_in)).parameters.values()
        given = [each.name for each in known if each.default is each.empty]
        try:
            inspect.signature(function).bind(*given)
        except TypeError as error:
            raise ValueError(f"{NAME} {path!r} is called with ({', '.join(given)}): {error}") from error
        except ValueError:  # it is not written in Python, and its signature is not known
            return

    def _checked(self, path: str, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        self._check_called(path, function)

        def loss(known: Any, *more: Any) -> Tensor:
            with called_for_user(NAME, function):
                found = function(known, *more)
            wanted = self._like(known)
            if not isinstance(found, Tensor) or found.shape != wanted.shape or not found.is_floating_point():
                got = (
                    f"a tensor of {str(found.dtype).removeprefix('torch.')} {[*found.shape]}"
                    if isinstance(found, Tensor)
                    else f"a {type(found).__name__}"
                )
                raise ValueError(
                    f"{NAME} {path!r} gave {got}, and a loss gives a number for each, without a mean: a tensor of "
                    f"floating point {[*wanted.shape]}"
                )
            if wanted.requires_grad and torch.is_grad_enabled() and not found.requires_grad:
                raise ValueError(
                    f"{NAME} {path!r} gave losses without a gradient, from which nothing can be learned: compute them "
                    "from what it was given, without detach(), item() or no_grad()"
                )
            return found

        return loss
