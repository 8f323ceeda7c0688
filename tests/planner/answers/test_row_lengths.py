"""Rows by their lengths alone."""

from __future__ import annotations

import pytest

from lowtide.methods import METHODS
from lowtide.planner.answers.row_lengths import notes_of_lengths, options_of_lengths, row_lengths


@pytest.mark.parametrize(
    ("method", "text", "lengths", "said"),
    [
        ("sft", "1024x8", (1024,) * 8, "8 rows of 1,024 tokens"),
        ("sft", "16, 32x2", (16, 32, 32), "3 rows of up to 32 tokens"),
        ("dpo", "1024x2", ((512, 512, 512),) * 2, "2 rows of 1,536 tokens (prompt 512, chosen 512, rejected 512)"),
        ("dpo", "10+20+30", ((10, 20, 30),), "1 row of 60 tokens (prompt 10, chosen 20, rejected 30)"),
        ("kto", "100x1", ((50, 50),), "1 row of 100 tokens (prompt 50, completion 50)"),
        ("grpo", "64x4", (64,) * 4, "4 rows of prompts of 64 tokens"),
    ],
)
def test_words_are_lengths(method, text, lengths, said):
    found = row_lengths(text, METHODS[method])
    assert (found.lengths, str(found)) == (lengths, said)


@pytest.mark.parametrize("text", ["", "x8", "1024x0", "0x8", "a lot", "1024x8x2", "-4", "_x3", "1__0x3"])
def test_what_is_none_is_refused(text):
    with pytest.raises(ValueError, match="1024x8"):
        row_lengths(text, METHODS["sft"])


def test_another_number_of_parts_is_refused():
    with pytest.raises(ValueError, match=r"a row of dpo has 3 parts, and 10\+20 has 2"):
        row_lengths("10+20", METHODS["dpo"])


def test_rows_are_prepared_rows_of_these_lengths():
    rows = row_lengths("10+20+30x2", METHODS["dpo"]).rows()
    assert [len(rows[1][name]) for name in ("prompt_ids", "chosen_ids", "rejected_ids")] == [10, 20, 30]
    assert row_lengths([5, 7], METHODS["sft"]).rows()["input_ids"] == [[1] * 5, [1] * 7]


def test_longer_rows_keep_the_shares_of_their_parts():
    found = row_lengths("10+20+30x2", METHODS["dpo"]).of(600)
    assert found.lengths == ((100, 200, 300),) * 2
    assert (found.longest, found.sequence, found.batch) == (600, 400, 2)


@pytest.mark.parametrize(
    ("method", "text", "given", "needs"),
    [
        ("sft", "1024x8", {}, {"per_device_train_batch_size": 8}),
        ("sft", "4096x32", {}, {"per_device_train_batch_size": 32, "max_length": 4096}),
        ("sft", "4096x32", {"max_length": 512, "per_device_train_batch_size": 4}, {}),
        ("sft", "4096x2", {"max_length": None}, {"per_device_train_batch_size": 2}),
        ("sft", "4096x2", {"max_seq_length": 8192}, {"per_device_train_batch_size": 2}),
        ("sft", "512x2", {"packing": True}, {"per_device_train_batch_size": 2, "max_length": 512}),
        ("pretrain", "512x2", {}, {"per_device_train_batch_size": 2, "max_length": 512}),
        ("dpo", "512+512+512x2", {}, {"per_device_train_batch_size": 2}),
        ("dpo", "1000+100+200x2", {}, {"per_device_train_batch_size": 2, "max_length": 1200}),
        ("dpo", "2048x2", {}, {"per_device_train_batch_size": 2, "max_length": 2048}),
        ("masked-lm", "1024x2", {}, {"per_device_train_batch_size": 2, "max_length": 1024}),
        ("grpo", "4096x2", {}, {"per_device_train_batch_size": 2}),
        ("online-dpo", "512x2", {}, {"per_device_train_batch_size": 2, "max_length": 576}),
        ("seq2seq", "2000+100x2", {}, {"per_device_train_batch_size": 2, "max_source_length": 2000}),
        ("seq2seq", "100+200x2", {}, {"per_device_train_batch_size": 2, "max_target_length": 200}),
    ],
)
def test_a_run_file_needs_options_that_cut_none_of_them(method, text, given, needs):
    assert options_of_lengths(row_lengths(text, METHODS[method]), given) == needs


@pytest.mark.parametrize(
    ("method", "text", "given", "said"),
    [
        ("sft", "300x2", {"max_length": 100}, "max_length=100 would cut"),
        ("sft", "64x4", {"packing": True}, "packing=True would fill rows up to max_length=1024"),
        ("sft", "64x4", {"packing": True, "max_length": 64}, ""),
        ("dpo", "512x2", {"max_length": 256}, "max_length=256 would cut"),
        ("sft", "64x4", {"max_length": 100}, ""),
        ("sft", "64x4", {"max_length": None}, ""),
    ],
)
def test_what_options_would_make_of_the_rows_is_said(method, text, given, said):
    assert " ".join(notes_of_lengths(row_lengths(text, METHODS[method]), given)).startswith(said)
    assert bool(notes_of_lengths(row_lengths(text, METHODS[method]), given)) == bool(said)
