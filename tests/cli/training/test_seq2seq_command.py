"""`lowtide seq2seq` from flags and from a run file, its estimate, its plan, and its demo."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM

from lowtide import Seq2SeqConfig, estimate
from lowtide.cli.main import main
from tests.support.marks import slow_but
from tests.support.models.pairs_of_texts import build, rows, tokenizer
from tests.support.runs.commands import SMALL, check_demo, check_flags_and_file, flags_of


@pytest.fixture
def given(tmp_path: Path) -> dict[str, Any]:
    """A model's folder, a file of rows, and where to write."""
    model, data = tmp_path / "base", tmp_path / "rows.jsonl"
    build("t5").save_pretrained(model)
    tokenizer().save_pretrained(model)
    data.write_text("".join(json.dumps(row) + "\n" for row in rows(24)))
    return {
        **{"model": str(model), "dataset": str(data), "output_dir": str(tmp_path / "run"), "max_steps": 3},
        **{"per_device_train_batch_size": 4, "label_smoothing_factor": 0.1},
        **SMALL,
    }


@pytest.mark.slow
def test_flags_and_run_files_train_alike(given: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    check_flags_and_file("seq2seq", given, capsys)
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "run")
    assert model.generate(torch.tensor([[7, 8, 1]]), max_new_tokens=3).shape[1] > 1


@pytest.mark.slow
def test_adapters_are_merged_into_their_base(given: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    flags = [*flags_of({**given, "use_peft": True, "lora_r": 2}), "--lora_target_modules", "q", "v"]
    assert main(["seq2seq", *flags]) == 0, capsys.readouterr().err
    assert json.loads((tmp_path / "run" / "adapter_config.json").read_text())["task_type"] == "SEQ_2_SEQ_LM"
    merged = tmp_path / "merged"
    assert main(["merge", "--adapter", str(tmp_path / "run"), "--output_dir", str(merged)]) == 0
    before, after = (AutoModelForSeq2SeqLM.from_pretrained(each) for each in (given["model"], merged))
    changed = {name for name, p in after.named_parameters() if not torch.equal(p, before.get_parameter(name))}
    assert changed
    assert all(name.endswith((".q.weight", ".v.weight")) for name in changed)


def test_a_missing_start_token_is_one_message(given: dict[str, Any], capsys: pytest.CaptureFixture[str]):
    file = Path(given["model"], "config.json")
    file.write_text(json.dumps({**json.loads(file.read_text()), "decoder_start_token_id": None}))
    Path(given["model"], "generation_config.json").unlink()
    assert main(["seq2seq", *flags_of(given)]) == 2
    assert "has no decoder_start_token_id" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("by", slow_but(["lengths"], ["lengths", "rows"]))
@pytest.mark.parametrize("family", slow_but(["t5"], ["t5", "bart"]))
def test_the_peak_is_predicted(family: str, by: str, tmp_path: Path):
    """Longer sources take more, and so do more layers of the decoder, which the config counts by themselves."""
    options = {"output_dir": str(tmp_path), "per_device_train_batch_size": 8, "use_cpu": True, "bf16": False}
    config, deeper = Seq2SeqConfig(**options), {"t5": "num_decoder_layers", "bart": "decoder_layers"}[family]

    def peak(longest: int, layers: int) -> Any:
        model = build(family, d_model=128, max_position_embeddings=512, **{deeper: layers}).config
        if by == "lengths":
            return estimate(config, model, lengths=[[longest, longest // 2]] * 24)
        given = rows(24, longest=longest, seed=1)
        return estimate(config, model, dataset=given, processing_class=tokenizer())

    short, long, deep = peak(50, 2), peak(200, 2), peak(50, 6)
    assert {"forward", "backward", "optimizer"} <= short.phases.keys()
    assert short.tensor_bytes < long.tensor_bytes
    assert short.phases["forward"]["weights"] < deep.phases["forward"]["weights"]


@pytest.mark.slow
def test_layers_that_are_unrolled_take_what_all_of_them_take(tmp_path: Path):
    """The encoder's layers are traced in part, and repeated; the decoder's are traced whole."""
    config = Seq2SeqConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, per_device_train_batch_size=4)
    lengths = [[120, 40]] * 8
    peaks = [
        estimate(config, build("t5", num_layers=layers, num_decoder_layers=3).config, lengths=lengths).tensor_bytes
        for layers in (5, 6, 7, 8)
    ]
    steps = [after - before for before, after in itertools.pairwise(peaks)]
    assert min(steps) > 0
    assert max(steps) < 1.1 * min(steps)


@pytest.mark.slow
def test_the_demo_trains_an_encoder_decoder(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    check_demo("seq2seq", "exact answers", tmp_path, capsys)
