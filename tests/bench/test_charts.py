"""The charts are well formed, have every bar, and can be read in light and dark."""

from xml.etree import ElementTree

import pytest

from bench.docs.charts import DARK, KINDS, LIGHT, Bar, Group, bar_chart, grid_chart
from bench.docs.matrix_charts import PAGES, matrix_chart, picture_of

SVG = "{http://www.w3.org/2000/svg}"


def luminance(colour: str) -> float:
    """As WCAG defines it."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
def test_text_and_bars_have_the_contrast_that_wcag_wants(colours):
    for name in ("ink", "faint"):
        assert contrast(colours[name], colours["paper"]) >= 4.5
    for name in KINDS:
        assert contrast(colours[name], colours["paper"]) >= 3


def test_bars_are_as_long_as_their_values_and_text_is_escaped():
    groups = [Group("a < b", [Bar(1.0, "one"), Bar(2.0, "two", 1)]), Group("c", [Bar(4.0, "four")])]
    root = ElementTree.fromstring(bar_chart("bytes & more", ("x", "y"), groups, note="n"))
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert {"a < b", "bytes & more", "one", "two", "four", "n", "x", "y"} <= {*texts}
    bars = [float(rect.get("width", 0)) for rect in root.iter(f"{SVG}rect") if rect.get("height") == "18"]
    assert bars[1] / bars[0] == pytest.approx(2, rel=0.01)
    assert bars[2] / bars[0] == pytest.approx(4, rel=0.01)


def test_a_grid_has_a_mark_for_every_cell_and_every_name():
    words = {
        ("first", "A"): "exact",
        ("first", "B"): "refused",
        ("a second one", "A"): "exact",
        ("a second one", "B"): "no-op",
    }
    root = ElementTree.fromstring(grid_chart("title", words))
    assert {"title", "first", "a second one", "A", "B", *words.values()} == {
        each.text for each in root.iter(f"{SVG}text")
    }
    exact = [each for each in root.iter(f"{SVG}rect") if each.get("class") == "c"]
    assert len(exact) == 1 + 2, "one is in the legend"
    assert len(list(root.iter(f"{SVG}path"))) == 1 + 1


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_the_pictures_of_matrices_are_those_of_their_tables(path):
    assert picture_of(path).read_text(encoding="utf-8") == matrix_chart(path)
    assert f"(charts/{path.stem}.svg)" in path.read_text(encoding="utf-8")
