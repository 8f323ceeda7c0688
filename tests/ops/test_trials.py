"""A kernel is tried before it is relied on: what is wrong or fails is told, what says nothing of it is not kept."""

from __future__ import annotations

import logging

import pytest
import torch

from lowtide.ops.trials import is_right

NUMBERS = torch.tensor([1.0, -2.0, 3.0])


def fails() -> list[tuple[torch.Tensor, torch.Tensor]]:
    raise KeyError("sm_999")


@pytest.mark.parametrize(
    ("trial", "told"),
    [
        (lambda: [(NUMBERS, NUMBERS), (NUMBERS + 0.01, NUMBERS)], None),
        (lambda: [(NUMBERS + 0.5, NUMBERS), (NUMBERS, NUMBERS)], "elsewhere, since the kernel for it is wrong by 0.5"),
        (lambda: [(NUMBERS, NUMBERS), (NUMBERS.log(), NUMBERS)], "is wrong by inf"),
        (fails, "fails with KeyError: 'sm_999'"),
    ],
)
def test_what_a_kernel_gives_is_compared(trial, told: str | None, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        assert is_right(trial, 0.1, "it draws elsewhere") is (told is None)
    assert caplog.text == "" if told is None else told in caplog.text


def test_without_memory_nothing_is_known_of_a_kernel():
    def trial():
        raise torch.OutOfMemoryError("none left")

    with pytest.raises(torch.OutOfMemoryError):
        is_right(trial, 0.1, "it draws elsewhere")
