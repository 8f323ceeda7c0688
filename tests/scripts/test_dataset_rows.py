"""Functions over rows and datasets give what TRL's of the same names give from the same input."""

import copy

import pytest
from datasets import Dataset, DatasetDict, IterableDataset

import lowtide
from lowtide.demo.model import make_tokenizer

trl = pytest.importorskip("trl", reason="the comparison needs the bench extra (trl)")


def message(role, content):
    return {"role": role, "content": content}


ASKED, ANSWER, OTHER = message("user", "1 + 1"), message("assistant", "2"), message("assistant", "3")
CONTINUED = message("assistant", "1 + ")
CONVERSATIONS = [
    {"messages": [ASKED, ANSWER]},
    {"prompt": [ASKED]},
    {"prompt": [ASKED, CONTINUED]},
    {"prompt": [ASKED], "completion": [ANSWER]},
    {"prompt": [ASKED], "chosen": [ANSWER], "rejected": [OTHER]},
    {"chosen": [ASKED, ANSWER], "rejected": [ASKED, OTHER]},
    {"prompt": [ASKED], "completion": [ANSWER], "label": False},
    {"messages": [ASKED, ANSWER], "chat_template_kwargs": {"loud": True}},
]
TEXTS = [
    {"text": "1 + 1 = 2"},
    {"prompt": "The sky is", "completion": " blue."},
    {"prompt": "The sky is", "chosen": " blue.", "rejected": " green."},
    {"chosen": "The sky is blue.", "rejected": "The sky is green."},
    {"chosen": "The sky is blue.", "rejected": "The sky is blue."},
    {"chosen": "A", "rejected": "B"},
]
MIXED = [
    {"prompt": "1 + 1", "chosen": [ASKED, ANSWER], "rejected": [ASKED, OTHER]},
    {"chosen": [ASKED, ANSWER], "rejected": [ASKED, ANSWER]},
]
SHAREGPT = [
    {"conversations": [{"from": "human", "value": "1 + 1"}, {"from": "gpt", "value": "2"}], "id": 7},
    {"conversations": [ASKED, ANSWER]},
    {"conversations": "text"},
    {"prompt": [{"from": "human", "value": "1 + 1"}], "completion": [{"from": "gpt", "value": "2"}]},
]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}{{ '!' if loud else '' }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{{ opening or '' }}{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.mark.parametrize("row", [*CONVERSATIONS, *TEXTS, *MIXED, *SHAREGPT])
@pytest.mark.parametrize(
    "name", ["is_conversational", "is_conversational_from_value", "maybe_convert_to_chatml", "maybe_extract_prompt"]
)
def test_a_row_is_read_as_trl_reads_it(name, row):
    if name == "is_conversational" and row is MIXED[0]:
        pytest.skip("TRL looks at one column, whichever a set gives first")
    before = copy.deepcopy(row)
    found = getattr(lowtide, name)(row)
    assert row == before  # TRL's maybe_convert_to_chatml changes it
    assert found == getattr(trl, name)(copy.deepcopy(row))


@pytest.mark.parametrize("row", [*CONVERSATIONS, *TEXTS])
@pytest.mark.parametrize("more", [{}, {"opening": "<think>"}])
def test_templates_are_applied_as_trl_applies_them(tokenizer, row, more):
    assert lowtide.maybe_apply_chat_template(row, tokenizer, **more) == trl.maybe_apply_chat_template(
        row, tokenizer, **more
    )


@pytest.mark.parametrize(
    ("row", "error"),
    [
        ({"prompt": [ASKED], "chosen": [ANSWER]}, KeyError),
        ({"prompt": [message("system", "Be brief.")]}, ValueError),
    ],
)
def test_rows_that_no_template_fits_are_refused_as_there(tokenizer, row, error):
    for library in (lowtide, trl):
        with pytest.raises(error):
            library.apply_chat_template(row, tokenizer)


def test_the_prompt_of_texts_that_differ_at_once_is_empty():
    # TRL looks at the last character there, and takes all but it for the prompt.
    assert lowtide.extract_prompt({"chosen": "A ", "rejected": "B "}) == {
        "prompt": "",
        "chosen": "A ",
        "rejected": "B ",
    }
    assert lowtide.extract_prompt({"chosen": "", "rejected": ""}) == {"prompt": "", "chosen": "", "rejected": ""}


PAIRS = {"prompt": ["a", "b", "c"], "chosen": ["1", "2", "3"], "rejected": ["4", "5", "6"], "id": [7, 8, 9]}


def made(kind, columns):
    rows = Dataset.from_dict(columns)
    return {"rows": rows, "splits": DatasetDict({"train": rows}), "stream": rows.to_iterable_dataset()}[kind]


def columns_of(dataset):
    dataset = dataset["train"] if isinstance(dataset, DatasetDict) else dataset
    if isinstance(dataset, IterableDataset):
        dataset = Dataset.from_list(list(dataset))
    return dataset.with_format(None).to_dict()


@pytest.mark.parametrize("kind", ["rows", "splits", "stream"])
@pytest.mark.parametrize("columns", [PAIRS, {"chosen": ["1"], "rejected": ["2"]}])
def test_pairs_are_taken_apart_as_trl_does(kind, columns):
    ours, theirs = (
        columns_of(library.unpair_preference_dataset(made(kind, columns), batch_size=2)) for library in (lowtide, trl)
    )
    assert ours == theirs
    assert columns_of(lowtide.maybe_unpair_preference_dataset(made("rows", columns), num_proc=1, desc="pairs"))


def test_what_is_no_pair_stays_as_it_is():
    rows = Dataset.from_dict({"prompt": ["a"], "completion": ["b"], "label": [True]})
    assert lowtide.maybe_unpair_preference_dataset(rows) is rows


TOKENS = {
    "input_ids": [[1, 2, 3, 4, 5], [6, 7], [8, 9, 10], [11], [], [12, 13, 14, 15, 16, 17, 18, 19, 20]],
    "labels": [[1, 2, 3, 4, -100], [-100, 7], [8, 9, 10], [11], [], [12, 13, 14, 15, 16, 17, 18, 19, 20]],
}


@pytest.mark.parametrize("kind", ["rows", "splits", "stream"])
@pytest.mark.parametrize("strategy", ["bfd", "bfd_split", "wrapped"])
@pytest.mark.parametrize("length", [1, 4, 7])
def test_rows_are_packed_as_trl_packs_them(kind, strategy, length):
    ours, theirs = (
        columns_of(library.pack_dataset(made(kind, TOKENS), length, strategy)) for library in (lowtide, trl)
    )
    assert ours == theirs


def test_a_format_is_kept_and_slices_are_packed():
    rows = Dataset.from_dict(TOKENS).select(range(1, 5)).with_format("numpy")
    for strategy in ("bfd", "wrapped"):
        ours, theirs = (library.pack_dataset(rows, 4, strategy, {"batch_size": 2}) for library in (lowtide, trl))
        assert columns_of(ours) == columns_of(theirs)
        assert ours.format == theirs.format


def test_packing_says_what_it_cannot_pack():
    with pytest.raises(ValueError, match="'bfdd' is not one of"):
        lowtide.pack_dataset(Dataset.from_dict(TOKENS), 4, "bfdd")
    with pytest.raises(TypeError, match="'id' is of int64"):
        lowtide.pack_dataset(Dataset.from_dict({"input_ids": [[1]], "id": [1]}), 4)
    with pytest.raises(ValueError, match="'labels' has another"):
        lowtide.pack_dataset(Dataset.from_dict({"input_ids": [[1, 2]], "labels": [[1]]}), 4)


def test_rows_are_cut_as_trl_cuts_them():
    from trl.experimental.utils import truncate_dataset

    rows = Dataset.from_dict(TOKENS | {"id": list(range(6))})
    assert columns_of(lowtide.truncate_dataset(rows, 3)) == columns_of(truncate_dataset(rows, 3))
