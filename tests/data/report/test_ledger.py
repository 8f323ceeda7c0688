"""The ledger: padding against a plain count, and what is shown of it."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from lowtide.data.report.ledger import Ledger, padding_share

LEDGER = Ledger(
    name="train [red]",
    rows=7_456,
    tokens=893_231,
    scored_tokens=441_223,
    tokens_cut=83_508,
    rows_cut=2_187,
    rows_dropped={"no scored token left after truncation": 17, "[bold]odd": 1},
    tokens_dropped=4_916,
    longest_row=150,
    batch_size=8,
    padding_avoided=0.1984,
    packed_rows=5_957,
    packing_fill=0.99971,
)


def shown(ledger, width=80):
    console = Console(width=width, record=True, force_terminal=False, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(ledger)
    return console.export_text()


@given(st.lists(st.integers(0, 20), max_size=30), st.integers(1, 9))
def test_padding_is_what_padded_batches_would_hold(lengths, batch_size):
    batches = [lengths[start : start + batch_size] for start in range(0, len(lengths), batch_size)]
    padded = sum(max(batch) * len(batch) for batch in batches)
    expected = 1 - sum(lengths) / padded if padded else 0.0
    assert padding_share(np.array(lengths, dtype=np.int32), batch_size) == pytest.approx(expected)


def test_the_table_fits_80_columns_and_says_everything():
    text = shown(LEDGER)
    assert max(map(len, text.splitlines())) <= 80
    for part in ("7,456", "893,231", "441,223", "83,508", "2,187 rows", "19.8%", "5,957", "99.971% full", "150"):
        assert part in text
    assert "no scored token left after truncation: 17" in " ".join(text.split())


def test_markup_in_the_data_is_shown_as_it_is():
    assert "train [red]" in shown(LEDGER)
    assert "[bold]odd: 1" in " ".join(shown(LEDGER, width=200).split())


def test_the_summary_is_one_line():
    assert "\n" not in LEDGER.summary()
    told = "tokens 893,231 (119.8 a row, 150 in the longest) | scored 441,223 (49.4% of the tokens) | cut 83,508 (8.5%"
    assert told in LEDGER.summary()


def test_it_becomes_json():
    assert json.loads(json.dumps(LEDGER.to_dict()))["rows_dropped"] == dict(LEDGER.rows_dropped)


def test_a_fill_just_short_of_full_is_not_shown_as_full():
    from dataclasses import replace

    assert "99.999% full" in shown(replace(LEDGER, packing_fill=0.9999999))
    assert "100.000% full" in shown(replace(LEDGER, packing_fill=1.0))
