"""An optimizer that steps a weight block by block, of which a trace takes a few."""

from __future__ import annotations

import pytest
from transformers import LlamaConfig

from lowtide import SFTConfig
from lowtide.memory.optimizers import compressed_adamw
from lowtide.methods import METHODS
from lowtide.ops.logits import linear_logprobs
from lowtide.planner.answers.row_lengths import row_lengths
from lowtide.planner.devices import DEVICES, device_named
from lowtide.planner.estimate import estimate_run
from lowtide.planner.tracing import fake_run
from lowtide.planner.tracing.fake_run import FakeRun

CPU = device_named("CPU-64GB")
DESCRIBED = LlamaConfig(
    vocab_size=1000, hidden_size=64, intermediate_size=200, num_hidden_layers=7, num_attention_heads=4,
    num_key_value_heads=2,
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("optim", ["adamw_compressed", "adamw_stochastic_8bit"])
def test_a_few_blocks_say_what_all_say(optim, monkeypatch):
    monkeypatch.setattr(compressed_adamw, "BLOCK", {"cpu": 1 << 11, "cuda": 1 << 11})
    described = LlamaConfig.from_dict(DESCRIBED.to_dict() | {"num_hidden_layers": 2})
    counted = []

    def estimated():
        config = SFTConfig(output_dir="run", use_cpu=True, report_to="none", optim=optim)
        rows = row_lengths("16x2", METHODS["sft"]).rows()
        run = FakeRun(METHODS["sft"], config, described, rows, prepared=True)
        found = estimate_run(run, DEVICES["H100-80GB"])
        costs = run.traced(DEVICES["H100-80GB"]).costs["optimizer"]
        return found.phases, found.tokens_per_second, sum(costs.operations.values())

    few = estimated()
    monkeypatch.setattr(fake_run, "_few_blocks", lambda costs, blocks: counted.append(len(blocks)) or blocks)
    assert estimated() == few
    assert max(counted) > 20


@pytest.mark.slow
def test_a_few_blocks_of_the_heads_rows_say_what_all_say(monkeypatch):
    def estimated():
        config = SFTConfig(output_dir="run", use_cpu=True, report_to="none", bf16=False)
        rows = row_lengths("600x2", METHODS["sft"]).rows()
        run = FakeRun(METHODS["sft"], config, DESCRIBED, rows, prepared=True)
        costs = run.traced(CPU).costs["head"]
        return estimate_run(run, CPU, beside=0).phases, sum(costs.operations.values())

    monkeypatch.setattr(linear_logprobs, "BLOCK_BYTES", 1 << 18)
    phases, operations = estimated()
    counted = []
    monkeypatch.setattr(fake_run, "_few_blocks", lambda costs, blocks: counted.append(len(blocks)) or blocks)
    all_phases, all_operations = estimated()
    assert max(counted) > 5
    assert operations == all_operations
    for phase, held in all_phases.items():
        assert sum(phases[phase].values()) == pytest.approx(sum(held.values()), rel=1e-3), phase


@pytest.mark.slow
def test_a_few_blocks_of_the_heads_gradient_say_what_all_say(monkeypatch):
    """Products in 16 bits go into a gradient of float32 block by block."""
    monkeypatch.setattr(linear_logprobs, "CAST_BYTES", 1 << 13)
    counted = []

    def estimated():
        config = SFTConfig(output_dir="run", use_cpu=True, report_to="none", bf16=True)
        run = FakeRun(METHODS["sft"], config, DESCRIBED, row_lengths("16x2", METHODS["sft"]).rows(), prepared=True)
        costs = run.traced(DEVICES["H100-80GB"]).costs["head"]
        return estimate_run(run, DEVICES["H100-80GB"]).phases, sum(costs.operations.values()), costs.flops

    few = estimated()
    monkeypatch.setattr(fake_run, "_few_blocks", lambda costs, blocks: counted.append(len(blocks)) or blocks)
    assert estimated() == few
    assert max(counted) == 32
