"""`lowtide check run.yaml`: what a run is told, looked at before it is started, without weights and without torch.

Options, files and places are checked by what checks them when the run starts. Of the rows the first ones are read by
the reader of the method's format, and the first conversation is rendered by the chat template. How options go together
is known to the method's config alone, which imports torch: `--memory` makes it, and traces the run.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowtide.cli.endings import DOES_NOT_FIT, USER_ERROR, UsageError
from lowtide.cli.planning.described_run import add_lengths
from lowtide.cli.training import train
from lowtide.cli.training.first_rows import PAIRS, UNPAIRED, first_rows, format_of
from lowtide.compat.argparse import Subparsers
from lowtide.escaping import shown
from lowtide.methods import METHODS
from lowtide.parsing import parse_json, read_object

if TYPE_CHECKING:
    from lowtide.cli.training.train import TrainingCommand

FIRST_ROWS = 100
YAML = (".yaml", ".yml")
SAYS_METHOD = re.compile(r"^#.*\blowtide ([\w.-]*\w)", re.MULTILINE)
NOT_LOOKED_AT = (
    "Not looked at: weights, whether transformers knows the type of model and its quantization, how options go "
    "together, and memory; --memory does all but the first."
)
OF_A_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


@dataclass(frozen=True)
class Checked:
    """One thing that was looked at."""

    what: str
    said: str
    ok: bool = True


def with_method(words: Sequence[str]) -> list[str]:
    """`check run.yaml ...` as `check METHOD --config run.yaml ...`, of the method that the file's comments name.

    Raises:
        UsageError: there is no such file, or it names no method.
    """
    given = list(words)
    place = next((n for n, word in enumerate(given[1:], start=1) if Path(word).suffix.lower() in YAML), None)
    if place is None or given[place - 1].startswith("--"):
        return given
    file = Path(given.pop(place))
    method = next((word for word in given[1:2] if word in METHODS), None)
    if method is None:
        if not file.is_file():
            raise UsageError(f"there is no file {str(file)!r}")
        named = SAYS_METHOD.findall(file.read_text(encoding="utf-8", errors="replace"))
        method = next((name for name in named if name in METHODS), None)
        if method is None:
            raise UsageError(f"{file} does not say its method: name it, as in lowtide check sft {file}")
        given.insert(1, method)
    return [*given[:2], "--config", str(file), *given[2:]]


def add_parser(subparsers: Subparsers, method: str | None) -> argparse.ArgumentParser:
    """Add the subcommand to `lowtide`'s parser, with that of a method beneath it, which is returned."""
    description = (
        "Check a run before it is started: options, files, places, columns of the rows and the chat template, without "
        "weights. lowtide check run.yaml, or lowtide check METHOD with the options of lowtide METHOD."
    )
    own, group = train.add_command(subparsers, "check", method, description)
    if group is not None:
        memory = "also how options go together, and the peak memory, from a trace without weights"
        group.add_argument("--memory", action="store_true", help=memory)
        group.add_argument("--device", metavar="NAME", help="with --memory: cpu, cuda, or a GPU such as H100-80GB")
        group.add_argument("--budget", metavar="SIZE", help="with --memory: what the run may take")
        add_lengths(group)
        group.add_argument("--json", action="store_true", help="print JSON")
    own.set_defaults(run=run)
    return own


def run(arguments: argparse.Namespace) -> int:
    """Check, and say what was found; the exit status is 2 where something is wrong, and 1 where it does not fit.

    Raises:
        ValueError, OSError: options, files or places are wrong, so that nothing else can be looked at.
    """
    with tempfile.TemporaryDirectory() as folder:  # nothing is written where the run would write
        given = train.read_run(arguments, has_rows=True if arguments.lengths else None, output_dir=folder)
    found = [
        Checked("options", f"{len(given.values) - 1} given, for {given.method}, all known and within their ranges")
    ]
    found.append(_output(given, arguments))
    if given.what.model is not None and (folder := Path(given.what.model).expanduser()).is_dir():
        found.append(_tried("tokenizer", lambda: _tokenizer(folder)))
    rows: list[dict[str, Any]] = []
    if arguments.lengths is None:
        found.append(_tried("rows", lambda: _rows(given, rows)))
    conversation = None
    if rows:
        read: list[Any] = []
        found.append(_tried("columns", lambda: _columns(given, rows, read)))
        conversation = next((each for each in read if each is not None), None)
    if conversation is not None:
        found.append(_tried("template", lambda: _template(given, conversation)))
    estimate = None
    if arguments.memory and all(each.ok for each in found):
        estimate, of_memory = _memory(arguments)
        found.append(of_memory)
    wrong = any(not each.ok for each in found if each.what != "memory")
    status = USER_ERROR if wrong else DOES_NOT_FIT if not all(each.ok for each in found) else 0
    _show(found, estimate, as_json=arguments.json)
    return status


def _show(found: Sequence[Checked], estimate: Any, *, as_json: bool) -> None:
    ok = all(each.ok for each in found)
    if as_json:
        told = {"ok": ok, "checks": [asdict(each) for each in found]}
        print(json.dumps(told | ({} if estimate is None else {"memory": estimate}), indent=2))
        return
    for each in found:
        print(shown(f"{'ok ' if each.ok else 'NO '} {each.what}: {each.said}"))
    if ok and estimate is None:
        print(NOT_LOOKED_AT)


def _tried(what: str, check: Callable[[], str]) -> Checked:
    try:
        return Checked(what, check())
    except (ValueError, OSError) as error:
        return Checked(what, " ".join([str(error), *getattr(error, "__notes__", ())]), ok=False)


def _output(given: TrainingCommand, arguments: argparse.Namespace) -> Checked:
    """Whether the output folder is there, or can be made; nothing is made."""
    from lowtide.cli.options import read_options
    from lowtide.cli.training.run_file import read_run_file

    values = read_run_file(arguments.config, arguments.options) if arguments.config else {}
    values |= read_options(arguments, arguments.options)
    output = Path(train.output_folder(values.get("output_dir"), given.what.model, given.method)).expanduser()
    there = next(each for each in (output, *output.absolute().parents) if each.exists())
    if not there.is_dir():
        return Checked("output folder", f"{there} is a file: name another --output_dir than {output}", ok=False)
    if not os.access(there, os.W_OK):
        return Checked("output folder", f"{there} cannot be written: name another --output_dir than {output}", ok=False)
    return Checked("output folder", f"{output}{'' if output.exists() else ', which is made'}")


def _tokenizer(folder: Path) -> str:
    """Reads the files of a model's tokenizer, without the classes that need torch."""
    from tokenizers import Tokenizer

    there = [folder / name for name in OF_A_TOKENIZER if (folder / name).exists()]
    for file in there:
        try:
            is_object = isinstance(parse_json(file.read_text(encoding="utf-8")), dict)
        except ValueError as error:
            raise ValueError(f"{file} is not JSON ({error})") from error
        if not is_object:
            raise ValueError(f"{file} holds no JSON object")
    if (folder / "tokenizer.json") in there:
        try:
            Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # the type is the library's own, and is no other than `Exception`
            raise ValueError(f"{folder / 'tokenizer.json'} is no tokenizer ({error})") from error
    return f"{', '.join(file.name for file in there)} can be read" if there else "no file of it is beside the model"


def _rows(given: TrainingCommand, first: list[dict[str, Any]]) -> str:
    """Reads the first rows."""
    found = first_rows(given, FIRST_ROWS)
    if found is None:
        return "a name on the hub, where nothing was asked"
    first.extend(found[0])
    return f"the first {len(first):,} can be read{', and those to evaluate on' if found[1] else ''}"


def _columns(given: TrainingCommand, rows: Sequence[dict[str, Any]], read: list[Any]) -> str:
    """Reads the rows in the method's format; puts the conversations of the first row that has one into `read`."""
    from lowtide.data.formats.reading import RowPlace

    columns = list(dict.fromkeys(name for row in rows for name in row))
    source = str(given.what.dataset or "the dataset")
    row_format = format_of(given, columns, _like(given.method))
    if row_format is None:
        return f"{', '.join(columns)}; rows of {given.method} are read when the run starts"
    batch = {name: [row.get(name) for row in rows] for name in columns}
    samples = row_format.read_batch(batch, RowPlace(source, range(len(rows))))
    parts = (part for sample in samples for part in getattr(sample, "sides", (sample,)))
    read.extend(part.messages for part in parts if hasattr(part, "messages"))
    return f"rows are read as {row_format.title}"


def _like(method: str) -> str:
    """The name of a built-in method whose rows are of the same kind as those of a user's own; else its own name."""
    if method in METHODS.rows:
        return method
    rows = METHODS[method].rows
    return next((name for name in ("sft", PAIRS[0], UNPAIRED[0]) if type(rows) is type(METHODS[name].rows)), method)


def _template(given: TrainingCommand, messages: Any) -> str:
    """Renders a conversation by the template that the run would take."""
    from lowtide.compat.templates.jinja import TEMPLATE_FAILURES, limit_templates
    from lowtide.data.encode.named_templates import template_at

    model = str(given.what.model)
    folder = Path(model).expanduser()
    own = given.values.get("chat_template_path")
    template = None if own is None else template_at(own)
    place = folder if own is None else Path(own).expanduser()
    if template is None and not place.is_dir():
        return f"{place} is a name on the hub, whose template was not looked at"
    template = template or _of_tokenizer(place)[0]
    special: Any = _of_tokenizer(folder)[1] if folder.is_dir() else {}
    if not template:
        raise ValueError(f"{place} has no chat template, and rows are conversations: name one by --chat_template_path")
    from transformers.utils.chat_template_utils import render_jinja_template

    limit_templates()
    try:
        ((text,), _) = render_jinja_template([list(messages)], chat_template=template, **special)
    except TEMPLATE_FAILURES as error:
        said = str(error) or type(error).__name__
        raise ValueError(f"the chat template cannot write the first conversation: {said}") from error
    return f"writes {len(text):,} characters of the first conversation"


def _of_tokenizer(folder: Path) -> tuple[str | None, dict[str, str]]:
    """The template that lies in a folder, and the tokens that it may write."""
    config: dict[str, Any] = {}
    if (folder / "tokenizer_config.json").is_file():
        config = read_object(folder / "tokenizer_config.json")
    special = {name: _token(value) for name, value in config.items() if name.endswith("_token") and value}
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8"), special
    there = config.get("chat_template")
    if isinstance(there, list):
        named = [each for each in there if isinstance(each, dict) and each.get("name") == "default"]
        there = named[0].get("template") if named else None
    if there is not None and not isinstance(there, str):
        raise ValueError(f"{folder / 'tokenizer_config.json'}: its chat_template must be text, not {there!r:.80}")
    return there, special


def _token(value: Any) -> str:
    return str(value.get("content", "") if isinstance(value, dict) else value)


def _memory(arguments: argparse.Namespace) -> tuple[dict[str, Any], Checked]:
    """What the run takes, and whether it fits."""
    from lowtide.cli.planning.described_run import described_run, device_of
    from lowtide.planner.tracing_process import tracing_here
    from lowtide.planning import estimate_method

    described = described_run(arguments)
    with tracing_here():
        found = estimate_method(
            described.method,
            described.model,
            budget=arguments.budget or described.values.get("memory_budget"),
            device=device_of(arguments),
            **described.inputs(),
        )
    return found.to_dict(), Checked("memory", found.verdict, ok=bool(found.fits))
