"""Boxes and words of the pictures on pages, as SVG."""

from collections.abc import Sequence
from html import escape

STYLE = (
    "text{font-family:sans-serif;font-size:12px;fill:#222}.s{font-size:11px}.h{font-size:14px;font-weight:bold}"
    ".q{fill:#555}.end{text-anchor:end}rect{stroke:#444;stroke-width:1}.idle{fill:#fff;stroke-dasharray:4 3}"
    ".train{stroke-width:2.5}"
)


def document(title: str, drawn: Sequence[str], width: float, height: float) -> str:
    """The text of an SVG of so many pixels, on white."""
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
    back = '<rect width="100%" height="100%" style="fill:#fff;stroke:none"/>'
    return "\n".join([head, f"<title>{title}</title>", f"<style>{STYLE}</style>", back, *drawn, "</svg>", ""])


def box(x: float, y: float, width: float, height: float, fill: str, kind: str = "") -> str:
    """A rectangle; `kind` is a class of `STYLE`, also of `text`."""
    filled = f' fill="{fill}"' if fill else ""
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height}"{filled} class="{kind}" rx="3"/>'


def text(x: float, y: float, words: str, kind: str = "") -> str:
    """Words that begin at a place."""
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" xml:space="preserve">{escape(words)}</text>'
