"""The Python of the pages runs as it stands there, their command lines are understood, and their links lead somewhere.

A trainer's example logs what its page says that it logs. Python that needs several processes, or a model of the hub, is
not run: its imports and the options of its configs are looked up.
"""

import ast
import dataclasses
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config import load_config_from_file

import lowtide
from lowtide.cli.main import parse
from lowtide.cli.options import read_options
from lowtide.cli.training.launch import OF_LAUNCHER
from lowtide.cli.training.run_file import read_run_file
from lowtide.cli.training.train import options_of_command
from tests.support.pages.pages import DOCS, PAGES, command_lines, fenced, headings, run, write_my_module

MEMORY = sorted(page.relative_to(DOCS).as_posix() for page in (DOCS / "memory").glob("*.md"))
TRAINERS = (
    "token-classification",
    "sequence-classification",
    "pretrain",
    "dpo",
    "kto",
    "reward",
    "orpo",
    "cpo",
    "tpo",
    "bco",
    "grpo",
    "gmpo",
    "prm",
    "a2po",
    "rloo",
    "gkd",
    "gold",
    "distillation",
    "iw-opd",
    "sdft",
    "sdpo",
    "masked-lm",
    "replaced-token-detection",
    "seq2seq",
)
RUN = (
    *(f"{method}.md" for method in TRAINERS),
    *MEMORY,
    *("chains.md", "prefix-sharing.md", "rollouts.md", "rewards.md", "plan.md", "a-step.md", "own-losses.md"),
    *("own-methods.md", "own-techniques.md"),
)
"""Pages whose Python tests below run."""
ALONE = ("after-training.md",)
"""Pages whose Python runs, and leaves no trainer behind."""
LOOKED_UP = (
    *("checkpoints.md", "lengths.md", "migrating-from-trl.md", "more-than-one-device.md", "packing.md"),
    *("padding-free.md", "pipeline-parallel.md", "sequence-parallel.md", "tensor-parallel.md", "vision-language.md"),
)
"""Pages whose Python needs several processes, a model of the hub, or what the reader has."""
UNNAMED = {"step", "epoch"}
"""Of every log entry of a `transformers.Trainer`."""


def logged_names(page: str) -> set[str]:
    """The names in the first column of the table under "Logged"."""
    (section,) = re.findall(
        r"^## Logged\n(.*?)^## ", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    firsts = [line.split("|")[1] for line in section.splitlines() if line.startswith("|")]
    return {name for first in firsts for name in re.findall(r"`([^`]+)`", first)}


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch, tmp_path):
    """What an example writes goes to a folder of the test, and what it sets is taken back."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")


@pytest.mark.parametrize("method", TRAINERS)
def test_a_trainers_example_trains_and_logs_what_its_page_lists(method):
    trainer = run(f"{method}.md")["trainer"]
    assert trainer.state.global_step == trainer.args.max_steps
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(entries) == trainer.args.max_steps
    assert set().union(*entries) - UNNAMED == logged_names(f"{method}.md")


def test_the_arithmetic_of_prefix_sharing():
    run("prefix-sharing.md")


@pytest.mark.parametrize("page", MEMORY)
def test_a_memory_techniques_example(page):
    trainer = run(page).get("trainer")
    assert trainer is None or trainer.state.global_step == trainer.args.max_steps


@pytest.mark.parametrize("page", [*PAGES, "../README.md"])
def test_a_command_line_is_one(page):
    Path("ds.json").write_text('{"zero_optimization": {"stage": 2}}', encoding="utf-8")  # which one command names
    write_my_module()
    for words in command_lines((DOCS / page).read_text(encoding="utf-8")):
        if "--help" in words:
            with pytest.raises(SystemExit):
                parse(words)
        else:
            arguments = parse(words)
            read_options(arguments, getattr(arguments, "options", {}))


@pytest.mark.parametrize("page", [page for page in PAGES if fenced(page, "yaml")])
def test_settings_in_yaml_are_read_by_what_they_are_for(page):
    for block in fenced(page, "yaml"):
        Path("settings.yaml").write_text(block, encoding="utf-8")
        keys = yaml.safe_load(block).keys()
        if "distributed_type" in keys:
            assert load_config_from_file("settings.yaml").to_dict()["num_processes"] == 4
        elif "apiVersion" not in keys:  # of Kubernetes
            read = read_run_file(Path("settings.yaml"), options_of_command("sft").options)
            assert {*read} == keys - OF_LAUNCHER


@pytest.mark.parametrize("page", [*(page for page in PAGES if fenced(page, "bash")), "../README.md"])
def test_lines_for_a_shell_are_such(page):
    for block in fenced(page, "bash"):
        subprocess.run(["bash", "-n"], input=block, text=True, check=True)


@pytest.mark.parametrize("page", MEMORY)
def test_a_memory_technique_has_a_command_line(page):
    assert command_lines((DOCS / page).read_text(encoding="utf-8")), f"{page} has no command line"


def test_every_pages_python_is_run_or_looked_up():
    assert {page for page in PAGES if fenced(page, "python")} == {*RUN, *ALONE, *LOOKED_UP}


@pytest.mark.parametrize("page", ALONE)
def test_python_that_trains_nothing(page):
    run(page)


@pytest.mark.parametrize("page", [*LOOKED_UP, "../README.md"])
def test_names_and_options_of_python_that_is_not_run(page):
    for block in fenced(page, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and node.module == "lowtide":
                assert {each.name for each in node.names} <= {*lowtide.__all__}
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in lowtide.__all__:
                known = getattr(lowtide, node.func.id)
                if dataclasses.is_dataclass(known):
                    fields = {field.name for field in dataclasses.fields(known)}
                    assert {each.arg for each in node.keywords} <= fields, f"{page}: {node.func.id}"


@pytest.mark.parametrize("page", ["plan.md", "other-trainers.md", "predicted-and-measured.md"])
def test_the_command_lines_of_answers(page):
    lines = re.findall(r"^    lowtide (.*)$", (DOCS / page).read_text(encoding="utf-8"), re.MULTILINE)
    assert lines, f"{page} has no command line"
    for line in lines:
        arguments = parse(shlex.split(line))
        read_options(arguments, getattr(arguments, "options", {}))


@pytest.mark.slow
@pytest.mark.parametrize("page", ["rollouts.md", "rewards.md"])
def test_the_examples_of_writing_and_rewarding(page):
    trainer = run(page)["trainer"]
    assert trainer.state.global_step == trainer.args.max_steps


def test_a_loss_of_ones_own_is_trained_with():
    write_my_module()
    trainer = run("own-losses.md")["trainer"]
    assert trainer.args.loss_type == ["my_module.my_loss", "sft"]
    assert trainer.state.global_step == trainer.args.max_steps


def test_a_method_of_ones_own_is_trained_with():
    write_my_module()
    trainer = run("own-methods.md")["trainer"]
    assert trainer.args.gamma == 1
    assert trainer.state.global_step == trainer.args.max_steps


def test_a_technique_of_ones_own_is_trained_with():
    write_my_module()
    trainer = run("own-techniques.md")["trainer"]
    assert "activations in bfloat16" in [each.name for each in trainer.techniques]
    assert trainer.state.global_step == trainer.args.max_steps


def test_what_the_example_of_a_step_prints_is_on_its_page(capsys):
    run("a-step.md")
    assert capsys.readouterr().out == "".join(fenced("a-step.md", "text"))


def test_the_plan_of_its_page():
    assert run("plan.md")["plan"].settings == {"gradient_checkpointing": False}


def test_every_page_is_listed_and_every_link_leads_somewhere():
    listed = (DOCS / "index.md").read_text(encoding="utf-8") + (DOCS / "memory.md").read_text(encoding="utf-8")
    for page in PAGES:
        assert page == "index.md" or f"({page})" in listed
    for page in DOCS.rglob("*.md"):
        for target, heading in links(page):
            linked = page.parent / target if target else page
            assert linked.exists(), f"{page.name}: {target}"
            assert not heading or heading in headings(linked), f"{page.name}: {target}#{heading}"


def links(page: Path) -> list[tuple[str, str]]:
    """The files that a page links to, and their headings."""
    return re.findall(r"\]\(([^)#:]*)(?:#([^):]*))?\)", page.read_text(encoding="utf-8"))
