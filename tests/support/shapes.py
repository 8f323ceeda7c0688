"""Checks the shapes and dtypes that signatures promise, under pytest only.

jaxtyping's import hook decorates every function and class of a module. Its own decorator binds the arguments of each
call to a signature, also where no annotation speaks of an array: a fifth of the time of a training's test. `checked`
stands in its place, which gives annotations that speak of arrays to beartype, and leaves functions without any as they
are. Other annotations are pyright's business: tests pass wrong types on purpose to read the error messages. A test that
passes wrong *shapes* on purpose is marked `unchecked_shapes`.
"""

import contextlib
import functools
import importlib.util
import inspect
import io
import re
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any, get_args

import jaxtyping
from beartype import beartype
from beartype.roar import BeartypeCallHintViolation
from jaxtyping import AbstractArray

_jaxtyped = jaxtyping.jaxtyped
_without_arrays: set[tuple[str, str, CodeType]] = set()
"""Module, name and code of functions that have been looked at: one inside another is decorated at each call of that."""


def check_what_is_imported() -> None:
    """Checks the functions of all modules of `lowtide` that are imported after this."""
    jaxtyping.jaxtyped = lambda **_: checked
    jaxtyping.install_import_hook(modules_with_shapes(), None)


def modules_with_shapes() -> list[str]:
    """Those of `lowtide` whose signatures speak of arrays; in the others there is nothing to look at."""
    spec = importlib.util.find_spec("lowtide")
    assert spec is not None
    assert spec.submodule_search_locations
    [folder] = map(Path, spec.submodule_search_locations)
    speaking = (path for path in folder.rglob("*.py") if "from jaxtyping import" in path.read_text(encoding="utf-8"))
    return [".".join(("lowtide", *path.relative_to(folder).with_suffix("").parts)) for path in speaking]


def checked(found: Any) -> Any:
    """A function or dataclass whose array annotations are checked at each call; all else as it is."""
    if isinstance(found, type):
        if "__dataclass_params__" in vars(found) and "__init__" in vars(found):
            found.__init__ = checked(found.__init__)
        return found
    key = (found.__module__, found.__qualname__, found.__code__)
    if key in _without_arrays:
        return found
    if not _of_arrays(found):
        _without_arrays.add(key)
        return found
    if inspect.isgeneratorfunction(found):  # beartype would check its arguments when the first value is asked for
        return _jaxtyped(found, typechecker=_beartype_of_arrays)
    checking = _beartype_of_arrays(found)

    @functools.wraps(found)
    def call(*args: Any, **named: Any) -> Any:
        if jaxtyping.config.jaxtyping_disable:
            return found(*args, **named)
        with _jaxtyped("context"):
            try:
                return checking(*args, **named)
            except BeartypeCallHintViolation as violation:
                with contextlib.redirect_stdout(io.StringIO()) as sizes:
                    jaxtyping.print_bindings()
                violation.add_note(sizes.getvalue())
                raise

    return call


def _beartype_of_arrays(function: Callable) -> Callable:
    said, function.__annotations__ = function.__annotations__, _of_arrays(function)
    try:
        return beartype(function)
    finally:
        function.__annotations__ = said


def _of_arrays(function: Callable) -> dict[str, Any]:
    """The hints of arguments and of what is returned that speak of arrays."""
    bound: set[str] = set()
    kept = {}
    for name, said in function.__annotations__.items():
        hint = _hint(said, function.__globals__)
        arrays = _arrays(hint)
        axes = [axis for array in arrays for axis in array.dim_str.split()]
        # An axis like `rows+1` can only be checked once an earlier argument has told how long `rows` is.
        if arrays and all(set(re.findall(r"[a-z_]\w*", axis)) <= bound for axis in axes if "+" in axis):
            kept[name] = hint
        bound.update(axes)
    return kept


def _hint(said: Any, names: dict[str, Any]) -> Any:
    """An annotation that may be a string; Any where it has a name that is only imported for type checkers."""
    try:
        return eval(said, names) if isinstance(said, str) else said
    except NameError:
        return Any


def _arrays(hint: Any) -> list[Any]:
    """The jaxtyping hints inside a hint such as `tuple[Int[Tensor, "rows"], ...] | None`."""
    if isinstance(hint, type) and issubclass(hint, AbstractArray):
        return [hint]
    return [array for part in get_args(hint) for array in _arrays(part)]
