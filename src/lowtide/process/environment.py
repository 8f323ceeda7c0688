"""`env:` of a run file: environment variables that are set before a run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any


def set_environment(variables: Any, path: object) -> None:
    """Sets environment variables, whose values may be text, numbers or booleans.

    Args:
        variables: a mapping of names to values; None sets nothing.
        path: the file that they are from, for the message.

    Raises:
        ValueError: they are no such mapping, or the system does not take one of them.
    """
    if variables is None:
        return
    if not isinstance(variables, Mapping) or not all(isinstance(name, str) and name for name in variables):
        raise ValueError(f"{path}: `env` is {variables!r}; it must be a mapping of variables to values")
    for name, value in variables.items():
        if isinstance(value, Mapping | list):
            raise ValueError(f"{path}: env: {name} is {value!r}; a variable holds one value: write it as text")
        try:
            os.environ[name] = str(value)
        except ValueError as error:  # a name with "=", or a null character
            raise ValueError(f"{path}: env: {name!r} cannot be set ({error}): correct it") from error
