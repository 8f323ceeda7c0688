"""The recipes: each run file is one, is planned from a config alone, fits its device, and trains a tiny model."""

import json
import re

import pytest
import yaml

from bench.measuring.results import path_of
from bench.recipes.__main__ import predicted, read_recipe
from bench.recipes.cases import RECIPES_BY_FILE
from bench.recipes.tables import PAGE
from lowtide.cli.main import main
from lowtide.cli.recipes import recipes
from lowtide.cli.training.train import config_of
from lowtide.demo.data import make_questions, write_rows
from lowtide.demo.lessons import LESSONS
from lowtide.demo.model import save

TINY = {"sft": "sft", "dpo": "dpo", "grpo": "grpo"}
"""Whose rows stand for those of a recipe, by method."""
TRAINED_HERE = ["qwen-8gb", "dpo-laptop", "grpo-gsm8k"]
"""One process, and no package that is optional."""


def recorded() -> dict[str, dict]:
    path = path_of("recipes", {"gpu": "predicted"})
    return {run["case"]: run for run in json.loads(path.read_text(encoding="utf-8"))["runs"]}


def test_every_file_is_a_recipe_with_a_place_on_the_page_and_a_prediction():
    assert recipes().keys() == RECIPES_BY_FILE.keys() == recorded().keys()
    page = PAGE.read_text(encoding="utf-8")
    for name, recipe in RECIPES_BY_FILE.items():
        assert f"\n## {name}\n\n    lowtide {recipe.method} --config {name}.yaml\n" in page
        assert f"[{recipe.title}](#{name})" in page


@pytest.mark.parametrize("name", RECIPES_BY_FILE)
def test_a_run_file_is_one_and_its_first_lines_say_its_command(name, tmp_path):
    recipe, path = RECIPES_BY_FILE[name], recipes()[name]
    assert f"lowtide {recipe.method} --config {name}.yaml" in path.read_text(encoding="utf-8")
    config = read_recipe(path, recipe.method, tmp_path).config(use_cpu=True)
    assert isinstance(config, config_of(recipe.method))


@pytest.mark.parametrize("name", RECIPES_BY_FILE)
def test_what_is_recorded_fits(name):
    run = recorded()[name]
    assert run["peak_bytes"] <= run["memory_bytes"]


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES_BY_FILE)
def test_a_recipe_is_planned_from_a_config_alone(name):
    pytest.importorskip("bitsandbytes", reason="a recipe stores weights in 4 bits")
    run, before = predicted(name), recorded()[name]
    assert run["peak_bytes"] <= run["memory_bytes"]
    assert run["peak_bytes"] == pytest.approx(before["peak_bytes"], rel=0.05), "python -m bench.recipes records anew"


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED_HERE)
def test_a_recipe_trains_a_tiny_model(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    method, file = RECIPES_BY_FILE[name].method, tmp_path / "run.yaml"
    save(tmp_path / "model", seed=0)
    questions = make_questions(200, seed=0)[1]
    write_rows((row for question in questions for row in LESSONS[TINY[method]].rows(question)), tmp_path / "rows.jsonl")
    given = yaml.safe_load(recipes()[name].read_text(encoding="utf-8"))
    given |= {"model": "model", "dataset": "rows.jsonl", "use_cpu": True, "max_steps": 2, "save_strategy": "no"}
    given |= {"max_length": 64} if "max_length" in given else {"max_completion_length": 8}
    for limit in ("max_prompt_length", "max_completion_length"):
        given |= {limit: 32} if limit in given else {}
    file.write_text(yaml.safe_dump(given), encoding="utf-8")
    assert main([method, "--config", str(file), "--disable_tqdm", "true"]) == 0
    report = json.loads((tmp_path / given["memory_report"]).read_text(encoding="utf-8"))
    assert report["steps"] == 2
    assert re.search(r"max_steps: 2", (tmp_path / given["output_dir"] / "run.yaml").read_text(encoding="utf-8"))
