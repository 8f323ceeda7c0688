"""`lowtide recipes`: run files for common runs, to copy and to name one's own data in."""

from __future__ import annotations

import argparse
from pathlib import Path

from lowtide.cli.endings import UsageError
from lowtide.cli.new_file import write_new
from lowtide.compat.argparse import Subparsers
from lowtide.escaping import shown
from lowtide.spelling import nearest

FOLDER = Path(__file__).parents[1] / "recipes"
SUMMARY = "list run files for common runs, and copy one to begin with"


def add_parser(subparsers: Subparsers) -> None:
    """Add the subcommand to `lowtide`'s parser."""
    parser = subparsers.add_parser(
        "recipes",
        help=SUMMARY,
        description="Run files for common runs. What each takes of its device is predicted in docs/recipes.md; "
        "`lowtide estimate METHOD --config FILE` predicts it for your own data and device.",
        allow_abbrev=False,
    )
    parser.add_argument("action", choices=("list", "copy"), help="list them, or write one to a file")
    parser.add_argument("name", nargs="?", metavar="NAME", help="the one that is written")
    parser.add_argument("--output", type=Path, metavar="FILE", help="where to write (default: NAME.yaml)")
    parser.set_defaults(run=run)


def recipes() -> dict[str, Path]:
    """The run files that lowtide comes with, by name."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.yaml"))}


def about(recipe: Path) -> tuple[str, str]:
    """What a recipe is for, and the command that runs it: the first comments of its file."""
    comments = [line.removeprefix("# ") for line in recipe.read_text(encoding="utf-8").splitlines() if line[:2] == "# "]
    return comments[0], next(line for line in comments if line.startswith("lowtide "))


def run(arguments: argparse.Namespace) -> int:
    """Print the recipes, or copy one; the exit status.

    Raises:
        UsageError: there is no such recipe, none is named, or the file is there already.
        OSError: it cannot be written.
    """
    known = recipes()
    if arguments.action == "list":
        width = max(map(len, known))
        for name, path in known.items():
            print(f"{name:{width}}  {about(path)[0]}")
        print("\nlowtide recipes copy NAME writes one to NAME.yaml.")
        return 0
    if arguments.name is None:
        raise UsageError(f"which recipe is copied? They are {', '.join(known)}")
    name = arguments.name.removesuffix(".yaml")
    if name not in known:
        raise UsageError(f"there is no recipe {name!r}{nearest(name, known)}; they are {', '.join(known)}")
    output = Path(f"{name}.yaml") if arguments.output is None else arguments.output
    text, command = known[name].read_text(encoding="utf-8"), about(known[name])[1]
    renamed = command.replace(f"{name}.yaml", str(output))
    write_new(output, text.replace(command, renamed))
    print(shown(f"Written: {output}. Name your model and data in it, then: {renamed}"))
    return 0
