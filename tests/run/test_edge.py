"""What a public call does with an exhausted memory that has no type of its own."""

from __future__ import annotations

import pytest

from lowtide.run.edge import out_of_memory_while
from lowtide.step.rank_sync import OutOfMemory

PanicException = type("PanicException", (BaseException,), {})
"""As tokenizers raise it."""


def test_a_tokenizer_without_memory_is_said_as_such():
    said = "out of memory while making the trainer: Onig: Regex search error"
    with pytest.raises(OutOfMemory, match=said), out_of_memory_while("making the trainer"):
        raise PanicException("Onig: Regex search error: fail to memory allocation")


@pytest.mark.parametrize("error", [PanicException("index out of bounds"), KeyboardInterrupt(), ValueError("other")])
def test_others_go_through(error):
    with pytest.raises(type(error)), out_of_memory_while("making the trainer"):
        raise error
