"""`lowtide doctor`: it says what is there, what is missing and why that would matter."""

import json

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
    monkeypatch.setattr(doctor, "_version", lambda package: versions.get(package, "9"))
    monkeypatch.setattr(doctor, "_requirements", lambda: ["torch>=2.11,<2.14"])
    found = doctor.versions()[-1]
    assert found.wrong
    assert said in found.remark
    assert main(["doctor"]) == 0
    assert "To mend: torch." in capsys.readouterr().out
