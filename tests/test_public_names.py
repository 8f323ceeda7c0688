"""The public names, once more: a change here is a change for users."""

import subprocess
import sys

import pytest

import lowtide
from lowtide import _OF_TRL

NAMES = [
    "BCOConfig",
    "BCOTrainer",
    "CPOConfig",
    "CPOTrainer",
    "DPOConfig",
    "DPOTrainer",
    "DataCollatorForCompletionOnlyLM",
    "DataCollatorWithFlattening",
    "KTOConfig",
    "KTOTrainer",
    "ORPOConfig",
    "ORPOTrainer",
    "RaggedBatch",
    "RewardConfig",
    "RewardTrainer",
    "SFTConfig",
    "SFTTrainer",
    "estimate",
    "plan",
]


def test_the_public_names_are_these():
    assert lowtide.__all__ == NAMES
    assert set(NAMES) <= set(dir(lowtide))


@pytest.mark.parametrize("name", _OF_TRL)
def test_what_stays_of_trl_is_there_and_is_said(name):
    assert hasattr(pytest.importorskip("trl"), name)
    with pytest.raises(ImportError, match=f"`from trl import {name}`"):
        exec(f"from lowtide import {name}")


def test_each_public_name_resolves_to_what_it_is_called():
    for name in NAMES:
        assert getattr(lowtide, name).__name__ == name


def test_an_unknown_name_is_an_attribute_error():
    assert not hasattr(lowtide, "SFTTrainner")


def test_importing_the_package_and_its_command_imports_nothing_heavy():
    code = (
        "import sys, lowtide, lowtide.cli.main\n"
        "print(sorted({'torch', 'transformers', 'datasets', 'numpy', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
