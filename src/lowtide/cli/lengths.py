"""`lowtide lengths DATA --tokenizer T`: how long a dataset's rows are, and which `max_length` to take.

Prints a table, and writes the same as a picture and as a page to look at: `lengths.png` and `lengths.html`.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from lowtide.cli.options import whole_number
from lowtide.compat.argparse import Subparsers
from lowtide.data.sources.places import check_place

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Int
    from rich.console import RenderableType

    from lowtide.data.report.lengths import LengthReport


def add_parser(subparsers: Subparsers) -> None:
    """Add the subcommand to `lowtide`'s parser."""
    parser = subparsers.add_parser(
        "lengths",
        help="how long a dataset's rows are, and which max_length to take",
        description="Show how long a dataset's rows are in tokens, what each max_length would cut, pad and pack, and "
        "which one to take.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "data",
        metavar="DATA",
        nargs="+",
        help="a JSONL, JSON, CSV or Parquet file, a folder, or a hub name; several are taken as one, and each may be "
        "an entry of `datasets` as JSON",
    )
    parser.add_argument("--tokenizer", required=True, metavar="T", help="a tokenizer's or model's folder or hub name")
    parser.add_argument(
        "--max_length",
        type=whole_number(),
        nargs="+",
        metavar="N",
        help="the candidates (default: powers of two and the halves between, from the median to the longest row)",
    )
    parser.add_argument(
        "--batch_size",
        type=whole_number(),
        default=8,
        metavar="N",
        help="the batch size that you have in mind (default: 8)",
    )
    parser.add_argument(
        "--output_dir",
        type=Path,
        default=Path("lengths-report"),
        metavar="DIR",
        help="where to write (default: %(default)s)",
    )
    parser.add_argument("--out", dest="output_dir", type=Path, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    parser.add_argument("--dataset_split", default="train", metavar="SPLIT", help="which split (default: train)")
    parser.add_argument("--dataset_config", metavar="NAME", help="which configuration of a dataset on the hub")
    parser.add_argument("--dataset_text_field", default="text", metavar="COLUMN", help="the column with plain text")
    parser.add_argument("--chat_template_path", metavar="PATH", help="a Jinja file, or a tokenizer that has a template")
    parser.add_argument("--dataset_num_proc", type=whole_number(), metavar="N", help="how many processes tokenize")
    parser.add_argument(
        "--packing_strategy", default="bfd", choices=("bfd", "bfd_split", "wrapped"), help="how bins are packed"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Report on a dataset's lengths; the exit status.

    Raises:
        ValueError: the data, the tokenizer, an option or the output folder can't be used.
        OSError: the data is not there.
    """
    _check_folder(args.output_dir)
    for each in args.data:
        if not each.startswith("{"):
            check_place(each, configured=args.dataset_config is not None)
    from lowtide.data.report.lengths import BATCH_SIZES, LengthReport
    from lowtide.data.report.lengths_page import write_html
    from lowtide.data.report.lengths_plot import write_png
    from lowtide.terminal import Console

    console = Console()
    lengths, left_out = _lengths(args)
    with console.status("Packing each candidate"):
        report = LengthReport.from_lengths(
            lengths, args.max_length, (*BATCH_SIZES, args.batch_size), args.packing_strategy
        )
    title = " + ".join(args.data)
    write_png(report, args.output_dir / "lengths.png", title)
    write_html(report, args.output_dir / "lengths.html", title, args.tokenizer)
    for part in _tables(report, args.batch_size):
        console.print(part)
    if left_out:
        console.print(f"{left_out:,} rows have no token to train on and are left out.", highlight=False)
    console.print(
        f"Written: {args.output_dir / 'lengths.png'} and {args.output_dir / 'lengths.html'}",
        markup=False,
        soft_wrap=True,
    )
    return 0


def _check_folder(folder: Path) -> None:
    """Make the folder now: a run of minutes should not end in finding that it can't be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--output_dir {folder} can't be made: {error.strerror}; name another folder") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"--output_dir {folder} can't be written to; name another folder")


def _lengths(args: argparse.Namespace) -> tuple[Int[np.ndarray, " rows"], int]:
    """The tokens of each row that could be trained on, uncut and in order; and how many others there are."""
    import numpy as np

    from lowtide.data.encode.chat import adopt_chat_template
    from lowtide.data.prepare import PrepareOptions, prepare
    from lowtide.data.sources.load import load_rows
    from lowtide.data.sources.mixtures import load_mixture
    from lowtide.engine.weights.loading import load_tokenizer

    options = PrepareOptions(
        max_length=None,
        dataset_text_field=args.dataset_text_field,
        num_proc=args.dataset_num_proc,
        source=" + ".join(args.data),
    )
    tokenizer = load_tokenizer(args.tokenizer)
    if args.chat_template_path is not None:
        adopt_chat_template(tokenizer, args.chat_template_path)
    which = {"split": args.dataset_split, "name": args.dataset_config}
    if len(args.data) > 1 or args.data[0].startswith("{"):
        entries = [each if each.startswith("{") else {"path": each, **which} for each in args.data]
        rows = load_mixture(entries)["train"]
    else:
        rows = load_rows(args.data[0], **which)
    prepared, ledger = prepare(
        rows, tokenizer, options, batch_size=args.batch_size, packing=False, name=args.dataset_split
    )
    assert ledger is not None, "only streams come without a ledger"
    tables = cast(Iterable[Any], prepared.select_columns(["input_ids"]).with_format("arrow").iter(10_000))
    columns = (chunk for table in tables for chunk in table["input_ids"].chunks)
    lengths = np.concatenate([np.diff(column.offsets) for column in columns])
    return lengths, sum(ledger.rows_dropped.values())


def _tables(report: LengthReport, batch_size: int) -> list[RenderableType]:
    from rich import box
    from rich.table import Table

    from lowtide.data.report.lengths import share

    spread = Table(title="Row lengths in tokens", title_justify="left", box=box.SIMPLE_HEAD)
    marks = {"median": 50, "90%": 90, "95%": 95, "99%": 99, "longest": 100}
    for name in ("rows", "tokens", "mean", *marks):
        spread.add_column(name, justify="right", no_wrap=True)
    mean = round(report.tokens / report.rows)
    values = [report.rows, report.tokens, mean, *(report.percentile(percent) for percent in marks.values())]
    spread.add_row(*(f"{value:,}" for value in values))

    best = report.recommended
    candidates = Table(
        title="What each max_length would do (pad at N: padding in batches of N rows)",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    padding = (f"pad\nat {size}" for size in best.padding)
    for name in ("max_length", "tokens\ncut", "rows\ncut", *padding, "packing\nfill", "\nbins"):
        candidates.add_column(name, justify="right", overflow="fold")
    for candidate in report.candidates:
        candidates.add_row(
            f"{candidate.max_length:,}",
            share(candidate.tokens_cut),
            share(candidate.rows_cut),
            *(share(padding) for padding in candidate.padding.values()),
            f"{candidate.fill:.2%}",
            f"{candidate.bins:,}",
            style="bold green" if candidate is best else None,
        )
    return [
        spread,
        candidates,
        f"[bold]Recommended: max_length={best.max_length}[/bold]  {report.reason}",
        f"Padded to the longest row, batches of {batch_size} would be {share(best.padding[batch_size])} padding; "
        "padding-free ones have none.",
    ]
