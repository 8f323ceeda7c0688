"""`lowtide generate`: the tokens of transformers' `generate`, and files that go on where they were interrupted."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lowtide.cli.after_training.generate import line_of, prompts_of
from lowtide.cli.main import main
from lowtide.data.sources.load import load_rows
from lowtide.rollout.generators.generator import Completion
from lowtide.rollout.generators.ragged import RaggedGenerator

TEXTS = ["one", "a longer prompt", "x", "and here is one more", "tide"]


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text, "answer": n}) + "\n" for n, text in enumerate(TEXTS)))
    return path


@pytest.fixture
def generate(talker, prompts, tmp_path, capsys):
    """Runs the command; gives status, the output's lines, and standard error."""

    def run(*words: str, output: str = "out.jsonl", status: int = 0):
        path = tmp_path / output
        given = {"--prompts": prompts, "--output": path, "--max_new_tokens": 7, "--dtype": "float32", "--batch_size": 2}
        always = [str(word) for name, value in given.items() if name not in words for word in (name, value)]
        assert main(["generate", str(talker), *always, *words]) == status
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines], capsys.readouterr().err

    return run


def test_greedy_completions_are_those_of_transformers(talker, generate):
    lines, _ = generate()
    model, tokenizer = AutoModelForCausalLM.from_pretrained(talker).eval(), AutoTokenizer.from_pretrained(talker)
    for number, (text, line) in enumerate(zip(TEXTS, lines, strict=True)):
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        found = model.generate(ids, max_new_tokens=7, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
        assert line == {
            "prompt": text,
            "completion": tokenizer.decode(found, skip_special_tokens=True),
            "answer": number,
            "finish": "length",
            "completion_tokens": 7,
        }


def test_as_json_it_says_what_was_written(talker, prompts, tmp_path, capsys):
    output = tmp_path / "out.jsonl"
    words = [
        "generate",
        str(talker),
        "--prompts",
        str(prompts),
        "--output",
        str(output),
        "--max_new_tokens",
        "3",
        "--json",
    ]
    for new in (len(TEXTS), 0):
        assert main(words) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["output"], found["model"], found["completions"]) == (str(output), str(talker), len(TEXTS))
        assert (found["now"]["prompts"], found["now"]["tokens"]) == (new, 3 * new)


def test_an_interrupted_command_goes_on_to_the_file_of_one_that_was_not(generate, tmp_path, monkeypatch, capsys):
    sampled = ["--temperature", "1", "--num_generations", "2", "--seed", "3"]
    whole, _ = generate(*sampled)
    assert len({line["completion"] for line in whole}) == 2 * len(TEXTS)
    own, calls = RaggedGenerator.generate, []

    def fails(self, *given, **named):
        calls.append(1)
        if len(calls) == 3:
            raise ValueError("the power is gone")
        return own(self, *given, **named)

    monkeypatch.setattr(RaggedGenerator, "generate", fails)
    lines, _ = generate(*sampled, output="cut.jsonl", status=2)
    assert lines == whole[:8]
    path = tmp_path / "cut.jsonl"
    path.write_bytes(path.read_bytes()[:-20])  # half a line: its row is written again, with the other half of it
    calls[:] = [1] * 3
    lines, err = generate(*sampled, output="cut.jsonl")
    assert lines == whole
    assert "3 rows are there" in err
    monkeypatch.setattr(RaggedGenerator, "generate", None)  # nothing is left to write
    assert generate(*sampled, output="cut.jsonl")[0] == whole


def test_other_settings_are_refused_unless_it_is_overwritten(generate, prompts, tmp_path):
    generate()
    _, err = generate("--temperature", "0.5", status=2)
    assert "was begun with other temperature (None, now 0.5)" in err
    prompts.write_text(json.dumps({"prompt": "other"}) + "\n")
    assert "was begun with other prompts" in generate(status=2)[1]
    assert len(generate("--overwrite")[0]) == 1
    (tmp_path / "mine.jsonl").write_text("{}\n")
    assert "no mine.jsonl.settings.json beside it" in generate(output="mine.jsonl", status=2)[1]
    assert (tmp_path / "mine.jsonl").read_text() == "{}\n"


def test_where_memory_runs_out_fewer_prompts_are_written_together(generate, monkeypatch):
    whole, _ = generate()
    own, sizes = RaggedGenerator.generate, []

    def needs_memory(self, model, requests, *rest):
        sizes.append(len(requests))
        if len(requests) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return own(self, model, requests, *rest)

    monkeypatch.setattr(RaggedGenerator, "generate", needs_memory)
    lines, err = generate("--batch_size", "4", output="again.jsonl")
    assert lines == whole
    assert sizes == [4, 2, 1, 1, 1, 1, 1]
    assert "out of memory: --batch_size 1 from now on" in err


def test_conversations_leave_out_their_last_answer(talker):
    talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    rows = load_rows([{"messages": talk}])
    [prompt] = prompts_of(rows, "rows", system="s")
    assert prompt == [{"role": "system", "content": "s"}, talk[0]]
    line = line_of(rows[0], prompt, Completion([5], finish="stop"), "b")
    assert line["completion"] == [{"role": "assistant", "content": "b"}]
    assert line["reference_completion"] == "a"
    [asked] = prompts_of(load_rows([{"prompt": "q"}]), "rows", as_chat=True)
    assert asked == [talk[0]]


@pytest.mark.parametrize(
    ("rows", "words", "message"),
    [
        ([{"promt": "a"}], [], "has no column `prompt` or `messages`; did you mean 'promt'?"),
        ([{"prompt": 3}], [], "row 0 (the first is 0): `prompt` is 3"),
        ([{"prompt": ""}], [], "row 0: the prompt has no tokens"),
        ([{"prompt": "a"}], ["--system", "s"], "--system goes before messages"),
        ([{"prompt": "a"}], ["--output", "."], "--output . is a folder"),
        ([{"prompt": "a"}], ["--num_generations", "0"], "must be a whole number from 1 on"),
    ],
)
def test_what_cannot_work_is_said_in_one_line(generate, prompts, rows, words, message):
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    _, err = generate(*words, status=2)
    assert message in err
    assert "Traceback" not in err
