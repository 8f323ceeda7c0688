"""What a policy writes, and what a tool does with it, is a failed call and never the end of a run."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch

from lowtide.rollout.calls import Caller
from lowtide.rollout.readable import readable
from lowtide.rollout.tools import answer_calls
from lowtide.users_functions import find_function


class Mute:
    def __str__(self) -> str:
        raise SystemExit(3)


class Wordless(Exception):
    def __str__(self) -> str:
        raise ValueError


def raises(error: BaseException) -> Any:
    def tool() -> None:
        raise error

    return tool


def later(error: BaseException) -> Any:
    async def tool() -> None:
        raise error

    return tool


def echo(text: Any = None) -> Any:
    return text


class Stop(BaseException):
    pass


ERRORS = (SystemExit(1), KeyboardInterrupt(), GeneratorExit(), Stop(), RecursionError(), Wordless(), MemoryError())


def answered(function: Any, arguments: Any = None, timeout: float | None = None, name: str = "tool") -> Any:
    call = {"type": "function", "function": {"name": name, "arguments": arguments or {}}}
    [answer] = answer_calls([call], {"tool": function}, Caller(timeout))
    answer.content.encode()
    answer.name.encode()
    return answer


@pytest.mark.parametrize("timeout", [None, 5.0])
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("kind", [raises, later])
def test_whatever_a_tool_raises_is_a_failed_call(kind, error, timeout):
    assert answered(kind(error), timeout=timeout).failed


@pytest.mark.parametrize(
    "arguments",
    ["[" * 3000 + "]" * 3000, "{", "[1]", '{"self": 1}', '{"function": 1}', '{"text": ' + "9" * 5000 + "}", '"x"'],
)
def test_arguments_that_cannot_be_passed_are_a_failed_call(arguments):
    assert answered(echo, arguments).failed


@pytest.mark.parametrize("value", [Mute(), [{"type": "image", "text": "x"}], [{"type": ["x"], "text": "x"}]])
def test_a_result_that_is_no_text_is_a_failed_call(value):
    assert answered(lambda: value).failed


def test_halves_of_surrogate_pairs_are_question_marks():
    assert answered(echo, '{"text": "a\\ud800b"}').content == "a?b"
    assert answered(echo, name="\ud800").failed
    assert answered(raises(ValueError("\ud800"))).content == "{'error': '?'}"
    assert readable([{"\udc00": ("\ud83d\ude00", 1, float("inf"))}]) == [{"?": ["??", 1, float("inf")]}]


def test_cycles_and_numbers_that_json_has_not_are_texts():
    cycle: list[Any] = []
    cycle.append(cycle)
    assert answered(lambda: cycle).content == "[[...]]"
    assert answered(echo, '{"text": NaN}').content == "nan"


def test_an_interrupt_of_the_user_ends_the_run():
    def interrupts() -> None:
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        answered(interrupts)
    assert signal.getsignal(signal.SIGINT) is before


def test_what_a_function_sets_for_the_process_is_put_back(tmp_path):
    def careless():
        os.chdir(tmp_path)
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        raise KeyError("nothing")

    before = os.getcwd()
    with pytest.raises(KeyError):
        Caller().start(careless)
    assert (os.getcwd(), torch.get_default_dtype(), torch.is_grad_enabled()) == (before, torch.float32, True)


@pytest.mark.parametrize("ending", ["import sys; sys.exit(0)", "raise KeyboardInterrupt"])
def test_a_module_that_ends_the_process_does_not_end_the_run(ending, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "module_that_ends.py").write_text(ending)
    with pytest.raises(ValueError, match=r"importing 'module_that_ends' failed with RuntimeError: (Sys|Key)"):
        find_function("module_that_ends.reward", "reward")
