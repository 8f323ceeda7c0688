"""`python -m bench.structure` counts what it says, on a small package."""

import pytest

from bench.structure import main

HEAD = "from __future__ import annotations\n"


@pytest.fixture
def package(tmp_path):
    """Writes modules of a package by their paths, and gives its folder."""
    folder = tmp_path / "small"

    def write(**modules: str):
        for name, text in {"__init__": "", **modules}.items():
            path = folder / f"{name.replace('__in__', '/')}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return str(folder)

    return write


def test_what_keeps_the_limits_passes(package, capsys):
    one = HEAD + "import small.two\n\nclass One:\n    def get(self):\n        return self._value, super()._value\n"
    assert main([package(one=one, two="def f(a, b): ...\nx = (1)._replace\n")]) == 0
    printed = capsys.readouterr().out
    assert "small: 2, " in printed
    assert "private accesses across modules: 0" in printed
    assert "circles: 0" in printed
    assert "longest function: 2 lines" in printed
    assert "longest signature: 2 parameters" in printed


@pytest.mark.parametrize(
    "text",
    [
        "import os\nos._name",
        "from os import _name",
        "from os._name import path",
        "import os._name",
        "getattr(object, '_name', None)",
        "def f(x: 'int') -> None:\n    x._name = 1",
    ],
)
def test_private_names_of_others_are_counted_but_in_compat(text, package, capsys):
    assert main([package(one=text)]) == 1
    printed = capsys.readouterr().out
    assert "private accesses across modules: 1" in printed
    assert "one.py:" in printed


def test_compat_may_use_private_names(package):
    assert main([package(compat__in__os="import os\nos._name", compat__in____init__="")]) == 0


@pytest.mark.parametrize(
    "back",
    [
        "from small import one",
        "from .one import x",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from small.one import x",
        "def f():\n    import small.one",
    ],
)
def test_circles_are_counted_however_they_are_imported(back, package, capsys):
    assert main([package(one="from small.two import f\nx = 1", two=back, three="import small.one")]) == 1
    assert "circle: small.one <-> small.two" in capsys.readouterr().out


def test_folders_of_too_many_files_are_listed(package, capsys):
    inner = {f"inner__in__m{number}": "" for number in range(18)}
    assert main([package(**inner)]) == 0
    assert main([package(**inner, inner__in____init__="")]) == 1
    printed = capsys.readouterr().out
    assert "folders of more than 18 files: 1" in printed
    assert printed.splitlines()[-1].endswith("small/inner: 19 files")


def test_long_functions_and_signatures_are_listed(package, capsys):
    names = ", ".join(f"a{number}" for number in range(9))
    own = f"class OwnTrainer:\n    def __init__(self, {names}): ...\n"
    long = "def long():\n" + "    x = 1\n" * 60
    assert main([package(one=f"def wide({names}): ...\n{own}{long}")]) == 1
    broken = capsys.readouterr().out.splitlines()[-2:]
    assert [line.split(": ", 1)[1] for line in broken] == ["long: 61 lines", "wide: 9 parameters"]
