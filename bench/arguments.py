"""The command lines of the bench modules that have no options: `--help`, and what a parent hands to its child."""

import argparse
import json
from typing import Any


def no_options(doc: str | None) -> None:
    """Answers `--help` with a module's docstring, and refuses anything else: what the module writes stays as it is."""
    _parser(doc).parse_args()


def specification(doc: str | None) -> dict[str, Any]:
    """What the parent asks of a child's module, whose docstring `--help` shows."""
    parser = _parser(doc)
    parser.add_argument("specification", type=json.loads, help="what to run, as one JSON object")
    return parser.parse_args().specification


def _parser(doc: str | None) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
