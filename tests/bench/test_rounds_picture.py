"""The picture of a conversation's rounds is that of how they are laid."""

from bench.docs.rounds_picture import PICTURE, picture


def test_it_is_that_of_the_code():
    assert PICTURE.read_text(encoding="utf-8") == picture(), "make docs draws it anew"
