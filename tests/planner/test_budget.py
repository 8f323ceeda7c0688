"""Budgets in words."""

from __future__ import annotations

import pytest

from lowtide.memory.allocators.measure import resident_bytes
from lowtide.planner.budget import bytes_of, read_budget
from lowtide.planner.devices import device_named

CPU = device_named("cpu")
GIB, GB = 1 << 30, 10**9


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("24GiB", 24 * GIB),
        ("24 gib", 24 * GIB),
        ("24g", 24 * GIB),
        ("24GB", 24 * GB),
        ("1.5GB", 1_500_000_000),
        ("700MiB", 700 << 20),
        ("2T", 2 << 40),
        ("123456", 123456),
        ("1_000b", 1000),
        ("1,000,000b", 1_000_000),
        (123456, 123456),
    ],
)
def test_an_amount_of_memory_is_read(text, count):
    assert bytes_of(text) == count


@pytest.mark.parametrize("text", ["a lot", "24 lb", "1,5GiB", "1,50,000", "", "-3GiB", "GiB", True])
def test_what_is_no_amount_is_refused_with_what_would_be_one(text):
    with pytest.raises(ValueError, match=r"24GiB.*auto"):
        read_budget(text, CPU)


def test_nothing_is_no_budget():
    with pytest.raises(ValueError, match="above 0"):
        read_budget("0GiB", CPU)


def test_more_than_a_device_has_is_what_it_has_and_that_is_said():
    device = device_named("L4")
    found = read_budget("80GiB", device)
    assert found.bytes == device.memory_bytes
    assert found.notes == ("the budget of 80GiB is more than L4-24GB has: 22.00 GiB is used",)
    assert read_budget("20GiB", device) == (20 * GIB, ())
    assert read_budget(None, device) == (device.memory_bytes, ())


def test_auto_is_what_is_free_and_what_this_process_has():
    assert resident_bytes() < read_budget("auto", CPU).bytes <= CPU.memory_bytes
    named = device_named("H100-80GB")
    assert read_budget("AUTO", named).bytes == named.memory_bytes


@pytest.mark.parametrize("text", ["9" * 400, "9" * 400 + "GiB"])
def test_more_than_a_number_holds_is_refused(text):
    with pytest.raises(ValueError, match="must be above 0 and finite"):
        bytes_of(text)
