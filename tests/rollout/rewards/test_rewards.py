"""Reward functions: called as TRL calls them, equal to its numbers, and stopped where they go wrong."""

import asyncio
import copy
import functools
import logging
import math
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from lowtide.objectives.advantages import weighted
from lowtide.rollout.rewards.completed import Completed
from lowtide.rollout.rewards.rewards import Rewards

ROWS = [{"prompt": f"Question {n}?", "answer": str(n), "level": n} for n in (0, 0, 1, 1)]
COMPLETIONS = [" 0", " 5", " 1", " 1!"]


def completed(**changes) -> Completed:
    prompts = [row["prompt"] for row in ROWS]
    more = {"completion_ids": [[7] * (n + 1) for n in range(4)], **changes}
    return Completed.of(ROWS, prompts, COMPLETIONS, **more)


def lengths(completions, **kwargs):
    return [float(len(each)) for each in completions]


def right(completions, answer):
    return [each.strip() == wanted for each, wanted in zip(completions, answer, strict=True)]


async def slow_levels(level, **kwargs):
    await asyncio.sleep(0.01)
    return [None if each == 0 else each / 2 for each in level]


class Counting:
    def __init__(self):
        self.seen = []

    def __call__(self, **everything):
        self.seen.append(everything)
        return torch.arange(4)


def test_the_numbers_of_functions_of_every_kind():
    by_two = functools.partial(lambda completion_ids, times, **_: [len(ids) * times for ids in completion_ids], times=2)
    rewards = Rewards([lengths, right, slow_levels, by_two, Counting()], weights=[1, 2, 3, 4, 5])
    found = rewards(completed())
    assert found.dtype == torch.float64
    nan = math.nan
    wanted = torch.tensor([[2, 1, nan, 2, 0], [2, 0, nan, 4, 1], [2, 1, 0.5, 6, 2], [3, 0, 0.5, 8, 3.0]]).double()
    torch.testing.assert_close(found, wanted, equal_nan=True)
    assert rewards.names == ["lengths", "right", "slow_levels", "<lambda>", "Counting"]
    torch.testing.assert_close(weighted(found, rewards.weights)[:3], torch.tensor([12.0, 23.0, 39.5]).double())


def test_a_function_with_kwargs_gets_all_that_trl_gives():
    pytest.importorskip("trl")
    from trl.trainer.grpo_trainer import GRPOTrainer

    ours, theirs = Counting(), Counting()
    functions = [lengths, slow_levels]
    rewards = Rewards([ours, *functions])
    state, environments = SimpleNamespace(global_step=3), [object() for _ in ROWS]
    found = rewards(completed(environments=environments), trainer_state=state)

    loop = rewards.caller.loop
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(device="cpu", gather=lambda each: each, is_main_process=False),
        args=SimpleNamespace(report_to=[]),
        reward_funcs=[theirs, *functions],
        reward_processing_classes=[None] * 3,
        reward_func_names=rewards.names,
        state=state,
        environments=environments,
        async_loop=loop._running(),
        _log_completion_extra=print,
        _log_metric=print,
        is_world_process_zero=lambda: False,
    )
    ids = [[7] * (n + 1) for n in range(4)]
    prompts = [row["prompt"] for row in ROWS]
    scored = GRPOTrainer._calculate_rewards.__wrapped__(trainer, ROWS, prompts, COMPLETIONS, ids)
    torch.testing.assert_close(found, scored.double(), equal_nan=True)
    [got], [wanted] = ours.seen, theirs.seen
    assert got.keys() == wanted.keys()
    same = got.keys() - {"log_extra", "log_metric"}
    assert {name: got[name] for name in same} == {name: wanted[name] for name in same}


def test_a_function_cannot_change_what_others_get():
    def greedy(completions, level):
        level.clear()
        return [float(completions.pop()[-1] == "!")] + [0.0] * len(completions)

    assert Rewards([greedy, lengths])(completed())[:, 1].tolist() == [2, 2, 2, 3]


def test_a_function_cannot_change_messages_or_tokens():
    def greedy(completions, prompts, completion_ids, **kwargs):
        completions[0].append({"role": "assistant", "content": "more"})
        prompts[1][0]["content"] = "other"
        completion_ids[2].clear()
        return [0.0] * len(completions)

    chats = [[{"role": "assistant", "content": text}] for text in COMPLETIONS]
    prompts = [[{"role": "user", "content": row["prompt"]}] for row in ROWS]
    given = Completed.of(ROWS, prompts, chats, completion_ids=[[7] * (n + 1) for n in range(4)])
    before = copy.deepcopy(given)
    Rewards([greedy])(given)
    assert given == before


@pytest.mark.parametrize("name", ["trainer_state", "log_extra", "log_metric", "prompts", "completions"])
def test_a_column_by_the_name_of_an_argument_is_warned_of_once(name, caplog):
    seen = Counting()
    given = Completed.of([{**row, name: "a column's"} for row in ROWS], ["?"] * 4, COMPLETIONS)
    rewards = Rewards([seen])
    for _ in range(2):
        rewards(given)
    assert seen.seen[0][name] not in ("a column's", ["a column's"] * 4)
    assert caplog.text.count(f"do not get the dataset's column(s) '{name}'") == 1


def test_other_columns_are_not_warned_of(caplog):
    Rewards([lengths])(completed())
    assert "column(s)" not in caplog.text


def test_async_functions_run_together():
    async def waits(completions):
        await asyncio.sleep(0.3)
        return [1.0] * len(completions)

    start = time.monotonic()
    Rewards([waits] * 5)(completed())
    assert time.monotonic() - start < 1.2


def test_alike_names_are_numbered():
    assert Rewards([lengths, lengths, right]).names == ["lengths", "lengths_2", "right"]


def test_what_is_logged_goes_to_the_logs():
    def logs(completions, log_extra, log_metric):
        log_extra("said", list(completions))
        log_metric("share", 0.5)
        return [0.0] * len(completions)

    seen = {}
    Rewards(logs)(completed(), log_extra=seen.__setitem__, log_metric=seen.__setitem__)
    assert seen == {"said": COMPLETIONS, "share": 0.5}


def test_a_row_that_no_function_scores_is_named_once(caplog):
    with caplog.at_level(logging.WARNING):
        found = Rewards([slow_levels, lambda level: [None, 1.0, None, None]])(completed(numbers=[8, 8, 9, 9]))
    [record] = caplog.records
    assert "1 of 4 completions" in record.getMessage()
    assert "completion 0 of the batch of row 8" in record.getMessage()
    assert "Question 0?" in record.getMessage()
    assert found[0].isnan().all()


# -- what goes wrong -------------------------------------------------------------------------------------------------


def raises_on_one(completions, **kwargs):
    return [float(each) for each in completions]  # " 1!" is no number


async def raises_later(completions, answer):
    await asyncio.sleep(0)
    return [1 / int(each) for each in answer]


class Endless:
    """A list of any index, of values that raise whatever is done with them."""

    def __init__(self, value=None):
        self.value = value

    def __len__(self):
        return 4

    def __getitem__(self, index):
        if self.value is None:
            raise KeyError(index)
        return self.value

    def __float__(self):
        raise OSError("no number")

    __repr__ = __float__  # type: ignore[assignment]


class Wordless(Exception):
    def __str__(self):
        raise OSError


def raises_without_words(completions):
    raise Wordless


WRONG = {
    "a list that raises": (
        lambda completions: Endless(),
        "a Endless, reading which raised KeyError: 0",
    ),
    "values that raise": (lambda completions: Endless(Endless()), "returned Endless for completion 0"),
    "an error without words": (raises_without_words, "raised Wordless: Wordless, for completion 0"),
    "no device": (lambda completions: torch.ones(4, device="meta"), "returned tensor.*meta.* for completion 0"),
    "no list": (lambda completions: torch.tensor(1.0), "a Tensor, reading which raised TypeError: "),
    "too few": (lambda completions: [1.0], "'<lambda>' returned 1 rewards for 4 completions"),
    "a number": (lambda completions: 1.0, "returned a float"),
    "nothing": (lambda completions: None, "returned a NoneType"),
    "a text": (lambda completions: "abcd", "returned a str"),
    "nan": (lambda completions: [1, 2, math.nan, 3], r"returned nan for completion 2 of the batch \(.*'Question 1\?'"),
    "infinity": (lambda completions: [1, 2, 3, -math.inf], "returned -inf for completion 3"),
    "too large": (lambda completions: [1, 1e39, 2, 3], r"returned 1e\+39 for completion 1"),
    "larger than any float": (lambda completions: [1, 10**400, 2, 3], r"returned 1000.* for completion 1"),
    "texts": (lambda completions: ["1"] * 4, "returned '1' for completion 0"),
    "lists": (lambda completions: [[1, 2]] * 4, r"completion 0 of .*: got \[1, 2\]; rewards of steps are"),
    "raised": (raises_on_one, r"'raises_on_one' raised ValueError: .*for completion 3 .*'Question 1\?'"),
    "raised later": (raises_later, "'raises_later' raised ZeroDivisionError: .* for completion 0"),
    "an unknown column": (lambda answers: answers, "takes an argument 'answers', .*did you mean 'answer'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_reward_stops_with_the_name_and_the_row(case):
    function, message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        Rewards([lengths, function])(completed())


def test_a_list_without_end_is_read_as_far_as_its_length():
    assert Rewards([lambda completions: Endless(2.0)])(completed())[:, 0].tolist() == [2.0] * 4


@pytest.mark.parametrize("kind", ["sync", "async", "async that blocks"])
def test_a_function_that_hangs_stops_within_its_time(kind):
    def hangs(completions):
        time.sleep(20)

    async def waits(completions):
        await asyncio.sleep(20)

    async def blocks(completions):
        time.sleep(20)

    function = {"sync": hangs, "async": waits, "async that blocks": blocks}[kind]
    rewards = Rewards([lengths, function], timeout=0.2)
    start = time.monotonic()
    with pytest.raises(ValueError, match=rf"'{function.__name__}' gave no rewards within reward_timeout=0.2 seconds"):
        rewards(completed())
    assert time.monotonic() - start < 3


def test_after_a_blocked_event_loop_there_is_another():
    async def blocks_once(level):
        if not done:
            done.append(True)
            time.sleep(3)
        return level

    done = []
    rewards = Rewards(blocks_once, timeout=0.2)
    with pytest.raises(ValueError, match="reward_timeout"):
        rewards(completed())
    assert rewards(completed()).flatten().tolist() == [0, 0, 1, 1]


def test_a_timeout_error_of_the_function_is_its_own():
    def times_out(completions):
        raise TimeoutError("the server is slow")

    with pytest.raises(ValueError, match="raised TimeoutError: the server is slow"):
        Rewards(times_out, timeout=5)(completed())


@pytest.mark.slow
def test_the_interpreter_ends_though_a_pool_hangs():
    program = """
import asyncio, time
from concurrent.futures import ThreadPoolExecutor
from lowtide.rollout.calls import Caller, CallTimedOut
def pooled():
    with ThreadPoolExecutor() as pool:
        pool.submit(time.sleep, 60).result()
async def threaded():
    await asyncio.to_thread(time.sleep, 60)
for function in (pooled, threaded):
    try:
        Caller(0.1).call(function)
    except CallTimedOut:
        print("timed out")
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=40, check=True)
    assert ended.stdout.split("\n")[:2] == ["timed out", "timed out"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"funcs": []}, "nothing to reward"),
        ({"funcs": [3]}, "has a int"),
        ({"funcs": [lengths], "weights": [1, 2]}, "weights: there are 2 for 1"),
        ({"funcs": [lengths], "weights": [math.nan]}, "finite"),
        ({"funcs": [lengths], "names": ["a", "b"]}, "names: there are 2"),
        ({"funcs": [lengths], "processing_classes": [None, None]}, "processing_classes: there are 2"),
        ({"funcs": [lengths], "timeout": 0}, "reward_timeout=0"),
    ],
)
def test_arguments_that_cannot_work(changes, message):
    with pytest.raises(ValueError, match=message):
        Rewards(changes.pop("funcs"), **changes)


def test_lists_of_other_lengths():
    with pytest.raises(ValueError, match="4 completions are to be scored, but completion_ids has 1"):
        completed(completion_ids=[[1]])


def test_a_function_that_wants_to_end_the_program_does_not_end_the_event_loop():
    async def leaves(completions):
        raise SystemExit(3)

    with pytest.raises(ValueError, match="'leaves' raised RuntimeError: SystemExit: 3"):
        Rewards(leaves)(completed())


@pytest.mark.parametrize("timeout", [None, 5.0])
@pytest.mark.parametrize("error", [SystemExit(3), GeneratorExit(3), KeyboardInterrupt(3)])
def test_a_function_that_wants_to_end_the_program_does_not_end_the_run(error, timeout):
    def leaves(completions):
        if " 1" in completions:
            raise error
        return [0.0] * len(completions)

    named = rf"'leaves' raised RuntimeError: {type(error).__name__}: 3, for completion 2"
    with pytest.raises(ValueError, match=named):
        Rewards(leaves, timeout=timeout)(completed())


def test_what_functions_got_where_none_applies_is_told(caplog):
    Rewards([lambda completions, **_: [None] * len(completions)])(completed())
    assert "All reward functions returned None for the following kwargs: {" in caplog.text
