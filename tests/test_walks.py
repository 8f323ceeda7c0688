"""The walks of a practitioner and a researcher: scripts of `examples/` that anyone can run, from an empty folder.

The engineer's begins with the wheel (`tests/packaging/test_wheel.py`). Each script itself refuses what is not as it
says.
"""

import sys
from importlib.util import find_spec

import pytest

from tests.support.packaging import ROOT, run


def walked(who: str, folder) -> list[str]:
    """What a walk prints."""
    return run(
        sys.executable, ROOT / "examples" / f"walk_{who}.py", folder=folder, PYTHONPATH=str(ROOT / "src")
    ).splitlines()


@pytest.mark.slow
def test_a_csv_with_odd_columns_becomes_a_model_that_llama_cpp_serves(tmp_path):
    said = walked("practitioner", tmp_path)
    assert [line.split()[2] for line in said if line.startswith("$ lowtide")][:5] == [
        *("check", "check", "sft", "chat", "evaluate"),
    ]
    if find_spec("gguf") and find_spec("xllamacpp"):
        assert any(line.startswith("llama.cpp, ") for line in said)
    else:
        assert any(line.startswith("left out: ") for line in said)


@pytest.mark.slow
def test_a_loss_a_reward_a_technique_and_a_method_of_ones_own_are_trained_with(tmp_path):
    said = walked("researcher", tmp_path)
    told = [line.partition(":")[0] for line in said if line.startswith("my_ideas.")]
    assert told == ["my_ideas.logistic", "my_ideas.brief", "my_ideas.FOCAL with gamma=0", "my_ideas.HALVES"]
