"""Rows of preferences that can't be used, and what the messages say of them."""

import pytest
from datasets import Dataset

from lowtide.data.preference import PreferenceOptions, prepare_pairs, prepare_unpaired

pytestmark = pytest.mark.usefixtures("datasets_cache")

USER = {"role": "user", "content": "How many clips?"}
OTHER_USER = {"role": "user", "content": "Half of 48?"}
ANSWER = {"role": "assistant", "content": "72"}
OTHER_ANSWER = {"role": "assistant", "content": "24"}
GOOD_TEXTS = {"chosen": "How many? 72", "rejected": "How many? 24"}
GOOD = {"prompt": "How many? ", "chosen": "72", "rejected": "24"}
GOOD_TALK = {"prompt": [USER], "chosen": [ANSWER], "rejected": [OTHER_ANSWER]}

BAD_PAIRS = [
    ({"question": "a", "answer": "b"}, "has the columns 'question', 'answer'; pairs need 'chosen' and 'rejected'"),
    (GOOD | {"chosen": None}, r"row 1 .*'chosen' is null; it must be a string"),
    (
        {"chosen": "xyz", "rejected": "How many?"},
        "row 1 .*begin with no prompt in common: the texts differ from the st",
    ),
    (
        {"chosen": [USER, ANSWER], "rejected": [OTHER_USER, ANSWER]},
        "row 1 .*begin with no prompt in common: the conversations differ",
    ),
    (
        {"chosen_ids": [5, 6], "rejected_ids": [7, 6]},
        "row 1 .*begin with no prompt in common: the token ids differ",
    ),
    (
        {"prompt_ids": [5], "chosen_ids": [6], "rejected_ids": [100_000]},
        r"row 1 .*the row's rejected side holds 100000, outside the vocabulary",
    ),
    (GOOD_TALK | {"chosen": [USER, ANSWER]}, "row 1 .*'prompt' and 'chosen' together: roles out of order"),
    (GOOD | {"margin": float("nan")}, r"row 1 .*'margin' is nan; it must be a number"),
    (GOOD | {"margin": None}, r"row 1 .*'margin' is None; it must be a number"),
]
FIRST = {
    "question": {"question": "a", "answer": "b"},
    "margin": GOOD | {"margin": 1.0},
    "prompt_ids": {"prompt_ids": [5], "chosen_ids": [6], "rejected_ids": [7]},
    "chosen_ids": {"chosen_ids": [5, 6], "rejected_ids": [5, 7]},
}


def first_row(bad):
    """A good row with the columns of a bad one."""
    for name, row in FIRST.items():
        if name in bad:
            return row
    if isinstance(bad["chosen"], list):
        return GOOD_TALK if "prompt" in bad else {"chosen": [USER, ANSWER], "rejected": [USER, OTHER_ANSWER]}
    return GOOD if "prompt" in bad else GOOD_TEXTS


@pytest.mark.parametrize(("bad", "message"), BAD_PAIRS)
def test_a_bad_pair_is_named(bad, message, tokenizer):
    dataset = Dataset.from_list([first_row(bad), bad])
    with pytest.raises(ValueError, match=message):
        prepare_pairs(dataset, tokenizer, PreferenceOptions(), batch_size=2, margins=True)


def test_a_prompt_beside_whole_conversations_is_explained(tokenizer):
    rows = [{"prompt": "How many?", "chosen": [USER, ANSWER], "rejected": [USER, OTHER_ANSWER]}]
    with pytest.raises(ValueError, match="If 'chosen' and 'rejected' repeat the prompt, remove the column"):
        prepare_pairs(Dataset.from_list(rows), tokenizer, PreferenceOptions(), batch_size=2)


@pytest.mark.parametrize("label", [0, 1])
def test_a_label_may_be_a_number(label, tokenizer):
    rows = Dataset.from_list([{"prompt": "a ", "completion": "b", "label": label}])
    prepared, _ = prepare_unpaired(rows, tokenizer, PreferenceOptions(), batch_size=2)
    assert prepared["label"][:] == [bool(label)]


@pytest.mark.parametrize("label", [2, -1, 0.5, "yes", None])
def test_a_label_must_be_true_or_false(label, tokenizer):
    rows = Dataset.from_list([{"prompt": "a ", "completion": "b", "label": label}])
    with pytest.raises(ValueError, match=rf"row 0 .*'label' is {label!r}; it must be true"):
        prepare_unpaired(rows, tokenizer, PreferenceOptions(), batch_size=2)


def test_columns_of_neither_kind_are_named(tokenizer):
    rows = Dataset.from_list([{"prompt": "a ", "completion": "b"}])
    with pytest.raises(ValueError, match="'prompt', 'completion'; labelled completions need"):
        prepare_unpaired(rows, tokenizer, PreferenceOptions(), batch_size=2)


def test_a_dataset_of_equal_sides_has_nothing_to_train_on(tokenizer):
    rows = Dataset.from_list([GOOD | {"rejected": "72"}, GOOD | {"chosen": "24"}])
    with pytest.raises(
        ValueError, match=r"every row was dropped \(chosen equals rejected: 2\)\. Look at the completions"
    ):
        prepare_pairs(rows, tokenizer, PreferenceOptions(), batch_size=2)


def test_prompts_that_fill_everything_leave_nothing(tokenizer):
    with pytest.raises(ValueError, match=r"left after truncation: 1\)\. Raise max_length \(it is 2\)"):
        prepare_pairs(Dataset.from_list([GOOD]), tokenizer, PreferenceOptions(max_length=2), batch_size=2)


def test_conversations_that_are_wholly_equal_are_dropped(tokenizer):
    rows = [
        {"chosen": [USER, ANSWER], "rejected": [USER, ANSWER]},
        {"chosen": [USER, ANSWER], "rejected": [USER, OTHER_ANSWER]},
    ]
    _, ledger = prepare_pairs(Dataset.from_list(rows), tokenizer, PreferenceOptions(), batch_size=2)
    assert ledger.rows_dropped == {"chosen equals rejected": 1}


@pytest.mark.parametrize("stream", [False, True])
def test_one_row_has_no_baseline(stream, tokenizer):
    rows = Dataset.from_list([{"prompt": "a ", "completion": "b", "label": True}])
    rows = rows.to_iterable_dataset() if stream else rows
    with pytest.raises(ValueError, match=r"has one row with something to train on.*loss_type='apo_zero_unpaired'"):
        prepare_unpaired(rows, tokenizer, PreferenceOptions(), batch_size=2, kl_block=2)
    prepared, _ = prepare_unpaired(rows, tokenizer, PreferenceOptions(), batch_size=2)
    assert len(list(prepared)) == 1
