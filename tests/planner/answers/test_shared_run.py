"""The line that a user makes public of a run."""

from __future__ import annotations

import json

import pytest
from transformers import LlamaConfig

import lowtide
from lowtide.planner.answers.known_models import known_config
from lowtide.planner.answers.shared_run import (
    SharedRun,
    options_of,
    public_device,
    public_version,
    published_name,
    shape_of,
)

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


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("date", "yesterday, at home"),
        ("date", "2026-13-01"),
        ("date", 20261124),
        ("versions", {"torch": "2.13.0+acme.secret"}),
        ("versions", {"torch": "/home/me/torch"}),
        ("versions", {"torch": 2}),
        ("versions", {"acme_llm": "1.0"}),
        ("versions", "torch 2.13.0"),
        ("method", "secret"),
        ("method", ["sft"]),
        ("shape", {"model_type": "acme_secret"}),
        ("shape", {"hidden_size": "secret"}),
        ("shape", {"hidden_size": [1]}),
        ("shape", {"tie_word_embeddings": 1}),
        ("shape", ["model_type"]),
        ("trained", {"adapters": False, "rank": 0, "stored": "float32"}),
        ("trained", {**RUN.trained, "path": "/home/me"}),
        ("trained", {**RUN.trained, "adapters": "no"}),
        ("trained", {**RUN.trained, "rank": "secret"}),
        ("trained", {**RUN.trained, "rank": -1}),
        ("trained", {**RUN.trained, "stored": "secret"}),
        ("trained", {**RUN.trained, "bits": 5}),
        ("options", {"optim": "secret"}),
        ("options", {"checkpointing_policy": "full/secret"}),
        ("options", {"optimizer_in_backward": "secret"}),
        ("options", {"bf16": "secret"}),
        ("options", {"max_length": {"path": "secret"}}),
        ("options", {"max_length": 1.5}),
        ("options", {"max_grad_norm": float("nan")}),
        ("options", {"precompute_ref_log_probs": True}),  # of DPO, and this is SFT
        ("rows", {"rows": 8, "longest": 10, "tokens": "many"}),
        ("rows", {"rows": 8, "longest": 10, "tokens": 80, "texts": 8}),
        ("rows", {"rows": 8}),
        ("device", "my-laptop"),
        ("device", "cpu secret"),
        ("device", "NVIDIA of Jane Doe"),
        ("device", "NVIDIA"),
        ("device", "cpu x86_64\nsecret"),
        ("device", None),
        ("device_bytes", "1 GiB"),
        ("steps", True),
        ("predicted_bytes", 1.5),
        ("measured_bytes", 0),
        ("phase", "secret"),
        ("phase", {}),
        ("model", ["Qwen/Qwen2.5-7B"]),
    ],
)
def test_no_field_takes_any_text(field, value):
    with pytest.raises(ValueError, match=field):
        SharedRun.read(json.dumps(json.loads(RUN.line()) | {field: value}))


def test_nothing_hides_behind_a_field_that_is_there_twice():
    with pytest.raises(ValueError, match="twice"):
        SharedRun.read('{"device": "my laptop", ' + RUN.line()[1:])


def test_versions_keep_what_is_public_of_them():
    for version in ("2.13.0", "3.14.0rc1", "2.13.0+cu130", "2.12.0.dev20260101", "2.9.1+rocm6.4", "0.50.2.post1"):
        assert public_version(version) == version
    assert public_version("2.13.0+acme.secret") == "2.13.0"
    assert public_version("2.9.0a0+50eac811a6.nv25.09") == "2.9.0a0"
    assert public_version("secret") == ""


@pytest.mark.parametrize(
    "name",
    [
        "cpu x86_64", "cpu arm64", "Tesla T4", "Tesla V100-SXM2-16GB", "NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3",
        "NVIDIA H100 PCIe", "NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 4060 Ti", "NVIDIA RTX 6000 Ada Generation",
        "NVIDIA GeForce RTX 5090 Laptop GPU", "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "NVIDIA A10G",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA B200", "NVIDIA L40S", "AMD Instinct MI300X", "Quadro RTX 6000",
        "NVIDIA GeForce RTX 2080 with Max-Q Design", "NVIDIA GH200 480GB", "AMD Radeon RX 7900 XTX",
    ],
)  # fmt: skip
def test_devices_are_called_as_their_makers_do(name):
    assert public_device(name) == name


def test_other_devices_have_no_name():
    assert public_device("Acme Secret 1") == "other GPU"
    assert public_device("cpu secret") == "cpu other"


def test_a_type_of_model_that_transformers_lacks_has_no_name():
    class Private(LlamaConfig):
        model_type = "acme_secret"

    assert shape_of(Private())["model_type"] == "other"


def test_a_private_model_has_its_shape_alone(tmp_path):
    private = LlamaConfig(hidden_size=64, num_hidden_layers=1, name_or_path="/home/me/secret")
    assert "secret" not in json.dumps(shape_of(private))
    assert published_name(shape_of(private)) is None
    assert published_name(shape_of(known_config("Qwen2.5-7B"))) == "Qwen/Qwen2.5-7B"


def test_options_have_no_paths(tmp_path):
    config = lowtide.SFTConfig(str(tmp_path), use_cpu=True, report_to="none", run_name="secret")
    text = json.dumps(options_of(config, "sft"))
    assert str(tmp_path) not in text
    assert "secret" not in text
    assert '"optim"' in text
