"""Chat templates with limits: they come with a model or a data set, and may loop without end or write without end.

Jinja's sandbox, in which transformers compiles them, bounds `range` and nothing else. transformers looks its class up
in the module `chat_template_utils` for each template, where `limit_templates` puts a subclass: every rendering, of any
caller and in any thread, then has the same limits. What one operation makes is predicted before it is made
(`lowtide.compat.templates.jinja_sizes`). A rendering as a whole is ended by a thread that looks at the time and at the
memory that was added, and raises in the thread that renders.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.compiler import CodeGenerator
from jinja2.runtime import markup_join, str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers.utils import chat_template_utils

from lowtide.compat.templates.jinja_sizes import (
    check_added,
    check_call,
    check_format,
    check_power,
    check_repeated,
    check_size,
    check_total,
)

TEMPLATE_SECONDS = 20.0
"""The time that a template has for one conversation."""
MOST_BYTES = 4 << 30
"""Memory that a template may add."""
_TICK = 0.25
"""Seconds between two looks."""
TEMPLATE_FAILURES = (
    *(TemplateError, TypeError, ValueError, LookupError, AttributeError),
    *(ArithmeticError, RecursionError, MemoryError),
)
"""What a template raises: ranges that are too large end in an `OverflowError`."""


class TemplateOverrun(ValueError):
    """A template took more time or memory than it may; it would take as much again for the next conversation."""


class _Code(CodeGenerator):
    """Python for a template, in which what joins or contains other values is checked by the environment."""

    def visit_Concat(self, node: nodes.Concat, frame: Any) -> None:
        self.write("environment.joined(")
        self._items(node.nodes, frame)
        self.write(")")

    def visit_List(self, node: nodes.List, frame: Any) -> None:
        self._checked(super().visit_List, node, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Any) -> None:
        if node.ctx == "load":
            self._checked(super().visit_Tuple, node, frame)
        else:
            super().visit_Tuple(node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Any) -> None:
        self._checked(super().visit_Dict, node, frame)

    def _items(self, items: Iterable[nodes.Node], frame: Any) -> None:
        self.write("(")
        for item in items:
            self.visit(item, frame)
            self.write(", ")
        self.write(")")

    def _checked(self, write: Callable[[Any, Any], None], node: nodes.Node, frame: Any) -> None:
        self.write("environment.checked(")
        write(node, frame)
        self.write(")")


class LimitedTemplate(Template):
    """A template whose rendering ends."""

    def render(self, *args: Any, **kwargs: Any) -> str:
        with ends_within(TEMPLATE_SECONDS):
            return _whole(super().render(*args, **kwargs))

    def generate(self, *args: Any, **kwargs: Any) -> Iterator[str]:
        with ends_within(TEMPLATE_SECONDS):
            size = 0
            for piece in super().generate(*args, **kwargs):
                size += len(piece)
                check_total(size)
                yield _whole(piece)


def _whole(text: str) -> str:
    """A text, unless it has halves of surrogate pairs, which UTF-8, and so tokenizers, have not."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the text has half a character, {text[error.start]!r}, which no tokenizer can read") from None
    return text


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox, in which no operation makes gigabytes at once."""

    intercepted_binops = frozenset({"*", "**", "%", "+"})
    code_generator_class = _Code
    template_class = LimitedTemplate

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.finalize = self.checked
        self.globals["lipsum"] = _limited("lipsum", self.globals["lipsum"])

    def from_string(self, *args: Any, **kwargs: Any) -> Any:
        self.filters = {name: _limited(name, made) for name, made in self.filters.items()}
        with ends_within(TEMPLATE_SECONDS):
            return super().from_string(*args, **kwargs)

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:  # type: ignore[override]
        pieces = list(pieces)
        check_size(pieces)
        return "".join(pieces)

    def joined(self, pieces: tuple[Any, ...]) -> str:
        """What `~` makes of values."""
        check_size(pieces)
        return markup_join(pieces) if self.autoescape else str_join(pieces)

    def checked(self, value: Any) -> Any:
        """A value, unless it is a container whose text has no end: one that holds another twice, over and over."""
        if isinstance(value, list | tuple | dict | set):
            check_size(value)
        return value

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            check_repeated(left, right)
        elif operator == "**":
            check_power(left, right)
        elif operator == "+":
            check_added(left, right)
        elif isinstance(left, str | bytes):
            check_format(left, right if isinstance(right, tuple) else (right,))
        made = super().call_binop(context, operator, left, right)
        return self.checked(made) if operator == "*" else made

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        subject = getattr(__obj, "__self__", None)
        if isinstance(subject, str | bytes | int):
            check_call(__obj.__name__, subject, args, kwargs)
        return __self.checked(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Any:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        @functools.wraps(wrapped)
        def limited(*args: Any, **kwargs: Any) -> str:
            check_format(value.__self__, (*args, *kwargs.values()))
            return wrapped(*args, **kwargs)

        return limited


def _limited(name: str, made: Any) -> Any:
    """A filter or function that predicts the size of its result first."""
    if getattr(made, "is_limited", False):
        return made
    at = 1 if hasattr(made, "jinja_pass_arg") else 0

    @functools.wraps(made)
    def limited(*args: Any, **kwargs: Any) -> Any:
        passed, given = args[:at], list(args[at:])
        if name in ("join", "sum") and given and isinstance(given[0], Iterator):
            given[0] = list(given[0])
        check_call(name, given[0] if given else "", given[1:], kwargs)
        return made(*passed, *given, **kwargs)

    limited.is_limited = True  # type: ignore[attr-defined]
    return limited


def limit_templates() -> None:
    """Has transformers compile chat templates in `LimitedEnvironment` from here on, those that it has compiled too."""
    module: Any = chat_template_utils
    if module.ImmutableSandboxedEnvironment is not LimitedEnvironment:
        module.ImmutableSandboxedEnvironment = LimitedEnvironment
        module._compile_jinja_template.cache_clear()


# -- the time and the memory of a whole rendering --------------------------------------------------------------------


class _Overrun(ValueError):
    """Raised in a thread by the one that watches it."""

    def __str__(self) -> str:
        return "the template takes more time or memory than it may"


@dataclass
class _Watched:
    seconds: float
    until: float
    most: int
    why: str = ""


class _Watch(threading.Thread):
    """Looks at the threads that render, and raises in those that take too much. It ends once none is left."""

    def __init__(self) -> None:
        super().__init__(daemon=True, name="lowtide-templates")
        self.lock = threading.Lock()
        self.rendering: dict[int, _Watched] = {}
        self.more = threading.Event()

    def run(self) -> None:
        while True:
            self.more.wait()
            least = min((each.seconds for each in list(self.rendering.values())), default=_TICK)
            time.sleep(min(_TICK, least / 2))
            with self.lock:
                if not self.rendering:
                    self.more.clear()
                for thread, each in self.rendering.items():
                    each.why = each.why or _overrun(each)
                    if each.why:
                        _raise_in(thread, _Overrun)


_watch: _Watch | None = None
_starting = threading.Lock()


def _forget_watch() -> None:
    """A forked process has no thread but the one that forked."""
    global _watch, _starting
    _watch, _starting = None, threading.Lock()


os.register_at_fork(after_in_child=_forget_watch)


def _running_watch() -> _Watch:
    global _watch
    with _starting:
        if _watch is None:
            _watch = _Watch()
            _watch.start()
        return _watch


@contextlib.contextmanager
def ends_within(seconds: float) -> Iterator[None]:
    """Ends what takes longer or adds more than `MOST_BYTES`, in any thread. Within another one it does nothing.

    Raises:
        TemplateOverrun: it did.
    """
    watch, thread = _running_watch(), threading.get_ident()
    if thread in watch.rendering:
        yield
        return
    each = _Watched(seconds, time.monotonic() + seconds, _resident() + MOST_BYTES)
    try:
        with watch.lock:
            watch.rendering[thread] = each
            watch.more.set()
        yield
    except BaseException as error:
        _leave(watch, thread, each)
        if each.why:
            raise TemplateOverrun(each.why) from error
        raise
    _leave(watch, thread, each)
    if each.why:
        raise TemplateOverrun(each.why)


def _leave(watch: _Watch, thread: int, each: _Watched) -> None:
    """Ends the watch over this thread; what was raised and has not arrived yet arrives here.

    It is not taken back: that would set a flag of the interpreter which only an arrival clears. While it is set, every
    call takes longer, and in Python 3.11 a traced one (a debugger, coverage) never begins.
    """
    while True:
        try:
            with watch.lock:
                watch.rendering.pop(thread, None)
            if not each.why:
                return
            _raise_in(thread, _Overrun)
            while True:
                time.sleep(0)
        except _Overrun:
            if thread not in watch.rendering:
                return


def _raise_in(thread: int, error: type[Exception]) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error))


def _overrun(each: _Watched) -> str:
    if time.monotonic() > each.until:
        return f"the template takes more than {each.seconds:g} seconds, as one that loops without end"
    if _resident() > each.most:
        return f"the template adds more than {MOST_BYTES >> 30} GiB, as one that writes without end"
    return ""


def _resident() -> int:
    """Bytes of memory that this process has; 0 where the system does not tell."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
