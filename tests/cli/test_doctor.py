"""`lowtide doctor`: it says what is there, what is missing and why that would matter."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from lowtide.cli import doctor
from lowtide.cli.main import main


def test_it_answers_with_what_is_here(capsys):
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert torch.__version__ in shown
    assert "scaled_dot_product_attention" in shown
    assert "Nothing that lowtide requires is missing." in shown


def test_json_has_the_same_in_groups(capsys):
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert list(report) == ["versions", "machine", "devices", "attention", "optional", "hub"]
    found = {each["name"]: each["found"] for each in report["versions"]}
    assert found["torch"] == torch.__version__


def test_a_missing_package_is_named_with_its_use_and_its_command(monkeypatch):
    monkeypatch.setattr(doctor, "find_spec", lambda module: None)
    (found,) = (doctor.optional(each) for each in doctor.OPTIONAL if each.module == "bitsandbytes")
    assert found.found is None
    assert found.remark == 'bases in 4 and 8 bits, 8-bit optimizers; pip install "lowtide[bnb]"'


@pytest.mark.parametrize(("version", "said"), [(None, 'pip install "torch'), ("1.0", "lowtide requires")])
def test_what_is_required_and_not_there_is_to_be_mended(version, said, monkeypatch, capsys):
    versions = {"torch": version}
    monkeypatch.setattr(doctor, "version_of", lambda package, missing="": versions.get(package, "9"))
    monkeypatch.setattr(doctor, "_requirements", lambda: ["torch>=2.11,<2.14"])
    found = doctor.versions()[-1]
    assert found.wrong
    assert said in found.remark
    assert main(["doctor"]) == 1
    assert "To mend: torch." in capsys.readouterr().out
    assert main(["doctor", "--json"]) == 1


def test_a_missing_optional_package_is_no_failure(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "find_spec", lambda module: None)
    assert main(["doctor"]) == 0
    assert "bitsandbytes" in capsys.readouterr().out


def test_a_torch_that_cannot_be_imported_is_said(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise OSError('libcudart.so.13: cannot open shared object file')")
    words = [sys.executable, "-m", "lowtide", "doctor", "--json"]
    paths = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    done = subprocess.run(words, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": paths})
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    (found,) = (each for each in report["versions"] if each["name"] == "torch")
    assert found["wrong"]
    assert "libcudart.so.13" in found["remark"]
    assert list(report) == ["versions", "optional", "hub"]


def test_an_old_gpu_is_told_what_training_accepts(monkeypatch):
    old = SimpleNamespace(name="Tesla T4", total_memory=15 << 30, major=7, minor=5)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: old)
    found = doctor._gpu(0).found
    assert "no bfloat16: float32, or --fp16 true" in found
    assert "with an adapter" not in found
