"""The bar of a run's bytes against its device."""

import pytest

from lowtide.trainers.reports.memory_bar import FREE, SHADES, memory_bar

GIB = 1 << 30


def cells(text: str) -> list[int]:
    return [text.count(block) for block, _ in SHADES]


def test_parts_are_as_long_as_their_share_of_the_device():
    bar, legend = memory_bar({"weights": 2 * GIB, "gradients": GIB, "optimizer": 0, "rest": GIB}, 16 * GIB).plain.split(
        "\n"
    )
    assert cells(bar) == [6, 3, 0, 3]
    assert bar.count(FREE) == 36
    assert bar.endswith("4.00 GiB of 16.00 GiB")
    assert legend.split("  ")[:3] == ["█ weights 2.00 GiB", "▓ gradients 1.00 GiB", "░ rest 1.00 GiB"]


def test_a_small_part_is_seen_and_the_bar_never_grows():
    bar = memory_bar({"weights": 10 * GIB, "gradients": 1, "optimizer": 1}, 10 * GIB).plain.split("\n")[0]
    assert all(cells(bar)[:3])
    assert sum(cells(bar)) == 48


@pytest.mark.parametrize(("size", "said"), [(9, False), (11, True)])
def test_what_does_not_fit_is_said(size, said):
    text = memory_bar({"weights": size * GIB}, 10 * GIB).plain
    assert ("too much" in text) is said
