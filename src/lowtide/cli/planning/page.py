"""`lowtide page`: a page on which models, methods and devices are chosen, and what fits is shown; one file, offline."""

from __future__ import annotations

import argparse
from pathlib import Path

from lowtide.compat.argparse import Subparsers
from lowtide.escaping import shown
from lowtide.own_files import write_output

NAME = Path("lowtide-gpus.html")


def add_parser(subparsers: Subparsers) -> None:
    """Add the subcommand to `lowtide`'s parser."""
    parser = subparsers.add_parser(
        "page",
        help="write a page that shows what fits which GPU",
        description="Write one HTML file on which a model, a method, a device and lengths can be chosen, and what fits "
        "is shown. It is offline: its numbers were traced beforehand, for well-known models.",
    )
    parser.add_argument("--output", type=Path, default=NAME, metavar="FILE", help=f"where to write (default: {NAME})")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the page; the exit status.

    Raises:
        OSError: it cannot be written.
    """
    from lowtide.planner.answers.kept_grid import grid
    from lowtide.planner.answers.page import html_of

    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    write_output(arguments.output, html_of(grid()))
    print(shown(f"Written: {arguments.output}. Open it in a browser."))
    return 0
