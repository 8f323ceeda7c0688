"""The rows of the table of memory techniques can be run, and what was measured is recorded and shown once each."""

import importlib

import pytest

from bench.docs.memory_docs import costs_table, memory_section
from bench.inputs.shapes import QWEN_05B
from bench.measuring import results
from bench.memory.__main__ import LENGTHS, parse
from bench.memory.cases import CASES, flags
from bench.memory.child import common
from bench.memory.tables import cells
from lowtide.memory.table import TECHNIQUES

HARDWARE = {"cpu": "A CPU", "threads": 2, "memory_gb": 8.0, "system": "Linux"}
VERSIONS = dict.fromkeys(("date", "lowtide", "lowtide_commit", "torch", "transformers", "trl"), "1")


@pytest.mark.parametrize("name", CASES)
def test_a_row_is_a_config_that_can_be_made(name: str, tmp_path):
    case = CASES[name]
    if case.package == "trl":
        pytest.importorskip("trl")
    options = common("cpu", str(tmp_path)) | flags(case, 8, 32)
    try:
        args = importlib.import_module(case.package).SFTConfig(**options)
    except ImportError:
        pytest.skip("transformers looks for the optimizer's package")
    assert args.max_length == 32
    assert args.per_device_train_batch_size * args.gradient_accumulation_steps in (8, 16)
    assert args.gradient_checkpointing
    if case.whole_batch:
        assert args.tokens_per_microbatch is None


def test_each_technique_with_an_option_of_its_own_is_a_row():
    assert {"compressed AdamW", "optimizer in backward", "activation offloading", "tiled MLP"} <= CASES.keys()
    assert not CASES.keys() & {"fused head", "prefix sharing", "gradient checkpointing"}
    assert all(CASES[name].exact == (TECHNIQUES[name].changes is None) for name in CASES.keys() & TECHNIQUES.keys())


def test_quick_measures_smaller_batches():
    assert (parse([]).batch, parse(["--quick"]).batch) == (8, 2)
    assert tuple(parse([]).lengths) == LENGTHS
    assert max(LENGTHS) <= QWEN_05B["max_position_embeddings"]


def run(case: str, length: int, **measured) -> dict:
    shared = {"batch": 8, "length": length, "versions": VERSIONS}
    return {"case": case, **shared, **measured}


def peak(gigabytes: float, seconds: float = 3.0) -> dict:
    return {
        "peak_bytes": int(gigabytes * 1e9),
        "reserved_bytes": None,
        "step_seconds": 2.0,
        "step_cpu_seconds": seconds,
    }


def test_a_run_is_recorded_over_the_earlier_one_of_the_same_size(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    for each in (run("plain", 32, **peak(9)), run("plain", 128, **peak(9)), run("plain", 32, **peak(8))):
        runs = results.merged("memory", HARDWARE, each, key=("case", "batch", "length"))
        results.write("memory", {"hardware": HARDWARE, "runs": runs})
    (recorded,) = results.recorded()
    assert [(each["length"], each["peak_bytes"]) for each in recorded["runs"]] == [(128, 9e9), (32, 8e9)]


def test_the_page_has_a_line_for_each_row_that_was_measured():
    runs = [
        run("plain", 32, **peak(8)),
        run("plain", 4, **peak(7.5)),
        run("LoRA, offloaded and tiled", 32, failed="killed"),
    ]
    page = memory_section({"hardware": HARDWARE, "runs": runs})
    assert "| plain | 7.50 GB, 3 s | 8.00 GB, 3 s |  |" in page
    assert "| *LoRA, offloaded and tiled* |  | killed | 2.5 GB |" in page
    assert "compressed" not in page.split("8 rows a step:")[1]


def test_costs_are_multiples_of_the_plain_run_of_the_same_size():
    runs = [
        run("plain", 32, **peak(8)),
        run("Lion", 32, **peak(6, seconds=2.0)),
        run("tiled MLP", 32, **peak(7.9, seconds=4.5)),
        run("paged AdamW", 32, failed="killed"),
        run("plain", 512, **peak(9)),
    ]
    lines = costs_table([{"hardware": HARDWARE, "runs": runs}])
    assert "| Lion | yes | 0.75x | yes | 0.67x |" in lines
    assert "| tiled MLP | the same | 0.99x | no | 1.50x |" in lines
    assert not any("paged" in line or line.startswith("| plain") for line in lines)


def test_a_run_that_gave_nothing_says_why():
    assert cells({"case": "QLoRA", "skipped": "needs bitsandbytes"}) == ["QLoRA", "needs bitsandbytes", ""]
    both = run("plain", 4, **peak(1)) | {"reserved_bytes": 2_000_000_000}
    assert cells(both)[1] == "1.00 GB (2.00 reserved)"
