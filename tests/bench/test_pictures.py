"""The pictures of a step and of the rounds of a conversation are those of what the code lays and plans."""

import pytest

from bench.docs import rounds_picture, step_picture
from bench.docs.step_picture import RANKS, segments_of
from tests.support.pages.pages import run


@pytest.mark.parametrize("of", [rounds_picture, step_picture], ids=["rounds", "step"])
def test_it_is_that_of_the_code(of):
    assert of.PICTURE.read_text(encoding="utf-8") == of.picture(), "make docs draws it anew"


def test_a_step_is_of_the_example_of_its_page(capsys):
    rows = [part.length for part in run("a-step.md")["batch"].segments]
    assert rows == [each.length for each in segments_of(RANKS[0])]
