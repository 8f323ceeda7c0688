"""Checks the shapes and dtypes that signatures promise, under pytest only.

jaxtyping's import hook hands every function of `lowtide` to `check_shapes`, which keeps the annotations that speak
of arrays and gives them to beartype. Other annotations are pyright's business: tests pass wrong types on purpose
to read the error messages. A test that passes wrong *shapes* on purpose is marked `unchecked_shapes`.
"""

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

from beartype import beartype
from jaxtyping import AbstractArray


def modules_with_shapes() -> list[str]:
    """Those of `lowtide` whose signatures speak of arrays; in the others every call would be looked at for nothing."""
    spec = importlib.util.find_spec("lowtide")
    assert spec is not None
    assert spec.submodule_search_locations
    [folder] = map(Path, spec.submodule_search_locations)
    speaking = (path for path in folder.rglob("*.py") if "from jaxtyping import" in path.read_text(encoding="utf-8"))
    return [".".join(("lowtide", *path.relative_to(folder).with_suffix("").parts)) for path in speaking]


def check_shapes(function: Callable) -> Callable:
    """The function with its array annotations checked at each call, and no others."""
    bound: set[str] = set()
    kept = {}
    for name, hint in function.__annotations__.items():
        arrays = _arrays(hint)
        axes = [axis for array in arrays for axis in array.dim_str.split()]
        # An axis like `rows+1` can only be checked once an earlier argument has told how long `rows` is.
        if arrays and all(set(re.findall(r"[a-z_]\w*", axis)) <= bound for axis in axes if "+" in axis):
            kept[name] = hint
        bound.update(axes)
    function.__annotations__ = kept
    return beartype(function)


def _arrays(hint: Any) -> list[Any]:
    """The jaxtyping hints inside a hint such as `tuple[Int[Tensor, "rows"], ...] | None`."""
    if isinstance(hint, type) and issubclass(hint, AbstractArray):
        return [hint]
    return [array for part in get_args(hint) for array in _arrays(part)]
