"""`lowtide sft`, from words to a saved model."""

import contextlib
import json
import re
import resource

import pytest
import torch
import yaml
from safetensors.torch import load_file

from lowtide.cli.main import main
from lowtide.cli.training import train
from lowtide.cli.training.adapters import AdapterOptions
from lowtide.demo.data import Question, write_rows
from lowtide.demo.tagging import save_tagger, tagged_rows
from lowtide.step.rank_sync import OutOfMemory


def weights(folder) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_a_run_saves_model_tokenizer_report_and_all_its_options(sft, tmp_path):
    run, report = tmp_path / "run", tmp_path / "reports" / "memory.json"
    status, out, err = sft("--assistant-only-loss", "--learning_rate=1e-3", "--memory_report", str(report))
    assert status == 0, err
    assert f"this repeats the run: lowtide sft --config {run / 'run.yaml'}" in out
    card = (run / "README.md").read_text()
    assert "lowtide sft --max_steps 2 --use_cpu" in card
    assert "--dataset train.jsonl" in card
    assert str(run) not in card
    assert (run / "model.safetensors").is_file()
    assert (run / "tokenizer.json").is_file()
    measured = json.loads(report.read_text())
    assert measured["steps"] == 2
    assert measured["states_bytes"] == sum(measured["states"].values())
    assert measured["peak_bytes"] > 0
    options = yaml.safe_load((run / "run.yaml").read_text())
    assert (options["learning_rate"], options["assistant_only_loss"], options["weight_decay"]) == (1e-3, True, 0.0)


@pytest.mark.slow
def test_the_run_file_of_a_run_repeats_it(sft, tmp_path):
    assert sft("--learning_rate", "1e-3")[0] == 0
    first = weights(tmp_path / "run")
    assert sft("--config", str(tmp_path / "run" / "run.yaml"), "--output_dir", str(tmp_path / "again"))[0] == 0
    again = weights(tmp_path / "again")
    assert first.keys() == again.keys()
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_the_command_line_wins_over_the_run_file(sft, tmp_path, model, data):
    file = tmp_path / "given.yaml"
    file.write_text(f"model: {model}\ndataset: {data}\nlearning_rate: 5e-4\nseed: 7\noutput_dir: {tmp_path / 'run'}\n")
    assert sft("--config", str(file), "--seed", "8")[0] == 0
    options = yaml.safe_load((tmp_path / "run" / "run.yaml").read_text())
    assert (options["learning_rate"], options["seed"]) == (5e-4, 8)


def test_an_exhausted_memory_is_one_message(sft, monkeypatch):
    def exhausted(self, *args, **kwargs):
        raise OutOfMemory("out of memory in backward: keep less")

    monkeypatch.setattr("lowtide.SFTTrainer.train", exhausted)
    status, out, err = sft()
    assert (status, "error: out of memory in backward: keep less" in err) == (2, True)
    assert "Traceback" not in out + err


def test_an_adapter_is_trained_and_saved_alone(sft, tmp_path):
    status, _, err = sft("--use_peft", "--lora_r", "4", "--lora_target_modules", "q_proj", "v_proj")
    assert status == 0, err
    adapter = json.loads((tmp_path / "run" / "adapter_config.json").read_text())
    assert (adapter["r"], adapter["lora_alpha"], adapter["lora_dropout"]) == (4, 32, 0.05)
    assert sorted(adapter["target_modules"]) == ["q_proj", "v_proj"]
    assert not (tmp_path / "run" / "model.safetensors").exists()


@pytest.mark.parametrize("given", [{"lora_target_modules": "all-linear-experts"}, {"lora_target_parameters": ["a.b"]}])
def test_adapters_of_experts_have_no_dropout_unless_it_is_given(given):
    for dropout in (None, 0.1):
        config = AdapterOptions(use_peft=True, lora_dropout=dropout, **given).peft_config()
        assert config is not None
        assert config.lora_dropout == (dropout or 0.0)


def test_one_target_module_is_a_name_and_no_pattern(sft, tmp_path):
    assert sft("--use_peft", "--lora_target_modules", "q_proj")[0] == 0
    assert json.loads((tmp_path / "run" / "adapter_config.json").read_text())["target_modules"] == ["q_proj"]


@pytest.mark.slow
def test_an_evaluation_set_is_evaluated(sft, data, tmp_path):
    status, out, err = sft("--eval_dataset", str(data), "--save_steps", "2", steps=2)
    assert status == 0, err
    assert "eval_loss 3." in out
    state = json.loads((tmp_path / "run" / "checkpoint-2" / "trainer_state.json").read_text())
    evaluated = [entry["step"] for entry in state["log_history"] if "eval_loss" in entry]
    assert evaluated == [2]  # within training, where trackers still listen


@pytest.mark.slow
def test_a_run_that_has_ended_is_evaluated_again(sft, data):
    given = ("--eval_dataset", str(data), "--save_steps", "2")
    first = sft(*given, steps=2)[1]
    status, again, err = sft(*given, "--resume_from_checkpoint", "latest", steps=2)
    assert status == 0, err
    loss = re.search(r"eval_loss \S+", first)[0]
    assert loss in again


def test_resuming_from_the_latest_checkpoint_ends_where_one_run_would(sft, tmp_path):
    every = ("--save_steps", "2", "--lr_scheduler_type", "constant", "--learning_rate", "1e-3")
    assert sft(*every, "--output_dir", str(tmp_path / "whole"), steps=4)[0] == 0
    assert "No checkpoint" in sft(*every, "--resume_from_checkpoint", "latest", steps=2)[2]
    status, _, err = sft(*every, "--resume_from_checkpoint", "latest", steps=4)
    assert (status, "No checkpoint" in err) == (0, False)
    whole, resumed = weights(tmp_path / "whole"), weights(tmp_path / "run")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


@pytest.mark.slow
def test_a_full_disk_is_said_and_leaves_the_checkpoints_before_whole(sft, tmp_path):
    assert sft("--save_steps", "2", steps=2)[0] == 0
    checkpoint = tmp_path / "run" / "checkpoint-2"
    before = {path.name: path.read_bytes() for path in checkpoint.iterdir()}
    with largest_file(500_000):
        status, out, err = sft("--save_steps", "2", "--resume_from_checkpoint", "latest", steps=4)
    assert status == 2, out
    assert f"step 4: the checkpoint could not be written to {tmp_path / 'run'}" in err
    assert "File too large" in err
    assert {path.name: path.read_bytes() for path in checkpoint.iterdir()} == before
    assert {path.name for path in (tmp_path / "run").glob("*checkpoint*")} == {"checkpoint-2"}
    assert not (tmp_path / "run" / ".saving").exists()


def test_a_final_model_that_cannot_be_written_is_said(sft, tmp_path):
    with largest_file(500_000):
        status, _, err = sft("--save_strategy", "no")
    assert (status, f"the model could not be written to {tmp_path / 'run'}" in err) == (2, True)


@contextlib.contextmanager
def largest_file(size: int):
    """Files end at `size` bytes, as they would on a disk with no more room."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", ""], "--model is missing: give it, or `model:` in the file of --config"),
        (["--dataset", "nowhere.jsonl"], "there is no file or folder 'nowhere.jsonl'"),
        (["--model", "./nowhere"], "'./nowhere'"),
        (["--max_length", "0"], "max_length"),
        (["--packing", "--max_length", "none"], "packing=True needs max_length"),
        (["--tokens_per_microbatch", "5"], "row"),
        (["--learning_rate", "fast"], "--learning_rate='fast' must be a number"),
        (["--lora_r", "4"], "lora_r has no effect without use_peft: add --use_peft, or drop it"),
        (["--load_in_4bit", "--load_in_8bit", "--use_peft"], "load_in_4bit and load_in_8bit exclude each other"),
        (["--load_in_4bit"], "add --use_peft"),
        (["--config", "nowhere.yaml"], "there is no file 'nowhere.yaml'"),
        (["--resume_from_checkpoint", "nowhere"], "'nowhere' is no checkpoint folder. There is none in"),
        (["--completion_only_loss", "true"], "completion_only_loss=True needs 'prompt' and 'completion'"),
        (["--deepspeed", "zero3.json"], "deepspeed"),
    ],
)
def test_what_cannot_work_is_one_message(sft, words, message):
    status, out, err = sft(*words)
    assert status == 2, out
    assert message in err
    assert "error: " in err
    assert "Traceback" not in out + err


def test_a_broken_line_is_named_with_its_file(sft, tmp_path):
    file = tmp_path / "broken.jsonl"
    file.write_text('{"text": "one"}\n{"text": \n')
    status, _, err = sft("--dataset", str(file))
    assert (status, f"{file}, line 2" in err) == (2, True)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"foo": 1}', "has the columns 'foo', and none of these is among them"),
        ('{"messages": []}', "row 0 (the first is 0): 'messages' is empty"),
        ('{"messages": [{"role": "user", "content": null}]}', "messages[0]['content'] is null; it must be a string"),
        ('{"input_ids": [1, 999]}', "row 0 (the first is 0): input_ids holds 999, outside the vocabulary"),
        ('{"input_ids": [1, 2], "labels": [-100, -100]}', "has nothing to train on: every row was dropped"),
    ],
)
def test_a_bad_row_is_named_with_its_file(sft, tmp_path, row, message):
    file = tmp_path / "[bad].jsonl"
    file.write_text(row + "\n")
    status, _, err = sft("--dataset", str(file))
    assert status == 2
    assert err.count("error: ") == 1
    assert f"error: {file}" in err
    assert message in err


def test_a_bad_evaluation_row_is_named_with_its_file(sft, tmp_path):
    file = tmp_path / "bad.jsonl"
    file.write_text('{"messages": []}\n')
    assert f"error: {file}, row 0" in sft("--eval_dataset", str(file))[2]


def test_an_output_folder_that_cannot_be_written_is_said_before_any_work(sft, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setattr(train.RunOptions, "load", lambda *args, **kwargs: pytest.fail("work was begun"))
    status, _, err = sft("--output_dir", str(tmp_path / "file" / "run"))
    assert status == 2
    assert (
        f"output_dir='{tmp_path}/file/run' cannot be written: no folder can be made in '{tmp_path}/file' (Not a" in err
    )


@pytest.mark.parametrize("name", ["model", "dataset", "eval_dataset"])
def test_an_output_folder_that_the_run_reads_from_is_refused(sft, tmp_path, monkeypatch, name):
    (tmp_path / "there").mkdir()
    monkeypatch.setattr(train.RunOptions, "load", lambda *args, **kwargs: pytest.fail("work was begun"))
    status, _, err = sft(f"--{name}", str(tmp_path / "there"), "--output_dir", str(tmp_path / "there/"))
    assert status == 2
    assert f"is the folder of {name} too, whose files the run would write over: name another output_dir" in err
    assert not [*(tmp_path / "there").iterdir()]


def test_an_empty_output_folder_is_refused(sft):
    status, _, err = sft("--output_dir", "")
    assert (status, "output_dir is empty" in err) == (2, True)


def test_a_budget_that_is_empty_is_no_amount(sft):
    status, _, err = sft("--memory_budget", "")
    assert (status, "memory budget '' is no amount of memory" in err) == (2, True)


@pytest.mark.slow
def test_several_datasets_train_as_one_file_of_them_would(sft, tmp_path, model, data):
    lines = data.read_text().splitlines(keepends=True)
    one, two, both = (tmp_path / name for name in ("one.jsonl", "two.jsonl", "both.jsonl"))
    one.write_text("".join(lines[:6]))
    two.write_text("".join(lines[6:]))
    both.write_text("".join(lines[:6] + lines[6:8]))
    file = tmp_path / "given.yaml"
    entries = [str(one), {"path": str(two), "split": "train[:2]", "columns": ["messages"]}]
    file.write_text(yaml.safe_dump({"model": str(model), "datasets": entries, "output_dir": str(tmp_path / "mixed")}))
    mixed = sft("--config", str(file))
    assert mixed[0] == 0, mixed[2]
    assert sft("--dataset", str(both), "--output_dir", str(tmp_path / "one"))[0] == 0
    ours, theirs = weights(tmp_path / "mixed"), weights(tmp_path / "one")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert yaml.safe_load((tmp_path / "mixed" / "run.yaml").read_text())["datasets"] == entries


def test_a_share_of_a_mixture_is_kept_for_evaluation(sft, tmp_path, model, data):
    words = ["--model", str(model), "--output_dir", str(tmp_path / "run"), "--config", str(tmp_path / "run.yaml")]
    (tmp_path / "run.yaml").write_text("test_split_size: 0.25\n")
    entry = json.dumps({"path": str(data), "weight": 2})
    status, out, err = sft(*words, "--datasets", str(data), entry.replace("weight", "weigth"))
    assert (status, "datasets[1] has the key 'weigth'; did you mean" in err) == (2, True)
    status, out, err = sft(*words, "--datasets", entry)
    assert status == 0, err
    assert "eval_loss" in out
    assert sft(*words, "--dataset", str(data))[0] == 0
    assert yaml.safe_load((tmp_path / "run" / "run.yaml").read_text())["test_split_size"] == 0.25
    status, _, err = sft(*words, "--dataset", str(data), "--eval_dataset", str(data))
    assert (status, "eval_dataset names others: give one of the two" in err) == (2, True)


def test_errors_name_the_file(sft, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "1 + 1 = 2"}\n')
    status, _, err = sft("--dataset", str(rows), "--tokens_per_microbatch", "2")
    assert status == 2
    assert f"below the longest row of {rows}, " in err


@pytest.mark.parametrize("method", ["dpo", "reward"])
def test_a_run_file_names_its_method(method, model, tmp_path, capsys):
    rows = tmp_path / "pairs.jsonl"
    rows.write_text('{"prompt": "1 + 1", "chosen": " = 2", "rejected": " = 3"}\n' * 4)
    given = {"model": model, "dataset": rows, "output_dir": tmp_path / "run", "max_steps": 1}
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    assert main([method, *words, "--use_cpu", "--disable_tqdm"]) == 0
    capsys.readouterr()
    assert f"`lowtide {method} --config`" in (tmp_path / "run" / "run.yaml").read_text()


@pytest.mark.slow
def test_token_classification_runs_from_words_and_a_run_file(tmp_path, capsys):
    save_tagger(tmp_path / "base", seed=0)
    questions = [Question(a, b) for a in range(3) for b in range(20, 24)]
    write_rows((row for each in questions for row in tagged_rows(each)), tmp_path / "rows.jsonl")
    weights_given = '{"B-LARGER": 2.0, "O": 0.5}'
    given = {"model": "base", "dataset": "rows.jsonl", "eval_dataset": "rows.jsonl", "output_dir": "run"}
    words = [word for name, value in given.items() for word in (f"--{name}", str(tmp_path / value))]
    words += ["--max_steps", "2", "--use_cpu", "--disable_tqdm", "--eval_strategy", "steps"]
    assert main(["token-classification", *words, "--class_weights", weights_given, "--label_all_tokens"]) == 0
    said = capsys.readouterr().out
    assert "eval_f1" in said
    options = yaml.safe_load((tmp_path / "run" / "run.yaml").read_text())
    assert options["class_weights"] == {"B-LARGER": 2.0, "O": 0.5}
    assert options["label_all_tokens"] is True
    first = weights(tmp_path / "run")
    again = ["--config", str(tmp_path / "run" / "run.yaml"), "--output_dir", str(tmp_path / "again")]
    assert main(["token-classification", *again]) == 0
    assert all(torch.equal(each, first[name]) for name, each in weights(tmp_path / "again").items())
    balanced = ["--class_weights", "balanced", "--output_dir", str(tmp_path / "balanced")]
    assert main(["token-classification", *words, *balanced]) == 0
    other = weights(tmp_path / "balanced")
    assert not torch.equal(other["classifier.weight"], first["classifier.weight"])


def test_a_checkpoint_at_the_end_of_the_run_says_that_nothing_was_trained(sft, tmp_path):
    sft("--save_steps", "1")
    status, out, _ = sft("--resume_from_checkpoint", "latest")
    assert status == 0
    assert "Nothing was trained: " in out


def test_an_output_folder_in_the_home_folder_is_written_there(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert train.output_folder("~/run", None, "sft") == str(tmp_path / "run")
    assert train.output_folder(None, "hub/name", "sft") == "name-sft"
