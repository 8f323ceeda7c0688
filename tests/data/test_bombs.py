"""Small inputs that would take all memory or time are refused, and named."""

import gzip
import json
import threading

import pytest
import yaml
from transformers import LlamaConfig

from lowtide.cli.endings import UsageError
from lowtide.cli.launch import launch_command
from lowtide.cli.run_file import read_run_file
from lowtide.compat.jinja import ends_within
from lowtide.data.encode import chat
from lowtide.data.formats.reading import ChatSample, RowPlace
from lowtide.data.sources import json_lines
from lowtide.data.sources.load import load_rows
from lowtide.engine.weights.load_errors import check_layers
from lowtide.engine.weights.shard_files import missing_shards
from lowtide.engine.weights.weight_files import read_json
from lowtide.parsing import parse_json, parse_yaml
from lowtide.trainers.checkpoints.soundness import Damage, _trainer_state

LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12)
)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("lines", [1, 3])
def test_a_line_that_is_too_long_is_named(tmp_path, monkeypatch, streaming, lines):
    monkeypatch.setattr(json_lines, "MOST_LINE_BYTES", 1000)
    monkeypatch.setattr(json_lines, "BLOCK_BYTES", 64)
    path = tmp_path / "train.jsonl.gz"
    with gzip.open(path, "wt") as file:
        for _ in range(lines - 1):
            file.write(json.dumps({"text": "a" * 900}) + "\n")
        file.write(json.dumps({"text": "a" * 2000}) + "\n")
    with pytest.raises(ValueError, match=rf"train.jsonl.gz, line {lines}: more than"):
        load_rows(path, streaming=streaming)


def test_lines_that_are_long_enough_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(json_lines, "MOST_LINE_BYTES", 1000)
    monkeypatch.setattr(json_lines, "BLOCK_BYTES", 64)
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps({"text": "a" * 900}) + "\n" for _ in range(20)))
    assert len(load_rows(path)) == 20


def test_a_shard_of_billions_names_some_that_are_missing(tmp_path):
    (tmp_path / "shard-00001-of-9999999999.safetensors").touch()
    assert missing_shards(tmp_path)[0] == "shard-00002-of-9999999999.safetensors"
    assert len(missing_shards(tmp_path)) < 100


@pytest.mark.parametrize("text", [LAUGHS, "a: &a [*a]", "[" * 3000 + "]" * 3000, "? [1, 2]\n: 3", "{{a: 1}: 2}"])
def test_yaml_that_grows_or_has_keys_that_are_none_is_an_error_of_yaml(text):
    with pytest.raises(yaml.YAMLError):
        parse_yaml(text)
    assert parse_yaml("a: &x [1]\nb: *x\n") == {"a": [1], "b": [1]}


@pytest.mark.parametrize("text", [LAUGHS, "[" * 3000 + "]" * 3000, "? [1, 2]\n: 3", "a: &a [*a]"])
def test_run_and_launcher_files_that_are_so_are_refused(tmp_path, text):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"run\.yaml"):
        read_run_file(path, {})
    with pytest.raises(UsageError, match=r"run\.yaml"):
        launch_command(["sft"], {"accelerate_config": str(path)})


def test_json_that_is_nested_deeply_is_no_json(tmp_path):
    text = "[" * 3000 + "]" * 3000
    with pytest.raises(json.JSONDecodeError, match="nested too deeply"):
        parse_json(text)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config.json is not JSON"):
        read_json(tmp_path / "config.json")
    (tmp_path / "train.jsonl").write_text('{"text": ' + text + "}\n")
    with pytest.raises(ValueError, match=r"train.jsonl, line 1"):
        load_rows(tmp_path / "train.jsonl")


@pytest.mark.parametrize("content", ["[]", "3", "{}", '{"_data_files": 3}'])
def test_a_saved_dataset_whose_state_is_none_is_refused(tmp_path, content):
    (tmp_path / "state.json").write_text(content)
    (tmp_path / "dataset_info.json").write_text("{}")
    with pytest.raises(ValueError, match="cannot be read as one"):
        load_rows(tmp_path)


def test_a_model_of_too_many_layers_is_refused():
    with pytest.raises(ValueError, match="num_hidden_layers=1000000000"):
        check_layers(LlamaConfig(num_hidden_layers=10**9), "m")


def test_a_step_beyond_the_run_is_damage(tmp_path):
    path = tmp_path / "trainer_state.json"
    path.write_text(json.dumps({"global_step": 10**15, "max_steps": 10}))
    with pytest.raises(Damage, match="beyond the 10 steps"):
        _trainer_state(path)
    path.write_text(json.dumps({"global_step": 10, "max_steps": 10}))
    _trainer_state(path)


def test_what_takes_too_long_is_ended():
    with pytest.raises(ValueError, match="loops without end"), ends_within(0.2):
        threading.Event().wait(30)


HOSTILE_TEMPLATES = {
    "a range that is too large": "{% for i in range(10**9) %}x{% endfor %}",
    "loops without end": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "more than 268,435,456 characters": "{{ 'x' * 10**10 }}",
    "more than 268,435,456": "{{ [1] * 10**10 }}",
    "a power above": "{{ 9 ** (10 ** 9) }}",
    "to a width": "{{ '%9999999999d' % 1 }}",
}


@pytest.mark.parametrize("what", HOSTILE_TEMPLATES)
def test_a_template_that_has_no_end_is_refused_with_the_row(tokenizer, monkeypatch, what):
    monkeypatch.setattr(chat, "TEMPLATE_SECONDS", 0.3)
    monkeypatch.setattr(chat, "_BATCH_SECONDS_A_ROW", 0.0)
    template = (
        "{% if messages[0].content == 'bad' %}" + HOSTILE_TEMPLATES[what] + "{% endif %}{{ messages[0].content }}"
    )
    rows = [ChatSample([{"role": "user", "content": text}]) for text in ("good", "bad")]
    encoder = chat.ChatEncoder(tokenizer, template=template)
    words = "can't render" if what.startswith("a range") else what
    with pytest.raises(ValueError, match=rf"row 5 .*(?s:.*){words}"):
        encoder.encode(rows, RowPlace("data.jsonl", [4, 5]))


def test_a_template_that_multiplies_within_reason_is_rendered(tokenizer):
    encoder = chat.ChatEncoder(tokenizer, template="{{ '=' * 3 }}{{ 2 ** 3 }}{{ '%03d' % 7 }}{{ 7 % 4 }}")
    [ids] = encoder.encode([ChatSample([{"role": "user", "content": "a"}])], RowPlace("data.jsonl", [0]))
    assert tokenizer.decode(ids) == "===80073"
