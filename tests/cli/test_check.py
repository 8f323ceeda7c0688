"""`lowtide check`: what a run is told, looked at before weights, each fault where it is."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from transformers import LlamaConfig

from lowtide.cli.check import with_method
from lowtide.cli.endings import UsageError
from lowtide.cli.main import main

TURNS = {"messages": [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]}
PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A model's config, rows and run files; nothing of a run may be written here."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("USE_TORCH", "1")
    LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
                num_key_value_heads=2, max_position_embeddings=256).save_pretrained("m")  # fmt: skip
    (tmp_path / "m" / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "</s>"}}))
    (tmp_path / "m" / "chat_template.jinja").write_text(TEMPLATE)
    (tmp_path / "endless.jinja").write_text("{{ 'x' * 10**10 }}")
    (tmp_path / "large.jinja").write_text("{% for i in range(10**9) %}{% endfor %}")
    (tmp_path / "bad.jinja").write_text("{% for m in messages %}{{ m.contentt.first }}{% endfor %}")
    rows = {"turns": TURNS, "pairs": PAIR, "odd": {"User Question": "a", "Bot Answer": "b"}}
    for name, row in rows.items():
        (tmp_path / f"{name}.jsonl").write_text(f"{json.dumps(row)}\n" * 3)
    (tmp_path / "broken.jsonl").write_text(json.dumps(TURNS) + '\n{"messages": [{"role": "user"}]}\n')
    (tmp_path / "run.yaml").write_text("# lowtide sft --config on this\nmodel: m\ndataset: turns.jsonl\n")
    return tmp_path


def checked(words: str, capsys) -> tuple[int, dict]:
    status = main(["check", *words.split(), "--json"])
    found = json.loads(capsys.readouterr().out)
    return status, {each["what"]: (each["ok"], each["said"]) for each in found["checks"]}


@pytest.mark.parametrize(
    "words", ["run.yaml", "sft run.yaml", "sft --config run.yaml", "dpo --model m --dataset pairs.jsonl"]
)
def test_what_is_right_is_said_to_be(folder, capsys, words):
    before = sorted(folder.rglob("*"))
    status, found = checked(words, capsys)
    assert status == 0
    assert all(ok for ok, _ in found.values()), found
    assert {"options", "output folder", "rows", "columns"} <= found.keys()
    assert sorted(folder.rglob("*")) == before, "nothing is written"


def test_the_template_writes_the_first_conversation(folder, capsys):
    _, found = checked("run.yaml", capsys)
    written = "user: 1+1?</s>assistant: 2</s>"
    assert found["template"] == (True, f"writes {len(written)} characters of the first conversation")


WRONG = {
    "columns": ("sft --model m --dataset odd.jsonl", "columns", "User Question"),
    "columns of pairs": ("dpo --model m --dataset turns.jsonl", "columns", "pairs need 'chosen' and 'rejected'"),
    "columns of singles": ("kto --model m --dataset turns.jsonl", "columns", "'label' (true or false)"),
    "a row": ("sft --model m --dataset broken.jsonl", "columns", "broken.jsonl, row 1 (the first is 0)"),
    "a name of columns": ("sft --model m --dataset odd.jsonl --columns prompt=Usr", "rows", "has no column 'Usr'"),
    "a template": ("run.yaml --chat_template_path bad.jinja", "template", "contentt"),
    "a template without end": ("run.yaml --chat_template_path endless.jinja", "template", "more than 67,108,864"),
    "a template of a large range": ("run.yaml --chat_template_path large.jinja", "template", "Range too big"),
    "output": ("run.yaml --output_dir run.yaml", "output folder", "is a file"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_named_with_all_else_looked_at(folder, capsys, case):
    words, what, said = WRONG[case]
    status, found = checked(words, capsys)
    assert status == 2
    assert [name for name, (ok, _) in found.items() if not ok] == [what]
    assert said in found[what][1]
    assert found["options"][0]


def test_the_method_is_the_files_or_the_command_lines(folder, capsys):
    assert with_method(["check", "run.yaml", "--json"]) == ["check", "sft", "--config", "run.yaml", "--json"]
    assert with_method(["check", "dpo", "run.yaml"]) == ["check", "dpo", "--config", "run.yaml"]
    assert with_method(["check", "dpo", "--config", "run.yaml"]) == ["check", "dpo", "--config", "run.yaml"]
    (folder / "own.yaml").write_text("model: m\n")
    with pytest.raises(UsageError, match=r"own\.yaml does not say its method"):
        with_method(["check", "own.yaml"])
    assert main(["check", "no.yaml"]) == 2
    assert "there is no file 'no.yaml'" in capsys.readouterr().err


@pytest.mark.slow
def test_memory_is_predicted_and_says_what_does_not_fit(folder, capsys):
    status, found = checked("sft --model m --lengths 64x2 --memory --device 4090", capsys)
    assert (status, found["memory"][0]) == (0, True)
    status, found = checked("sft --model m --lengths 64x2 --memory --device 4090 --budget 1MiB", capsys)
    assert (status, found["memory"][0]) == (1, False)


@pytest.mark.slow
def test_it_goes_without_torch(folder):
    """Which alone takes longer than all of the check."""
    code = (
        "import sys\nfrom lowtide.cli.main import main\n"
        "assert main(['check', 'run.yaml', '--chat_template_path', 'chatml']) == 0\n"
        "assert 'torch' not in sys.modules"
    )
    env = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "PYTHONPATH": ":".join(filter(None, sys.path))}
    subprocess.run([sys.executable, "-c", code], capture_output=True, env=env, cwd=folder, check=True)


CONFIGS = [
    *("[]", "{", '{"vocab_size": -1}', '{"num_attention_heads": 0}', '{"hidden_size": [32]}'),
    *('{"dtype": "floaty"}', '{"text_config": {"torch_dtype": "floaty"}}', '{"quantization_config": "int4"}'),
]


@pytest.mark.parametrize("config", CONFIGS)
def test_a_config_that_is_none_ends_the_check(folder, capsys, config):
    (folder / "m" / "config.json").write_text(config)
    assert main(["check", "run.yaml"]) == 2
    assert "the config of" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["a/b/c", "a b", "org/name/"])
def test_a_name_that_the_hub_does_not_have_ends_the_check(folder, capsys, name):
    assert main(["check", "sft", "--model", name, "--dataset", "turns.jsonl"]) == 2
    assert f"model '{name}' cannot be loaded: there is no such folder" in capsys.readouterr().err


def test_a_slice_of_a_split_is_read_as_the_run_reads_it(folder, capsys):
    entry = json.dumps({"path": "turns.jsonl", "split": "train[:2]"}).replace(" ", "")
    for words in ("--dataset turns.jsonl --dataset_split train[:2]", f"--datasets turns.jsonl {entry}"):
        status, found = checked(f"sft --model m {words}", capsys)
        assert found["rows"][0], found
        assert status == 0


def test_a_share_for_evaluation_is_taken_where_the_number_of_rows_is_known(folder, capsys):
    assert checked("run.yaml --test_split_size 0.5 --eval_strategy steps --eval_steps 1", capsys)[0] == 0


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("tokenizer.json", b"\x00\xff", "is not JSON"),
        ("tokenizer.json", b'{"model": {"type": "BPE", "vocab": "x", "merges": []}}', "is no tokenizer"),
        ("tokenizer_config.json", b"[1]", "holds no JSON object"),
    ],
)
def test_a_tokenizer_that_is_none_is_named(folder, capsys, name, content, said):
    (folder / "m" / name).write_bytes(content)
    status, found = checked("dpo --model m --dataset pairs.jsonl", capsys)
    assert status == 2
    assert [what for what, (ok, _) in found.items() if not ok] == ["tokenizer"]
    assert f"{name} {said}" in found["tokenizer"][1]


def test_what_rows_hold_is_shown_escaped(folder, capsys):
    (folder / "odd.jsonl").write_text(json.dumps({"messages": [{"role": "\x1b]0;a\x07", "content": 3}]}))
    assert main(["check", "sft", "--model", "m", "--dataset", "odd.jsonl"]) == 2
    said = capsys.readouterr().out
    assert "NO  columns" in said
    assert "\x1b" not in said


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (3, "its chat_template must be text, not 3"),
        ([{"x": 1}, 2], "has no chat template"),
        ("", "has no chat template"),
    ],
)
def test_a_template_that_is_none_is_said(folder, capsys, template, said):
    (folder / "m" / "chat_template.jinja").unlink()
    (folder / "m" / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"x": 1}, "chat_template": template}))
    _, found = checked("run.yaml", capsys)
    assert said in found["template"][1]
    assert not found["template"][0]
