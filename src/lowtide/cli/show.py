"""`lowtide show DATA --model M`: rows of a dataset as the model will see them, what is scored and what is dropped."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowtide.cli.options import add_options, read_options
from lowtide.cli.training.train import options_of_command
from lowtide.compat.argparse import Subparsers
from lowtide.data.sources.places import check_place
from lowtide.engine.weights.places import check_model_place
from lowtide.methods import METHODS
from lowtide.option_values import Option

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.text import Text

    from lowtide.data.report.row_parts import ShownSegment

READ = (
    *("dataset_text_field", "chat_template_path", "eos_token", "max_length", "truncation_mode", "completion_only_loss"),
    *("assistant_only_loss", "turns", "roles_to_train", "train_on_last_turn_only", "thought_end"),
    *("max_prompt_length", "max_completion_length"),
)
"""The options of a training on which a row depends."""
STYLES = {"context": "dim", "scored": "bold green", "dropped": "red strike"}


def add_parser(subparsers: Subparsers) -> None:
    """Add the subcommand to `lowtide`'s parser."""
    parser = subparsers.add_parser(
        "show",
        help="rows of a dataset as the model will see them: what is context, scored and dropped",
        description="Show rows of a dataset as the model will see them: what is context, what is scored, and what a "
        "limit drops. Segments do not see each other, but for what one goes on from.",
        allow_abbrev=False,
    )
    parser.add_argument("data", metavar="DATA", help="a JSONL, JSON, CSV or Parquet file, a folder, or a hub name")
    parser.add_argument(
        "--model", "--tokenizer", required=True, metavar="M", help="a model's or tokenizer's folder or hub name"
    )
    parser.add_argument(
        "--method",
        choices=shown_methods(),
        help="what is trained; by default sft, dpo for rows with the columns chosen and rejected, kto for those with "
        "completion and label",
    )
    parser.add_argument("--row", type=int, default=0, metavar="N", help="the first row to show (default: 0)")
    parser.add_argument("--rows", type=int, default=1, metavar="N", help="how many to show (default: 1)")
    parser.add_argument("--dataset_split", default="train", metavar="SPLIT", help="which split (default: train)")
    parser.add_argument("--dataset_config", metavar="NAME", help="which configuration of a dataset on the hub")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write the rows as a page, coloured")
    options: dict[str, Option] = {}
    for method in shown_methods():
        options = read_by(method) | options
    add_options(parser.add_argument_group("options of the training, with its defaults"), options.values())
    parser.set_defaults(run=run, options=options)


def shown_methods() -> list[str]:
    """The methods whose rows are shown: those of texts and answers, which take turns as they are generated."""
    return [name for name in METHODS if "turns" in options_of_command(name).options]


def read_by(method: str) -> dict[str, Option]:
    """The options of a method on which a row depends."""
    return {name: each for name, each in options_of_command(method).options.items() if name in READ}


def run(args: argparse.Namespace) -> int:
    """Show rows; the exit status.

    Raises:
        ValueError: the data, the tokenizer or an option can't be used, or there is no such row.
        OSError: the data is not there.
    """
    check_place(args.data, configured=args.dataset_config is not None)
    check_model_place(args.model)
    from lowtide.data.encode.chat import adopt_chat_template
    from lowtide.data.report.shown_page import ShownRow, write_html
    from lowtide.data.sources.load import load_rows
    from lowtide.data.sources.titles import entitled
    from lowtide.engine.weights.loading import load_tokenizer
    from lowtide.methods.shared.rows import Preparation
    from lowtide.run.inputs.loading import stop_ids_of
    from lowtide.terminal import Console

    tokenizer = load_tokenizer(args.model)
    rows: Any = load_rows(args.data, split=args.dataset_split, name=args.dataset_config)
    if not 0 <= args.row < len(rows) or args.rows < 1:
        raise ValueError(f"--row {args.row} --rows {args.rows}: {args.data} has the rows 0 to {len(rows) - 1}")
    name = args.method or _method_for(rows.column_names)
    method, given = METHODS[name], _given(name, read_options(args, args.options))
    if getattr(given, "chat_template_path", None) is not None:
        adopt_chat_template(tokenizer, given.chat_template_path)
    stop_ids = tuple(stop_ids_of(_generation_config(args.model), tokenizer))
    how = Preparation(tokenizer, given, len(tokenizer), stop_ids=stop_ids)
    console, shown = Console(), list[ShownRow]()
    for number in range(args.row, min(args.row + args.rows, len(rows))):
        segments = method.rows.shown(entitled(rows.select([number]), args.data), how)
        shown.append(ShownRow(number, segments))
        for place, segment in enumerate(segments, start=1):
            heading = f"row {number}, {segment.title(place, len(segments))}"
            for line in _lines(heading, segment, coloured=console.color_system is not None):
                console.print(line, soft_wrap=True)
    if args.html is not None:
        write_html(shown, args.html, f"Rows of {args.data}")
        console.print(f"Written: {args.html}", markup=False, soft_wrap=True)
    return 0


def _method_for(columns: Sequence[str]) -> str:
    """The method whose rows have such columns."""
    if {"chosen", "rejected"} <= {*columns}:
        return "dpo"
    return "kto" if {"completion", "label"} <= {*columns} else "sft"


def _given(method: str, values: dict[str, Any]) -> Any:
    """The options of a method.

    Raises:
        ValueError: a value can't be used, or the method reads no such option.
    """
    read = read_by(method)
    for name in values:
        if name not in read:
            raise ValueError(f"--{name} is no option of {method}, which reads {', '.join(read)}: leave it out")
    given = METHODS[method].options(**values)
    given.check()
    return given


def _generation_config(model: str) -> Any:
    """Of a model; None where there is none, as beside a tokenizer alone."""
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(model)
    except (OSError, ValueError):
        return None


def _lines(heading: str, segment: ShownSegment, *, coloured: bool) -> Iterator[Text]:
    from rich.text import Text

    parts, counts = segment.parts, segment.counts
    told = [(f"{count:,} {kind}", STYLES[kind]) for kind, count in counts.items()]
    yield Text.assemble(
        (f"{heading}: {sum(counts.values()):,} tokens: ", "bold"), *(each for one in told for each in (one, " "))
    )
    if segment.where:
        yield Text.assemble((segment.where, "italic"), (repr(segment.before), STYLES["context"]))
    if coloured:
        yield Text.assemble(*((part.text, STYLES[part.kind]) for part in parts))
    else:
        for part in parts:
            yield Text(f"{part.kind}: {part.text!r}")
    yield Text()
