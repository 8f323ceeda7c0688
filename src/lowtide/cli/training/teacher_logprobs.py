"""`lowtide teacher-logprobs gkd ...`: what a teacher says of a dataset's completions, written for runs without it.

It takes the options of the run that reads them, and the teacher beside: `teacher_logprobs` is the folder that is
written, and `loss_top_k` how many of the likeliest tokens of each place.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

from lowtide.cli.endings import UsageError
from lowtide.cli.options import read_options
from lowtide.cli.planning.profile import WITHOUT
from lowtide.cli.training import train
from lowtide.cli.training.run_file import read_run_file
from lowtide.compat.argparse import Subparsers

FOLDER = "teacher_logprobs"
"""The option of methods that read what is written."""
OF_READING: dict[str, Any] = {FOLDER: None, "loss_top_k": 1, "loss_add_tail": True}
"""Options of the run that reads, as they are in the one that writes."""
EVALUATED = {"eval_strategy", "eval_dataset", "eval_split"}
"""What says which rows are evaluated, of which the teacher is asked too."""


def add_parser(subparsers: Subparsers, method: str | None) -> argparse.ArgumentParser:
    """Add the subcommand to `lowtide`'s parser, with that of a method beneath it, which is returned."""
    description = (
        "Write the log-probabilities that a teacher gives the completions of a dataset, --loss_top_k of each place, "
        "into the folder --teacher_logprobs. `lowtide METHOD` with the same options, but for the teacher's, reads them "
        "and loads no teacher."
    )
    if method is not None and FOLDER not in train.options_of_command(method).options:
        raise UsageError(f"lowtide teacher-logprobs writes for methods that take --{FOLDER}, which {method} does not")
    own, _ = train.add_command(subparsers, "teacher-logprobs", method, description)
    own.set_defaults(run=run)
    return own


def run(arguments: argparse.Namespace) -> int:
    """Has the teacher say it; the exit status.

    Raises:
        ValueError: anything that the user can mend; OSError likewise.
    """
    asked: dict[str, Any] = read_run_file(arguments.config, arguments.options) if arguments.config else {}
    asked |= read_options(arguments, arguments.options)
    folder, top = asked.get(FOLDER), asked.get("loss_top_k", 1)
    if folder is None:
        raise UsageError(f"--{FOLDER} is missing: name the folder to write")
    with tempfile.TemporaryDirectory() as made:
        plain = {name: value for name, value in WITHOUT.items() if name not in EVALUATED}
        changes = {**plain, **OF_READING, "lmbda": 0.0, "seq_kd": False, "output_dir": made}
        given = train.read_run(arguments, **changes)
        trainer = given.trainer(given.config())
        count = trainer.write_teacher_logprobs(folder, top_logprobs=top)
    print(
        f"{folder} has what the teacher says of {count:,} texts, its {top} likeliest tokens of each place. A run reads "
        f"it by --teacher_logprobs {folder} --loss_top_k {top} --lmbda 0, without a teacher"
    )
    return 0
