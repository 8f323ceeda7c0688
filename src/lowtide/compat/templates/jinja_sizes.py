"""How large the result of one operation of a chat template would be, predicted before it is made.

One call of a filter or of a method of a text runs in C from beginning to end: no other thread can end it, and the
memory is taken at once. So each operation that makes much of little has its prediction here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence, Set, Sized
from typing import Any

from jinja2.exceptions import SecurityError

MOST_CHARACTERS = 1 << 26
"""Of a text or a list that a template makes at once."""
MOST_DIGITS = 100_000
"""Of a number."""
_PADS = frozenset({"batch", "center", "ljust", "rjust", "slice", "to_bytes", "truncate", "zfill"})
_KEEPS = frozenset(
    (
        *("attr", "batch", "count", "d", "default", "first", "groupby", "items", "last", "length", "list", "map"),
        *("random", "reject", "rejectattr", "reverse", "select", "selectattr", "slice"),
    )
)
"""Filters that neither write nor compare what their value holds."""


_GIVEN_WIDTH = re.compile(r"%[^%a-zA-Z]*\*|\{[^{}]*\{")
"""Fields whose width is among what is formatted."""


def check_repeated(left: Any, right: Any) -> None:
    """`left * right`."""
    for repeated, count in ((left, right), (right, left)):
        if isinstance(repeated, str | bytes | list | tuple) and isinstance(count, int):
            check_total(len(repeated) * count, "`*`")
    if isinstance(left, int) and isinstance(right, int):
        _check_digits(left.bit_length() + right.bit_length())


def check_power(left: Any, right: Any) -> None:
    """`left ** right`."""
    if isinstance(left, int) and isinstance(right, int):
        _check_digits(left.bit_length() * right)


def check_added(left: Any, right: Any) -> None:
    """`left + right`."""
    if isinstance(left, str | bytes | list | tuple) and isinstance(right, str | bytes | list | tuple):
        check_total(len(left) + len(right), "`+`")


def check_size(value: Any) -> None:
    """A value as a text: what it holds twice counts twice."""
    measured(value)


def check_format(text: str | bytes, given: Sequence[Any]) -> None:
    """`text % given` and `text.format(*given)`."""
    plain = text if isinstance(text, str) else text.decode("latin-1")
    widths = _numbers(plain)
    if _GIVEN_WIDTH.search(plain):
        widths += [number for each in given for number in _numbers(str(each)[:100])]
    if any(width > 999_999 for width in widths):
        raise SecurityError("the template formats something to a width of a million characters or more")
    fields = max(plain.count("%"), plain.count("{"))
    check_total(len(text) + fields * measured(list(given)) + sum(widths), "a format")


def check_call(name: str, subject: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """A filter, or a method of a text or a number, by its name."""
    given = [*args, *kwargs.values()]
    most = max((abs(each) for each in given if isinstance(each, int)), default=0)
    longest = max((len(each) for each in given if isinstance(each, str | bytes)), default=0)
    text = subject if isinstance(subject, str | bytes) else ""
    size = 0
    if name in _PADS:
        size = most * max(longest, 1)
    elif name == "round":
        _check_digits(4 * most)
    elif name == "lipsum":  # paragraphs of at most so many words
        size = 10 * math.prod(max(abs(each), 1) for each in (subject, *given) if isinstance(each, int))
    elif name == "format":
        check_format(str(subject), given)
    elif name == "indent":
        size = _places(subject, "\n") * max(most, longest, 4)
    elif name == "expandtabs":
        size = _places(subject, "\t") * max(most, 8)
    elif name == "wordwrap":
        size = len(text) * max(longest, 1)
    elif name == "replace" and given and isinstance(given[0], str | bytes):
        size = _places(subject, given[0]) * longest
    elif name == "translate":
        size = len(text) * max((measured(each) for each in given), default=0)
    elif name == "join":
        size = _joined(subject, given)
    elif name == "tojson":
        size, depth = _walked(subject)
        size *= 1 + depth * most + (depth + 2) * measured(given)
    check_total(size, f"`{name}`")
    if name not in _KEEPS:
        measured(subject)


def measured(value: Any) -> int:
    """Characters and elements of a value as a text, about.

    Raises:
        SecurityError: there are more than `MOST_CHARACTERS`.
    """
    return _walked(value)[0]


def _walked(value: Any) -> tuple[int, int]:
    """`measured`, and how deep it is."""
    if isinstance(value, str | bytes):
        check_total(len(value))
        return len(value), 0
    size, deepest, left = 0, 0, [(value, 0)]
    while left:
        each, depth = left.pop()
        deepest = max(deepest, depth)
        if isinstance(each, str | bytes):
            size += len(each)
        elif isinstance(each, Mapping):
            left += [(part, depth + 1) for pair in each.items() for part in pair]
        elif isinstance(each, list | tuple | Set):
            left += [(part, depth + 1) for part in each]
        size += 1
        if size + len(left) > MOST_CHARACTERS:
            check_total(size + len(left))
    return size, deepest


def _joined(subject: Any, given: Sequence[Any]) -> int:
    """The filter, whose subject are the texts; or the method, whose subject stands between them."""
    is_method = isinstance(subject, str | bytes) and bool(given) and not isinstance(given[0], str | None)
    texts = given[0] if is_method else subject
    between = subject if is_method else max((each for each in given if isinstance(each, str)), key=len, default="")
    return measured(texts) + len(between) * (len(texts) if isinstance(texts, Sized) else 0)


def _places(text: Any, part: str | bytes) -> int:
    """How often a text holds another, and one more."""
    if isinstance(text, bytes):
        return text.count(part if isinstance(part, bytes) else part.encode()) + 1
    return str(text).count(str(part)) + 1


def _numbers(text: str) -> list[int]:
    return [int(each[:8]) for each in re.findall(r"[0-9]+", text)]


def check_total(size: int, by: str = "one operation") -> None:
    """A number of characters or elements."""
    if size > MOST_CHARACTERS:
        raise SecurityError(f"the template makes more than {MOST_CHARACTERS:,} characters at once, with {by}")


def _check_digits(bits: int) -> None:
    if bits > 3 * MOST_DIGITS:
        raise SecurityError(f"the template makes a number of more than {MOST_DIGITS:,} digits")
