"""Preferences prepared: what the ledger counts, the cache, streams and KL completions."""

import io

import pytest
from datasets import Dataset, IterableDataset
from rich.console import Console

from lowtide.data.encode.kl_completions import previous_in_block
from lowtide.data.preference import PreferenceOptions, prepare_pairs, prepare_unpaired

pytestmark = pytest.mark.usefixtures("datasets_cache")

PARTS = ("prompt", "chosen", "rejected")
IDS = tuple(f"{part}_ids" for part in PARTS)


def pairs(*rows):
    return Dataset.from_list([dict(zip(IDS, map(list, row), strict=True)) for row in rows])


def prepared(dataset, tokenizer, batch_size=2, whole=False, margins=False, **options):
    return prepare_pairs(
        dataset, tokenizer, PreferenceOptions(**options), batch_size=batch_size, whole=whole, margins=margins
    )


def test_the_ledger_counts_a_shared_prompt_once(tokenizer):
    rows = pairs(
        ([1] * 6, [2] * 5, [3] * 2),
        ([1] * 4, [2] * 2, [3] * 2),
        ([1] * 2, [5, 6], [5, 6]),
        ([1] * 12, [2], [3]),
        ([], [2], [3, 4]),
        ([1] * 3, [4], [5]),
    )
    dataset, ledger = prepared(rows, tokenizer, max_length=9, max_prompt_length=11)
    assert [tuple(map(len, row.values())) for row in dataset] == [(6, 3, 2), (4, 2, 2), (3, 1, 1)]
    assert (ledger.rows, ledger.tokens, ledger.scored_tokens, ledger.longest_row) == (3, 24, 11, 11)
    assert (ledger.tokens_cut, ledger.rows_cut) == (2, 1)
    assert ledger.cut_by_part == {"prompt": 0, "chosen": 2, "rejected": 0}
    assert ledger.rows_dropped == {
        "chosen equals rejected": 1,
        "no scored token": 1,
        "no scored token left after truncation": 1,
    }
    assert ledger.tokens_dropped == 6 + 14 + 3
    assert ledger.padding_avoided == pytest.approx(1 - 24 / (4 * 9 + 2 * 4))
    assert ledger.to_dict()["cut_by_part"] == {"prompt": 0, "chosen": 2, "rejected": 0}
    assert "from 1 row; prompt 0, chosen 2, rejected 0)" in ledger.summary()
    shown = Console(width=80, record=True, file=io.StringIO())
    shown.print(ledger)
    text = " ".join(shown.export_text().split())
    assert "from 1 row; prompt 0, chosen 2, rejected 0" in text
    assert "of what padded batches of 2 pairs, each prompt twice, would compute" in text


def test_whole_pairs_share_what_both_sides_begin_with(tokenizer):
    rows = Dataset.from_list(
        [
            {"chosen_ids": [1, 2, 3, 4], "rejected_ids": [1, 2, 5]},
            {"chosen_ids": [1, 2, 3], "rejected_ids": [1, 2]},
            {"chosen_ids": [1, 2], "rejected_ids": [3, 4]},
            {"chosen_ids": [1] * 9, "rejected_ids": [2]},
        ]
    )
    dataset, ledger = prepared(rows, tokenizer, whole=True, max_length=8)
    assert [list(row.values()) for row in dataset] == [
        [[1, 2], [3, 4], [5]],
        [[1], [2, 3], [2]],
        [[], [1, 2], [3, 4]],
    ]
    assert ledger.rows_dropped == {"longer than max_length": 1}
    assert ledger.scored_tokens == 6
    with pytest.raises(ValueError, match="max_prompt_length and max_completion_length cut"):
        prepared(rows, tokenizer, whole=True, max_prompt_length=3)


ASKED, GOLD = {"role": "user", "content": "How many?"}, {"role": "assistant", "content": "72 clips."}


def triple(prompt, *answers):
    return {"prompt": prompt, **dict(zip(("chosen", "rejected", "reference"), answers, strict=True))}


@pytest.mark.parametrize(
    "row",
    [
        triple("How many?", " 72", " 7", " seventy-two"),
        {name: f"How many? {name}" for name in ("chosen", "rejected", "reference")},
        triple([ASKED], [GOLD], [GOLD | {"content": "7"}], [GOLD | {"content": "seventy-two"}]),
        {name: [ASKED, GOLD | {"content": name}] for name in ("chosen", "rejected", "reference")},
        {"instruction": "How many?", "chosen": "72", "rejected": "7", "reference": "seventy-two"},
        {"conversations": [ASKED], "chosen": GOLD, "rejected": GOLD | {"content": "7"}, "reference": GOLD},
        {"prompt_ids": [5], "chosen_ids": [6], "rejected_ids": [7], "reference_ids": [8, 9]},
    ],
    ids=["texts", "implicit texts", "conversations", "implicit conversations", "Alpaca", "ShareGPT", "ids"],
)
def test_a_third_side_is_read_as_the_chosen_one(row, tokenizer):
    """In every form of a pair: it has the tokens that it has in the place of the chosen one."""
    sides = ("chosen", "rejected", "reference")
    three, ledger = prepare_pairs(Dataset.from_list([row]), tokenizer, PreferenceOptions(sides=sides), batch_size=2)
    assert three.column_names == [*IDS, "reference_ids"]
    names = {"chosen": "reference", "reference": "chosen"}
    names |= {f"{name}_ids": f"{other}_ids" for name, other in names.items()}
    other = Dataset.from_list([{names.get(name, name): value for name, value in row.items()}])
    other, _ = prepare_pairs(other, tokenizer, PreferenceOptions(sides=sides), batch_size=2)
    assert three[0]["reference_ids"] == other[0]["chosen_ids"]
    assert ledger.scored_tokens == sum(len(three[0][f"{side}_ids"]) for side in sides)
    two, _ = prepared(Dataset.from_list([row]), tokenizer)
    assert two[0] == {name: three[0][name] for name in IDS}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a ", "chosen": "b", "rejected": "c"}, "pairs need 'chosen', 'rejected' and 'reference'"),
        (triple("a ", "b", "c", None), "'reference' is null; it must be a string"),
        (triple("a ", "b", "c", [GOLD]), "'prompt' is a str and 'reference' is a list"),
        (
            {"chosen": "a b", "rejected": "a c", "reference": "x"},
            "'reference' begin with no prompt in common",
        ),
    ],
)
def test_a_third_side_that_cannot_be_read_is_named(row, message, tokenizer):
    sides = ("chosen", "rejected", "reference")
    with pytest.raises(ValueError, match=message):
        prepare_pairs(Dataset.from_list([row]), tokenizer, PreferenceOptions(sides=sides), batch_size=2)


def test_margins_come_along(tokenizer):
    rows = Dataset.from_list(
        [{"prompt": "a ", "chosen": "b", "rejected": "c", "margin": margin} for margin in (0.5, 2.0)]
    )
    dataset, _ = prepared(rows, tokenizer, margins=True, whole=True)
    assert dataset["margin"][:] == [0.5, 2.0]
    assert "margin" not in prepared(rows, tokenizer, whole=True)[0].column_names
    assert "margin" not in prepared(rows.remove_columns("margin"), tokenizer, margins=True)[0].column_names


TEXTS = [
    {"prompt": "How many? ", "chosen": "72 clips.", "rejected": "7"},
    {"prompt": "Half of 48? ", "chosen": "24", "rejected": "I don't know, says the ledger."},
    {"prompt": "And then? ", "chosen": "12", "rejected": "12"},
]


def test_a_second_start_finds_the_cache(tokenizer, monkeypatch):
    first, ledger = prepared(Dataset.from_list(TEXTS), tokenizer)
    labelled, _ = prepare_unpaired(Dataset.from_list(TEXTS), tokenizer, PreferenceOptions(), batch_size=2, kl_block=2)
    tokenizer("something", padding=False)

    def refuse(*_):
        raise AssertionError("prepared again")

    monkeypatch.setattr("lowtide.data.encode.sides.SideEncoder.__call__", refuse)
    monkeypatch.setattr("lowtide.data.encode.kl_completions.range_index", refuse)
    again, same_ledger = prepared(Dataset.from_list(TEXTS), tokenizer)
    assert list(again) == list(first)
    assert same_ledger == ledger
    relabelled, _ = prepare_unpaired(Dataset.from_list(TEXTS), tokenizer, PreferenceOptions(), batch_size=2, kl_block=2)
    assert list(relabelled) == list(labelled)
    for changed in (
        {"max_length": 9},
        {"truncation_mode": "keep_end"},
        {"whole": True},
        {"eos_token": "<|endoftext|>"},
    ):
        with pytest.raises(AssertionError, match="prepared again"):
            prepared(Dataset.from_list(TEXTS), tokenizer, **changed)


@pytest.mark.slow
def test_streams_give_the_same_rows(tokenizer):
    rows = [row | {"prompt": row["prompt"] + str(index)} for index in range(401) for row in TEXTS]
    dataset = Dataset.from_list(rows)
    here, _ = prepared(dataset, tokenizer, max_length=20)
    stream, no_ledger = prepared(dataset.to_iterable_dataset(), tokenizer, max_length=20)
    assert isinstance(stream, IterableDataset)
    assert no_ledger is None
    assert list(stream) == list(here)
    options = PreferenceOptions(max_length=20)
    here, _ = prepare_unpaired(dataset, tokenizer, options, batch_size=2, kl_block=7)
    stream, _ = prepare_unpaired(dataset.to_iterable_dataset(), tokenizer, options, batch_size=2, kl_block=7)
    assert list(stream) == list(here)


def test_processes_do_not_change_the_result(tokenizer):
    dataset = Dataset.from_list(TEXTS * 4)
    alone, ledger = prepare_unpaired(dataset, tokenizer, PreferenceOptions(), batch_size=2, kl_block=4)
    two, same = prepare_unpaired(
        dataset, tokenizer, PreferenceOptions(num_proc=2, fingerprint="2"), batch_size=2, kl_block=4
    )
    assert list(two) == list(alone)
    assert same == ledger


@pytest.mark.parametrize(
    ("rows", "block", "expected"),
    [(6, 3, [2, 0, 1, 5, 3, 4]), (5, 2, [1, 0, 3, 2, 3]), (3, 1, [0, 0, 1]), (1, 4, [0]), (2, 4, [1, 0])],
)
def test_each_row_gets_the_completion_of_the_one_before_it(rows, block, expected):
    assert previous_in_block(rows, block).tolist() == expected


def test_a_kl_completion_is_cut_to_the_room_after_its_prompt(tokenizer):
    rows = [
        {"prompt_ids": [1] * 7, "completion_ids": [2] * 6, "label": True},
        {"prompt_ids": [1] * 2, "completion_ids": [3] * 9, "label": False},
    ]
    dataset, ledger = prepare_unpaired(
        Dataset.from_list(rows), tokenizer, PreferenceOptions(max_length=8), batch_size=2, kl_block=2
    )
    assert dataset["completion_ids"][:] == [[2], [3] * 6]
    assert dataset["kl_completion_ids"][:] == [[3], [2] * 6]
    assert ledger.cut_by_part == {"prompt": 0, "completion": 8}


def test_labels_that_are_all_the_same_are_warned_of(tokenizer, caplog):
    rows = [{"prompt": "a ", "completion": "b", "label": True}] * 2
    prepare_unpaired(Dataset.from_list(rows), tokenizer, PreferenceOptions(), batch_size=2)
    assert caplog.text.count("every row has the label True") == 1


@pytest.mark.parametrize("rows", [3, 4, 5])
def test_a_last_row_by_itself_gets_the_completion_before_it_in_a_stream_too(rows, tokenizer, monkeypatch):
    monkeypatch.setattr("lowtide.data.encode.kl_completions.ROWS_AT_A_TIME", 2)
    dataset = Dataset.from_list([{"prompt": "a ", "completion": f"{n}{n}", "label": n % 2 == 0} for n in range(rows)])
    here, stream = (
        prepare_unpaired(each, tokenizer, PreferenceOptions(), batch_size=2, kl_block=2)[0]
        for each in (dataset, dataset.to_iterable_dataset())
    )
    assert list(stream) == list(here)
    assert list(stream) == list(here), "a second epoch of the stream differs"


def test_a_single_row_of_a_stream_that_gets_its_own_completion_is_warned_of(tokenizer, caplog):
    rows = [{"prompt": "a " * count, "completion": "b", "label": True} for count in (1, 90)]
    options = PreferenceOptions(max_length=20, truncation_mode="keep_start")
    stream = Dataset.from_list(rows).to_iterable_dataset()
    assert len(list(prepare_unpaired(stream, tokenizer, options, batch_size=2, kl_block=2)[0])) == 1
    assert "the baseline of row 0 is estimated from its own completion" in caplog.text
