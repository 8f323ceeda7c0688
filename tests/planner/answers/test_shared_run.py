"""The line that a user makes public of a run."""

from __future__ import annotations

import json

import pytest
from transformers import LlamaConfig

import lowtide
from lowtide.planner.answers.known_models import known_config
from lowtide.planner.answers.shared_run import SharedRun, options_of, published_name, shape_of

RUN = SharedRun(
    date="2026-11-24", versions={"torch": "2.13.0"}, method="sft", model=None, shape={"hidden_size": 64},
    trained={"adapters": False, "rank": 0, "stored": "float32", "bits": 0}, options={"bf16": True},
    rows={"rows": 8, "longest": 10, "tokens": 80}, device="cpu x86_64", device_bytes=1 << 30, steps=3,
    predicted_bytes=103, measured_bytes=100, phase="backward",
)  # fmt: skip


def test_a_line_is_read_again():
    assert SharedRun.read(RUN.line()) == RUN
    assert "\n" not in RUN.line()
    assert RUN.error == pytest.approx(0.03)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"path": "/home/me"}, "exactly the fields"),
        ({"shape": {"_name_or_path": "mine"}}, "_name_or_path"),
        ({"options": {"output_dir": "secret"}}, "output_dir"),
        ({"model": "mine/private"}, "its shape alone"),
    ],
)
def test_nothing_else_is_in_it(change, message):
    with pytest.raises(ValueError, match=message):
        SharedRun.read(json.dumps(json.loads(RUN.line()) | change))


def test_a_private_model_has_its_shape_alone(tmp_path):
    private = LlamaConfig(hidden_size=64, num_hidden_layers=1, name_or_path="/home/me/secret")
    assert "secret" not in json.dumps(shape_of(private))
    assert published_name(shape_of(private)) is None
    assert published_name(shape_of(known_config("Qwen2.5-7B"))) == "Qwen/Qwen2.5-7B"


def test_options_have_no_paths(tmp_path):
    config = lowtide.SFTConfig(str(tmp_path), use_cpu=True, report_to="none", run_name="secret")
    text = json.dumps(options_of(config))
    assert str(tmp_path) not in text
    assert "secret" not in text
    assert '"optim"' in text
