"""What editors know of configs and trainers is what the table of methods makes."""

from bench.stubs import STUB, stub


def test_the_stub_is_that_of_the_table():
    assert STUB.read_text() == stub(), "python -m bench.stubs writes it anew"
