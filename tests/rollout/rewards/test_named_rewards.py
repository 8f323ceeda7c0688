"""Rewards by name: built-in ones, with TRL's numbers where TRL has them, and functions by their path."""

import math
import sys

import pytest

from lowtide.rollout.rewards import builtin, published
from lowtide.rollout.rewards.completed import Completed
from lowtide.rollout.rewards.named import BUILTIN, find_reward
from lowtide.rollout.rewards.rewards import Rewards

RIGHT = [
    ("4", "4"),
    ("It is 4.", "4"),
    ("so 2 + 2 = 4", "Two and two.\n#### 4"),
    ("The answer is 1,234.50.", "1234.5"),
    ("7 or 8? \\boxed{8}. Not 9", "8"),
    ("\\boxed{\\frac{1}{2}}", "\\boxed{\\frac{1}{2}}"),
    ("<think>3?</think><answer> Paris </answer>", "paris"),
    ("Let me see. #### $42", "42"),
    ("The answer is 42 apples.", 42),
    (" Paris.", "Paris"),
]
WRONG = [
    ("5", "4"),
    ("I do not know", "4"),
    ("", "4"),
    ("The answer is 4, no: the answer is 5", "4"),
    ("It is Paris", "Paris"),
    ("\\boxed{41}, 42", "42"),
]


@pytest.mark.parametrize(("said", "wanted"), RIGHT)
def test_a_right_answer(said, wanted):
    assert builtin.exact_answer([said, [{"role": "assistant", "content": said}]], answer=[wanted] * 2) == [1.0, 1.0]


@pytest.mark.parametrize(("said", "wanted"), WRONG)
def test_a_wrong_answer(said, wanted):
    assert builtin.exact_answer([said], solution=[wanted]) == [0.0]


def test_a_row_without_an_answer_is_left_out():
    assert builtin.exact_answer(["4", "4"], answer=[None, " "]) == [None, None]
    with pytest.raises(ValueError, match="ground_truth"):
        builtin.exact_answer(["4"], response=["4"])


def test_the_last_turn_is_read_after_tools():
    turns = [
        {"role": "assistant", "content": "", "tool_calls": [{}]},
        {"role": "tool", "content": "5"},
        {"role": "assistant", "content": "It is 4"},
    ]
    assert builtin.exact_answer([turns], answer=["4"]) == [1.0]


def test_format_and_length():
    good = "<think>\nso\n</think>\n<answer>4</answer>\n"
    bad = [good + "!", good * 2, "<answer>4</answer>", "<think>so</think> 4", "<think>so</think><answer></answer>"]
    assert builtin.format_reward([good, *bad]) == [1.0] + [0.0] * 5
    assert builtin.length_reward([[1] * 100, []]) == [-0.1, 0.0]


THOUGHTS = [
    "<think>a</think> b",
    "<think>\na\n</think>\nb\nc",
    "x <think>a</think>",
    "<think>a",
    "<think>a<think>b</think>",
    "<think>a</think> <think>b</think>",
    "",
    "<think></think>",
]
IDS = [[], [1], [1, 2], [5] * 5, [1, 2, 3, 4] * 5, [1] * 80, [1] * 90, [1] * 100, [1] * 101]


def test_published_rewards_have_the_numbers_of_trl():
    rewards = pytest.importorskip("trl.rewards")
    chats = [[{"role": "assistant", "content": each}] for each in THOUGHTS]
    assert published.think_format_reward(chats) == rewards.think_format_reward(chats)
    for size, lowest in ((1, -1.0), (3, -0.5), (2, 0.0)):
        ours = published.get_repetition_penalty_reward(size, lowest)
        assert ours(IDS) == rewards.get_repetition_penalty_reward(size, lowest)(IDS)
    for cache in (0, 20):
        ours = published.get_soft_overlong_punishment(100, cache)
        assert ours(IDS) == rewards.get_soft_overlong_punishment(100, cache)(IDS)
    with pytest.raises(ValueError, match="must not be positive"):
        published.get_repetition_penalty_reward(max_penalty=0.5)


MATHS = [
    (r"It is \boxed{\frac{1}{3}}", r"\frac{1}{3}"),
    (r"It is \boxed{\frac{1}{2}}", r"\frac{1}{3}"),
    (r"<think>hm</think> $x = \boxed{0.5}$", r"\boxed{\frac12}"),
    ("nothing", "$3$"),
    (r"\boxed{3}", "no mathematics"),
]


def test_mathematics_has_the_numbers_of_trl():
    pytest.importorskip("math_verify")
    rewards = pytest.importorskip("trl.rewards")
    chats = [[{"role": "assistant", "content": each}] for each, _ in MATHS]
    right = [each for _, each in MATHS]
    for name in ("accuracy_reward", "reasoning_accuracy_reward"):
        logs: list[dict] = [{}, {}]
        ours = getattr(published, name)(chats, right, log_extra=logs[0].__setitem__)
        assert ours == getattr(rewards, name)(chats, right, log_extra=logs[1].__setitem__)
        assert logs[0] == logs[1]
    ids = [[1] * 10 * n for n in range(len(MATHS))]
    cosine = published.get_cosine_scaled_reward(30)(chats, right, ids)
    theirs = rewards.get_cosine_scaled_reward(30)(chats, right, ids)
    assert all(a == b or math.isclose(a, b) for a, b in zip(cosine, theirs, strict=True))


def test_mathematics_without_its_package_says_what_to_install(monkeypatch):
    monkeypatch.setattr("lowtide.rollout.rewards.named.find_spec", lambda name: None)
    monkeypatch.setattr("lowtide.rollout.rewards.published.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install math-verify"):
        Rewards("accuracy_reward")
    with pytest.raises(ImportError, match="pip install math-verify"):
        published.accuracy_reward(["1"], ["1"])


def test_rewards_by_name_are_called():
    what = Completed(["2 + 2?"] * 2, ["4", "<think>x</think>"], [[1], [1] * 1200], columns={"answer": ["4", "4"]})
    names = ["exact_answer", "format", "length", "think_format_reward", "get_soft_overlong_punishment"]
    found = Rewards(names)(what)
    assert found[0].tolist() == pytest.approx([1, 0, -0.001, 0, 0])
    assert found[1].tolist() == pytest.approx([0, 0, -1.2, 1, -176 / 256])


def test_a_function_by_its_path(tmp_path, monkeypatch):
    (tmp_path / "own_rewards.py").write_text(
        "def shout(completions):\n    return [each.isupper() for each in completions]\n"
    )
    (tmp_path / "broken_rewards.py").write_text("import no_such_package\n")
    (tmp_path / "raising_rewards.py").write_text("raise KeyError('x')\n")
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    found = Rewards(["own_rewards.shout", "lowtide.rollout.rewards.builtin.length_reward"])
    assert found.names == ["shout", "length_reward"]
    assert found(Completed(["a", "a"], ["A", "a"], [[1], [1]]))[:, 0].tolist() == [1, 0]
    assert sys.path == before
    for name, message in {
        "own_rewards.shuot": "has no 'shuot'; did you mean 'shout'",
        "own_rewards.__name__": "is a str, which cannot be called",
        "no_rewards.shout": "there is no module 'no_rewards', neither installed nor as a file in",
        "broken_rewards.shout": "No module named 'no_such_package'",
        "raising_rewards.shout": "failed with KeyError",
        "exact_anwser": "not built in .*did you mean 'exact_answer'",
    }.items():
        with pytest.raises(ValueError, match=message):
            find_reward(name)


def test_built_in_names_are_functions():
    assert all(callable(each) for each in BUILTIN.values())


def test_a_file_of_rewards_is_no_model_and_its_function_is_named(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for path, named in {"./r.py": r"as r\.NAME$", "../r.py:short": r"as r\.short, run in \.\.$"}.items():
        with pytest.raises(ValueError, match=rf"is a file: name the function in it by its path, {named}"):
            Rewards([path])
