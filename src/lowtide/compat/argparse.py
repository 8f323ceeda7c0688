"""What the project takes from the inside of argparse: which options a parser has, and the types of its parts."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import TypeAlias

Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
"""What `add_subparsers` returns; it has no public name."""
Arguments: TypeAlias = "argparse._ActionsContainer"
"""What has `add_argument`: a parser, or a group."""
ArgumentGroup: TypeAlias = "argparse._ArgumentGroup"
"""What `add_argument_group` returns."""


def options_of(parser: argparse.ArgumentParser) -> Mapping[str, argparse.Action]:
    """A parser's options by their words (`--lr`): to name an unknown one before what is missing is complained of."""
    return parser._option_string_actions


def actions_of(parser: argparse.ArgumentParser) -> Sequence[argparse.Action]:
    """All of a parser's arguments, in order: to set the defaults that a file gives."""
    return parser._actions


def parsers_beneath(action: argparse.Action) -> list[argparse.ArgumentParser]:
    """The parsers of subcommands, where an argument is one; else none."""
    return list(action.choices.values()) if isinstance(action, argparse._SubParsersAction) else []
