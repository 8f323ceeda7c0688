"""`lowtide merge` from a trained adapter to a model that answers as the two of them do."""

import os
import subprocess
import sys
import time

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from lowtide.cli.main import main


@pytest.fixture
def adapter(model, tmp_path):
    base = AutoModelForCausalLM.from_pretrained(model)
    adapted = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


@pytest.mark.parametrize("named", [True, False])
def test_the_merged_model_is_the_model_with_its_adapter(model, adapter, tmp_path, capsys, named):
    output = tmp_path / "deep" / "merged"
    words = ["--model", str(model)] if named else []
    assert main(["merge", *words, "--adapter", str(adapter), "--output-dir", str(output)]) == 0
    assert str(output) in capsys.readouterr().out
    ids = AutoTokenizer.from_pretrained(output)("1 + 2", return_tensors="pt").input_ids
    wanted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), str(adapter)).eval()(ids).logits
    torch.testing.assert_close(AutoModelForCausalLM.from_pretrained(output).eval()(ids).logits, wanted)


def test_the_dtype_can_be_chosen(model, adapter, tmp_path):
    words = ["--adapter", str(adapter), "--output_dir", str(tmp_path / "out"), "--dtype", "bfloat16"]
    assert main(["merge", *words]) == 0
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--adapter": "nowhere"}, "--adapter: there is no folder 'nowhere'"),
        ({"--adapter": "."}, "has no adapter_config.json"),
        ({"--model": "./nowhere"}, "model './nowhere' cannot be loaded"),
        ({"--output_dir": "adapter"}, "is a folder that is read from"),
        ({"--output_dir": "file"}, "is a file"),
        ({"--output_dir": ""}, "--output_dir: is empty"),
    ],
)
def test_what_cannot_work_is_said_in_one_line(model, adapter, tmp_path, monkeypatch, capsys, change, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    given = {"--model": str(model), "--adapter": "adapter", "--output_dir": "out", **change}
    assert main(["merge", *(word for pair in given.items() for word in pair)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert not (tmp_path / "out").exists()


def test_a_pipe_among_the_files_of_adapters_is_refused(adapter, tmp_path, capsys):
    (adapter / "adapter_model.safetensors").unlink()
    os.mkfifo(adapter / "adapter_model.safetensors")
    assert main(["merge", "--adapter", str(adapter), "--output_dir", str(tmp_path / "out")]) == 2
    assert "adapter_model.safetensors is neither a file nor a folder" in capsys.readouterr().err


def test_adapters_that_are_not_whole_are_refused(adapter, tmp_path, capsys):
    file = adapter / "adapter_model.safetensors"
    weights = load_file(file)
    lost = sorted(weights)[0]
    save_file({name: weight for name, weight in weights.items() if name != lost}, file, metadata={"format": "pt"})
    words = ["merge", "--adapter", str(adapter), "--output_dir", str(tmp_path / "out")]
    assert main(words) == 2
    assert f"hold no {lost.replace('.weight', '.default.weight')}, which would keep initial" in capsys.readouterr().err
    file.write_bytes(file.read_bytes()[:-9])
    assert main(words) == 2
    assert f"{file} " in (error := capsys.readouterr().err)
    assert "is truncated" in error
    assert not (tmp_path / "out").exists()


def test_help_is_quick():
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", "lowtide", "merge", "--help"], check=True, capture_output=True)
    assert time.perf_counter() - start < 2  # half a second on a machine that does nothing else


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "holds a JSON list where an object belongs"),
        ("{", "is not JSON"),
        ('{"base_model_name_or_path": [1]}', "base_model_name_or_path=[1], and a model's name is text"),
    ],
)
def test_a_configuration_of_adapters_of_other_kinds_is_refused(adapter, tmp_path, capsys, content, message):
    (adapter / "adapter_config.json").write_text(content)
    assert main(["merge", "--adapter", str(adapter), "--output_dir", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err
