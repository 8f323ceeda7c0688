"""Tools: described, called, and their errors given back."""

import asyncio
import time

import pytest

from lowtide.rollout.calls import Caller
from lowtide.rollout.tools import answer_calls, text_of_result, tool_schemas, tools_by_name


def double(number: int) -> int:
    """
    Doubles a number.

    Args:
        number: what to double.
    """
    return 2 * number


async def later(number: int) -> int:
    """
    Doubles a number, later.

    Args:
        number: what to double.
    """
    await asyncio.sleep(0.2)
    return 2 * number


def slow(number: int) -> int:
    time.sleep(20)
    return number


TOOLS = {"double": double, "later": later, "slow": slow}


def call(name, **arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def test_tools_are_described_by_their_docstrings():
    [schema] = tool_schemas([double])
    number = {"type": "integer", "description": "what to double."}
    parameters = {"type": "object", "properties": {"number": number}, "required": ["number"]}
    assert schema["function"] == {
        "name": "double",
        "description": "Doubles a number.",
        "parameters": parameters,
    } | ({"return": schema["function"]["return"]} if "return" in schema["function"] else {})


def test_answers_are_in_the_order_of_calls_and_async_ones_run_together():
    start = time.monotonic()
    calls = [call("later", number=n) for n in range(4)]
    answers = answer_calls([*calls[:2], call("double", number=5), *calls[2:]], TOOLS, Caller())
    assert [each.content for each in answers] == ["0", "2", "10", "4", "6"]
    assert time.monotonic() - start < 0.7


WRONG = {
    "raises": (call("double", other=1), "double", "unexpected keyword argument 'other'"),
    "unknown": (call("halve"), "halve", "Tool halve not found."),
    "another type": ({"type": "code", "name": "x"}, "x", "Unsupported tool call type: code"),
    "no dict": ("double(2)", "unknown", "must be a dict"),
    "arguments that are a list": (
        {"function": {"name": "double", "arguments": [1]}},
        "double",
        "argument after ** must be a mapping",
    ),
    "arguments that are no JSON": ({"name": "double", "arguments": "{"}, "double", "Expecting property name"),
}


@pytest.mark.parametrize("case", WRONG)
def test_errors_are_given_back(case):
    wrong, name, message = WRONG[case]
    [first, second] = answer_calls([wrong, {"name": "double", "arguments": '{"number": 4}'}], TOOLS, Caller())
    assert first.failed
    assert first.message["name"] == name
    assert message in first.content
    assert first.content.startswith("{'error': ")
    assert second.message == {"role": "tool", "name": "double", "content": "8"}


def test_a_tool_that_hangs_is_given_back_too():
    [hung, fine] = answer_calls([call("slow", number=1), call("later", number=1)], TOOLS, Caller(0.5))
    assert hung.failed
    assert hung.content == "{'error': 'No result within 0.5 seconds.'}"
    assert fine.content == "2"


def test_results_that_are_no_text():
    assert text_of_result([1, 2], "it") == "[1, 2]"
    assert text_of_result([], "it") == "[]"
    assert text_of_result([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "it") == "ab"
    with pytest.raises(ValueError, match="'it' returned a part of type 'image'"):
        text_of_result([{"type": "image", "image": None}], "it")


def test_tools_that_cannot_be_told_apart_or_described():
    with pytest.raises(ValueError, match="two tools are called 'double'"):
        tools_by_name([double, double])
    with pytest.raises(ValueError, match="has a int"):
        tools_by_name([3])
    with pytest.raises(ValueError, match="tool 'slow' cannot be described"):
        tool_schemas([slow])
