"""`lowtide show DATA --model M`: rows of a dataset as the model will see them, what is scored and what is dropped."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from lowtide.compat.argparse import Subparsers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.text import Text

    from lowtide.data.report.row_parts import ShownSegment

STYLES = {"context": "dim", "scored": "bold green", "dropped": "red strike"}


def add_parser(subparsers: Subparsers) -> None:
    """Add the subcommand to `lowtide`'s parser."""
    parser = subparsers.add_parser(
        "show",
        help="rows of a dataset as the model will see them: what is context, scored and dropped",
        description="Show rows of a dataset as the model will see them in supervised fine-tuning: what is context, "
        "what is scored, and what a limit drops. Segments do not see each other, but for what one goes on from.",
        allow_abbrev=False,
    )
    parser.add_argument("data", metavar="DATA", help="a JSONL, JSON, CSV or Parquet file, a folder, or a hub name")
    parser.add_argument(
        "--model", "--tokenizer", required=True, metavar="M", help="a model's or tokenizer's folder or hub name"
    )
    parser.add_argument("--row", type=int, default=0, metavar="N", help="the first row to show (default: 0)")
    parser.add_argument("--rows", type=int, default=1, metavar="N", help="how many to show (default: 1)")
    parser.add_argument("--dataset_split", default="train", metavar="SPLIT", help="which split (default: train)")
    parser.add_argument("--dataset_config", metavar="NAME", help="which configuration of a dataset on the hub")
    parser.add_argument("--dataset_text_field", default="text", metavar="COLUMN", help="the column with plain text")
    parser.add_argument("--chat_template_path", metavar="PATH", help="a Jinja file, or a tokenizer that has a template")
    parser.add_argument("--max_length", type=int, metavar="N", help="the most tokens of a segment (default: no limit)")
    parser.add_argument(
        "--truncation_mode", default="keep_start", choices=("keep_start", "keep_end"), help="which end max_length keeps"
    )
    parser.add_argument("--assistant_only_loss", action="store_true", help="score only what the assistant says")
    parser.add_argument(
        "--turns", default="as_generated", choices=("as_generated", "whole"), help="how the assistant's turns are taken"
    )
    parser.add_argument("--roles_to_train", nargs="+", metavar="ROLE", help="the roles of the messages that are scored")
    parser.add_argument("--train_on_last_turn_only", action="store_true", help="score only the last of these messages")
    parser.add_argument("--eos_token", metavar="TOKEN", help="the token that ends a text or a turn")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Show rows; the exit status.

    Raises:
        ValueError: the data, the tokenizer or an option can't be used, or there is no such row.
        OSError: the data is not there.
    """
    from lowtide.data.encode.chat import adopt_chat_template
    from lowtide.data.options import PrepareOptions
    from lowtide.data.report.row_parts import segments_of
    from lowtide.data.sources.load import load_rows
    from lowtide.engine.weights.loading import load_tokenizer
    from lowtide.run.inputs.loading import stop_ids_of
    from lowtide.terminal import Console

    tokenizer = load_tokenizer(args.model)
    if args.chat_template_path is not None:
        adopt_chat_template(tokenizer, args.chat_template_path)
    rows: Any = load_rows(args.data, split=args.dataset_split, name=args.dataset_config)
    if not 0 <= args.row < len(rows) or args.rows < 1:
        raise ValueError(f"--row {args.row} --rows {args.rows}: {args.data} has the rows 0 to {len(rows) - 1}")
    own = ("dataset_text_field", "max_length", "truncation_mode", "assistant_only_loss", "turns", "eos_token")
    options = PrepareOptions(
        **{name: getattr(args, name) for name in (*own, "roles_to_train", "train_on_last_turn_only")},
        source=args.data,
        stop_ids=tuple(stop_ids_of(_generation_config(args.model), tokenizer)),
    )
    console = Console()
    for number in range(args.row, min(args.row + args.rows, len(rows))):
        segments = segments_of(rows.select([number]), tokenizer, options)
        for place, segment in enumerate(segments, start=1):
            heading = f"row {number}, segment {place} of {len(segments)}"
            for line in _lines(heading, segment, coloured=console.color_system is not None):
                console.print(line, soft_wrap=True)
    return 0


def _generation_config(model: str) -> Any:
    """Of a model; None where there is none, as beside a tokenizer alone."""
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(model)
    except (OSError, ValueError):
        return None


def _lines(heading: str, segment: ShownSegment, *, coloured: bool) -> Iterator[Text]:
    from rich.text import Text

    parts = segment.parts
    counts = {kind: sum(part.tokens for part in parts if part.kind == kind) for kind in STYLES}
    told = [(f"{count:,} {kind}", STYLES[kind]) for kind, count in counts.items() if count]
    yield Text.assemble(
        (f"{heading}: {sum(counts.values()):,} tokens: ", "bold"), *(each for one in told for each in (one, " "))
    )
    if segment.prefix >= 0:
        where = f"goes on behind the first {segment.seen:,} tokens of segment {segment.prefix + 1}, which end with "
        yield Text.assemble((where, "italic"), (repr(segment.before), STYLES["context"]))
    if coloured:
        yield Text.assemble(*((part.text, STYLES[part.kind]) for part in parts))
    else:
        for part in parts:
            yield Text(f"{part.kind}: {part.text!r}")
    yield Text()
