"""What messages advise can be done from the command line, or is said to be for Python."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import lowtide

PACKAGE = Path(lowtide.__file__).parent
PYTHON_ALONE = "formatting_func|processing_class|peft_config|compute_metrics|compute_loss_func|teacher_model"
ADVISED = re.compile(rf"\b(pass|give|passing|giving|take)\b[^.;:,]{{0,40}}?\b({PYTHON_ALONE})\b(?!_name_or_path)")
NOT_OF_RUNS = ("scripts", "compat", "calibration.py")
"""Read by those who write Python in any case."""
OF_OBJECTS = ("a model without a name", "the model came sharded")
"""How messages begin that only a model which was passed loaded can end in."""


def texts(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The strings of a module with their lines, docstrings aside."""
    docs = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield node.lineno, "".join(str(each.value) for each in node.values if isinstance(each, ast.Constant))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs | inside:
            yield node.lineno, node.value


def test_what_only_python_can_give_is_said_so():
    wrong = [
        f"{path.relative_to(PACKAGE)}:{line}: {text}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.relative_to(PACKAGE).parts[0] not in NOT_OF_RUNS
        for line, text in texts(ast.parse(path.read_text(encoding="utf-8")))
        if ADVISED.search(text) and " " in text and "in Python" not in text and not text.startswith(OF_OBJECTS)
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("all weights are trained: pass a `peft_config`, or not", True),
        ("or pass it as `processing_class`", True),
        ("set teacher_model_name_or_path", False),
        ("formatting_func failed", False),
    ],
)
def test_advice_is_known(text, found):
    assert bool(ADVISED.search(text)) == found
