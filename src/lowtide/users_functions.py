"""Functions that a user passes, such as `compute_metrics`: what they raise goes on, with a note of whose it is. And
those that a user names, by a path such as `my_module.my_reward`.

The traceback is what the function's author needs; among the frames of a training the note says where to look.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lowtide.spelling import nearest

RAISED_BY = "This was raised by"


@contextlib.contextmanager
def leaving_no_trace() -> Iterator[None]:
    """Puts back what a function may set for the whole process, and the run goes by: the current folder, which the
    output is written below, torch's default dtype, and whether gradients are recorded."""
    import torch

    folder, dtype = _current_folder(), torch.get_default_dtype()
    try:
        with torch.set_grad_enabled(torch.is_grad_enabled()):
            yield
    finally:
        torch.set_default_dtype(dtype)
        if folder is not None and _current_folder() != folder:
            with contextlib.suppress(OSError):
                os.chdir(folder)


def _current_folder() -> str | None:
    """None where it was removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


@contextlib.contextmanager
def stopping_nobody() -> Iterator[None]:
    """Turns what is no `Exception` (SystemExit, KeyboardInterrupt, GeneratorExit) into one, unless the user interrupted
    the run meanwhile: what is called inside of a run must not end it without a word. What is set for the whole process
    is put back.

    Raises:
        RuntimeError: names what was raised.
    """
    interrupted: list[bool] = []
    before: Any = signal.getsignal(signal.SIGINT)
    watched = threading.current_thread() is threading.main_thread() and callable(before)

    def note(*given: Any) -> Any:
        interrupted.append(True)
        return before(*given)

    if watched:
        signal.signal(signal.SIGINT, note)
    try:
        with leaving_no_trace():
            yield
    except Exception:
        raise
    except BaseException as error:
        if interrupted:
            raise
        raise RuntimeError(": ".join([type(error).__name__, *map(words_of, error.args)])) from error
    finally:
        if watched:
            signal.signal(signal.SIGINT, before)


def words_of(value: Any, write: Callable[[Any], str] = str) -> str:
    """The text of an object of a user's class; the name of the class where it raises in place of giving one."""
    try:
        with stopping_nobody():
            return write(value)
    except Exception:
        return type(value).__name__


@contextlib.contextmanager
def called_for_user(argument: str, function: Any) -> Iterator[None]:
    """Around the call of a function that came as an argument."""
    try:
        with stopping_nobody():
            yield
    except Exception as error:
        name = getattr(function, "__qualname__", type(function).__name__)
        error.add_note(f"{RAISED_BY} {argument}, a function that was passed ({name}).")
        raise


def is_from_user(error: BaseException) -> bool:
    """Whether a function raised it that `called_for_user` was around."""
    return any(note.startswith(RAISED_BY) for note in getattr(error, "__notes__", ()))


def find_function(path: str, title: str) -> Callable[..., Any]:
    """What can be called at a dotted path, `my_module.my_function`; modules are looked for in the current folder too.

    Args:
        title: what messages call it.

    Raises:
        ValueError: there is none; says where it was looked for.
    """
    found = find_named(path, title)
    if not callable(found):
        raise ValueError(f"{title} {path!r} is a {type(found).__name__}, which cannot be called")
    return found


def check_no_file(path: str, title: str) -> None:
    """Refuses a file, `./rewards.py` or `rewards.py:length`, in the place of a function's path.

    Raises:
        ValueError: says what the function's path is.
    """
    file, _, name = path.partition(":")
    if not file.endswith(".py") and not (os.sep in file and os.path.isfile(file)):
        return
    module = Path(os.path.relpath(file)).with_suffix("")
    where = f", run in {module.parent}" if ".." in module.parts else ""
    dotted = ".".join([module.name] if where else module.parts)
    raise ValueError(
        f"{title} {path!r} is a file: name the function in it by its path, as {dotted}.{name or 'NAME'}{where}"
    )


def find_named(path: str, title: str) -> Any:
    """As `find_function`, what stands at a path, of any kind."""
    check_no_file(path, title)
    module_name, _, attribute = path.rpartition(".")
    if not module_name:
        raise ValueError(f"{title} {path!r} is no path of a function such as my_module.my_function")
    module = _import(module_name, f"{title} {path!r}")
    if not hasattr(module, attribute):
        raise ValueError(
            f"{title} {path!r}: module {module_name!r} ({getattr(module, '__file__', 'built in')}) has no "
            f"{attribute!r}{nearest(attribute, vars(module))}"
        )
    return getattr(module, attribute)


def _import(module: str, title: str) -> Any:
    """A module, that of the current folder before others of its name."""
    folder = os.getcwd()
    sys.path.insert(0, folder)
    try:
        with stopping_nobody():  # a script that ends by sys.exit is no end of the run
            return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise ValueError(f"{title}: importing {module!r} failed: {error}") from error
        raise ValueError(
            f"{title}: there is no module {module!r}, neither installed nor as a file in {folder}"
        ) from error
    except Exception as error:
        raise ValueError(f"{title}: importing {module!r} failed with {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(folder)
