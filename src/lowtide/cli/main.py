"""The `lowtide` command: its subcommands are those of `commands`, each imported only when it is asked for.

What a user can mend ends in one message and exit status 2; a traceback is for bugs, or for `--traceback`.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

import lowtide
from lowtide.cli.commands import OF_A_METHOD, PREDICT, TOOLS, commands, trains
from lowtide.cli.endings import INTERRUPTED, USER_ERROR, UsageError, status_of
from lowtide.compat.argparse import options_of
from lowtide.memory.allocators.settings import expand_segments, without_thread_cache
from lowtide.methods import METHODS
from lowtide.process.deferred_imports import defer_imports
from lowtide.process.ways_out import by_command
from lowtide.renamed import replaced
from lowtide.spelling import nearest
from lowtide.trainers.checkpoints.signals import stopping_at_once
from lowtide.users_functions import is_from_user, words_of

OF_OTHER_COMMANDS = {
    "--budget": "gpus takes no --budget, which is each device's memory: lowtide plan and lowtide estimate take one",
    "--devices": "gpus takes no --devices, since it asks each device by itself: lowtide plan takes several",
}
"""What `gpus` says of an option that it has not and a similar command has."""


class Parser(argparse.ArgumentParser):
    """An argument parser that raises instead of exiting, and takes no abbreviations."""

    def __init__(self, **kwargs) -> None:
        super().__init__(**{"allow_abbrev": False, **kwargs})

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; gives its exit status: 0, 1 where a plan or an estimate says that a run does not fit, or
    where doctor finds that training cannot work, 2 for what the user can mend, 3 where another rank stopped the run,
    130 if interrupted, 143 after SIGTERM."""
    words = list(sys.argv[1:] if argv is None else argv)
    if argv is None and words and trains(words[0]):
        without_thread_cache()
    if argv is None:
        import_module("lowtide.terminal").show_safely()
        _without_noise()
    command = next((word for word in words if not word.startswith("-")), "")
    with stopping_at_once(f"running lowtide {command}".strip()):
        return _status_of(words)


def _without_noise() -> None:
    """Libraries do not warn of what their next versions change, which who types a command cannot mend, and draw no bars
    where standard error is no terminal: each state of a bar would be a line there. To be called before they are
    imported."""
    if not sys.warnoptions:
        warnings.simplefilter("ignore", FutureWarning)
        warnings.filterwarnings("default", category=FutureWarning, module="lowtide")  # our own can be mended
    if not sys.stderr.isatty():
        for library in ("HUB", "DATASETS"):  # transformers goes by the hub's
            os.environ.setdefault(f"HF_{library}_DISABLE_PROGRESS_BARS", "1")


def _status_of(words: Sequence[str]) -> int:
    """What `main` gives, of a command line as it stands."""
    traceback = "--traceback" in words
    try:
        given = [_underscored(word) for word in words if word != "--traceback"]
        if METHODS.keys() & set(given[:1]):
            given = import_module("lowtide.cli.training.launch").prepare(given)
        if given[:1] == ["check"]:
            given = import_module("lowtide.cli.check").with_method(given)
        with by_command():
            arguments = parse(given)
            return arguments.run(arguments)
    except SystemExit as exit:  # --help and --version
        return exit.code if isinstance(exit.code, int) else 0
    except KeyboardInterrupt as error:
        _complain(str(error) or "interrupted", "")
        return INTERRUPTED
    except Exception as error:
        status = status_of(error)
        if traceback or status is None:
            raise
        hint = "" if isinstance(error, UsageError) else "--traceback shows where this comes from"
        failures = sys.modules.get("lowtide.ranks.failures")
        if failures is None or not failures.first_says_the_same(error):
            _complain(describe(error), hint)
        return status


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The arguments of a command line; `run` among them is the function that carries it out.

    Raises:
        UsageError: an unknown subcommand or option, with the nearest name.
    """
    command = next((word for word in words if not word.startswith("-")), None)
    there = commands(command)
    if command is not None and command not in there:
        raise UsageError(f"there is no command {command!r}{nearest(command, there)} (see lowtide --help)")
    parser = Parser(prog="lowtide", description="Post-train language models at the lowest peak memory, exactly.")
    parser.add_argument("--version", action="version", version=f"lowtide {lowtide.__version__}")
    parser.add_argument("--traceback", action="store_true", help="show the traceback of an error")
    subparsers = parser.add_subparsers(metavar="COMMAND", title="commands", parser_class=Parser)
    own: list[argparse.ArgumentParser] = []
    for name, summary in there.items():
        if name != command:
            subparsers.add_parser(name, help=summary)
        elif name in METHODS:
            expand_segments()  # before torch is imported
            defer_imports()
            own.append(import_module("lowtide.cli.training.train").add_parser(subparsers, name))
        elif name in OF_A_METHOD:
            expand_segments()
            if name in PREDICT:
                defer_imports()
            own.append(import_module(TOOLS[name][0]).add_parser(subparsers, _method_after(name, words)))
        else:
            import_module(TOOLS[name][0]).add_parser(subparsers)
            own.append(subparsers.choices[name])
    if command is None and not words:
        parser.print_help()
        parser.exit(USER_ERROR)
    _refuse_unknown(words, command, parser, *own)
    return parser.parse_args(words)


def _method_after(command: str, words: Sequence[str]) -> str | None:
    """The method that a command is of; None where help is asked for instead.

    Raises:
        UsageError: there is none, or an unknown one, with the nearest name.
    """
    method = next((word for word in words[words.index(command) + 1 :] if not word.startswith("-")), None)
    if method is None and {"-h", "--help"} & set(words):
        return None
    first = "".join(words[words.index(command) + 1 :][:1]).partition("=")[0]
    if command == "gpus" and first in ("--device", "--json") and not METHODS.keys() & set(words):
        return None  # it says of all built-in models what the device holds
    if method not in METHODS:
        there = f"there is no method {method!r}{nearest(method, METHODS)}" if method else "a method is missing"
        raise UsageError(f"{there}: lowtide {command} METHOD, of {', '.join(METHODS)} (see lowtide {command} --help)")
    return method


def describe(error: BaseException) -> str:
    """An error and its notes in one message, naming the file where the system does."""
    return " ".join([_said(error), *getattr(error, "__notes__", ())])


def _said(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if isinstance(error, MemoryError):
        return f"out of memory{f': {error}' if str(error) else ''}. Leave the process more memory, or load less into it"
    if isinstance(error, RecursionError):
        return "a file, a row or a template that the run reads is nested too deeply to be read"
    if is_from_user(error):
        return f"{type(error).__name__}: {words_of(error)}."
    return str(error) or type(error).__name__


def _underscored(word: str) -> str:
    """`--learning-rate=X` as `--learning_rate=X`: both spellings are in use."""
    name, equals, value = word.partition("=")
    return name.replace("-", "_").replace("__", "--", 1) + equals + value if word.startswith("--") else word


def _refuse_unknown(words: Sequence[str], command: str | None, *parsers: argparse.ArgumentParser) -> None:
    """Name an option that no parser has, before argparse complains of what may be missing because of it, and tell of
    one that is given twice."""
    known = {option: action.dest for parser in parsers for option, action in options_of(parser).items()}
    given: dict[str, str] = {}
    for option in (word.split("=")[0] for word in words if word.startswith("--")):
        before = given.get(known.get(option, ""))
        if before and os.environ.get("LOCAL_RANK", "0") == "0":
            _say("warning: ", "bold yellow", f"{option} comes after {before}, which it replaces: give one of them")
        given[known.get(option, "")] = option
        if option not in known:
            if command == "gpus" and option in OF_OTHER_COMMANDS:
                raise UsageError(OF_OTHER_COMMANDS[option])
            said = ""
            if command in METHODS or command in OF_A_METHOD:
                said = import_module("lowtide.cli.training.option_table").whose(option[2:]) or replaced(option[2:])
            raise UsageError(
                f"there is no option {option}{said or nearest(option, known)} (see {parsers[-1].prog} --help)"
            )


def _complain(message: str, hint: str) -> None:
    _say("error: ", "bold red", message, (f"  ({hint})" if hint else "", "dim"))


def _say(title: str, style: str, *message: Any) -> None:
    """A line on stderr."""
    from rich.text import Text

    from lowtide.terminal import Console

    line = Text.assemble((title, style), *message)
    Console(stderr=True).print(line, soft_wrap=True, highlight=False)


if __name__ == "__main__":
    sys.exit(main())
