"""What becomes of columns: parts of content, padding, Alpaca's and ShareGPT's, and those that nothing reads."""

import pytest
from datasets import Dataset, IterableDataset

from lowtide.data.formats.columns import warn_of_unused
from lowtide.data.preference import PreferenceOptions, prepare_pairs, prepare_unpaired
from lowtide.data.prepare import PrepareOptions, prepare

pytestmark = pytest.mark.usefixtures("datasets_cache")

ASKED, SAID, WRONG = "How many clips?", "72 clips.", "48 clips."


@pytest.fixture(autouse=True)
def forget():
    """What was said in another test is said again."""
    warn_of_unused.cache_clear()


def said(role, content):
    return {"role": role, "content": content}


def parts(*texts):
    return [{"type": "text", "text": text} for text in texts]


def sft(rows, tokenizer, **options):
    prepared, ledger = prepare(
        Dataset.from_list(rows), tokenizer, PrepareOptions(**options), batch_size=2, packing=False
    )
    return list(prepared), ledger


def pairs(rows, tokenizer, **more):
    prepared, ledger = prepare_pairs(Dataset.from_list(rows), tokenizer, PreferenceOptions(), batch_size=2, **more)
    return list(prepared), ledger


# -- content in parts ------------------------------------------------------------------------------------------------


def test_content_in_parts_is_its_text(tokenizer):
    whole = [{"messages": [said("user", ASKED), said("assistant", SAID)]}]
    cut = [{"messages": [said("user", parts(ASKED)), said("assistant", parts(SAID[:3], SAID[3:]))]}]
    assert sft(cut, tokenizer)[0] == sft(whole, tokenizer)[0]
    pair = {"prompt": [said("user", parts(ASKED))], "chosen": [said("assistant", parts(SAID))]}
    plain = {"prompt": [said("user", ASKED)], "chosen": [said("assistant", SAID)]}
    assert (
        pairs([pair | {"rejected": [said("assistant", parts(WRONG))]}], tokenizer)[0]
        == pairs([plain | {"rejected": [said("assistant", WRONG)]}], tokenizer)[0]
    )


def test_images_in_content_name_the_row(tokenizer):
    image = {"type": "image", "text": None}
    rows = [
        {"messages": [said("user", parts(ASKED)), said("assistant", parts(SAID))]},
        {"messages": [said("user", [image, *parts(ASKED)]), said("assistant", parts(SAID))]},
    ]
    message = r"a.jsonl, row 1 .*messages\[0\]\['content'\]\[0\] is of type 'image', and text models are trained here"
    with pytest.raises(ValueError, match=message):
        sft(rows, tokenizer, source="a.jsonl")


# -- padding ---------------------------------------------------------------------------------------------------------


def test_padding_is_left_out_whichever_side_it_is_on(tokenizer):
    row = {"input_ids": [0, 0, 5, 6, 7, 0], "attention_mask": [0, 0, 1, 1, 1, 0], "completion_mask": [0, 0, 0, 1, 1, 1]}
    assert sft([row], tokenizer)[0] == [{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}]
    labelled = {**row, "labels": [0, 0, 5, -100, 7, 0]}
    assert sft([labelled], tokenizer)[0] == [{"input_ids": [5, 6, 7], "labels": [5, -100, 7]}]


def test_a_row_that_is_all_padding_is_dropped_and_counted(tokenizer):
    rows = [{"input_ids": [5, 6], "attention_mask": [1, 1]}, {"input_ids": [0, 0], "attention_mask": [0, 0]}]
    prepared, ledger = sft(rows, tokenizer)
    assert [row["input_ids"] for row in prepared] == [[5, 6]]
    assert ledger.rows_dropped == {"no tokens": 1}


def test_positions_that_a_row_has_anyway_are_fine(tokenizer):
    row = {"input_ids": [5, 6, 7], "position_ids": [0, 1, 2]}
    assert sft([row], tokenizer)[0] == [{"input_ids": [5, 6, 7], "labels": [5, 6, 7]}]


@pytest.mark.parametrize(
    ("ids", "mask"), [("{}_input_ids", "{}_attention_mask"), ("input_ids_{}", "attention_mask_{}")]
)
@pytest.mark.parametrize("whole", [False, True])
def test_pairs_of_padded_tokens_under_older_names(tokenizer, ids, mask, whole):
    plain = {"chosen_ids": [5, 6, 7, 8], "rejected_ids": [5, 6, 9]}
    padded = {ids.format("chosen"): [5, 6, 7, 8], ids.format("rejected"): [5, 6, 9, 0]}
    padded |= {mask.format("chosen"): [1, 1, 1, 1], mask.format("rejected"): [1, 1, 1, 0]}
    expected = pairs([plain], tokenizer, whole=whole)[0]
    assert expected == [{"prompt_ids": [5, 6], "chosen_ids": [7, 8], "rejected_ids": [9]}]
    assert pairs([padded], tokenizer, whole=whole)[0] == expected


# -- Alpaca and ShareGPT ---------------------------------------------------------------------------------------------


def test_alpaca_rows_are_conversations_where_there_is_a_template(tokenizer):
    rows = [
        {
            "instruction": ASKED,
            "input": "In April.",
            "output": SAID,
            "system": "Be brief.",
            "history": [["Hi", "Hello"]],
        },
        {"instruction": ASKED, "input": "", "output": SAID, "system": None, "history": []},
    ]
    first = [said("system", "Be brief."), said("user", "Hi"), said("assistant", "Hello")]
    same = [
        {"prompt": [*first, said("user", f"{ASKED}\nIn April.")], "completion": [said("assistant", SAID)]},
        {"prompt": [said("user", ASKED)], "completion": [said("assistant", SAID)]},
    ]
    prepared, ledger = sft(rows, tokenizer)
    assert prepared == sft(same, tokenizer)[0]
    assert ledger.read_as == "Alpaca, as conversations (instruction, output, input, system, history)"
    assert "read as Alpaca" in ledger.summary()


def test_alpaca_rows_are_alpacas_texts_where_there_is_none(tokenizer):
    tokenizer.chat_template = None
    prepared, ledger = sft([{"instruction": ASKED, "input": "In April.", "output": SAID}], tokenizer)
    text = tokenizer.decode(prepared[0]["input_ids"])
    assert text.startswith("Below is an instruction that describes a task, paired with an input")
    assert text.endswith(f"### Instruction:\n{ASKED}\n\n### Input:\nIn April.\n\n### Response:\n{SAID}<|im_end|>")
    assert tokenizer.decode([label for label in prepared[0]["labels"] if label != -100]) == f"{SAID}<|im_end|>"
    assert ledger.read_as.startswith("Alpaca, as texts")


def test_alpaca_and_sharegpt_pairs_are_pairs(tokenizer):
    prompt = [said("system", "Be brief."), said("user", ASKED)]
    plain = {"prompt": prompt, "chosen": [said("assistant", SAID)], "rejected": [said("assistant", WRONG)]}
    expected = pairs([plain], tokenizer)[0]
    alpaca = {"instruction": ASKED, "system": "Be brief.", "chosen": SAID, "rejected": WRONG}
    talk = [{"from": "system", "value": "Be brief."}, {"from": "human", "value": ASKED}]
    answers = [{"from": "gpt", "value": text} for text in (SAID, WRONG)]
    sharegpt = {"conversations": talk, "chosen": answers[0], "rejected": answers[1]}
    implicit = {"chosen": [*talk, answers[0]], "rejected": [*talk, answers[1]]}
    with_system = {"conversations": talk[1:], "system": "Be brief.", "chosen": answers[:1], "rejected": answers[1:]}
    for row in (alpaca, sharegpt, implicit, with_system):
        assert pairs([row], tokenizer)[0] == expected, row


def test_sharegpt_rows_open_with_their_system_column(tokenizer):
    talk = [{"from": "human", "value": ASKED}, {"from": "gpt", "value": SAID}]
    opened = [{"from": "system", "value": "Be brief."}, *talk]
    expected = sft([{"conversations": opened}], tokenizer)[0]
    assert sft([{"conversations": talk, "system": "Be brief."}], tokenizer)[0] == expected
    assert sft([{"conversations": opened, "system": "Another."}], tokenizer)[0] == expected


def test_a_text_column_comes_before_alpacas(tokenizer):
    rows = [{"instruction": ASKED, "input": "", "output": SAID, "text": "The weather."}]
    assert tokenizer.decode(sft(rows, tokenizer)[0][0]["input_ids"]) == "The weather.<|im_end|>"


# -- columns that nothing reads --------------------------------------------------------------------------------------


def test_unused_columns_are_named_once(tokenizer, caplog):
    rows = [{"messages": [said("user", ASKED), said("assistant", SAID)], "text": "another", "id": 3}]
    for source in ("train.jsonl", "eval.jsonl"):
        sft(rows, tokenizer, source=source)
    warnings = [record.getMessage() for record in caplog.records]
    assert warnings == ["rows are read from the columns 'messages'; not used: 'text', 'id'."]


def test_unused_columns_of_pairs_labels_and_streams(tokenizer, caplog):
    pair = {"prompt": ASKED, "chosen": SAID, "rejected": WRONG, "rating": 3}
    pairs([pair], tokenizer)
    assert "not used: 'rating'" in caplog.text
    labelled = [{"prompt": ASKED, "completion": SAID, "label": True, "stars": 1}] * 2
    prepare_unpaired(Dataset.from_list(labelled), tokenizer, PreferenceOptions(), batch_size=2)
    assert "not used: 'stars'" in caplog.text
    stream = IterableDataset.from_generator(lambda: iter([{"text": SAID, "source": "x"}]))
    prepare(stream, tokenizer, PrepareOptions(), batch_size=2, packing=False)
    assert "not used: 'source'" in caplog.text


def test_nothing_is_said_where_all_is_read(tokenizer, caplog):
    sft([{"messages": [said("user", ASKED), said("assistant", SAID)], "tools": None}], tokenizer)
    sft([{"q": ASKED, "a": SAID}], tokenizer, formatting_func=lambda row: row["q"] + row["a"])
    assert not caplog.records


@pytest.mark.parametrize("column", ["images", "image", "pixel_values"])
def test_images_are_refused(tokenizer, column):
    rows = [{"messages": [said("user", ASKED), said("assistant", SAID)], column: [1]}]
    with pytest.raises(ValueError, match=f"the train dataset has the column '{column}', and text models are trained"):
        sft(rows, tokenizer)
    assert sft(rows, tokenizer, formatting_func=lambda row: row["messages"])[0]


# -- templates -------------------------------------------------------------------------------------------------------

TEMPLATES = {
    "messages say": "{% for m in messages %}{{ m['role'] }}: {{ m['text'] }}\n{% endfor %}",
    "assistant says": "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}{% endif %}{% endfor %}",
}


@pytest.mark.parametrize("whose", TEMPLATES)
def test_a_template_that_writes_the_same_whatever_is_said_is_refused(tokenizer, whose):
    tokenizer.chat_template = TEMPLATES[whose]
    message = f"the train dataset: the chat template writes the same text whatever the {whose}"
    talk = [said("user", ASKED), said("assistant", SAID)]
    with pytest.raises(ValueError, match=message):
        sft([{"messages": talk}], tokenizer)
    with pytest.raises(ValueError, match=message):
        pairs([{"prompt": talk[:1], "chosen": talk[1:], "rejected": [said("assistant", WRONG)]}], tokenizer)


def test_a_template_that_leaves_out_what_comes_with_tool_calls_is_fine(tokenizer):
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% else %}{{ m.content }}{% endif %}"
        "{% endfor %}"
    )
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add"}}]}
    assert sft([{"messages": [said("user", ASKED), call]}], tokenizer)[0]
