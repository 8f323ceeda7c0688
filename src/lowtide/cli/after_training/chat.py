"""`lowtide chat RUN`: talk with a trained model, an adapter, or the last checkpoint of a run that goes on.

A turn is shown as it is written. Keys and values of what was said stay held, so that a further turn reads the new
message alone, unless the chat template writes earlier turns otherwise. On a terminal thoughts are dim, and Ctrl-C ends
the model's turn. Without one, messages are lines of standard input, and answers alone go to standard output.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowtide.cli.after_training.writing_options import (
    WritingOptions,
    add_writing_options,
    read_writing_options,
    told,
)
from lowtide.cli.endings import UsageError
from lowtide.compat.argparse import Subparsers
from lowtide.escaping import shown
from lowtide.parsing import parse_json

if TYPE_CHECKING:
    from lowtide.cli.after_training.loaded_run import LoadedRun
    from lowtide.rollout.generators.generator import Completion
    from lowtide.rollout.spoken import Piece
    from lowtide.terminal import Console

MOST_HELD = 32_768
"""Tokens of a conversation with a model that does not say how many it was made for."""
NEW, EXIT = "/new", "/exit"


def add_parser(subparsers: Subparsers) -> None:
    """Add the subcommand to `lowtide`'s parser."""
    parser = subparsers.add_parser(
        "chat",
        help="talk with a trained model, an adapter or a checkpoint",
        description="Talk with a trained model, an adapter, or the last checkpoint of a run that goes on. "
        f"{NEW} begins anew, {EXIT} or Ctrl-D ends, and Ctrl-C ends the model's turn. Standard input that is no "
        "terminal is read line by line.",
        allow_abbrev=False,
    )
    add_writing_options(parser)
    parser.add_argument("--system", metavar="TEXT", help="the system's message")
    parser.add_argument(
        "--tools",
        nargs="+",
        default=[],
        metavar="TOOL",
        help="what the model may call: paths of functions (my_module.my_tool), which are called, and JSON files with "
        "schemas (as of OpenAI), of which the next line is what a call returns",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Talk; the exit status.

    Raises:
        ValueError: there is no such model, it writes no conversations, or an option can't be used.
    """
    options = read_writing_options(arguments)
    schemas, functions = read_tools(arguments.tools)
    from lowtide.cli.after_training.loaded_run import folder_of
    from lowtide.rollout.talk import Talk
    from lowtide.terminal import Console

    folder = folder_of(arguments.model)
    loaded = options.load(folder)
    talk = Talk(
        loaded.tokenizer,
        system=arguments.system,
        template_kwargs=options.chat_template_kwargs,
        stop_ids=loaded.stop_ids,
        tools=schemas,
    )
    notes = Console(stderr=True)
    notes.print(
        f"{folder}: {told(options.sampling(loaded))}, by {loaded.by}. {NEW} begins anew, {EXIT} ends.",
        style="dim",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    Chat(loaded, talk, options, Console(), notes, functions).run()
    return 0


def read_tools(words: Sequence[str]) -> tuple[list[dict[str, Any]], dict[str, Callable[..., Any]]]:
    """The schemas of all tools, and by name those that are functions.

    Args:
        words: paths of functions, and of JSON files.

    Raises:
        UsageError, ValueError: there is no such file or function, it cannot be described, or two have one name.
    """
    from lowtide.users_functions import find_function

    files = [word for word in words if word.endswith(".json") or Path(word).is_file()]
    schemas = [schema for word in files for schema in read_schemas(Path(word))]
    functions: dict[str, Callable[..., Any]] = {}
    if len(files) < len(words):
        from lowtide.rollout.tools import tool_schemas, tools_by_name

        functions = tools_by_name([find_function(word, "--tools") for word in words if word not in files])
        schemas += tool_schemas(list(functions.values()))
    names = [schema["function"]["name"] for schema in schemas]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UsageError(f"--tools: two are called {twice!r}, and the model knows them by name: leave one out")
    return schemas, functions


def read_schemas(path: Path) -> list[dict[str, Any]]:
    """The schemas of a file: a list of them, or one; each with or without OpenAI's `{"type": "function", ...}` around.

    Raises:
        UsageError: there is no such file.
        ValueError: it holds something else; names the entry.
    """
    if not path.is_file():
        raise UsageError(f"--tools: there is no file {str(path)!r}")
    try:
        held = parse_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"--tools: {path} is not JSON ({error})") from error
    found = []
    for number, each in enumerate(held if isinstance(held, list) else [held]):
        inner = each.get("function", each) if isinstance(each, dict) else None
        if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
            raise ValueError(
                f"--tools: entry {number} of {path} (the first is 0) is no schema of a function with a name"
            )
        found.append({"type": "function", "function": inner})
    if not found:
        raise ValueError(f"--tools: {path} holds no schema")
    return found


def _said_of(call: Mapping[str, Any]) -> str:
    return f"{call['name']} with {json.dumps(call.get('arguments') or {}, ensure_ascii=False)}"


class Chat:
    """A conversation at a terminal.

    Args:
        console: where the model speaks.
        notes: where everything else is said.
        functions: what answers calls of these names; the person answers those of others.
    """

    def __init__(
        self,
        loaded: LoadedRun,
        talk: Any,
        options: WritingOptions,
        console: Console,
        notes: Console,
        functions: Mapping[str, Callable[..., Any]] | None = None,
    ) -> None:
        self.loaded, self.talk, self.options = loaded, talk, options
        self.console, self.notes, self.functions = console, notes, functions or {}
        self.most = loaded.context or MOST_HELD
        self._interrupted = False
        self._turn: list[int] = []
        self._pending = False
        """Whether a message was said that is not answered."""
        self._over = False
        """Whether the person has nothing more to say."""

    def run(self) -> None:
        """Until the person has nothing more to say."""
        while self._pending or self._ask():
            self._pending = False
            self._write()

    # -- the person ----------------------------------------------------------------------------------------------------

    def _ask(self) -> bool:
        """Reads a message into the conversation, or what the tools return that the model called; False where there is
        none."""
        self._call()
        if self._is_answered:
            return True
        while not self._over and (text := self._line(self._before())) not in (None, EXIT):
            if text == NEW:
                self.talk.begin()
            elif self.talk.call is not None:
                self.talk.returned(text)
                self._call()
                if self._is_answered:
                    return True
            elif text:
                self.talk.say(text)
                return True
        self._over = True
        return False

    @property
    def _is_answered(self) -> bool:
        """Whether all calls of the model's last turn have their results."""
        return self.talk.call is None and self.talk.messages[-1:] != [] and self.talk.messages[-1]["role"] == "tool"

    def _call(self) -> None:
        """Calls the functions that the model's last turn calls, up to one that the person answers."""
        from lowtide.rollout.calls import Caller
        from lowtide.rollout.tools import answer_calls

        while self.talk.call is not None and self.talk.call["name"] in self.functions:
            said = _said_of(self.talk.call)
            (answer,) = answer_calls([{"function": self.talk.call}], self.functions, Caller())
            self.talk.returned(answer.content)
            self._note(f"{said} {'fails' if answer.failed else 'returns'}: {answer.content}")

    def _before(self) -> str:
        """What stands before a line of the person; tells of a call whose result it is to be."""
        call = self.talk.call
        if call is None:
            return "> "
        self._note(f"It calls {_said_of(call)}: the next line is what that returns.")
        return f"{call['name']} returns> "

    def _note(self, text: str) -> None:
        self.notes.print(shown(text), style="dim", markup=False, highlight=False, soft_wrap=True)

    def _line(self, before: str) -> str | None:
        try:
            if sys.stdin.isatty():
                with contextlib.suppress(ImportError):
                    import readline  # noqa: F401  (gives `input` its history and its keys)
            return input(before if sys.stdin.isatty() else "").strip()
        except EOFError:
            return None

    # -- the model -----------------------------------------------------------------------------------------------------

    def _write(self) -> None:
        """The model's turns, as long as what was said before them stays held."""
        from lowtide.rollout.generators.generator import Request

        prompt = self.talk.prompt()
        room = self.most - len(prompt)
        if room < 1:
            self._tell_full()
            return
        self._listen()
        sampling = replace(self.options.sampling(self.loaded), max_new_tokens=room)
        request = Request(prompt, seed=self.options.seed + len(self.talk.messages))
        with self._ends_turns():
            self.loaded.generator.generate(self.loaded.model, [request], sampling, self._reply, self._heard)
        if self._turn:  # the context is full
            self._answered()

    def _listen(self) -> None:
        """Begins to hear a turn."""
        from lowtide.rollout.spoken import Speech

        self._turn = []
        self.speech = Speech(self.loaded.tokenizer, self.talk.text[-100:], self.loaded.stop_ids)

    def _heard(self, request: int, number: int, token: int) -> bool:
        """Shows a token; whether the turn ends with it."""
        self._turn.append(token)
        self._show(self.speech.feed(token))
        full = len(self._turn) >= self.options.max_new_tokens
        if full and token not in self.loaded.stop_ids:
            self.notes.print(f"\n(cut at max_new_tokens={self.options.max_new_tokens:,})", style="dim", markup=False)
        return full or self._interrupted

    def _reply(self, request: int, number: int, completion: Completion) -> list[int] | None:
        """What the person says next, as tokens; None where the conversation is over or is read anew."""
        self._answered()
        self._pending = self._ask()
        if not self._pending:
            return None
        rest = self.talk.following()
        if rest is None or self.talk.held + 1 > self.most:
            return None
        self._pending = False
        self._listen()
        return rest

    def _answered(self) -> None:
        self._show(self.speech.rest())
        self.console.say("\n")
        self.talk.answered(self._turn)
        self._turn, self._interrupted = [], False

    def _show(self, pieces: Sequence[Piece]) -> None:
        coloured = self.console.color_system is not None
        for piece in pieces:
            if not (piece.is_mark and coloured):
                self.console.say(piece.text, style="dim" if piece.is_thought else None)

    def _tell_full(self) -> None:
        self.notes.print(
            f"The conversation fills the {self.most:,} tokens that the model was made for: {NEW} begins anew.",
            markup=False,
            soft_wrap=True,
        )

    @contextlib.contextmanager
    def _ends_turns(self) -> Iterator[None]:
        """While it lasts, an interrupt ends the model's turn, and a second one everything."""
        before = signal.getsignal(signal.SIGINT)

        def stop(number: int, frame: Any) -> None:
            if self._interrupted or not self._turn:
                raise KeyboardInterrupt
            self._interrupted = True

        try:
            signal.signal(signal.SIGINT, stop)
        except ValueError:  # not in the main thread
            yield
            return
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)
