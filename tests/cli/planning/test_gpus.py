"""`lowtide gpus`: from a model's config to a list of devices."""

from __future__ import annotations

import argparse
import contextlib
import io
import json

import pytest
from rich.console import Console
from transformers import LlamaConfig

from lowtide.cli.main import main
from lowtide.cli.planning import gpus
from lowtide.cli.planning.described_run import described_run
from lowtide.planner.answers.device_table import DeviceRow, DeviceTable, Fit
from lowtide.planner.answers.known_models import known_models
from lowtide.planner.devices import DEVICES, GIB


@pytest.fixture(scope="module")
def described(tmp_path_factory):
    folder = tmp_path_factory.mktemp("described")
    LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096,
    ).save_pretrained(folder)  # fmt: skip
    return str(folder)


@pytest.mark.slow
def test_from_a_config_alone_it_lists_devices(described, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["gpus", "dpo", "--model", described, "--lengths", "64x2"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert max(map(len, out.splitlines())) <= 80
    said = " ".join(out.split())
    texts = ["full: from T4-16GB on", "QLoRA: from T4-16GB on", "longest row", "CPU-16GB and larger", "predicted"]
    rows = "2 rows of 96 tokens (prompt 32, chosen 32, rejected 32)"
    command = f"lowtide dpo --model {described} --dataset DATA --per_device_train_batch_size 2"
    for text in (*texts, rows, "(DATA stands for your rows)", command):
        assert text in said, text


@pytest.fixture(scope="module")
def with_adapters(described):
    """Words of the command, and the JSON of all devices."""
    words = ["gpus", "sft", "--model", described, "--use_peft"]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main([*words, "--json"]) == 0
    return words, json.loads(out.getvalue())


@pytest.mark.slow
def test_as_json_with_adapters(with_adapters):
    found = with_adapters[1]
    assert found["smallest"] == {"LoRA": "T4-16GB", "QLoRA": "T4-16GB"}
    row = next(each for each in found["rows"] if each["device"] == "RTX-4090")
    fit = row["fits"]["LoRA"]
    assert fit["fits"] is True
    assert fit["settings"]["use_peft"] is True
    assert fit["longest_row"] == 4096
    assert fit["tokens_per_second"] > 0


@pytest.mark.slow
def test_one_device_in_one_screen(with_adapters, described, capsys, monkeypatch):
    """The numbers are those that the table of all devices has."""
    monkeypatch.setenv("COLUMNS", "80")
    words, every = with_adapters
    assert main([*words, "--device", "4090", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row == next(each for each in every["rows"] if each["device"] == "RTX-4090")
    assert main([*words, "--device", "4090"]) == 0
    out = capsys.readouterr().out
    assert len(out.splitlines()) <= 30, out
    said = " ".join(out.split())
    assert "on RTX-4090" in said
    for way, fit in row["fits"].items():
        assert f"{way} " in said
        assert f"{fit['longest_row']:,}" in said
        assert gpus._written(fit["settings"]) in said
    assert said.count(f"lowtide sft --model {described} --dataset DATA") == 1


def test_the_command_has_the_users_own_options_and_those_of_the_lengths(described):
    words = ["--model", described, "--lengths", "2048x4", "--fsdp", "true", "--lora_target_modules", "q_proj", "v_proj"]
    parser = argparse.ArgumentParser()
    gpus.add_parser(parser.add_subparsers(), "sft")
    given = described_run(parser.parse_args(["gpus", "sft", *words, "--use_peft", "--model_init_kwargs", '{"a": 1}']))
    found = gpus._command(given, Fit("LoRA", {"use_peft": True, "gradient_checkpointing": False}, 1, 2, None, None))
    assert found == (
        f"lowtide sft --model {described} --dataset DATA --fsdp true --lora_target_modules q_proj v_proj "
        "--model_init_kwargs '{\"a\": 1}' --per_device_train_batch_size 4 --max_length 2048 "
        "--use_peft --gradient_checkpointing false"
    )


def _said_of(peaks: dict[str, float], capsys) -> str:
    """What is printed of a way that takes so many GiB on each device."""
    rows = []
    for name, gib in peaks.items():
        size = DEVICES[name].memory_bytes
        fit = Fit("full", {}, int(gib * GIB), int(size / 1.05), 100.0, 2048)
        rows.append(DeviceRow(name, "cuda", size, {"full": fit}))
    table = DeviceTable("sft", "m", 10**9, "8 rows", tuple(rows), {"full": None})
    console = Console(width=80)
    for part in gpus._way(table, "full", {}):
        console.print(part)
    return " ".join(capsys.readouterr().out.split())


def test_sizes_are_in_gib_as_other_commands_have_them(capsys):
    said = _said_of({"V100-16GB": 15.2, "RTX-4090": 15.4, "B200-180GB": 15.5}, capsys)
    assert "device peak GiB of GiB" in said
    assert "RTX-4090 15.40 23.60" in said
    assert "B200-180GB 15.50 178.30" in said


def test_what_does_not_fit_says_what_is_left_free(capsys):
    left = "5% of a device (on a CPU 6%) is left for what the prediction may miss"
    said = _said_of({"V100-16GB": 15.2, "RTX-4090": 15.4}, capsys)
    assert f"Does not fit V100-16GB: it takes 15.20 GiB at least, and {left}." in said
    assert f"fits none of them; it takes 15.20 GiB at least, and {left}" in _said_of({"V100-16GB": 15.2}, capsys)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--lengths", "much"), "write '1024x8'"),
        (("--dataset", "rows.jsonl"), "reads no dataset"),
        (("--lenghts", "8x8"), "--lengths"),
        (("--device", "H1000"), "unknown device 'H1000'"),
        (("--devices", "8xH100"), "lowtide plan takes several"),
    ],
)
def test_what_a_user_can_mend_is_one_message(described, capsys, words, says):
    assert main(["gpus", "sft", "--model", described, *words]) == 2
    assert says in " ".join(capsys.readouterr().err.split())


def test_a_model_is_needed(capsys):
    assert main(["gpus", "sft"]) == 2
    assert "--model is missing" in capsys.readouterr().err


def test_without_a_method_it_says_what_a_gpu_holds_of_all_built_in_models(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    some = {name: known_models()[name] for name in ("Qwen/Qwen2.5-0.5B", "meta-llama/Llama-3.1-70B")}
    monkeypatch.setattr("lowtide.planner.answers.known_models.known_models", lambda: some)
    assert main(["gpus", "--device", "4090"]) == 0
    said = capsys.readouterr().out
    assert "on RTX-4090" in said
    (line,) = [line for line in said.splitlines() if line.startswith(" Qwen2.5-0.5B ")]
    assert line.count("32k") == 4
    assert "It holds none of Llama-3.1-70B" in said
    assert "lowtide gpus sft --model Qwen/Qwen2.5-0.5B --device 4090" in said
    assert main(["gpus", "--device", "4090", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert [each["smallest"]["LoRA"] for each in made] == ["RTX-4090", None]


def test_without_a_method_other_devices_are_refused_with_the_command_that_asks_them(capsys):
    assert main(["gpus", "--device", "T4"]) == 2
    assert "lowtide gpus sft --model M --device T4" in capsys.readouterr().err
    assert main(["gpus", "fst", "--device", "4090"]) == 2
    assert "no method 'fst'" in capsys.readouterr().err
