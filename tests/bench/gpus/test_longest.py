"""The longest row is found from any start, predicted, and tried by a run that can also not fit."""

import pytest
import torch

from bench.inputs.shapes import LLAMA_8B
from bench.longest import child as longest_child
from bench.longest.__main__ import STEP, longest, parse, predicted_fits
from bench.longest.cases import CASES, LongCase, flags
from bench.longest.tables import cells
from lowtide import SFTConfig
from lowtide.step.rank_sync import OutOfMemory

ERRORS = [
    torch.OutOfMemoryError("CUDA out of memory"),
    OutOfMemory("out of memory: a row"),
    ValueError("out of memory in backward, when some parameters were stepped and others not"),
]


@pytest.mark.parametrize("factor", [2.0, 1.0625])
@pytest.mark.parametrize("start", [1, 7, 8, 40, 200])
def test_the_longest_that_fits_is_found_from_any_start(start: int, factor: float):
    limit = 41_000
    tried = []

    def fits(length: int) -> bool:
        tried.append(length)
        return length <= limit

    low, high = longest(fits, start * STEP, factor)
    assert low <= limit < high <= low + max(STEP, high // 16)
    assert all(length % STEP == 0 and length > 0 for length in tried)
    assert len(tried) == len(set(tried))


def test_nothing_fits():
    assert longest(lambda length: False, 8 * STEP, 2.0) == (0, STEP)


@pytest.mark.slow
def test_a_gpu_is_predicted_where_there_is_none():
    options = parse(["--device", "H100-80GB", "--layers", "2"])
    assert (options.here, options.device) == ("cpu", "H100-80GB")
    assert predicted_fits("LoRA, checkpointing", 8192, options)
    assert not predicted_fits("LoRA, checkpointing", 1 << 20, options)


@pytest.mark.parametrize("name", CASES)
def test_a_row_is_a_config_that_can_be_made(name: str, tmp_path):
    assert SFTConfig(str(tmp_path), **flags(CASES[name], 4096)).max_length == 4096


@pytest.mark.slow
def test_a_run_trains(monkeypatch):
    small = LLAMA_8B | {"vocab_size": 32_000, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    monkeypatch.setattr("bench.longest.cases.LLAMA_8B", small | {"num_key_value_heads": 1})
    case = LongCase({"activation_offloading": True, "mlp_tile_tokens": 8})
    assert len(longest_child.measured(case, length=32, layers=1, steps=3, device="cpu")) == 2


@pytest.mark.parametrize("error", ERRORS)
def test_a_run_that_does_not_fit_says_so(error: Exception, monkeypatch, capsys):
    def full(*_: object, **__: object):
        raise error

    monkeypatch.setattr(longest_child, "measured", full)
    longest_child.main({"case": "LoRA, checkpointing", "length": 32})
    assert '"fits": false' in capsys.readouterr().out


def test_another_error_is_one(monkeypatch):
    def broken(*_: object, **__: object):
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(longest_child, "measured", broken)
    with pytest.raises(RuntimeError, match="no kernel image"):
        longest_child.main({"case": "LoRA, checkpointing", "length": 32})


def test_a_run_is_a_line():
    assert cells({"case": "LoRA", "predicted": 94_208}) == ["LoRA", "94,208", "", ""]
