"""`lowtide recipes`: what is listed, and what a copy is."""

from __future__ import annotations

import pytest
import yaml

from lowtide.cli.main import main
from lowtide.cli.recipes import about, recipes


def test_each_is_listed_with_what_it_is_for(capsys):
    assert main(["recipes", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name, path in recipes().items():
        title, command = about(path)
        assert any(line.split() == [name, *title.split()] for line in lines)
        assert command.endswith(f" --config {name}.yaml")


def test_a_copy_is_the_file_and_says_the_command_that_runs_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["recipes", "copy", "qwen-8gb"]) == 0
    assert (tmp_path / "qwen-8gb.yaml").read_text() == recipes()["qwen-8gb"].read_text()
    assert "lowtide sft --config qwen-8gb.yaml" in capsys.readouterr().out


def test_a_copy_under_another_name_names_itself(tmp_path, capsys):
    output = tmp_path / "mine.yaml"
    assert main(["recipes", "copy", "dpo-laptop", "--output", str(output)]) == 0
    assert f"# lowtide dpo --config {output}" in output.read_text().splitlines()
    assert yaml.safe_load(output.read_text()) == yaml.safe_load(recipes()["dpo-laptop"].read_text())
    assert f"lowtide dpo --config {output}" in " ".join(capsys.readouterr().out.split())


def test_nothing_is_overwritten_and_a_wrong_name_is_answered_with_the_nearest(tmp_path, capsys):
    output = tmp_path / "mine.yaml"
    output.write_text("my own")
    assert main(["recipes", "copy", "dpo-laptop", "--output", str(output)]) == 2
    assert output.read_text() == "my own"
    assert "is there already" in " ".join(capsys.readouterr().err.split())
    assert main(["recipes", "copy", "dpo-labtop"]) == 2
    assert "did you mean 'dpo-laptop'?" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["recipes"], "action"),
        (["recipes", "copy"], "which recipe is copied? They are dpo-laptop, "),
        (["recipes", "write", "x"], "choose from"),
    ],
)
def test_half_a_command_is_refused(words, said, capsys):
    assert main(words) == 2
    assert said in " ".join(capsys.readouterr().err.split())
