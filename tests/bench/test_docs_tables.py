"""Tables in the docs that `make docs` writes."""

from bench.docs import MEMORY_PAGE, TECHNIQUES_END, TECHNIQUES_MARK
from bench.memory_docs import techniques_table


def test_the_table_of_memory_techniques_is_that_of_the_code():
    _, rest = MEMORY_PAGE.read_text(encoding="utf-8").split(TECHNIQUES_MARK)
    table, _ = rest.split(TECHNIQUES_END)
    assert table.strip().splitlines() == techniques_table(), "run `make docs`"
