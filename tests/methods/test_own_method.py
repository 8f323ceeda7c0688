"""A user's own method by its path trains, is estimated, checked and refused as a built-in one is."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import lowtide
from lowtide.cli.main import main
from lowtide.methods import METHODS
from lowtide.methods.method import TokenObjective
from lowtide.ops.logits.linear_logprobs import TokenStats
from lowtide.run.options.configs import config_class
from tests.support.runs.saved_llama import COMMON, DESCRIBED, saved_model
from tests.support.runs.toy_method import FloorOptions

NUMBERS = itertools.count()
OWN = """
import dataclasses
import torch
from dataclasses import dataclass
from lowtide.methods import orpo
from lowtide.methods.method import RowObjective, TokenObjective
from lowtide.methods.sft import SFTOptions
from lowtide.methods.shared.rows import Texts
from tests.support.runs.toy_method import METHOD as FLOOR

PAIRS = orpo.METHOD
number = 3


class Undecorated(SFTOptions):
    floor: float = 0.1


@dataclass
class Unsaid(SFTOptions):
    floor: float = 0.1


def with_loss(function):
    return dataclasses.replace(FLOOR, objective=lambda options, *, aux_coefficient=0.0: TokenObjective(function))


def failing(stats):
    raise ZeroDivisionError("by nothing")


def vector(options, *, aux_coefficient=0.0):
    made = orpo.objective(options)
    return dataclasses.replace(made, loss=lambda pairs, counts: torch.ones(2))


UNDECORATED = dataclasses.replace(FLOOR, options=Undecorated)
UNSAID = dataclasses.replace(FLOOR, options=Unsaid)
ROWS = dataclasses.replace(FLOOR, rows=Texts)
UNCALLED = dataclasses.replace(FLOOR, objective=lambda options: None)
NOTHING = dataclasses.replace(FLOOR, objective=lambda options, aux_coefficient: None)
MEAN = with_loss(lambda stats: -stats.logprobs.mean())
WHOLE = with_loss(lambda stats: torch.ones_like(stats.logprobs).long())
FAILING = with_loss(failing)
VECTOR = dataclasses.replace(PAIRS, objective=vector)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module in the current folder; a new one each time, since Python imports a module once."""
    name = f"own_methods_{next(NUMBERS)}"
    Path(tmp_path, f"{name}.py").write_text(OWN, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return name


def config_of(path: str) -> Any:
    return config_class(METHODS[path])


def lay_out(folder: Path) -> list[str]:
    rows = "".join(json.dumps({"text": f"{n} + {n} = {2 * n}"}) + "\n" for n in range(8))
    Path(folder, "rows.jsonl").write_text(rows, encoding="utf-8")
    options = [f"--{name}={value}" for name, value in COMMON.items()]
    return ["--model", str(saved_model(folder / "model")), "--dataset", "rows.jsonl", *options]


def test_its_command_trains_repeats_and_is_evaluated(module, tmp_path, capsys):
    path, words = f"{module}.FLOOR", lay_out(tmp_path)
    assert main([path, *words, "--output_dir", "run", "--floor", "0.2"]) == 0
    assert f"`lowtide {path} --config`" in Path("run/run.yaml").read_text(encoding="utf-8")
    capsys.readouterr()
    assert main(["check", "run/run.yaml"]) == 0
    assert f"for {path}" in (said := capsys.readouterr().out)
    assert "rows are read as" in said
    assert main([path, "--config", "run/run.yaml", "--output_dir", "again"]) == 0
    weights = [Path(run, "model.safetensors").read_bytes() for run in ("run", "again")]
    assert weights[0] == weights[1]
    assert main(["evaluate", "run", "--data", "rows.jsonl", "--device", "cpu"]) == 0
    assert "loss" in capsys.readouterr().out


def test_it_is_estimated_and_has_help(module, tmp_path, capsys):
    words = [f"{module}.FLOOR", *lay_out(tmp_path), "--output_dir", "run"]
    assert main(["estimate", *words]) in (0, 1)
    assert "peak" in capsys.readouterr().out.lower()
    assert main([words[0], "--help"]) == 0
    assert "--floor" in (said := capsys.readouterr().out)
    assert f"The method that {module}.FLOOR declares" in said
    assert main(["--help"]) == 0
    assert module not in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.traced_apart
def test_it_is_known_where_runs_are_traced(module):
    made = config_of(f"{module}.FLOOR")(output_dir="run", use_cpu=True, report_to="none", max_length=64)
    assert lowtide.estimate(made, DESCRIBED, lengths=[24] * 8).peak_bytes > 0


def test_its_name_is_its_path_and_its_classes_are_found_again(module):
    import pickle

    method = METHODS[f"{module}.FLOOR"]
    made = config_of(method.name)(output_dir="run", use_cpu=True, report_to="none", floor="0.25")
    assert isinstance(made, FloorOptions)
    assert method.name == f"{module}.FLOOR"
    assert method.name not in list(METHODS)
    assert pickle.loads(pickle.dumps(made)).floor == 0.25
    assert pickle.loads(pickle.dumps(method)) is method
    with pytest.raises(ValueError, match=r"floor=-1\.0 must be at least 0"):
        config_of(method.name)(output_dir="run", floor=-1.0)


def test_its_objective_is_the_declared_one(module):
    drawn = torch.randn(7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found: Any = METHODS[f"{module}.FLOOR"].objective(FloorOptions(floor=0.3), aux_coefficient=0.1)
    assert isinstance(found, TokenObjective)
    assert found.aux_coefficient == 0.1
    assert torch.equal(found.loss(TokenStats(drawn)), torch.relu(-drawn - 0.3))


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("FLOR", r"has no 'FLOR'; did you mean 'FLOOR'\?"),
        ("number", "is of type int, and no declaration"),
        ("UNDECORATED", "its options Undecorated are no dataclass"),
        ("UNSAID", "Unsaid.floor has no sentence"),
        ("ROWS", "is no RowLayout of lowtide.methods.shared.rows"),
        ("UNCALLED", r"is called as objective\(options, aux_coefficient=\.\.\.\)"),
    ],
)
def test_what_is_no_method_is_refused(module, path, said, capsys):
    with pytest.raises(ValueError, match=said):
        METHODS[f"{module}.{path}"]
    assert main([f"{module}.{path}", "--model", "M"]) == 2
    assert path in capsys.readouterr().err


def test_what_its_functions_give_is_checked(module):
    stats, options = TokenStats(torch.zeros(3)), FloorOptions()
    for path, said in (
        ("MEAN", r"gave a tensor of float32 \[\], and a loss of tokens gives a number for each.*\[3\]"),
        ("WHOLE", r"gave a tensor of int64 \[3\]"),
    ):
        made: Any = METHODS[f"{module}.{path}"].objective(options, aux_coefficient=0.0)
        with pytest.raises(ValueError, match=said):
            made.loss(stats)
    made = METHODS[f"{module}.FAILING"].objective(options, aux_coefficient=0.0)
    with pytest.raises(ZeroDivisionError) as raised:
        made.loss(stats)
    assert "raised by method" in raised.value.__notes__[0]
    with pytest.raises(ValueError, match="its objective gave a NoneType"):
        METHODS[f"{module}.NOTHING"].objective(options, aux_coefficient=0.0)
    pairs = METHODS[f"{module}.VECTOR"]
    of_rows: Any = pairs.objective(pairs.options(), aux_coefficient=0.0)
    with pytest.raises(ValueError, match=r"gave a tensor of float32 \[2\], and a loss of rows gives an Outcome"):
        of_rows.loss(None, {})


def test_what_is_no_path_is_no_method(capsys):
    for word in ("run.yaml", "rows.jsonl", "0.1", "a..b", "a/b.c"):
        assert word not in METHODS
    assert main(["no_such_module.METHOD", "--model", "M"]) == 2
    assert "there is no module 'no_such_module'" in capsys.readouterr().err
    assert main(["run.yaml"]) == 2
    assert "there is no command 'run.yaml'" in capsys.readouterr().err
