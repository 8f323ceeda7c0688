"""Scripts written for TRL train with one import changed: their names, their calls, their command lines.

`scripts/` has our own scripts, with the calls that TRL's scripts and examples make. Each runs here on a tiny model;
those of the four methods run with TRL itself too, to the same losses.
"""

import json
import math
import runpy
import sys
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import HfApi, ModelCard

from lowtide.demo.data import make_questions, write_rows
from lowtide.demo.model import save
from tests.support.marks import slow_but

SCRIPTS = Path(__file__).parent / "scripts"
FAST = "--max_steps 2 --use_cpu --report_to none --disable_tqdm true --logging_steps 1 --learning_rate 1e-3"
PEFT = ["--use_peft", "--lora_r", "4", "--lora_target_modules", "all-linear"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save(folder, seed=0)
    return folder


def folder_of(tmp_path_factory, name, make):
    """A dataset's folder with a training and a test file, as on the hub."""
    folder = tmp_path_factory.mktemp(name)
    questions = make_questions(10, seed=0)[0]
    write_rows([make(each) for each in questions[:32]], folder / "train.jsonl")
    write_rows([make(each) for each in questions[32:40]], folder / "test.jsonl")
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """For each form of rows a dataset's folder."""

    def pair(question):
        *prompt, answer = question.messages
        wrong = {**answer, "content": answer["content"].replace("1", "2") + " 7"}
        return prompt, [answer], [wrong]

    def talk(question):
        return {"messages": question.messages}

    def preference(question):
        return dict(zip(("prompt", "chosen", "rejected"), pair(question), strict=True))

    def implicit(question):
        prompt, chosen, rejected = pair(question)
        return {"chosen": prompt + chosen, "rejected": prompt + rejected}

    def completion(question):
        return dict(zip(("prompt", "completion"), pair(question), strict=False))

    def label(question):
        return {**completion(question), "label": len(question.answer) % 2 == 0}

    forms = {"talk": talk, "preference": preference, "implicit": implicit, "completion": completion, "label": label}
    return {name: folder_of(tmp_path_factory, name, make) for name, make in forms.items()}


def run(script, words, monkeypatch, library="lowtide"):
    """Runs a script as `python script.py WORDS` would; gives its globals."""
    path = SCRIPTS / f"{script}.py"
    if library != "lowtide":
        text = path.read_text().replace("from lowtide import", f"from {library} import")
        path = Path(words[words.index("--output_dir") + 1]).with_suffix(".py")
        path.write_text(text)
    monkeypatch.setattr(sys, "argv", [str(path), *map(str, words)])
    return runpy.run_path(str(path), run_name="__main__")


def losses(trainer):
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


ROWS_OF = {"sft": "talk", "dpo": "preference", "kto": "label", "reward": "preference"}
"""The form of rows of each script that takes TRL's command line."""


@pytest.mark.slow
@pytest.mark.parametrize("script", slow_but(["sft"], ROWS_OF))
def test_a_script_of_trls_commands_trains_pushes_and_resumes(script, model, data, tmp_path, monkeypatch):
    uploads = []

    def upload(self, **given):
        uploads.append(given)
        done = Future()
        done.set_result(None)
        return done

    monkeypatch.setattr(HfApi, "create_repo", lambda self, name, **_: SimpleNamespace(repo_id="someone/tiny"))
    monkeypatch.setattr(HfApi, "upload_folder", upload)
    file = tmp_path / "run.yaml"
    file.write_text(f"env:\n  LOWTIDE_MIGRATION: {script}\neval_strategy: steps\neval_steps: 2\nsave_steps: 2\n")
    monkeypatch.setenv("LOWTIDE_MIGRATION", "")
    words = ["--config", file, "--model_name_or_path", model, "--dataset_name", data[ROWS_OF[script]]]
    words += ["--output_dir", tmp_path / "run", *FAST.split(), *PEFT]
    words += ["--lora_task_type", "SEQ_CLS"] if script == "reward" else []
    pushing = ["--push_to_hub", "--hub_model_id", "someone/tiny"]
    trainer = run(script, [*words, *pushing], monkeypatch)["trainer"]
    assert len(losses(trainer)) == 2
    assert all(map(math.isfinite, losses(trainer)))
    assert any("eval_loss" in log for log in trainer.state.log_history)
    assert (tmp_path / "run" / "adapter_model.safetensors").is_file()
    assert uploads
    assert ModelCard.load(tmp_path / "run" / "README.md").data.to_dict()["library_name"] == "peft"
    checkpoint = str(tmp_path / "run" / "checkpoint-2")
    again = [*words, "--resume_from_checkpoint", checkpoint, "--max_steps", "3"]
    assert run(script, again, monkeypatch)["trainer"].state.global_step == 3


@pytest.mark.slow
@pytest.mark.parametrize("script", slow_but([*ROWS_OF][:1], ROWS_OF))
def test_the_losses_are_those_of_the_same_script_with_trl(script, model, data, tmp_path, monkeypatch):
    pytest.importorskip("trl", reason="the comparison needs the bench extra (trl)")
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
    found = []
    for library in ("lowtide", "trl"):
        words = ["--model_name_or_path", model, "--dataset_name", data[ROWS_OF[script]], "--bf16", "false"]
        words += ["--output_dir", tmp_path / library, *FAST.split(), "--save_strategy", "no"]
        words += ["--turns", "whole"] if library == "lowtide" and script != "sft" else []  # as TRL takes answers
        found.append(losses(run(script, words, monkeypatch, library)["trainer"]))
    assert found[0] == pytest.approx(found[1], rel=2e-3)


def test_a_mixture_trains(model, data, tmp_path, monkeypatch):
    file = tmp_path / "run.yaml"
    entries = [{"path": str(data["talk"]), "fraction": 0.5}, {"path": str(data["talk"]), "fraction": 0.5}]
    file.write_text(json.dumps({"datasets": entries, "test_split_size": 4, "eval_strategy": "steps", "eval_steps": 1}))
    words = ["--config", file, "--model_name_or_path", model, "--output_dir", tmp_path / "run", *FAST.split()]
    trainer = run("sft", words, monkeypatch)["trainer"]
    assert len(trainer.train_dataset) + len(trainer.eval_dataset) == 64


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "rows"),
    slow_but([("orpo", "preference")], [("orpo", "preference"), ("cpo", "implicit"), ("bco", "label")]),
)
def test_scripts_with_transformers_parser_train(script, rows, model, data, tmp_path, monkeypatch):
    words = ["--model_name_or_path", model, "--dataset_name", data[rows], "--output_dir", tmp_path / "run"]
    trainer = run(script, [*words, *FAST.split(), *PEFT], monkeypatch)["trainer"]
    assert len(losses(trainer)) == 2


def test_a_base_model_is_made_to_chat_and_its_completions_are_logged(model, data, tmp_path, monkeypatch):
    found = run("chat_model", [model, data["completion"], tmp_path], monkeypatch)
    table = found["completions"].table
    assert [row[0] for row in table] == ["1", "1", "2", "2"]
    assert all(isinstance(text, str) for _, _, text in table)
    assert (tmp_path / "bema" / "model.safetensors").is_file()
    assert (tmp_path / "model.safetensors").is_file()


@pytest.mark.slow
def test_rows_reshaped_by_hand_train(model, data, tmp_path, monkeypatch):
    found = run("rows_by_hand", [model, data["implicit"], tmp_path], monkeypatch)
    assert found["trainer"].state.global_step == 2
    assert len(found["singles"]) == 64
    assert (tmp_path / "model.safetensors").is_file()


@pytest.mark.slow
def test_a_reference_of_the_scripts_own_follows_the_policy(model, data, tmp_path, monkeypatch):
    found = run("own_reference", [model, data["preference"], tmp_path], monkeypatch)
    start = found["create_reference_model"](found["AutoModelForCausalLM"].from_pretrained(model))
    moved = dict(found["ref_model"].named_parameters())
    name = "model.layers.0.mlp.up_proj.weight"
    assert not moved[name].equal(start.get_parameter(name))
    assert found["trainer"].state.global_step == 1
