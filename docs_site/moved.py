"""The addresses that pages had before, and where their text is now: `make site` leaves a page there that leads on."""

from pathlib import Path

MOVED = {
    "gpus": "plan.html#on-which-devices",
    "how-much-memory": "predictions.html#what-a-step-holds",
    "measured-runs": "predicted-and-measured.html#your-runs",
    "planning-devices": "plan.html#several-devices",
    "published-peaks": "predicted-and-measured.html#published-by-others",
    "sharding-estimate": "predictions.html#what-sharding-splits",
}
"""By name of the old page."""
PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>Moved</title>
<meta name="robots" content="noindex">
<meta http-equiv="refresh" content="0; url={target}">
<p>This page is now <a href="{target}">here</a>.</p>
</html>
"""


def write_redirects(folder: Path) -> None:
    """Writes a page at each old address into a built site.

    Raises:
        ValueError: an old address is that of a page, or leads nowhere.
    """
    for name, target in MOVED.items():
        page, _, heading = target.partition("#")
        old = folder / f"{name}.html"
        if old.exists():
            raise ValueError(f"docs_site.moved: {name} is a page again; take it out of MOVED")
        if f'id="{heading}"' not in (folder / page).read_text(encoding="utf-8"):
            raise ValueError(f"docs_site.moved: {name} leads to {target}, and there is no such heading")
        old.write_text(PAGE.format(target=target), encoding="utf-8")
