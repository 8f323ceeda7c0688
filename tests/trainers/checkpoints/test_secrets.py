"""No file of a run has an access token in it."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from lowtide import SFTConfig
from lowtide.cli.training.run_file import write_run_file
from lowtide.option_values import options_of
from lowtide.run.options.secrets import without_secrets
from tests.support.runs.small_runs import small

TOKEN = "hf_abcdefghijklmnopqrstuvwxyz"


def config(folder: Path) -> SFTConfig:
    return SFTConfig(
        output_dir=str(folder), hub_token=TOKEN, model_init_kwargs={"token": TOKEN, "revision": "main"}, use_cpu=True
    )


def test_no_file_of_a_run_has_the_token(tmp_path):
    trainer = small(tmp_path, max_steps=2, hub_token=TOKEN)
    trainer.args.model_init_kwargs = {"token": TOKEN, "revision": "main"}
    trainer.train()
    trainer.save_model()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"training_args.bin", "trainer_state.json"} <= {path.name for path in files}
    assert not [path for path in files if TOKEN.encode() in path.read_bytes()]
    assert trainer.args.hub_token == TOKEN
    saved = torch.load(tmp_path / "training_args.bin", weights_only=False)
    assert (saved.hub_token, saved.model_init_kwargs) == (None, {"token": None, "revision": "main"})
    assert saved.learning_rate == trainer.args.learning_rate


def test_copies_in_this_process_keep_the_token(tmp_path):
    given = config(tmp_path)
    for each in (copy.copy(given), copy.deepcopy(given)):
        assert each.hub_token == each.model_init_kwargs["token"] == TOKEN
        assert each.requested == given.requested


def test_trackers_do_not_get_the_token(tmp_path):
    given = config(tmp_path)
    assert TOKEN not in given.to_json_string()
    assert TOKEN not in str(given.to_sanitized_dict())


def test_a_run_file_has_no_token(tmp_path):
    values = {"hub_token": TOKEN, "model_init_kwargs": {"token": TOKEN, "revision": "main"}, "eos_token": "<eos>"}
    write_run_file(tmp_path / "run.yaml", values, options_of(SFTConfig), method="sft")
    text = (tmp_path / "run.yaml").read_text()
    assert TOKEN not in text
    assert "revision: main" in text
    assert "eos_token: <eos>" in text


def test_what_only_sounds_secret_stays():
    assert without_secrets({"eos_token": "<eos>", "token": True, "api_key": "x"}) == {
        "eos_token": "<eos>", "token": True, "api_key": None,
    }  # fmt: skip


def test_secrets_of_other_services_in_lists_and_in_addresses_are_cleared():
    given = {
        "aws_secret_access_key": "wJalr",
        "awsSecretAccessKey": "wJalr",
        "api-key": "x",
        "storage_options": [{"password": "p", "user": "me"}, {"hf_token": [TOKEN]}],
        "headers": (TOKEN, "plain"),
        "dataset": "https://me:secret@host/data.jsonl?x=1#a@b",
        "proxies": ["http://me:secret@proxy:80"],
        "stop_tokens": ["<end>"],
        "mail": "me@host",
    }
    kept = copy.deepcopy(given)
    assert without_secrets(given) == {
        "aws_secret_access_key": None,
        "awsSecretAccessKey": None,
        "api-key": None,
        "storage_options": [{"password": None, "user": "me"}, {"hf_token": [None]}],
        "headers": (None, "plain"),
        "dataset": "https://host/data.jsonl?x=1#a@b",
        "proxies": ["http://proxy:80"],
        "stop_tokens": ["<end>"],
        "mail": "me@host",
    }
    assert given == kept


HF, KEY = "hf_" + "a" * 30, "AKIA" + "B" * 16


@pytest.mark.parametrize(
    ("given", "cleared"),
    [
        ({"dataset": "https://me:pa@ss@host/x"}, {"dataset": "https://host/x"}),
        ({"dataset": f"https://{HF}@host/x"}, {"dataset": "https://host/x"}),
        ({"dataset": "ssh://git@host/x"}, {"dataset": "ssh://git@host/x"}),
        ({"dataset": f"s3://{KEY}:word/bucket"}, {"dataset": "s3:///bucket"}),
        ({"dataset": "https://host/?token=abc&x=1"}, {"dataset": "https://host/?token=&x=1"}),
        ({"dataset": "https://host/?X-Amz-Signature=abc"}, {"dataset": "https://host/?X-Amz-Signature="}),
        ({"env": [f"A={HF}", "WANDB_API_KEY=abc", "B=1"]}, {"env": ["A=", "WANDB_API_KEY=", "B=1"]}),
        ({"run_name": f"by {HF}, twice"}, {"run_name": "by , twice"}),
        (
            {"storage_options": {"sas_token": "x", "account_key": "x"}},
            {"storage_options": dict.fromkeys(("sas_token", "account_key"))},
        ),
        (
            {"credentials": {"id": 1}, "auth": ("me", "word"), "cookie": "a", "pwd": "b"},
            {"credentials": None, "auth": (None, None), "cookie": None, "pwd": None},
        ),
        ({"hub_access_tokens": ["a"]}, {"hub_access_tokens": [None]}),
        ({"key": "-----BEGIN PRIVATE KEY-----\nabc"}, {"key": None}),
        ({"special": {"pad_token": "<pad>", "tokens": ["<a>"], "token_ids": [1], "optim_args": "eps=1"}}, None),
    ],
)
def test_secrets_within_texts_and_of_further_services_are_cleared(given, cleared):
    assert without_secrets(given) == (given if cleared is None else cleared)
