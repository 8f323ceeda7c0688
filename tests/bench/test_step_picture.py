"""The picture of a step is drawn from the example of its page, as the code plans it."""

from bench.docs.step_picture import PICTURE, RANKS, picture, segments_of
from tests.support.pages.pages import run


def test_it_is_that_of_its_plan():
    assert PICTURE.read_text(encoding="utf-8") == picture(), "make docs draws it anew"


def test_it_is_of_the_example_of_its_page(capsys):
    rows = [part.length for part in run("a-step.md")["batch"].segments]
    assert rows == [each.length for each in segments_of(RANKS[0])]
