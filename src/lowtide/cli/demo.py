"""`lowtide demo`: train a tiny model on generated arithmetic, and show what it learned."""

from __future__ import annotations

import argparse
from pathlib import Path

from lowtide.cli.main import main
from lowtide.cli.options import whole_number
from lowtide.compat.argparse import Subparsers
from lowtide.demo.lessons import LESSONS


def add_parser(subparsers: Subparsers) -> None:
    """Add the subcommand to `lowtide`'s parser."""
    parser = subparsers.add_parser(
        "demo",
        help="train a tiny model on generated arithmetic, and show what it learned",
        description="Make a tiny model and arithmetic, train with `lowtide sft` or another method, and examine it on "
        "held-out questions before and after: how many answers are exact, how many pairs of a right and a wrong "
        "answer it prefers rightly, or how many questions it labels or judges rightly. Nothing is "
        "downloaded; it takes one to three minutes on two cores.",
    )
    parser.add_argument("--method", choices=list(LESSONS), default="sft", help="how to train [%(default)s]")
    parser.add_argument("--output_dir", type=Path, default=Path("demo-output"), metavar="DIR", help="[%(default)s]")
    parser.add_argument("--max_steps", type=whole_number(), metavar="N", help="stop sooner (default: what learns it)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of data and weights [%(default)s]")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the demo; the exit status."""
    from lowtide.demo.run import Sizes, run_demo
    from lowtide.trainers.checkpoints.output_folder import check_writable

    check_writable(arguments.output_dir)
    method = arguments.method
    report = run_demo(
        arguments.output_dir,
        lambda name, file: main([name, "--config", str(file)]),
        method=method,
        sizes=Sizes(steps=arguments.max_steps),
        seed=arguments.seed,
    )
    return 0 if report else 2
