"""The ways out that a plan names where nothing fits: all that the command line has, and none that it refuses."""

from __future__ import annotations

import json
from itertools import takewhile

import pytest

from lowtide.cli.main import main
from lowtide.planner.answers.ways_out import is_taken

VALUES = {"stream", "resident", "two_pass", "true", "cpu", "8bit", "4bit", "bfloat16"}
"""Of the options that ways out name, as far as they have some."""

OF_NO_ESTIMATE = ("--lossy", "--devices", "--max_length")


def words_of(way: str) -> list[list[str]]:
    """The options that a way out begins with; one list for each value that it has "or" between."""
    words = [word.rstrip(",") for word in way.split()]
    said = [*takewhile(lambda word: word.startswith("--") or word in VALUES or word.startswith("adamw_"), words)]
    rest = words[len(said) :]
    other = [[*said[:-1], rest[1]]] if rest[:1] == ["or"] else []
    return [said, *other]


def ways(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    assert main(["plan", *words, "--budget", "10KiB", "--json"]) == 1
    return json.loads(capsys.readouterr().out)["ways"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "device", "words", "named"),
    [
        ("sft", "4090", (), {"--trained_weights", "--optimizer_in_backward"}),
        ("dpo", "4090", (), {"--trained_weights", "--precompute_ref_log_probs", "--ref_model_storage"}),
        ("dpo", "cpu", (), {"--trained_weights", "--precompute_ref_log_probs"}),
        ("dpo", "4090", ("--precompute_ref_log_probs",), {"--trained_weights"}),
        ("kto", "4090", ("--max_grad_norm", "0"), {"--trained_weights"}),
        ("sft", "4090", ("--use_peft",), {"--load_in_4bit", "--dtype"}),
        ("sft", "4090", ("--trained_weights", "stream", "--optimizer_in_backward", "two_pass"),
                     {"--use_peft"}),
    ],
)  # fmt: skip
def test_each_is_one_that_the_command_takes(capsys, model, method, device, words, named):
    run = [method, "--model", str(model), "--lengths", "64x2", "--device", device, *words]
    found = ways(capsys, *run)
    tried = [way for way in found if way.startswith("--") and not way.startswith(OF_NO_ESTIMATE)]
    for name in named:
        assert any(name in way for way in tried), found
    for each in [words for way in tried for words in words_of(way)]:
        status = main(["estimate", *run, *each])
        assert status in (0, 1), (each, capsys.readouterr().err)


@pytest.mark.slow
def test_weights_are_those_of_the_whole_model_where_they_are_streamed(capsys):
    """A 7B, of which a layer at a time is resident."""
    words = ["--model", "Qwen/Qwen2.5-7B", "--lengths", "64x1", "--device", "4090", "--trained_weights", "stream"]
    found = ways(capsys, "sft", *words, "--optimizer_in_backward", "two_pass")
    assert any("in 16 bits (14.19 GiB)" in way for way in found), found
    assert any("in 4 bits (QLoRA, some 3.99 GiB)" in way for way in found), found


@pytest.mark.slow
def test_stacks_of_experts_are_counted_in_4_bits(capsys):
    """Of Qwen3-30B-A3B 29 billion weights of 30.5 are experts'."""
    words = ["--model", "Qwen/Qwen3-30B-A3B", "--lengths", "64x1", "--device", "4090", "--use_peft"]
    found = ways(capsys, "sft", *words, "--dtype", "bfloat16")
    assert any("in 4 bits (QLoRA, some 15.99 GiB)" in way for way in found), found


def test_a_way_that_does_not_fit_is_known():
    way = "--base_weights stream brings in a layer of them at a time, from host memory"
    assert is_taken(way, {"gradient_checkpointing": True, "base_weights": "stream"})
    assert not is_taken(way, {"gradient_checkpointing": True, "base": 1})
