"""Row formats: what each is read into, and the message for each way in which a row can be wrong."""

import json

import pytest

from lowtide.data.formats.reading import ChatSample, TextSample, TokenSample, detect_format

USER, ASSISTANT = {"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}
SYSTEM, TOOL = {"role": "system", "content": "be brief"}, {"role": "tool", "content": "42"}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}


def read(row, **options):
    return detect_format(list(row), **options).read(row)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"text": "a"}, TextSample("a")),
        ({"prompt": "a", "completion": "b"}, TextSample("b", prompt="a")),
        ({"messages": [SYSTEM, USER, ASSISTANT]}, ChatSample([SYSTEM, USER, ASSISTANT])),
        ({"prompt": [USER], "completion": [ASSISTANT]}, ChatSample([USER, ASSISTANT], 1)),
        ({"input_ids": [1, 2], "labels": [-100, 2]}, TokenSample([1, 2], [-100, 2])),
        ({"input_ids": [1, 2], "completion_mask": [0, 1]}, TokenSample([1, 2], completion_mask=[0, 1])),
        # A prompt without a completion is a column like any other.
        ({"prompt": "a", "messages": [USER, ASSISTANT]}, ChatSample([USER, ASSISTANT])),
    ],
)
def test_reads_each_format(row, expected):
    assert read(row) == expected


def test_from_value_conversations_become_role_content_ones():
    turns = [("system", "be brief"), ("human", "hello"), ("gpt", "hi")]
    row = {"conversations": [{"from": role, "value": text} for role, text in turns]}
    assert read(row).messages == [SYSTEM, USER, ASSISTANT]


def test_conversations_may_hold_role_content_messages():
    assert read({"conversations": [USER, ASSISTANT]}).messages == [USER, ASSISTANT]


def test_the_text_column_has_the_name_it_is_given():
    assert read({"body": "a", "n": 1}, text_field="body") == TextSample("a")


def test_tools_may_be_json_and_null_keywords_are_absent():
    tools = [{"type": "function", "function": {"name": "f"}}]
    row = {
        "messages": [USER, CALL, TOOL, ASSISTANT],
        "tools": json.dumps(tools),
        "chat_template_kwargs": {"enable_thinking": False, "other": None},
    }
    sample = read(row)
    assert sample.tools == tools
    assert sample.template_kwargs == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("made", "expected"), [("a b", TextSample("a b")), ([USER, ASSISTANT], ChatSample([USER, ASSISTANT]))]
)
def test_a_formatting_func_makes_a_text_or_messages(made, expected):
    assert read({"question": "a"}, formatting_func=lambda row: made) == expected


@pytest.mark.parametrize(
    "messages",
    [
        [USER, ASSISTANT, USER, ASSISTANT],
        [SYSTEM, USER, CALL, TOOL, TOOL, ASSISTANT, USER],
        [SYSTEM, SYSTEM, USER, ASSISTANT],
        [{"role": "developer", "content": "x"}, USER, ASSISTANT],
    ],
)
def test_roles_in_order_are_accepted(messages):
    assert read({"messages": messages}).messages == messages


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([USER, USER], "message 1 has the role 'user' after 'user', where 'assistant' belongs"),
        ([ASSISTANT, USER], "message 0 has the role 'assistant' at the start, where 'system' or 'user' belongs"),
        ([USER, ASSISTANT, ASSISTANT], "message 2 has the role 'assistant' after 'assistant'"),
        ([USER, SYSTEM, ASSISTANT], "message 1 has the role 'system'"),
        ([USER, TOOL], "message 1 has the role 'tool'"),
        ([{"role": "owl", "content": "hoo"}], "the role 'owl'; known roles are 'system'"),
    ],
)
def test_roles_out_of_order_are_refused(messages, problem):
    with pytest.raises(ValueError, match=problem):
        read({"messages": messages})


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"messages": []}, "'messages' is empty"),
        ({"messages": None}, "'messages' is null"),
        ({"messages": "hello"}, "'messages' is a str; it must be a list of messages"),
        ({"messages": ["hello"]}, r"messages\[0\] is a str"),
        ({"messages": [{"content": "a"}]}, r"messages\[0\] has the keys 'content'; a message has a 'role'"),
        ({"messages": [USER, CALL | {"tool_calls": "[]"}]}, r"messages\[1\]\['tool_calls'\] is or holds a str"),
        ({"messages": [USER, CALL | {"tool_calls": ["f()"]}]}, r"is or holds a str; it must be a list of calls"),
        *(
            ({"messages": [USER, CALL | {"tool_calls": [call]}]}, r"\['tool_calls'\]\[0\] says no function")
            for call in (
                {},
                {"function": {"arguments": {}}},
                {"name": ""},
                {"function": {"name": None}},
                {"function": "f"},
            )
        ),
        ({"messages": [{"role": 3, "content": "a"}]}, r"messages\[0\]\['role'\] is a int"),
        ({"messages": [USER, {"role": "assistant", "content": None}]}, r"messages\[1\]\['content'\] is null"),
        (
            {"messages": [{"role": "user", "content": ["a"]}]},
            r"messages\[0\]\['content'\]\[0\] is a str without a text",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            r"\['content'\]\[0\] is a dict without a text",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            r"\[0\] is of type 'image', and text models",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "thought"}]}]},
            r"\[0\] is of type 'thought'; a part of a",
        ),
        ({"text": None}, "'text' is null; it must be a string"),
        ({"text": True}, "'text' is a bool"),
        ({"prompt": "a", "completion": [ASSISTANT]}, "'prompt' is a str and 'completion' is a list"),
        ({"prompt": "a", "completion": None}, "'completion' is null"),
        ({"prompt": [USER], "completion": []}, "'completion' is empty"),
        ({"prompt": [USER], "completion": [USER]}, "roles out of order: message 1"),
        ({"input_ids": None}, "'input_ids' is null"),
        ({"input_ids": [1.5]}, "'input_ids' must be a list of integers"),
        ({"input_ids": [1, 2], "labels": [1]}, "'labels' has 1 values and 'input_ids' 2"),
        ({"input_ids": [1], "completion_mask": [0, 1]}, "'completion_mask' has 2 values and 'input_ids' 1"),
        ({"messages": [USER], "tools": "{"}, "'tools' is a string that is not JSON"),
        ({"messages": [USER], "chat_template_kwargs": "{"}, "'chat_template_kwargs' is a string that is not JSON"),
        ({"messages": [USER], "chat_template_kwargs": [1]}, "'chat_template_kwargs' is a list; it must be a mapping"),
        ({"messages": [USER], "chat_template_kwargs": {"tokenize": False}}, "has 'tokenize', which says how rows are"),
        ({"input_ids": [1, 2, 3], "completion_mask": [0, 5, 7]}, r"completion_mask\[1\] is 5; a mask holds 0 and 1"),
        ({"input_ids": [1, 2], "assistant_masks": [0, -1]}, r"assistant_masks\[1\] is -1; a mask holds 0 and 1"),
        ({"input_ids": [1, 2], "attention_mask": [0, 2]}, r"attention_mask\[1\] is 2; a mask holds 0 and 1"),
        ({"input_ids": [1, 2, 3], "attention_mask": [1, 0, 1]}, r"attention_mask\[1\] is 0 between tokens"),
        ({"input_ids": [1, 2], "attention_mask": [1]}, "'attention_mask' has 1 values and 'input_ids' 2"),
        ({"input_ids": [1, 2, 3], "position_ids": [0, 1, 0]}, r"position_ids\[2\] is 0; .* packed of several"),
        ({"input_ids": [1, 2], "position_ids": [3, 4]}, r"position_ids\[0\] is 3; .* Remove the column"),
        ({"instruction": "a", "output": True}, "'output' is a bool; it must be a string"),
        ({"instruction": "a", "output": 0.5}, "'output' is the number 0.5, which may have been written in another way"),
        ({"instruction": "a", "output": "b", "history": [["c"]]}, r"history\[0\] is a list"),
    ],
)
def test_a_row_that_is_wrong_is_refused(row, problem):
    with pytest.raises(ValueError, match=problem):
        read(row)


@pytest.mark.parametrize(
    ("made", "problem"),
    [
        (["a", "b"], "returned a list; it is called with one row"),
        (None, "returned null"),
        ([USER, USER], "out of order"),
    ],
)
def test_what_a_formatting_func_must_not_return(made, problem):
    with pytest.raises(ValueError, match=problem):
        read({"question": "a"}, formatting_func=lambda row: made)


def test_a_formatting_func_that_fails_is_named_with_its_error():
    with pytest.raises(ValueError, match="formatting_func failed with KeyError: 'missing'"):
        read({"question": "a"}, formatting_func=lambda row: row["missing"])


def test_unknown_columns_are_named_with_those_that_are_understood():
    with pytest.raises(ValueError, match=r"data.jsonl has the columns 'riddle', 'key'.*'body'.*'messages'"):
        detect_format(["riddle", "key"], text_field="body", source="data.jsonl")


def test_keywords_of_the_template_may_be_json():
    rows = [{"messages": [USER], "chat_template_kwargs": given} for given in ('{"mood": "glad"}', {"mood": "glad"})]
    assert [read(row).template_kwargs for row in rows] == [{"mood": "glad"}] * 2
