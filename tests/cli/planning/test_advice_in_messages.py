"""What messages advise can be done from the command line where the run was started by it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import lowtide
from lowtide.cli.main import main
from lowtide.data.formats.reading import detect_format
from lowtide.process.ways_out import by_command, in_python

PACKAGE = Path(lowtide.__file__).parent
PYTHON_ALONE = "formatting_func|processing_class|peft_config|compute_metrics|compute_loss_func|teacher_model"
ADVISED = re.compile(rf"\b(pass|give|passing|giving|take)\b[^.;:,]{{0,40}}?\b({PYTHON_ALONE})\b(?!_name_or_path)")
NOT_OF_RUNS = ("scripts", "compat", "calibration.py")
"""Read by those who write Python in any case."""
OF_OBJECTS = ("a model without a name", "the model came sharded")
"""How messages begin that only a model which was passed loaded can end in."""


def texts(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The strings of a module with their lines, docstrings and what only scripts are told aside."""
    docs = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    told = (node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "in_python")
    docs |= {id(part) for node in told for part in ast.walk(node)}
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
    for node in ast.walk(tree):
        if id(node) in docs:
            continue
        if isinstance(node, ast.JoinedStr):
            yield node.lineno, "".join(str(each.value) for each in node.values if isinstance(each, ast.Constant))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            yield node.lineno, node.value


@pytest.mark.slow
def test_what_only_scripts_can_give_is_not_told_to_commands():
    wrong = [
        f"{path.relative_to(PACKAGE)}:{line}: {text}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.relative_to(PACKAGE).parts[0] not in NOT_OF_RUNS
        for line, text in texts(ast.parse(path.read_text(encoding="utf-8")))
        if ADVISED.search(text) and " " in text and not text.startswith(OF_OBJECTS)
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


def test_a_part_for_scripts_is_not_said_by_the_command():
    assert in_python("pass it", "save it") == "pass it"
    with by_command():
        assert in_python("pass it", "save it") == "save it"
        assert in_python(", or pass it") == ""
    assert in_python("pass it") == "pass it"


def test_columns_without_a_format():
    with pytest.raises(ValueError, match="or pass a formatting_func"):
        detect_format(["question", "body"])
    with by_command(), pytest.raises(ValueError, match="or set dataset_text_field") as refused:
        detect_format(["question", "body"])
    assert "formatting_func" not in str(refused.value)
    assert "rename_columns" not in str(refused.value)


def test_the_command_names_what_it_has(tmp_path, capsys):
    rows, model = tmp_path / "rows.jsonl", tmp_path / "model"
    rows.write_text('{"text": "a b c"}\n')
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "llama"}')
    given = ["--model", str(model), "--dataset", str(rows), "--output_dir", str(tmp_path / "out")]
    assert main(["sft", *given]) == 2
    said = capsys.readouterr().err
    assert "no tokenizer at" in said
    assert "processing_class" not in said
