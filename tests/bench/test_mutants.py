"""Changes of a source are what they say, and the tests of a line are those that run it."""

from __future__ import annotations

import pytest

from bench.mutants.changes import changes_of, is_program
from bench.mutants.covering import Covered

SOURCE = '''"""A docstring with 1 number."""

def mean(values: "Float[Tensor, 2]", least=0.5) -> float:
    """The mean of 3."""
    assert len(values) > 0
    if values.empty():
        raise ValueError("at least 1")
    total = values.abs().sum() - least * (
        2
    )
    return swapped(total, values) / max(len(values), 1)
'''
EXPECTED = {
    ("a constant", "least=1.0"),
    ("a negated condition", "if not (values.empty()):"),
    ("a dropped call", "(values).sum() - least"),
    ("another function", "values.abs().mean() - least"),
    ("an operator", "values.abs().sum() + least"),
    ("an operator", "- least / ("),
    ("a dropped term", "total = (values.abs().sum())"),
    ("a constant", "3"),
    ("swapped arguments", "swapped(values, total)"),
    ("a denominator", "/ (max(len(values), 1) + 1)"),
    ("another function", "/ min(len(values), 1)"),
    ("an operator", "swapped(total, values) * max"),
}


@pytest.mark.parametrize(("kind", "after"), sorted(EXPECTED))
def test_changes_are_made_in_one_place(kind, after):
    made = [each for each in changes_of("a.py", SOURCE) if each.kind == kind and after in each.after]
    assert len(made) >= 1
    for change in made:
        changed = change.made_in(SOURCE.encode())
        assert is_program(changed)
        assert changed.startswith(SOURCE.encode()[: change.start])
        assert changed.endswith(SOURCE.encode()[change.end :])


def test_what_changes_no_number_is_left_alone():
    befores = " ".join(each.before for each in changes_of("a.py", SOURCE))
    for text in ("docstring", "mean of", "assert", "raise"):
        assert text not in befores
    assert not any("Tensor, 3" in each.after for each in changes_of("a.py", SOURCE))


def test_the_tests_of_a_line_are_those_that_run_it_the_quickest_first():
    change = next(each for each in changes_of("a.py", SOURCE) if each.kind == "swapped arguments")
    lines = {("a.py", change.first): {"slower::one", "quick::one", "quick::two"}, ("a.py", 6): {"other::one"}}
    lines |= {("b.py", change.first): {"another::one"}}
    seconds = {"slower::one": 2.0, "quick::one": 0.1, "quick::two": 0.3}
    assert Covered(lines, seconds).of(change) == ["quick::one", "quick::two", "slower::one"]


def test_what_modules_read_of_a_module_is_tested_by_their_tests_too():
    default = next(each for each in changes_of("a.py", SOURCE) if each.after.endswith("least=1.0) -> float:"))
    assert not default.in_function
    lines = {("a.py", 9): {"a::one"}, ("b.py", 3): {"b::one"}, ("c.py", 3): {"c::one"}}
    seconds = {"a::one": 2.0, "b::one": 0.1, "c::one": 0.1, "tests/test_a.py::one": 1.0}
    assert Covered(lines, seconds, {"a.py": {"b.py"}}).of(default) == ["b::one", "a::one"]
    inside = next(each for each in changes_of("a.py", SOURCE) if each.kind == "swapped arguments")
    assert Covered({}, seconds).of(inside) == ["tests/test_a.py::one"], "which may start processes that run it"
