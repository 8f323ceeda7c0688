"""Several processes, the environment of a run file, older options, and the names of outputs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lowtide import SFTConfig
from lowtide.cli.main import main
from lowtide.cli.training.launch import launch_command, prepare, split
from lowtide.renamed import REPLACED

GPUS = "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nnum_processes: 2\nuse_cpu: false\n"
CPUS = "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_CPU\nnum_processes: 2\nuse_cpu: true\n"


@pytest.fixture(autouse=True)
def own_environment(monkeypatch):
    fsdp = ("ACCELERATE_USE_FSDP", "FSDP_VERSION", "FSDP_RESHARD_AFTER_FORWARD")
    for name in ("LOCAL_RANK", "ACCELERATE_USE_CPU", "LOWTIDE_TEST", "LOWTIDE_ACCELERATE_CONFIG", *fsdp):
        monkeypatch.setenv(name, "")  # put back afterwards
        monkeypatch.delenv(name)


def test_the_launchers_options_are_taken_out_of_the_command_line():
    words = ["sft", "--num_processes=2", "--model", "m", "--accelerate_config", "a.yaml", "--packing"]
    assert split(words) == (
        ["sft", "--model", "m", "--packing"],
        {"num_processes": "2", "accelerate_config": "a.yaml"},
    )


def test_one_process_needs_no_launcher_and_several_get_one(tmp_path):
    assert launch_command(["sft"], {"num_processes": "1"}) is None
    command = launch_command(["sft", "--model", "m"], {"num_processes": "4"})
    assert command is not None
    assert command[1:3] == ["-m", "lowtide.compat.launching"]
    assert command[command.index("--num_processes") + 1] == "4"
    assert command[-5:] == ["-m", "lowtide", "sft", "--model", "m"]
    file = tmp_path / "gpus.yaml"
    file.write_text(GPUS)
    command = launch_command(["sft"], {"accelerate_config": str(file)})
    assert command is not None
    assert command[3:5] == ["--config_file", str(file)]


def test_a_config_for_processors_starts_as_many_processes_as_it_says(tmp_path):
    file = tmp_path / "cpus.yaml"
    file.write_text(CPUS)  # accelerate itself would start one
    command = launch_command(["sft"], {"accelerate_config": str(file)})
    assert command is not None
    assert command[command.index("--num_processes") + 1] == "2"
    assert os.environ["ACCELERATE_USE_CPU"] == "true"


@pytest.mark.parametrize("name", ["fsdp1", "fsdp2"])
def test_a_short_name_shards_over_so_many_processes(name):
    command = launch_command(["sft"], {"accelerate_config": name, "num_processes": 4})
    assert command is not None
    assert "--config_file" not in command
    assert command[command.index("--num_processes") + 1] == "4"
    assert os.environ["ACCELERATE_USE_FSDP"] == "true"
    assert os.environ["FSDP_VERSION"] == name[-1]


def test_a_config_for_fsdp_shards_on_processors_too(tmp_path):
    file = tmp_path / "fsdp.yaml"
    text = "distributed_type: FSDP\nnum_processes: 2\nfsdp_config:\n  fsdp_version: 2\n"
    file.write_text(text + "  fsdp_reshard_after_forward: false\nuse_cpu: true\n")
    command = launch_command(["sft"], {"accelerate_config": str(file)})
    assert command is not None
    assert command[command.index("--num_processes") + 1] == "2"
    wanted = {"ACCELERATE_USE_CPU": "true", "ACCELERATE_USE_FSDP": "true", "FSDP_RESHARD_AFTER_FORWARD": "false"}
    assert wanted.items() <= os.environ.items()
    file.write_text(text)
    command = launch_command(["sft"], {"accelerate_config": str(file)})
    assert command is not None
    assert command[3:5] == ["--config_file", str(file)]


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"num_processes": "two"}, "num_processes is 'two'; it must be a whole number from 1 to"),
        ({"num_processes": "1000000"}, "num_processes is '1000000'; it must be a whole number from 1 to"),
        ({"num_processes": "9" * 5000}, "num_processes is '99999999"),
        ({"num_processes": "0"}, "num_processes is '0'"),
        ({"accelerate_config": "absent.yaml"}, "there is no file 'absent.yaml'. `accelerate config` writes one"),
        ({"accelerate_config": "zero3"}, "'zero3', which is no file: .* --deepspeed FILE"),
        ({"accelerate_config": "TP"}, "is for TP, which is not built"),
        ({"accelerate_config": "fsdp2"}, "needs the number of processes to shard over: add --num_processes N"),
        ({"accelerate_config": "other"}, "has no `distributed_type`"),
    ],
)
def test_what_cannot_be_launched_is_refused(tmp_path, wanted, message):
    texts = {"TP": "distributed_type: TP\nnum_processes: 2\n", "other": "a: 1\n"}
    name = wanted.get("accelerate_config")
    if name in texts:
        (tmp_path / "a.yaml").write_text(texts[name])
        wanted = {"accelerate_config": str(tmp_path / "a.yaml")}
    with pytest.raises(ValueError, match=message):
        launch_command(["sft"], wanted)


def test_a_run_file_may_name_them_and_set_the_environment(tmp_path, monkeypatch):
    file = tmp_path / "run.yaml"
    file.write_text("env: {LOWTIDE_TEST: 3}\nnum_processes: 2\n")
    started = []
    monkeypatch.setattr(os, "execv", lambda path, command: started.append(command))
    words = ["sft", "--config", str(file)]
    prepare(words)
    assert os.environ["LOWTIDE_TEST"] == "3"
    [command] = started
    assert command[-3:] == words
    monkeypatch.setenv("LOCAL_RANK", "0")  # under a launcher already
    assert prepare(words) == words
    assert len(started) == 1


def test_the_environment_is_set_and_a_run_repeats_with_the_file(sft, tmp_path, model, data):
    file = tmp_path / "with_env.yaml"
    file.write_text(f"env:\n  LOWTIDE_TEST: here\nmodel: {model}\ndataset: {data}\noutput_dir: {tmp_path / 'run'}\n")
    status, _, err = sft("--config", str(file))
    assert status == 0, err
    assert os.environ["LOWTIDE_TEST"] == "here"
    assert "LOWTIDE_TEST" not in (tmp_path / "run" / "run.yaml").read_text()  # it may hold secrets
    file.write_text("env: [1]\n")
    status, _, err = sft("--config", str(file))
    assert status == 2
    assert "`env` is [1]; it must be a mapping" in err


@pytest.mark.slow
def test_two_processes_train_together(model, data, tmp_path):
    words = ["sft", "--model", model, "--dataset", data, "--output_dir", tmp_path / "run", "--num_processes", 2]
    words += [
        "--max_steps",
        2,
        "--use_cpu",
        "--disable_tqdm",
        "--per_device_train_batch_size",
        2,
        "--report_to",
        "none",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[3] / "src")}
    done = subprocess.run(
        [sys.executable, "-m", "lowtide", *map(str, words), "--memory_report", str(tmp_path / "memory.json")],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("The model is in") == 1
    assert f"--config {tmp_path / 'run' / 'run.yaml'} --num_processes 2" in done.stdout
    state = json.loads((tmp_path / "run" / "checkpoint-2" / "trainer_state.json").read_text())
    assert state["global_step"] == 2
    assert state["epoch"] == pytest.approx(2 * 2 * 2 / 64)  # 64 rows; two ranks take 2 each in a step


@pytest.mark.parametrize("name", ["rpo_alpha", "evaluation_strategy", "padding_value"])
def test_an_option_of_older_versions_says_what_replaced_it(name, sft, tmp_path):
    said = REPLACED[name]
    status, _, err = sft(f"--{name}", "1")
    assert status == 2
    assert f"there is no option --{name}, an option of older versions: {said}" in " ".join(err.split())
    file = tmp_path / "old.yaml"
    file.write_text(f"{name}: 1\n")
    assert said in " ".join(sft("--config", str(file))[2].split())
    with pytest.raises(TypeError, match="an option of older versions") as error:
        SFTConfig(**{name: 1})
    assert str(error.value).endswith(said)


@pytest.mark.slow
def test_folders_are_output_dir_and_older_names_are_accepted(model, data, tmp_path, capsys):
    rows = [str(data), "--tokenizer", str(model), "--max_length", "16"]
    for name in ("output_dir", "out"):
        assert main(["lengths", *rows, f"--{name}", str(tmp_path / name)]) == 0
        assert (tmp_path / name / "lengths.html").is_file()
    given = ["estimate", "sft", "--model", str(model), "--dataset", str(data), "--max_steps", "1", "--use_cpu"]
    assert main([*given, "--output", str(tmp_path / "found" / "estimate.json")]) == 0
    assert json.loads((tmp_path / "found" / "estimate.json").read_text())["phases"]
