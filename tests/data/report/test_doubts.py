"""Rows that are trained on and doubtful are warned of once, with how many they are and the first of them."""

import logging

import pytest
from datasets import Dataset, IterableDataset

from lowtide.data.formats.samples import TextSample
from lowtide.data.preference import PreferenceOptions, prepare_pairs, prepare_unpaired
from lowtide.data.prepare import PrepareOptions, prepare
from lowtide.data.report.doubts import Doubt, doubts_of

pytestmark = pytest.mark.usefixtures("datasets_cache")

EMPTY, UNASKED, RELABELLED = "so that no more than an end token", "what was not asked", "other tokens than 'input_ids'"
ENDLESS, MASKED = "does not learn to stop", "followed, as by TRL"
BROKEN, UNWRITTEN = "are a text that is no JSON", "leaves something out"
ALL = (BROKEN, EMPTY, UNASKED, RELABELLED, ENDLESS, MASKED)
TEXTS = {"prompt": "How many? ", "completion": "72 clips."}
PAIR = {"prompt": "How many? ", "chosen": "72 clips.", "rejected": "48 clips."}
LABELLED = TEXTS | {"label": True}


def user(text):
    return {"role": "user", "content": text}


def said(text, **more):
    return {"role": "assistant", "content": text, **more}


def chat(answer):
    return {"messages": [user("How many?"), said(answer)]}


def warned(caplog, prepare_rows):
    """What preparing says of rows, by the sentence that it is known by: how many rows, of how many, and the first."""
    with caplog.at_level(logging.WARNING):
        prepare_rows()
    found = {}
    for record in caplog.records:
        for sentence in ALL:
            if sentence in record.getMessage():
                assert sentence not in found, "it is said once"
                assert isinstance(record.args, tuple)
                found[sentence] = record.args[1:4]
    return found


def sft(rows, tokenizer, **options):
    return prepare(Dataset.from_list(rows), tokenizer, PrepareOptions(**options), batch_size=2, packing=False)


def pairs(rows, tokenizer, **more):
    return prepare_pairs(Dataset.from_list(rows), tokenizer, PreferenceOptions(), batch_size=2, **more)


def unpaired(rows, tokenizer, **more):
    return prepare_unpaired(Dataset.from_list(rows), tokenizer, PreferenceOptions(), batch_size=2, **more)


# -- answers and prompts that are empty ------------------------------------------------------------------------------


@pytest.mark.parametrize("blank", ["", " ", "\n\t", "<|im_end|>"])
@pytest.mark.parametrize(
    ("prepares", "good", "column"),
    [
        (sft, TEXTS, "completion"),
        (sft, {"instruction": "How many?", "output": "72"}, "output"),
        (pairs, PAIR, "chosen"),
        (pairs, PAIR, "rejected"),
        (unpaired, LABELLED, "completion"),
    ],
)
def test_empty_completions_are_counted(prepares, good, column, blank, tokenizer, caplog):
    tokenizer.chat_template = None
    rows = [good, good | {column: blank}, good, good | {column: blank}]
    assert warned(caplog, lambda: prepares(rows, tokenizer)) == {EMPTY: (2, 4, 1)}


@pytest.mark.parametrize("blank", ["", " \n"])
def test_empty_messages_of_the_assistant_are_counted(blank, tokenizer, caplog):
    assert warned(caplog, lambda: sft([chat("72"), chat(blank)], tokenizer)) == {EMPTY: (1, 2, 1)}


def test_empty_messages_of_pairs_are_counted(tokenizer, caplog):
    good = {"prompt": [user("How many?")], "chosen": [said("72")], "rejected": [said("48")]}
    rows = [good, good, good | {"rejected": [said("")]}]
    assert warned(caplog, lambda: pairs(rows, tokenizer)) == {EMPTY: (1, 3, 2)}


def test_a_reward_model_compares_no_empty_answer_in_silence(tokenizer, caplog):
    rows = [PAIR | {"chosen": ""}, PAIR]
    assert warned(caplog, lambda: pairs(rows, tokenizer, whole=True)) == {EMPTY: (1, 2, 0)}


def test_an_answer_that_ends_as_the_other_goes_on_is_none_that_is_empty(tokenizer, caplog):
    rows = [{"chosen": "How many? 72", "rejected": "How many? 72 clips."}]
    assert warned(caplog, lambda: pairs(rows, tokenizer, whole=True)) == {}


def test_a_conversation_without_an_answer_has_an_empty_one(tokenizer, caplog):
    rows = [chat("72"), {"messages": [user("How many?")]}]
    assert warned(caplog, lambda: sft(rows, tokenizer)) == {EMPTY: (1, 2, 1)}


@pytest.mark.parametrize("more", [{"tool_calls": [{"name": "count"}]}, {"reasoning_content": "There are 72."}])
def test_calls_of_tools_and_thoughts_are_no_empty_answer(more, tokenizer, caplog):
    rows = [{"messages": [user("How many?"), said("", **more)]}]
    assert warned(caplog, lambda: sft(rows, tokenizer)) == {}


@pytest.mark.parametrize("writes_all", [True, False])
def test_a_second_system_message_that_is_not_written_is_counted(writes_all, tokenizer, caplog):
    if not writes_all:
        tokenizer.chat_template = tokenizer.chat_template.replace(
            "{% for message in messages %}",
            "{% for message in messages %}{% if loop.first or message['role'] != 'system' %}",
        ).replace("{% endfor %}", "{% endif %}{% endfor %}", 1)
    system = [{"role": "system", "content": text} for text in ("Be brief.", "Be kind.")]
    rows = [chat("72"), {"messages": [*system, user("How many?"), said("72")]}]
    with caplog.at_level(logging.WARNING):
        sft(rows, tokenizer)
    assert caplog.text.count(f"in 1 of 2 rows (the first is row 1) the chat template {UNWRITTEN}") == (not writes_all)


@pytest.mark.parametrize("arguments", ['{"city": "Ro', "Rome", '{"city": "Rome"}', {"city": "Rome"}, "", None])
def test_arguments_that_are_no_json_are_counted(arguments, tokenizer, caplog):
    rows = [
        {"messages": [user("How warm?"), said("", tool_calls=[{"function": {"name": "find", "arguments": each}}])]}
        for each in (arguments, arguments)
    ]
    expected = {BROKEN: (2, 2, 0)} if arguments in ('{"city": "Ro', "Rome") else {}
    assert warned(caplog, lambda: sft(rows, tokenizer)) == expected


@pytest.mark.parametrize(("prepares", "good"), [(sft, TEXTS), (pairs, PAIR), (unpaired, LABELLED)])
def test_empty_prompts_are_counted(prepares, good, tokenizer, caplog):
    rows = [good, good | {"prompt": " "}]
    assert warned(caplog, lambda: prepares(rows, tokenizer)) == {UNASKED: (1, 2, 1)}


def test_rows_of_a_pair_that_is_taken_apart_have_its_number(tokenizer, caplog):
    rows = [PAIR, PAIR | {"rejected": ""}]
    assert warned(caplog, lambda: unpaired(rows, tokenizer)) == {EMPTY: (1, 4, 1)}


def test_what_is_found_in_the_cache_is_warned_of_again(tokenizer, caplog):
    rows = Dataset.from_list([TEXTS, TEXTS | {"completion": ""}])
    for _ in range(2):
        caplog.clear()
        how = PrepareOptions()
        found = warned(caplog, lambda: prepare(rows, tokenizer, how, batch_size=2, packing=False))  # noqa: B023
        assert found == {EMPTY: (1, 2, 1)}


@pytest.mark.parametrize("packing", [False, True])
def test_a_stream_is_warned_of_once(packing, tokenizer, caplog):
    rows = [TEXTS, TEXTS | {"completion": ""}] * 1500  # more than two batches
    stream = IterableDataset.from_generator(lambda: iter(rows))
    prepared, _ = prepare(stream, tokenizer, PrepareOptions(), batch_size=2, packing=packing)
    assert warned(caplog, lambda: list(prepared)) == {EMPTY: (500, 1000, 1)}


# -- rows that are token ids -----------------------------------------------------------------------------------------


def test_labels_of_other_tokens_are_counted_and_learned(tokenizer, caplog):
    end = tokenizer.eos_token_id
    same = {"input_ids": [5, 6, 7, end], "labels": [-100, 6, 7, end]}
    shifted = {"input_ids": [5, 6, 7, end], "labels": [6, 7, end, -100]}
    prepared = None

    def prepares():
        nonlocal prepared
        prepared, _ = sft([same, shifted], tokenizer)

    assert warned(caplog, prepares) == {RELABELLED: (1, 2, 1)}
    assert prepared is not None
    assert prepared["labels"][:] == [same["labels"], shifted["labels"]]


def test_a_mask_that_scores_other_tokens_than_the_labels_is_counted(tokenizer, caplog):
    end = tokenizer.eos_token_id
    alike = {"input_ids": [5, 6, 7, end], "labels": [-100, -100, 7, end], "completion_mask": [0, 0, 1, 1]}
    other = alike | {"labels": [5, 6, 7, end]}
    assert warned(caplog, lambda: sft([alike, other], tokenizer)) == {MASKED: (1, 2, 1)}


def test_token_ids_without_an_end_are_warned_of_where_none_has_one(tokenizer, caplog):
    endless, ended = {"input_ids": [5, 6, 7]}, {"input_ids": [5, 6, 7, tokenizer.eos_token_id]}
    assert warned(caplog, lambda: sft([endless] * 3, tokenizer)) == {ENDLESS: (3, 3, 0)}
    caplog.clear()
    assert warned(caplog, lambda: sft([endless, ended], tokenizer)) == {}, "rows may be pieces of a text"


def test_an_end_that_is_not_scored_is_none(tokenizer, caplog):
    rows = [{"input_ids": [5, 6, 7, tokenizer.eos_token_id], "labels": [5, 6, 7, -100]}]
    assert warned(caplog, lambda: sft(rows, tokenizer)) == {ENDLESS: (1, 1, 0)}


def test_pairs_of_token_ids_are_looked_at_too(tokenizer, caplog):
    end = tokenizer.eos_token_id
    good = {"prompt_ids": [5], "chosen_ids": [7, end], "rejected_ids": [6, end]}
    assert warned(caplog, lambda: pairs([good, good | {"rejected_ids": [end]}], tokenizer)) == {EMPTY: (1, 2, 1)}
    caplog.clear()
    assert warned(caplog, lambda: pairs([good | {"chosen_ids": [7], "rejected_ids": [6]}], tokenizer)) == {
        ENDLESS: (1, 1, 0)
    }


@pytest.mark.parametrize("column", ["input_ids", "labels"])
def test_true_and_false_are_no_token_ids(column, tokenizer):
    row = {"input_ids": [5, 6], "labels": [5, 6]} | {column: [True, False]}
    with pytest.raises(ValueError, match=f"row 0 .*'{column}' must be a list of integers"):
        sft([row], tokenizer)


# -- templates and what is left out ----------------------------------------------------------------------------------

ENDLESS_TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
MARKED_TEMPLATE = ENDLESS_TEMPLATE.replace("\n", "<|endoftext|>")


NO_END, NO_STOP = "writes no special token after what the assistant says", "writes no token at which generation stops"
A_PAIR = {"prompt": [user("How?")], "chosen": [said("a")], "rejected": [said("b")]}


@pytest.mark.parametrize(
    ("prepares", "row", "template", "told"),
    [
        *((prepares, row, None, None) for prepares, row in ((sft, chat("72")), (pairs, A_PAIR))),
        *(
            (sft, chat("72"), template, told)
            for template, told in ((ENDLESS_TEMPLATE, NO_END), (MARKED_TEMPLATE, None))
        ),
        *((pairs, A_PAIR, template, NO_STOP) for template in (ENDLESS_TEMPLATE, MARKED_TEMPLATE)),
    ],
)
def test_a_template_that_writes_no_end_is_warned_of(prepares, row, template, told, tokenizer, caplog):
    tokenizer.chat_template = template or tokenizer.chat_template
    with caplog.at_level(logging.WARNING):
        prepares([row], tokenizer)
    assert [text for text in (NO_END, NO_STOP) for _ in range(caplog.text.count(text))] == [told] * (told is not None)


def test_rows_that_are_left_out_are_counted(tokenizer, caplog):
    end = tokenizer.eos_token_id
    row = {"input_ids": [5, 6, end], "labels": [5, 6, end]}
    with caplog.at_level(logging.WARNING):
        sft([row, row | {"labels": [-100] * 3}, row], tokenizer)
        pairs([PAIR, PAIR | {"rejected": PAIR["chosen"]}], tokenizer)
    assert "1 of 3 rows are not trained on (no scored token: 1)" in caplog.text
    assert "1 of 2 rows are not trained on (chosen equals rejected: 1)" in caplog.text


def test_rows_that_a_stream_leaves_out_are_said_once(tokenizer, caplog):
    end = tokenizer.eos_token_id
    row = {"input_ids": [5, 6, end], "labels": [5, 6, end]}
    rows = [row, row | {"labels": [-100] * 3}] * 1500
    stream = IterableDataset.from_generator(lambda: iter(rows))
    prepared, _ = prepare(stream, tokenizer, PrepareOptions(), batch_size=2, packing=False)
    with caplog.at_level(logging.WARNING):
        assert len(list(prepared)) == 1500
    assert caplog.text.count("500 of the rows 0 to 999 have nothing to train on") == 1
    assert caplog.text.count("nothing to train on") == 1


@pytest.mark.parametrize("text", ["", " \n", "\u200b", "\ufeff \u200d\u00ad"])
def test_a_text_of_which_nothing_shows_is_empty(text):
    assert doubts_of([TextSample(text=text), TextSample(text=f"{text}a")]).tolist() == [Doubt.NO_ANSWER, 0]


# -- what a template leaves out --------------------------------------------------------------------------------------

LEFT_OUT = "the chat template leaves something out"
CALL = {"type": "function", "function": {"name": "count", "arguments": {"what": "clips"}}}
TOOLS = [{"type": "function", "function": {"name": "count", "description": "Counts.", "parameters": {}}}]
HIDING = {
    "tools": "{% for m in messages %}{{ m.content }}{{ m.tool_calls if m.tool_calls }}<|im_end|>{% endfor %}",
    "calls": "{{ tools if tools }}{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}",
    "answers": "{{ tools if tools }}{% for m in messages if m.role != 'tool' %}{{ m.content }}"
    "{{ m.tool_calls if m.tool_calls }}<|im_end|>{% endfor %}",
}
"""Templates, by what they leave out."""
HAVING = {
    "tools": {"messages": [user("How many?"), said("72.")], "tools": TOOLS},
    "calls": {"messages": [user("How many?"), said("Let me see.", tool_calls=[CALL]), user("And?"), said("72.")]},
    "answers": {"messages": [user("How many?"), said("Well"), {"role": "tool", "content": "72"}, said("72.")]},
}


@pytest.mark.parametrize("part", HAVING)
@pytest.mark.parametrize("options", [{}, {"assistant_only_loss": True}], ids=["whole", "turns"])
def test_parts_that_a_template_does_not_write_are_counted(part, options, tokenizer, caplog):
    rows = [{**dict.fromkeys(HAVING[part]), **chat("72.")}, HAVING[part], HAVING[part]]
    for left_out, template in HIDING.items():
        caplog.clear()
        tokenizer.chat_template = template
        with caplog.at_level(logging.WARNING):
            sft(rows, tokenizer, **options)
        assert caplog.text.count(f"in 2 of 3 rows (the first is row 1) {LEFT_OUT}") == (left_out == part)


def test_parts_of_pairs_that_a_template_does_not_write_are_counted(tokenizer, caplog):
    prompt = [{"role": "system", "content": "Be brief."}, user("How many?")]
    tokenizer.chat_template = HIDING["answers"].replace("tool'", "system'")
    with caplog.at_level(logging.WARNING):
        pairs([{"prompt": prompt, "chosen": [said("72")], "rejected": [said("48")]}], tokenizer)
    assert f"in 1 of 1 rows (the first is row 0) {LEFT_OUT}" in caplog.text


@pytest.mark.parametrize(
    ("more", "warns"),
    [("", 0), ("{{ [1, 2] | random }}", 1), ("{{ lipsum(1) }}", 1), ("{{ strftime_now('%f') }}", 1)],
)
def test_a_template_that_draws_at_random_is_told_once(more, warns, tokenizer, caplog):
    tokenizer.chat_template += more
    with caplog.at_level(logging.WARNING):
        sft([chat("72."), chat("71.")], tokenizer)
    assert caplog.text.count("the chat template does not write the same twice") == warns
