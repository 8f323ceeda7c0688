"""Columns with other names than formats have: renamed, read as they are, or proposed."""

import pytest
from datasets import Dataset

from lowtide.data.formats.likely import likely_columns
from lowtide.data.formats.preferences import detect_pairs, detect_unpaired
from lowtide.data.formats.reading import detect_format
from lowtide.data.formats.samples import ChatSample, TextSample
from lowtide.data.sources.columns import with_columns
from lowtide.data.sources.mixtures import load_mixture

ODD = {"User Question": ["a"], "Bot Answer": ["b"], "prompt": ["old"]}
WANTED = {"prompt": "User Question", "completion": "Bot Answer"}


@pytest.mark.parametrize("streaming", [False, True])
def test_columns_get_the_names_that_formats_have(streaming, caplog):
    rows = Dataset.from_dict(ODD)
    named = with_columns(rows.to_iterable_dataset() if streaming else rows, WANTED)
    assert list(named) == [{"prompt": "a", "completion": "b"}]
    assert "the columns 'prompt' of" in caplog.text  # which another one takes the name of


def test_two_columns_may_change_their_names():
    rows = Dataset.from_dict({"prompt": ["b"], "completion": ["a"]})
    assert list(with_columns(rows, {"prompt": "completion", "completion": "prompt"})) == [
        {"prompt": "a", "completion": "b"}
    ]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"prompt": "User question"}, "no column 'User question'; did you mean 'User Question'"),
        ({"User Question": "question"}, r"turn it round, columns=\{'question': 'User Question'\}"),
        ({"prompt": "Bot Answer", "completion": "Bot Answer"}, "is to have two names"),
        ({"prompt": 3}, "must be the name of a column"),
    ],
)
def test_names_that_cannot_be_given_are_refused(columns, message):
    with pytest.raises(ValueError, match=message):
        with_columns(Dataset.from_dict(ODD), columns)


def test_each_dataset_of_a_mixture_has_columns_of_its_own(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"q": "1", "a": "2"}\n')
    (tmp_path / "b.jsonl").write_text('{"prompt": "3", "completion": "4"}\n')
    entries = [{"path": str(tmp_path / "a.jsonl"), "columns": {"prompt": "q", "completion": "a"}}]
    rows = load_mixture([*entries, str(tmp_path / "b.jsonl")])["train"]
    assert list(rows) == [{"prompt": "1", "completion": "2"}, {"prompt": "3", "completion": "4"}]


@pytest.mark.parametrize(
    ("asked", "answered"),
    [("question", "answer"), ("input", "output"), ("instruction", "response"), ("query", "response")],
)
@pytest.mark.parametrize("chats", [True, False])
def test_what_was_asked_and_answered_is_read_and_named(asked, answered, chats):
    found = detect_format([asked, answered, "id"], chats=chats)
    assert found.title == f"{asked} and {answered}, as {'conversations' if chats else 'texts'} ({asked}, {answered})"
    sample = found.read({asked: "why", answered: "so"})
    if chats:
        assert isinstance(sample, ChatSample)
        assert [(each["role"], each["content"]) for each in sample.messages] == [("user", "why"), ("assistant", "so")]
        assert sample.prompt_messages == 1
    else:
        assert sample == TextSample("so", prompt="why")


@pytest.mark.parametrize(
    ("columns", "name"),
    [
        (["question", "answer", "text"], "text"),
        (["instruction", "input", "output"], "Alpaca, as conversations"),
        (["prompt", "completion", "response"], "prompt-completion"),
    ],
)
def test_known_formats_come_first(columns, name):
    assert detect_format(columns).name == name


@pytest.mark.parametrize("beside", ["context", "system", "history"])
def test_what_a_prompt_would_need_is_not_left_out(beside):
    with pytest.raises(ValueError, match="none of these is among them"):
        detect_format(["question", "answer", beside])


@pytest.mark.parametrize(
    ("columns", "wanted", "found"),
    [
        (["User Question", "Bot Answer"], ("prompt", "completion"), WANTED),
        (["userQuestion", "botAnswer", "id"], ("prompt", "completion"), None),
        (["prompt", "gpt_reply"], ("prompt", "completion"), {"prompt": "prompt", "completion": "gpt_reply"}),
        (["question", "id"], ("prompt", "completion"), {}),
        (["better_answer", "worse_answer"], ("chosen", "rejected"), None),
    ],
)
def test_likely_columns_are_found_by_the_words_in_their_names(columns, wanted, found):
    expected = dict(zip(wanted, columns, strict=False)) if found is None else found
    assert likely_columns(columns, wanted) == expected


@pytest.mark.parametrize(
    ("detect", "columns", "proposed"),
    [
        (detect_format, ["User Question", "Bot Answer"], '{"prompt": "User Question", "completion": "Bot Answer"}'),
        (detect_format, ["Body"], '{"text": "Body"}'),
        (detect_pairs, ["query", "good", "bad"], '{"prompt": "query", "chosen": "good", "rejected": "bad"}'),
        (detect_unpaired, ["query", "reply", "liked"], '"label": "liked"}'),
    ],
)
def test_a_refusal_proposes_them(detect, columns, proposed):
    with pytest.raises(ValueError, match="If their names say what they hold") as caught:
        detect(columns, source="rows.csv")
    assert f"--columns '{proposed}'" in str(caught.value) or proposed in str(caught.value)


def test_a_refusal_shows_how_to_name_them_where_no_name_tells():
    with pytest.raises(ValueError, match="To say which is which") as caught:
        detect_format(["Nummer", "Frage", "Antwort"], source="rows.csv")
    assert """--columns '{"prompt": "...", "completion": "..."}'""" in str(caught.value)
    with pytest.raises(ValueError, match="none of these is among them") as caught:
        detect_format(["Nummer"], source="rows.csv")
    assert "which is which" not in str(caught.value)
