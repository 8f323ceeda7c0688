"""The shell of a report's page: one HTML file that asks nothing of the network.

Plots are plain elements placed in percent, so that their labels keep a readable size in a narrow window, and colours
are variables, so that a page follows the reader's light or dark setting.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape


def page(title: str, body: str, *, style: str = "", script: str = "") -> str:
    """A whole page.

    Args:
        title: plain text; escaped here.
        body: HTML, in which whatever comes from data is escaped already.
        style: CSS beyond that of all pages.
        script: JavaScript that runs when the body is there.
    """
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{STYLE}{style}</style>
</head>
<body>
<main>
{body}
</main>{f"{chr(10)}<script>{script}</script>" if script else ""}
</body>
</html>
"""


def facts(values: Mapping[str, str]) -> str:
    """Tiles, each a number with its name."""
    tiles = (f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in values.items())
    return f'<dl class="facts">{"".join(tiles)}</dl>'


STYLE = """
:root { color-scheme: light dark; --page: #fbfaf8; --panel: #ffffff; --ink: #22262b; --dim: #646b73; --line: #dfdcd6;
  --best: #2d7d46; --tint: #eaf4ec; }
@media (prefers-color-scheme: dark) { :root { --page: #16191d; --panel: #1e2227; --ink: #e4e6e8; --dim: #9aa2ab;
  --line: #343a41; --best: #6fcb8b; --tint: #1d2f24; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 60rem; margin: 0 auto; padding: 2rem 1.25rem 4rem; }
h1 { margin: 0; font-size: 1.7rem; } h2 { margin: 2.5rem 0 .75rem; font-size: 1.15rem; }
p { margin: 0; } .about { color: var(--dim); overflow-wrap: anywhere; } .about b { color: var(--ink); }
.advice { margin-top: 1.5rem; padding: 1rem 1.25rem; background: var(--tint); border-left: 4px solid var(--best);
  border-radius: 4px; }
.advice .label { color: var(--dim); } .advice .value { font-size: 2.2rem; font-weight: 700; line-height: 1.2;
  color: var(--best); }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(8.5rem, 1fr)); gap: .75rem; margin: 1rem 0 0; }
.facts div { padding: .6rem .8rem; background: var(--panel); border: 1px solid var(--line); border-radius: 4px; }
dt { color: var(--dim); font-size: .85rem; } dd { margin: 0; font-size: 1.15rem; font-weight: 600; }
dd, td, .side, .down { font-variant-numeric: tabular-nums; }
figure { display: grid; grid-template: 15rem 1.4rem auto / 3.4rem 1fr; margin: 0; padding: 1rem 1.5rem .75rem .5rem;
  background: var(--panel); border: 1px solid var(--line); border-radius: 4px; }
.frame { position: relative; border-left: 1px solid var(--dim); border-bottom: 1px solid var(--dim); }
.frame > i { position: absolute; } .frame svg { position: absolute; width: 100%; height: 100%; overflow: visible; }
.rule { left: 0; right: 0; border-top: 1px solid var(--line); }
.side, .down { position: relative; color: var(--dim); font-size: .8rem; }
.side span { position: absolute; right: .5rem; transform: translateY(50%); line-height: 1; }
.down { grid-column: 2; } .down span { position: absolute; top: .2rem; transform: translateX(-50%); }
figcaption { grid-column: 2; text-align: center; color: var(--dim); font-size: .85rem; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.25rem; margin-bottom: .5rem; font-size: .9rem; }
.legend span::before { content: ""; display: inline-block; width: 1.4rem; margin-right: .4rem; vertical-align: middle;
  border-top: 3px solid; }
.scroll { overflow-x: auto; background: var(--panel); border: 1px solid var(--line); border-radius: 4px; }
table { border-collapse: collapse; width: 100%; font-size: .92rem; }
th, td { padding: .4rem .7rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
th { color: var(--dim); font-weight: 500; } th[colspan] { text-align: center; }
tbody tr:last-child td { border-bottom: 0; }
td:first-child, tr:first-child > th:first-child { position: sticky; left: 0; background: var(--panel);
  text-align: left; }
.note { margin-top: .6rem; color: var(--dim); font-size: .88rem; }
@media (max-width: 40rem) { .down .spare { display: none; } main { padding-top: 1.25rem; } }
"""
