"""The command lines of the bench modules that have no options: `--help`, and what a parent hands to its child."""

import argparse
import json
import sys
from typing import Any


def no_options(doc: str | None) -> None:
    """Answers `--help` with a module's docstring, and refuses anything else: what the module writes stays as it is."""
    parser_of(doc).parse_args()


def specification(doc: str | None) -> dict[str, Any]:
    """What the parent asks of a child's module, whose docstring `--help` shows."""
    parser = parser_of(doc)
    parser.add_argument("specification", type=json.loads, help="what to run, as one JSON object")
    return parser.parse_args().specification


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """A parser whose `--help` shows a module's docstring, and names the command as one writes it."""
    spec = sys.modules["__main__"].__spec__
    command = spec and f"python -m {spec.name.removesuffix('.__main__')}"
    return argparse.ArgumentParser(command, description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
