"""`lowtide evaluate --data`: the loss that the model gives the held-out tokens, by dataset."""

import json
from pathlib import Path

import matplotlib
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lowtide.cli.after_training.evaluation_plot import panels_of, write_picture
from lowtide.cli.after_training.held_out import check_device, losses, method_of
from lowtide.cli.endings import UsageError
from lowtide.cli.main import main

SAID = [("a", "bcd"), ("tide", "in and out"), ("xyz", "q")]


@pytest.fixture
def data(tmp_path):
    for name, pairs in {"first": SAID, "second": SAID[:1]}.items():
        rows = [{"prompt": prompt, "completion": completion} for prompt, completion in pairs]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [str(tmp_path / f"{name}.jsonl") for name in ("first", "second")]


def plain_loss(talker, pairs) -> float:
    """The mean over all completions' tokens, with the end token, a row at a time."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(talker).eval(), AutoTokenizer.from_pretrained(talker)
    nats = []
    for prompt, completion in pairs:
        before, after = tokenizer(prompt)["input_ids"], [*tokenizer(completion)["input_ids"], tokenizer.eos_token_id]
        with torch.no_grad():
            logprobs = model(torch.tensor([before + after])).logits[0].log_softmax(-1)
        nats += [-float(logprobs[len(before) + n - 1, token]) for n, token in enumerate(after)]
    return sum(nats) / len(nats)


def test_the_loss_of_each_dataset_is_that_of_the_plain_model(talker, data, tmp_path, capsys, caplog):
    output = tmp_path / "found.json"
    words = ["evaluate", str(talker), "--data", *data, "--device", "cpu", "--output", str(output)]
    assert main([*words, "--picture", str(tmp_path / "found.png")]) == 0
    shown = capsys.readouterr().out
    assert "a step is to take" not in caplog.text  # nothing of a training that is not asked for
    assert "input_ids" not in caplog.text
    assert (tmp_path / "found.png").read_bytes().startswith(b"\x89PNG")
    for wrong, said in {"found.pdf": "ends in .png or .svg", "": "is a folder: name a file"}.items():
        assert main([*words, "--picture", str(tmp_path / wrong)]) == 2
        assert said in capsys.readouterr().err
    found = json.loads(output.read_text())
    assert found["method"] == "sft"
    [of_model] = found["data"].values()
    for name, pairs in {"first": SAID, "second": SAID[:1]}.items():
        assert of_model[name]["loss"] == pytest.approx(plain_loss(talker, pairs), rel=1e-5)
        assert f"{of_model[name]['loss']:.4g}" in shown


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_the_picture_has_what_the_tables_have(tmp_path, kind):
    odd = "a $name$ with_marks"
    found = {
        "arc": {odd: {"acc": 0.25, "acc_stderr": 0.05, "acc_norm": 0.5}, "base": {"acc": 0.125, "acc_stderr": 0.04}},
        "held (sft)": {odd: {"loss": 1.5, "acc": 0.75}, "base": {"loss": 2.5, "acc": 0.625}},
    }
    panels = panels_of(found)
    assert panels["acc"] == {
        "arc": {odd: (0.25, 0.05), "base": (0.125, 0.04)},
        "held (sft)": {odd: (0.75, 0.0), "base": (0.625, 0.0)},
    }
    assert {*panels} == {"acc", "acc_norm", "loss"}
    path = tmp_path / f"found.{kind}"
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        write_picture(found, path, "Evaluation of run")
    if kind == "svg":
        text = path.read_text()
        for said in (odd, "base", "acc_norm", "held (sft)", "0.125", "2.5", "Evaluation of run"):
            assert f">{said}<" in text
    else:
        assert path.read_bytes().startswith(b"\x89PNG")


def test_the_columns_of_the_run_are_those_of_rows_that_have_them(talker, data, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("model: M\ncolumns: {prompt: User Question, completion: Bot Answer}\n")
    odd = tmp_path / "odd.csv"
    odd.write_text("".join(f"{a};{b}\n" for a, b in [("User Question", "Bot Answer"), *SAID]))
    found = losses(str(talker), "sft", file, [str(odd), data[0]], device="cpu")
    assert found["odd"]["loss"] == pytest.approx(found["first"]["loss"], rel=1e-6)


def test_as_json_what_is_printed_is_what_is_written(talker, data, tmp_path, capsys):
    output = tmp_path / "found.json"
    assert main(["evaluate", str(talker), "--data", *data, "--device", "cpu", "--output", str(output), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(output.read_text())


def test_the_options_of_the_run_are_kept(talker, data, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("# All options of this run: `lowtide sft --config` on this file repeats it.\nmodel: M\n"
                    "completion_only_loss: false\nlearning_rate: 1.0\n")  # fmt: skip
    whole = losses(str(talker), "sft", file, data[:1], device="cpu")["first"]["loss"]
    assert whole != pytest.approx(plain_loss(talker, SAID), rel=1e-3)


def test_the_method_is_that_of_the_run_file(tmp_path):
    assert method_of(str(tmp_path), None) == ("sft", None)
    file = tmp_path / "run.yaml"
    file.write_text("# All options of this run: `lowtide dpo --config` on this file repeats it.\n")
    assert method_of(str(tmp_path), None) == ("dpo", file)
    (tmp_path / "checkpoint-5").mkdir()
    assert method_of(str(tmp_path / "checkpoint-5"), None) == ("dpo", file)
    assert method_of(str(tmp_path), "sft") == ("sft", None)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "there is nothing to measure"),
        (["--data", "first.jsonl", "--method", "stf"], "did you mean 'sft'?"),
        (["--data", "first.jsonl", "--method", "grpo"], "grpo learns from rewards"),
        (["--data", "first.jsonl", "--method", "dpo"], "give the model that training began with by --ref_model"),
        (["--data", "first.jsonl", "--ref_model", "M"], "--ref_model has no effect with sft"),
        (["--data", "first.jsonl", "--device", "x"], "--device 'x' cannot be used here"),
        (["--data", "frist.jsonl"], "Did you mean 'first.jsonl'?"),
    ],
)
def test_what_cannot_work_is_said_in_one_line(talker, data, tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    assert main(["evaluate", str(talker), *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_tasks_need_their_extra(talker, monkeypatch, capsys):
    monkeypatch.setattr("lowtide.cli.after_training.evaluate.find_spec", lambda name: None)
    assert main(["evaluate", str(talker), "--tasks", "hellaswag"]) == 2
    assert "pip install 'lowtide[eval]'" in capsys.readouterr().err


def test_a_device_that_a_trainer_does_not_take_is_refused():
    for asked, taken in ((None, "cuda:0"), ("cuda", "cuda:0"), ("cuda:0", "cuda:0"), ("cpu", "cpu")):
        check_device(asked, torch.device(taken))
    with pytest.raises(UsageError, match="give --device cuda with CUDA_VISIBLE_DEVICES=1"):
        check_device("cuda:1", torch.device("cuda:0"))
    with pytest.raises(UsageError, match="measures on cpu, and not on --device cuda"):
        check_device("cuda", torch.device("cpu"))


def test_the_rows_that_are_measured_on_are_not_written_over(data, tmp_path, capsys):
    before = Path(data[0]).read_bytes()
    (tmp_path / "link.json").symlink_to(data[0])
    for output, said in ((data[0], "is a file of --data"), ("link.json", "is a file of --data"), (".", "is a folder")):
        assert main(["evaluate", "m", "--data", *data, "--output", str(tmp_path / output)]) == 2
        assert said in capsys.readouterr().err
    assert Path(data[0]).read_bytes() == before
