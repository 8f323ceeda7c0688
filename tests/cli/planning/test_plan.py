"""`lowtide plan` and `lowtide estimate`, from words to a run file that runs below its budget."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from safetensors import safe_open
from transformers import AutoConfig, GPT2Config

from lowtide.cli.main import main
from lowtide.memory.allocators.measure import resident_bytes
from lowtide.planner.pieces import Searches
from lowtide.planner.tracing.fake_run import FakeRun
from tests.support.marks import slow_but

MIB = 1 << 20
FEW = (
    *("--gradient_checkpointing", "true", "--checkpointing_policy", "full", "--checkpointing_every", "1"),
    *("--activation_offloading", "false"),
)
"""With all of them set there is little to choose, and to trace."""
STREAMED_WHOLE = [("meta-llama/Meta-Llama-3-8B", "2048x1", "float32"), ("Qwen/Qwen2.5-7B", "1024x1", "float32")]
PAST = "go past the 8 positions that the model was made for"


@pytest.fixture
def plan(model, data, capsys):
    """Runs `lowtide plan sft` on the tiny model and data; gives status, standard output and error."""

    def run(*words: str, command: str = "plan", method: str = "sft") -> tuple[int, str, str]:
        always = [command, method]
        for name, value in {"model": model, "dataset": data}.items():
            if f"--{name}" not in words:
                always += [f"--{name}", str(value)]
        status = main([*always, *([] if {"--device", "--devices"} & {*words} else ["--device", "cpu"]), *words])
        return status, *capsys.readouterr()

    return run


@pytest.mark.slow
def test_the_run_file_runs_below_the_budget(plan, tmp_path, model, data):
    file, report = tmp_path / "plans" / "plan.yaml", tmp_path / "memory.json"
    budget = resident_bytes() + 300 * MIB
    status, out, err = plan("--budget", str(budget), "--output", str(file), "--max_steps", "2", "--use_cpu")
    assert status == 0, err
    assert f"lowtide sft --config {file}" in " ".join(out.split())
    settings = yaml.safe_load(file.read_text())
    assert settings == {"model": str(model), "dataset": str(data), "max_steps": 2, "use_cpu": True} | {
        "gradient_checkpointing": False
    }
    words = ["sft", "--config", file, "--output_dir", tmp_path / "run", "--memory_report", report, "--disable_tqdm"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-m", "lowtide", *map(str, words)], capture_output=True, env=environment)
    assert done.returncode == 0, done.stderr.decode()
    assert json.loads(report.read_text())["peak_bytes"] < budget


@pytest.mark.slow
def test_a_planned_run_trains_the_adapters_of_all_layers(plan, sft, tmp_path):
    adapters = ("--use_peft", "--lora_target_modules", "all-linear", "--lora_r", "2")
    file, trained = tmp_path / "plan.yaml", {}
    few = (*FEW, "--mlp_tile_tokens", "none", "--optimizer_in_backward", "false")
    status, _, err = plan("--budget", "64GiB", "--output", str(file), *adapters, *few)
    assert status == 0, err
    for name, words in {
        "planned": ("--config", str(file)),
        "budget": ("--memory_budget", "64GiB", *adapters, *few),
        "plain": (*adapters, *few),
    }.items():
        status, _, err = sft(*words, "--output_dir", str(tmp_path / name), steps=1)
        assert status == 0, err
        with safe_open(tmp_path / name / "adapter_model.safetensors", "pt") as saved:
            trained[name] = sorted(saved.keys())
    assert trained["planned"] == trained["budget"] == trained["plain"]
    assert {name.split(".layers.")[1][0] for name in trained["plain"]} == {"0", "1"}


@pytest.mark.slow
def test_as_json_it_has_runners_up_and_what_each_technique_would_do(plan):
    status, out, err = plan("--budget", "64GiB", "--json", *FEW)
    assert status == 0, err
    found = json.loads(out)
    assert found["settings"] == {}
    assert found["requested"]["gradient_checkpointing"] is True
    assert found["chosen"]["peak_bytes"] == found["estimate"]["peak_bytes"] <= found["budget_bytes"]
    assert "optimizer in backward, two passes" in {each["technique"] for each in found["techniques"]}
    assert all(each["peak_bytes"] <= found["budget_bytes"] for each in found["runners_up"])
    assert not any(each["changes"] for each in [found["chosen"], *found["techniques"]])


@pytest.mark.slow
def test_lossy_choices_are_named(plan):
    fewer = ("--dtype", "float32", "--optimizer_in_backward", "false", "--mlp_tile_tokens", "none")
    status, out, err = plan("--budget", "64GiB", "--json", "--lossy", *FEW, *fewer)
    assert status == 0, err
    changing = {each["technique"]: each["changes"] for each in json.loads(out)["techniques"] if each["changes"]}
    assert {"LoRA", "compressed AdamW"} <= changing.keys()
    assert "use_peft" not in json.loads(out)["settings"], "another model is a last resort"


@pytest.mark.slow
def test_it_fits_a_narrow_terminal(plan, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "48")
    status, out, err = plan("--budget", "64GiB", "--output", str(tmp_path / "plan.yaml"), *FEW)
    assert status == 0, err
    table = out.split("Written:")[0]
    assert "What each technique would do" in table
    assert max(map(len, table.splitlines())) <= 48


@pytest.mark.slow
def test_pairs_are_planned_for_a_gpu_that_is_not_here(plan, tmp_path):
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text(
        "\n".join(json.dumps({"prompt": "17 + 5 =", "chosen": " 22", "rejected": " 23"}) for _ in range(8))
    )
    status, out, err = plan(
        "--budget", "20GiB", "--json", "--device", "l4", "--dataset", str(pairs), *FEW, method="dpo"
    )  # fmt: skip
    assert status == 0, err
    assert json.loads(out)["device"] == "L4-24GB"


def test_over_devices_the_run_file_starts_the_processes(plan, tmp_path):
    file = tmp_path / "plan.yaml"
    status, out, err = plan("--devices", "2xH100", "--fsdp", "true", *FEW, "--output", str(file))
    assert status == 0, err
    said = " ".join(out.split())
    for text in (
        "2 x H100-80GB: FSDP2",
        "tokens/s of all devices",
        "while its 2 processes cut their parts",
        "predicted",
    ):
        assert text in said, text
    written = yaml.safe_load(file.read_text())
    assert (written["num_processes"], written["fsdp"]) == (2, True)


def test_over_devices_the_plan_is_json_too(plan):
    status, out, err = plan("--devices", "2xH100", "--fsdp", "true", *FEW, "--json")
    assert status == 0, err
    cluster = json.loads(out)["spread"]["cluster"]
    assert (cluster["per_node"], cluster["nodes"]) == (2, 1)
    flops = cluster["device"]["sheet"]["flops"]
    assert flops["bfloat16"] > flops["float32"]


@pytest.mark.slow
def test_an_estimate_is_a_table_or_json(plan):
    status, out, err = plan("--json", command="estimate")
    assert status == 0, err
    found = json.loads(out)
    assert found["peak_bytes"] == sum(found["phases"][found["phase"]].values())
    status, out, err = plan("--max_length", "32", command="estimate")
    assert status == 0, err
    assert "in all" in out
    assert "weights" in out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--budget", "much"), "no amount of memory"),
        (("--budget", "8GiB", "--device", "H10"), "unknown device 'H10'"),
        (("--budget", "8GiB", "--dataset", "nowhere.jsonl"), "nowhere.jsonl"),
        (("--budget", "8GiB", "--model", "no/such"), "no/such"),
        (("--budget", "8GiB", "--use_peft", "--load_in_8bit"), "not traced, but for load_in_4bit"),
        (("--budget", "8GiB", "--beta", "0.1"), "--beta: it is of"),
        (("--devices", "8xH1000"), "unknown device 'H1000'"),
        (("--devices", "64xH100"), "write --devices 8xH100 --nodes 8"),
        (("--devices", "8xH100", "--device", "l4"), "leave one of them out"),
        (("--nodes", "2"), "need `devices`"),
        (("--devices", "2xH100", "--host_memory", "much"), "no amount of memory"),
    ],
)
def test_what_a_user_can_mend_is_one_message(plan, words, says):
    status, _, err = plan(*words)
    assert (status, says in " ".join(err.split())) == (2, True), err


@pytest.mark.parametrize(
    ("words", "ways"),
    [
        (
            (),
            (
                "--lossy",
                "--trained_weights stream",
                "--optim adamw_compressed",
                "--use_peft --dtype bfloat16",
                "--use_peft --load_in_4bit",
            ),
        ),
        (("--use_peft",), ("--lossy", "--dtype bfloat16", "--load_in_4bit")),
    ],
)
def test_what_does_not_fit_ends_in_1_with_every_way_out(plan, words, ways):
    status, out, err = plan("--budget", "10KiB", *words)
    assert status == 1, err
    said = " ".join(out.split())
    for text in ("Does not fit: the budget of 10.0 KiB is below the weights", "lowtide gpus sft", *ways):
        assert text in said, text
    status, out, err = plan("--budget", "10KiB", "--json", *words)
    found = json.loads(out)
    assert (status, found["fits"], found["budget_bytes"]) == (1, False, 10_240), err
    assert found["spare_bytes"] == 10_240 - found["peak_bytes"]
    assert all(any(way in each for each in found["ways"]) for way in ways)


def test_a_budget_below_weights_of_4_bits_is_refused_without_a_search(plan, monkeypatch):
    monkeypatch.setattr(Searches, "best", lambda *_: pytest.fail("all settings were searched"))
    status, out, err = plan("--budget", "1KiB", "--lossy")
    assert status == 1, err
    assert "Does not fit: the budget of 1.0 KiB is below the weights" in " ".join(out.split())


def test_an_estimate_says_whether_it_fits(plan):
    status, out, err = plan("--budget", "1MiB", command="estimate")
    assert status == 1, err
    assert "Does not fit:" in out
    assert "lowtide plan sft" in " ".join(out.split())
    status, out, err = plan("--json", "--budget", "1MiB", command="estimate")
    found = json.loads(out)
    assert (status, found["fits"], found["room_bytes"]) == (1, False, MIB)
    status, out, err = plan("--device", "l4", command="estimate")
    assert status == 0, err
    assert "Fits: " in out
    assert "on L4-24GB" in out
    assert "Assumed: " in out


@pytest.mark.slow
def test_lengths_stand_for_a_dataset(capsys, model):
    words = ["--model", str(model), "--lengths", "64x4", "--device", "4090"]
    status = main(["estimate", "dpo", *words, "--json"])
    out, err = capsys.readouterr()
    assert status == 0, err
    assert json.loads(out)["device"] == "RTX-4090"
    assert main(["estimate", "dpo", *words, "--dataset", "rows.jsonl"]) == 2
    assert "leave one of them out" in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_a_run_file_for_lengths_sees_such_rows(capsys, model, tmp_path):
    file = tmp_path / "plan.yaml"
    words = ["plan", "sft", "--model", str(model), "--lengths", "64x4", "--device", "4090", "--output", str(file)]
    assert main([*words, "--max_length", "32", "--learning_rate", "1e-4", "--hub_token", "hf_x", *FEW]) == 0
    out, _ = capsys.readouterr()
    assert f"(DATA stands for your rows): lowtide sft --config {file} --dataset DATA" in " ".join(out.split())
    text = file.read_text()
    written = yaml.safe_load(text)
    assert (written["per_device_train_batch_size"], written["max_length"]) == (4, 32)
    assert written["learning_rate"] == 1e-4
    assert "add `dataset:`" in text
    assert "hf_x" not in text
    assert main(["estimate", "sft", "--config", str(file), "--lengths", "64x4", "--device", "4090"]) == 0


def test_a_method_that_another_trainer_lacks_is_refused_before_all_else(capsys, monkeypatch):
    monkeypatch.setattr(
        "lowtide.cli.planning.plan.described_run", lambda arguments: pytest.fail("the run was looked at")
    )
    words = ["plan", "cpo", "--model", "m", "--lengths", "64x4", "--device", "4090", "--for", "axolotl"]
    assert main(words) == 2
    assert "Axolotl has no cpo" in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_the_file_for_another_trainer_is_the_one_that_is_run(capsys, model, tmp_path):
    file = tmp_path / "trl.yaml"
    words = ["plan", "sft", "--model", str(model), "--lengths", "64x4", "--device", "4090", "--for", "trl", *FEW]
    assert main([*words, "--output", str(file)]) == 0
    text = file.read_text()
    assert f"# Run it: trl sft --config {file}\n" in text
    assert yaml.safe_load(text)["per_device_train_batch_size"] == 4


@pytest.mark.slow
def test_trl_runs_the_file_that_is_written_for_it(plan, tmp_path):
    pytest.importorskip("trl")
    folder, file = tmp_path / "rows", tmp_path / "trl.yaml"
    folder.mkdir()
    (folder / "rows.jsonl").write_text("\n".join(json.dumps({"text": "17 + 5 = 22"}) for _ in range(8)))
    own = ("--output_dir", str(tmp_path / "run"), "--max_steps", "1", "--use_cpu", "--report_to", "none", *FEW)
    status, _, err = plan("--dataset", str(folder), "--for", "trl", "--output", str(file), *own)
    assert status == 0, err
    words = [str(Path(sys.executable).with_name("trl")), "sft", "--config", str(file)]
    done = subprocess.run(words, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr.decode()
    assert (tmp_path / "run" / "model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.sweep
def test_quantized_weights_are_streamed_to_a_gpu_where_nothing_else_fits(capsys):
    """A 70B takes 8 GB of embedding and head in float32, and 36 of layers in 4 bits."""
    words = ["plan", "sft", "--model", "meta-llama/Llama-3.1-70B", "--lengths", "1024x1", "--device", "4090"]
    assert main([*words, "--use_peft", "--load_in_4bit", "--gradient_checkpointing", "true", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["settings"]["base_weights"] == "stream"
    assert 36e9 < found["estimate"]["host_bytes"] < 90e9


@pytest.mark.slow
@pytest.mark.sweep
def test_frozen_weights_are_streamed_where_nothing_else_fits(capsys):
    words = ["plan", "sft", "--model", "meta-llama/Llama-3.1-70B", "--lengths", "1024x1", "--device", "4090"]
    adapted = [*words, "--use_peft", "--dtype", "bfloat16", "--gradient_checkpointing", "true", "--json"]
    assert main(adapted) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["settings"]["base_weights"] == "stream"
    assert found["estimate"]["host_bytes"] > 130e9
    assert not found["chosen"]["changes"]
    assert any("host memory" in note for note in found["notes"])


@pytest.mark.parametrize(("model", "lengths", "dtype"), slow_but((), STREAMED_WHOLE, swept=STREAMED_WHOLE[:1]))
def test_trained_weights_are_streamed_where_nothing_else_fits(capsys, model, lengths, dtype):
    """An 8B, all of it, on a card of 24 GB; and a 7B whose backward holds most at its end, but with streamed weights at
    its beginning."""
    words = ["plan", "sft", "--model", model, "--lengths", lengths, "--device", "4090"]
    assert main([*words, "--dtype", dtype, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["settings"]["trained_weights"] == "stream"
    assert found["settings"]["optimizer_in_backward"] == "two_pass"
    assert found["estimate"]["peak_bytes"] < 24e9
    assert found["estimate"]["host_bytes"] > 3 * 2 * 7e9
    assert not found["chosen"]["changes"]
    assert any("host memory" in note for note in found["notes"])


def test_float16_is_planned_for_a_gpu_without_bfloat16(capsys, model):
    words = ["--model", str(model), "--lengths", "64x4", "--fp16", "--use_peft", "--dtype", "float16", "--json"]
    assert main(["estimate", "sft", *words, "--device", "t4"]) == 0
    assert json.loads(capsys.readouterr().out)["device"] == "T4-16GB"
    assert main(["estimate", "sft", *words, "--device", "cpu"]) == 2
    assert "fp16=True needs a GPU" in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_frozen_weights_in_float32_are_proposed_in_bfloat16(capsys, model):
    words = ["estimate", "dpo", "--lengths", "64x4", "--device", "h100", "--use_peft"]
    of_known = [*words, "--model", "Qwen/Qwen2.5-0.5B"]
    assert main(of_known) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "--dtype bfloat16 stores them in half the memory, which rounds none of them" in said
    assert "With it the peak is" in said
    assert main([*of_known, "--dtype", "bfloat16"]) == 0
    assert "stores them in half" not in " ".join(capsys.readouterr().out.split())
    assert main([*words, "--model", str(model)]) == 0  # of so few weights an allocator holds as much with half of them
    assert "stores them in half" not in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lengths", "budget", "says"),
    [
        ("64x4", (), "256 tokens in the heaviest micro-batch;"),
        ("64x4", ("--tokens_per_microbatch", "128"), "128 tokens in the heaviest micro-batch;"),
        ("64x4", ("--tokens_per_microbatch", "100"), "64 tokens in the heaviest micro-batch;"),
        ("256x2", ("--tokens_per_microbatch", "64"), "256 tokens in the heaviest micro-batch, run in pieces of"),
    ],
)
def test_the_tokens_that_are_assumed_are_those_of_the_heaviest_micro_batch(capsys, model, lengths, budget, says):
    words = ["estimate", "sft", "--model", str(model), "--lengths", lengths, "--device", "4090", *budget]
    assert main(words) == 0
    assert f"Assumed: {says}" in " ".join(capsys.readouterr().out.split())


@pytest.fixture
def with_table(model, tmp_path) -> Path:
    """A model with a table of 8 positions, and the tokenizer of the tiny one."""
    folder = tmp_path / "table"
    tiny = AutoConfig.from_pretrained(model)
    GPT2Config(vocab_size=tiny.vocab_size, n_positions=8, n_embd=16, n_layer=2, n_head=2).save_pretrained(folder)
    for path in Path(model).iterdir():
        if path.name != "config.json" and path.suffix in (".json", ".jinja"):
            (folder / path.name).write_bytes(path.read_bytes())
    return folder


def test_rows_beyond_the_models_positions_are_refused_as_a_training_does(plan, with_table):
    status, _, err = plan("--budget", "8GiB", "--model", str(with_table))
    assert (status, "8 positions" in err, "max_length=8" in err) == (2, True, True), err


@pytest.mark.slow
def test_lengths_beyond_a_table_of_positions_are_refused_before_anything_is_traced(with_table, capsys, monkeypatch):
    monkeypatch.setattr(FakeRun, "traced", None)
    words = ["--model", str(with_table), "--lengths", "9x2"]
    for command in ("estimate", "plan", "gpus"):
        assert main([command, "sft", *words]) == 2
        said = " ".join(capsys.readouterr().err.split())
        assert "9 tokens, and the model 8 positions" in said
        assert "give --lengths of at most 8 tokens" in said
    assert main(["estimate", "sft", "--model", str(with_table), "--lengths", "99999999x1"]) == 2
    assert "give shorter or fewer --lengths" in " ".join(capsys.readouterr().err.split())
    monkeypatch.undo()
    assert main(["estimate", "sft", "--model", str(with_table), "--lengths", "8x2", "--device", "4090"]) == 0


@pytest.fixture
def with_few_positions(model, tmp_path) -> Path:
    """A model that was made for 8 positions, and computes any."""
    short = tmp_path / "short"
    shutil.copytree(model, short)
    config = AutoConfig.from_pretrained(model)
    config.max_position_embeddings = 8
    config.save_pretrained(short)
    return short


@pytest.mark.slow
def test_rows_beyond_computed_positions_are_taken_as_a_training_takes_them(plan, sft, with_few_positions):
    status, _, err = sft("--model", str(with_few_positions), steps=1)
    assert status == 0, err
    status, out, err = plan("--model", str(with_few_positions), command="estimate")
    assert (status, PAST in " ".join(out.split())) == (0, True), err


@pytest.mark.parametrize(
    "words", [["estimate", "sft", "--device", "4090"], pytest.param(["gpus", "sft"], marks=pytest.mark.slow)]
)
def test_lengths_beyond_computed_positions_are_taken(words, with_few_positions, capsys):
    assert main([*words, "--model", str(with_few_positions), "--lengths", "64x2"]) == 0
    assert PAST in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
def test_a_run_with_a_budget_writes_what_it_chose(sft, tmp_path):
    status, _, err = sft("--memory_budget", "64GiB")
    assert status == 0, err
    options = yaml.safe_load((tmp_path / "run" / "run.yaml").read_text())
    assert (options["memory_budget"], options["gradient_checkpointing"]) == ("64GiB", False)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ((), "stored in float32, computed in float32"),
        (("--bf16", "true"), "stored in float32, computed in bfloat16"),
        (("--dtype", "bfloat16"), "stored in bfloat16, computed in bfloat16"),
        (("--optim", "adamw_flash"), "stored in bfloat16, computed in bfloat16"),
    ],
)
def test_the_precision_that_is_assumed_is_that_of_the_run(capsys, model, options, says):
    words = ["estimate", "sft", "--model", str(model), "--lengths", "64x2", "--device", "cpu", "--use_cpu", "true"]
    assert main([*words, "--bf16", "false", *options]) == 0
    assert f"weights {says};" in " ".join(capsys.readouterr().out.split())
