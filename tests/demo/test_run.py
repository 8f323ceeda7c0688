"""The demo in miniature: some steps of each method through the real command."""

import json
from dataclasses import replace

import pytest
import yaml
from transformers import AutoTokenizer

from lowtide.cli.main import main
from lowtide.demo.answers import answers, exact_match
from lowtide.demo.data import Question
from lowtide.demo.detecting import with_wrong_digit, wrong_digit
from lowtide.demo.lessons import LESSONS
from lowtide.demo.model import make_model, make_tokenizer, save
from lowtide.demo.run import Sizes, run_demo
from tests.support.marks import slow_but


@pytest.fixture
def command():
    """Makes what runs a method's command on a run file."""
    return lambda method, file: main([method, "--traceback", "--config", str(file), "--disable_tqdm", "true"])


@pytest.mark.slow
def test_twenty_steps_train_report_and_save(tmp_path, command, capsys):
    report = run_demo(tmp_path, command, sizes=Sizes(steps=20, held_out=20, samples=3))
    assert report is not None
    assert report == json.loads((tmp_path / "report.json").read_text())
    assert report["exact_match_before"] == 0
    assert 0 <= report["exact_match_after"] <= 1
    parameters = make_model(make_tokenizer(), seed=0).num_parameters()
    assert report["states"]["gradients"] == 4 * parameters
    assert report["states"]["optimizer"] == 8 * parameters
    assert report["states_bytes"] == sum(report["states"].values())
    assert report["peak_bytes"] >= report["resident_bytes_before_training"] > 0
    assert report["ledger"]["tokens_cut"] == 0
    assert report["seconds"] > 0
    assert (tmp_path / "model" / "model.safetensors").is_file()
    shown = capsys.readouterr().out
    for part in ("exact answers", "states predicted", "peak measured", str(tmp_path / "model")):
        assert part in shown


@pytest.mark.slow
@pytest.mark.parametrize("method", slow_but(["dpo"], ["dpo", "kto", "reward", "tpo"]))
def test_preferences_are_counted_before_and_after(tmp_path, command, capsys, method):
    sizes = Sizes(steps=2, questions=256, held_out=40, samples=3)
    report = run_demo(tmp_path, command, method=method, sizes=sizes)
    assert report is not None
    assert report == json.loads((tmp_path / "report.json").read_text())
    assert 0.2 < report["preference_accuracy_before"] < 0.8
    assert 0 <= report["preference_accuracy_after"] <= 1
    assert report["states_bytes"] == sum(report["states"].values())
    assert report["ledger"]["rows"] == sum(1 for _ in (tmp_path / "train.jsonl").open())
    shown = capsys.readouterr().out
    for part in ("rightly preferred", "chosen less rejected", str(tmp_path / "model")):
        assert part in shown


@pytest.mark.slow
@pytest.mark.parametrize("method", slow_but(["gold"], ["gold", "sdft"]))
def test_what_comes_before_is_trained_by_its_own_command(tmp_path, command, capsys, monkeypatch, method):
    lesson = LESSONS[method]
    monkeypatch.setitem(LESSONS, method, replace(lesson, taught=2, teacher=min(lesson.teacher, 3)))
    report = run_demo(tmp_path, command, method=method, sizes=Sizes(steps=2, questions=256, held_out=20, samples=3))
    assert report is not None
    assert sum(1 for _ in (tmp_path / "train.jsonl").open()) == 256
    for folder, steps in {"taught": 2, **({"teacher": 3} if lesson.teacher else {})}.items():
        assert yaml.safe_load((tmp_path / folder / "sft.yaml").read_text())["max_steps"] == steps
        assert (tmp_path / folder / "model" / "model.safetensors").is_file()
    if lesson.teacher_base is not None:
        ours, theirs = (AutoTokenizer.from_pretrained(tmp_path / name / "model") for name in ("taught", "teacher"))
        assert ours.get_vocab() != theirs.get_vocab()
    assert yaml.safe_load((tmp_path / f"{method}.yaml").read_text())["model"] == str(tmp_path / "taught" / "model")
    assert "exact answers" in capsys.readouterr().out


@pytest.mark.slow
def test_pretraining_begins_with_random_weights_and_a_learned_tokenizer(tmp_path, command, capsys):
    sizes = Sizes(steps=20, questions=2000, held_out=20, samples=3)
    report = run_demo(tmp_path, command, method="pretrain", sizes=sizes)
    assert report is not None
    assert report["exact_match_before"] == 0
    assert (tmp_path / "base" / "beginning.json").is_file()
    assert not (tmp_path / "base" / "model.safetensors").exists()
    assert (tmp_path / "model" / "model.safetensors").is_file()
    assert "exact answers" in capsys.readouterr().out


@pytest.mark.slow
def test_labels_are_counted_before_and_after(tmp_path, command, capsys):
    sizes = Sizes(steps=120, questions=2000, held_out=40, samples=3)
    report = run_demo(tmp_path, command, method="token-classification", sizes=sizes)
    assert report is not None
    assert report["exact_labels_before"] < 0.2
    assert report["exact_labels_after"] > 0.4
    shown = capsys.readouterr().out
    for part in ("all labels right", "marked as the larger number", str(tmp_path / "model")):
        assert part in shown


@pytest.mark.slow
def test_wrong_digits_are_found_before_and_after(tmp_path, command, capsys):
    sizes = Sizes(steps=150, questions=2000, held_out=60, samples=3)
    report = run_demo(tmp_path, command, method="replaced-token-detection", sizes=sizes)
    assert report is not None
    assert report["exact_match_before"] < 0.05
    assert report["exact_match_after"] > 0.1
    shown = capsys.readouterr().out
    for part in ("wrong digit found", "held to be replaced", str(tmp_path / "model")):
        assert part in shown


def test_a_wrong_digit_stands_in_the_place_of_the_right_one():
    question = Question(27, 38)
    assert with_wrong_digit(question).replace(wrong_digit(question) + ", so", "5, so") == "27 + 38\n7 + 8 = 15, so 65"
    assert wrong_digit(question) != "5"


def test_a_run_that_fails_is_no_report(tmp_path):
    assert run_demo(tmp_path, lambda name, file: 2, sizes=Sizes(steps=1, held_out=2, samples=1)) is None
    assert not (tmp_path / "report.json").exists()


def test_answers_come_in_the_order_of_the_questions(tmp_path):
    save(tmp_path, seed=0)
    questions = [Question(a, a // 7) for a in range(90)]
    together = answers(tmp_path, questions, "all")
    alone = [answers(tmp_path, [question], "one")[0] for question in questions[::30]]
    assert together[::30] == alone


def test_exact_match_counts_whole_answers():
    questions = [Question(1, 2), Question(9, 3)]
    assert exact_match(["1 + 2 = 3, so 3", "9 + 3 = 12, so 2"], questions) == 0.5
