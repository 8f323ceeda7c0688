"""Which devices hold a run: beside estimates of the same settings, one by one."""

from __future__ import annotations

import dataclasses

import pytest
from transformers import LlamaConfig

from lowtide.methods import METHODS
from lowtide.planner.answers import device_table as tables
from lowtide.planner.answers import traces
from lowtide.planner.answers.curves import Point
from lowtide.planner.answers.device_table import device_table
from lowtide.planner.answers.row_lengths import row_lengths
from lowtide.planner.answers.traces import KINDS
from lowtide.planner.answers.ways import LORA, QLORA, Stage, Way, run_of, ways_of
from lowtide.planner.candidate import PlannedRun
from lowtide.planner.devices import DEVICES, GIB
from lowtide.planner.estimate import estimate_run
from tests.support.marks import slow_but

DESCRIBED = LlamaConfig(
    vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=4096,
)  # fmt: skip
DEVICE = DEVICES["A100-40GB"]
SETTINGS = {"gradient_checkpointing": True, "dtype": "bfloat16"}


WIDE = LlamaConfig(
    vocab_size=8192, hidden_size=512, intermediate_size=1408, num_hidden_layers=4, num_attention_heads=8,
    num_key_value_heads=4, max_position_embeddings=16_384,
)  # fmt: skip


def run(described=DESCRIBED, **more) -> PlannedRun:
    return PlannedRun(METHODS["sft"], described, {"save_strategy": "no"}, DEVICE, prepared=True, **more)


@pytest.fixture
def one_way(monkeypatch):
    """Of all ways LoRA alone, with one stage, in this process."""
    way = Way(LORA, (Stage(LORA, SETTINGS, name="checkpointing"),), {"use_peft": True})
    monkeypatch.setattr("lowtide.planner.answers.traces.ways_of", lambda run: [way])
    monkeypatch.setattr("lowtide.planner.parallel._cores", lambda: 1)
    return way


def test_what_there_was_no_time_for_is_said_and_nothing_is_made_up(monkeypatch):
    """Rows that are asked for are traced first; a longest row is never beyond what was traced."""
    ways = [Way(name, (Stage(name, SETTINGS, name="checkpointing"),), {"use_peft": True}) for name in (LORA, QLORA)]
    monkeypatch.setattr(traces, "ways_of", lambda run: ways)
    monkeypatch.setattr("lowtide.planner.parallel._cores", lambda: 1)
    made = []

    def point(run, lengths, options, spaces):
        made.append(lengths.longest)
        clock[0] += 10
        phases = {each: {"forward": GIB} for each in spaces}
        return Point(lengths.longest, 1, 1.0, dict.fromkeys(("layers", "head", "optimizer"), ({}, 1.0)), phases)

    clock = [0.0]
    monkeypatch.setattr(traces, "point_of", point)
    monkeypatch.setattr(traces.time, "monotonic", lambda: clock[0])
    lengths = row_lengths("256x4", METHODS["sft"])
    asked = {"model": "tiny", "devices": [DEVICE]}
    for seconds, rows, left_out in (
        (
            15,
            {LORA: 256, QLORA: 256},
            "2 of 4 traces were made in 15 s, which leaves out LoRA with longer rows on GPUs",
        ),
        (
            5,
            {LORA: 256},
            "1 of 4 traces were made in 5 s, which leaves out QLoRA altogether on GPUs with bfloat16, LoRA",
        ),
        (100, {LORA: 4096, QLORA: 4096}, ""),
    ):
        clock[0] = 0.0
        made.clear()
        found = device_table({"cuda": run()}, lengths, seconds=seconds, **asked)
        assert {name: fit.longest_row for name, fit in found.rows[0].fits.items()} == rows
        assert any(note.startswith(left_out) for note in found.notes) if left_out else not found.notes
        assert made == sorted(made)
        assert {*found.refused} == {LORA, QLORA} - {*rows}


@pytest.mark.slow
def test_the_rows_that_are_asked_for_take_what_an_estimate_says(one_way):
    lengths = row_lengths("256x4", METHODS["sft"])
    found = device_table({"cuda": run()}, lengths, model="tiny", devices=[DEVICE])
    (row,) = found.rows
    fit = row.fits[LORA]
    adapted = run_of(run(), one_way)
    batch = {"per_device_train_batch_size": 4, **SETTINGS}
    alone = estimate_run(adapted.faked(lengths.rows(), {**batch, "tokens_per_microbatch": 256}), DEVICE)
    whole = estimate_run(adapted.faked(lengths.rows(), batch), DEVICE)
    assert fit.fits
    assert fit.settings == {"use_peft": True, **SETTINGS}
    assert fit.longest_row == 4096
    assert alone.peak_bytes <= fit.peak_bytes
    assert fit.peak_bytes >= 0.98 * whole.peak_bytes
    assert fit.tokens_per_second == pytest.approx(whole.tokens_per_second, rel=0.05)
    assert fit.tokens_per_second > 1.5 * alone.tokens_per_second
    assert found.smallest().device == DEVICE.name


@pytest.mark.parametrize("kind", slow_but((), ["cuda", "older"], swept=["older"]))
def test_every_setting_takes_what_an_estimate_of_it_says(kind):
    """Of all ways, with batches that fit whole and with those that are cut; but for what an allocator rounds, and the
    gradients of another micro-batch, which a whole batch has not."""
    like = DEVICES[KINDS[kind]]
    roomy, small = (dataclasses.replace(like, memory_bytes=like.context_bytes + size) for size in (20 * GIB, GIB))
    asked = dataclasses.replace(run(described=WIDE), device=like)
    lengths = row_lengths("1024x16", METHODS["sft"])
    found = device_table(
        {"cuda": asked, kind: asked}, lengths, model="wide", devices=[roomy, small, DEVICES["H100-80GB"]]
    )
    ways, cut = {way.name: way for way in ways_of(asked)}, 0
    for row in found.rows:
        for fit in (each for each in row.fits.values() if each.fits and row.memory_bytes <= roomy.memory_bytes):
            written = {name: value for name, value in fit.settings.items() if name not in ways[fit.way].written}
            options = {"per_device_train_batch_size": 16, "eval_strategy": "no", **written}
            alone = estimate_run(run_of(asked, ways[fit.way]).faked(lengths.rows(), options), like)
            beside = like.context_bytes
            assert 0.94 <= (fit.peak_bytes - beside) / (alone.peak_bytes - beside) <= 1.15, (fit.way, written)
            assert 0.85 <= fit.tokens_per_second / alone.tokens_per_second <= 1.05, (fit.way, written)
            cut += "tokens_per_microbatch" in written
    assert cut


@pytest.mark.slow
def test_a_budget_of_the_user_stays(one_way):
    asked = dataclasses.replace(run(), requested={"save_strategy": "no", "tokens_per_microbatch": 128})
    lengths = row_lengths("256x4", METHODS["sft"])
    fit = device_table({"cuda": asked}, lengths, model="tiny", devices=[DEVICE]).rows[0].fits[LORA]
    options = {"per_device_train_batch_size": 4, **SETTINGS}
    alone = estimate_run(run_of(asked, one_way).faked(lengths.rows(), options), DEVICE)
    assert "tokens_per_microbatch" not in fit.settings
    assert fit.peak_bytes == alone.peak_bytes
    assert fit.longest_row == 4096


@pytest.mark.slow
def test_where_a_batch_is_too_large_it_is_cut(one_way, monkeypatch):
    lengths = row_lengths("256x4", METHODS["sft"])
    whole = device_table({"cuda": run()}, lengths, model="tiny", devices=[DEVICE]).rows[0].fits[LORA]
    room = int((whole.peak_bytes - 2**19) * 1.05)
    small = dataclasses.replace(DEVICE, memory_bytes=room)
    cut = device_table({"cuda": run()}, lengths, model="tiny", devices=[small]).rows[0].fits[LORA]
    assert cut.fits
    assert 256 <= cut.settings["tokens_per_microbatch"] < 1024
    assert cut.longest_row < 4096


@pytest.mark.slow
def test_what_does_not_fit_says_what_it_takes(one_way):
    small = dataclasses.replace(DEVICE, memory_bytes=GIB // 4)
    found = device_table({"cuda": run()}, row_lengths("256x4", METHODS["sft"]), model="tiny", devices=[small])
    fit = found.rows[0].fits[LORA]
    assert (fit.fits, fit.longest_row, found.smallest()) == (False, 0, None)
    assert fit.peak_bytes > fit.room_bytes
    assert found.to_dict()["rows"][0]["fits"][LORA]["fits"] is False


def test_the_smaller_and_the_cheaper_come_first():
    names = [each.name for each in sorted(DEVICES.values(), key=tables.as_bought)]
    order = ["T4-16GB", "RTX-3090", "RTX-4090", "A100-40GB", "H100-80GB", "B200-180GB", "CPU-16GB", "Apple-16GB"]
    assert [name for name in names if name in order] == order


def test_adapters_leave_out_what_trains_all_weights():
    from peft import LoraConfig

    assert [way.name for way in ways_of(run())] == ["full", "full, 16 bits", LORA, QLORA]
    assert [way.name for way in ways_of(run(peft_config=LoraConfig()))] == [LORA, QLORA]


def test_what_a_user_sets_stays(monkeypatch):
    asked = dataclasses.replace(run(), requested={"gradient_checkpointing": False})
    assert [stage.name for way in ways_of(asked) for stage in way.stages] == ["plain", "plain"]
    asked = dataclasses.replace(run(), requested={"model_init_kwargs": {"dtype": "float32"}})
    (lora,) = [way for way in ways_of(asked) if way.name == LORA]
    assert all("dtype" not in stage.options for stage in lora.stages)
