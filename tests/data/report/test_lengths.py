"""The length report against plain counting, and its two renderings."""

import re
from html.parser import HTMLParser

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from lowtide.data.batches.packing import pack
from lowtide.data.report.lengths import BATCH_SIZES, LengthReport, share
from lowtide.data.report.lengths_page import write_html
from lowtide.data.report.lengths_plot import brief, octaves, shorten, write_png

some_lengths = st.lists(st.integers(0, 300), min_size=1, max_size=60).filter(any)


def padding_by_hand(lengths: list[int], size: int) -> float:
    batches = [lengths[at : at + size] for at in range(0, len(lengths), size)]
    positions = sum(len(batch) * max(batch) for batch in batches)
    return (positions - sum(lengths)) / positions


@given(some_lengths, st.lists(st.integers(1, 320), min_size=1, max_size=3))
@settings(max_examples=80, deadline=None)
def test_each_candidate_is_what_counting_gives(lengths, max_lengths):
    report = LengthReport.from_lengths(np.array(lengths), max_lengths, batch_sizes=[1, 3, 8])
    assert [candidate.max_length for candidate in report.candidates] == sorted(set(max_lengths))
    for candidate in report.candidates:
        kept = [min(length, candidate.max_length) for length in lengths]
        assert candidate.tokens_cut == pytest.approx((sum(lengths) - sum(kept)) / sum(lengths))
        assert candidate.rows_cut == pytest.approx(np.mean([n > candidate.max_length for n in lengths]))
        assert candidate.padding == {size: pytest.approx(padding_by_hand(kept, size)) for size in (1, 3, 8)}
        plan = pack(np.array(lengths), candidate.max_length)
        assert (candidate.bins, candidate.fill) == (plan.bins, plan.fill)
        assert report.cut(candidate.max_length) == pytest.approx((candidate.tokens_cut, candidate.rows_cut))


@given(some_lengths)
@settings(max_examples=80, deadline=None)
def test_totals_percentiles_and_histogram(lengths):
    report = LengthReport.from_lengths(np.array(lengths))
    assert (report.rows, report.tokens, report.longest) == (len(lengths), sum(lengths), max(lengths))
    for percent in (0, 1, 50, 95, 99.9, 100):
        assert report.percentile(percent) == np.percentile(lengths, percent, method="inverted_cdf")
    edges, rows = report.histogram()
    assert rows.tolist() == np.histogram(np.maximum(lengths, 1), edges)[0].tolist()
    assert rows.sum() == len(lengths)
    assert (np.diff(edges) > 0).all()


@given(some_lengths)
@settings(max_examples=80, deadline=None)
def test_the_usual_candidates_reach_from_the_median_to_the_longest_row(lengths):
    candidates = [candidate.max_length for candidate in LengthReport.from_lengths(np.array(lengths)).candidates]
    assert candidates == sorted(set(candidates))
    assert candidates[-1] >= max(lengths)
    assert all(candidate < max(lengths) for candidate in candidates[:-1])


def test_padding_follows_the_order_of_the_dataset():
    mixed, sorted_ = [2, 8, 2, 8], [2, 2, 8, 8]
    padding = [
        LengthReport.from_lengths(np.array(rows), [8], [2]).candidates[0].padding[2] for rows in (mixed, sorted_)
    ]
    assert padding == [12 / 32, 0]


def test_the_smallest_candidate_that_keeps_enough_is_recommended():
    lengths = np.array([100] * 9900 + [200] * 100)  # 1% of the rows are beyond 100, with 1% of the tokens
    report = LengthReport.from_lengths(lengths, [64, 100, 189, 190, 256])
    assert report.recommended.max_length == 190
    assert report.cut(190)[0] <= 0.001 < report.cut(189)[0]


def test_the_rule_holds_at_its_limits():
    lengths = np.array([100] * 990 + [110] * 10)
    assert LengthReport.from_lengths(lengths, [100, 110]).recommended.max_length == 100
    one_more = np.array([100] * 989 + [110] * 11)
    report = LengthReport.from_lengths(one_more, [100, 110])
    assert report.recommended.max_length == 110
    assert report.reason == (
        "110 is the smallest candidate that cuts at most 0.1% of the tokens and 1% of the rows: it cuts nothing."
    )


def test_where_no_candidate_keeps_enough_the_largest_is_named_with_what_it_cuts():
    report = LengthReport.from_lengths(np.array([100, 100, 100, 1000]), [50, 200])
    assert report.recommended.max_length == 200
    assert report.reason == (
        "No candidate cuts at most 0.1% of the tokens and 1% of the rows; 200 is the largest: it cuts 61.5% of the "
        "tokens, in 1 of 4 rows. The longest row has 1,000 tokens: try a larger max_length."
    )


@pytest.mark.parametrize(
    ("lengths", "options", "message"),
    [
        ([], {}, "no tokens in 0 rows"),
        ([0, 0], {}, "no tokens in 2 rows"),
        ([3], {"max_lengths": [0, 4]}, "max_length must be at least 1, not 0"),
        ([3], {"max_lengths": []}, "max_length must be at least 1, not None"),
        ([3], {"batch_sizes": [-2]}, "batch_size must be at least 1, not -2"),
    ],
)
def test_what_cannot_be_reported_is_refused(lengths, options, message):
    with pytest.raises(ValueError, match=message):
        LengthReport.from_lengths(np.array(lengths, dtype=int), **options)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0%"), (1e-7, "<0.001%"), (0.00012, "0.012%"), (0.0012, "0.12%"), (0.0123, "1.2%"), (1, "100.0%")],
)
def test_shares_show_small_values(value, text):
    assert share(value) == text


def test_lengths_on_axes_are_brief():
    assert [brief(n) for n in (1, 512, 1024, 1536, 131072, 2**20)] == ["1", "512", "1k", "1.5k", "128k", "1M"]
    assert octaves(LengthReport.from_lengths(np.array([5, 70]), [64])) == [4, 8, 16, 32, 64, 128]
    assert shorten("x" * 100 + "/end.jsonl", 20).endswith("/end.jsonl")
    assert len(shorten("x" * 100, 20)) == 20


# -- renderings ---------------------------------------------------------------------------------------------

CASES = {
    "long-tailed": np.random.default_rng(0).lognormal(5, 1, 3000).astype(int) + 1,
    "one row": np.array([1]),
    "an empty row": np.array([0, 9]),
    "one very long row": np.array([3, 200_000]),
}


class Page(HTMLParser):
    """A page's text and tags; asserts that tags are closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open, self.tags, self.text = [], [], ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


@pytest.mark.parametrize("lengths", CASES.values(), ids=CASES.keys())
def test_the_page_is_well_formed_self_contained_and_says_what_the_report_says(lengths, tmp_path):
    report = LengthReport.from_lengths(lengths)
    write_html(report, tmp_path / "page.html", "rows.jsonl", "a tokenizer")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    page = Page(text)
    assert not re.search(r"https?:|//|@import|url\(|<link|<script|<img|\bnan\b|\binf\b", text.lower())
    assert report.reason in page.text
    for candidate in report.candidates:
        assert f"{candidate.max_length:,}" in page.text
        assert f"{candidate.fill:.2%}" in page.text
    assert len([tag for tag, attrs in page.tags if attrs.get("class") == "chosen"]) == 1
    heads = [tag for tag, _ in page.tags if tag == "th"]
    assert len(heads) >= len(BATCH_SIZES)
    places = [float(value) for value in re.findall(r"(?:left|bottom|height):([-\d.]+)%", text)]
    assert all(-0.01 <= place <= 100.01 for place in places)


def test_what_comes_from_the_data_is_escaped(tmp_path):
    hostile = "<script>alert('x')</script>\"&.jsonl"
    write_html(LengthReport.from_lengths(np.array([3])), tmp_path / "page.html", hostile, hostile)
    page = Page((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert "script" not in {tag for tag, _ in page.tags}
    assert page.text.count(hostile) == 3  # the title, the source and the tokenizer


@pytest.mark.parametrize("lengths", CASES.values(), ids=CASES.keys())
def test_the_picture_is_drawn_whatever_the_name(lengths, tmp_path):
    write_png(LengthReport.from_lengths(lengths), tmp_path / "picture.png", "a $ name_ with $\\frac$.jsonl")
    with Image.open(tmp_path / "picture.png") as picture:
        assert picture.size == (1650, 660)
        assert len(picture.convert("RGB").getcolors(maxcolors=1 << 20)) > 10
