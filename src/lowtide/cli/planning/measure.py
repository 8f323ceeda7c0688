"""`lowtide measure sft --config run.yaml`: real steps of a run, and its measured peak beside the predicted one.

With `--share FILE` it adds one line of JSON to a file, with nothing private in it, for the public table of predicted
and measured peaks (docs/predicted-and-measured.md).
"""

from __future__ import annotations

import argparse
import platform
import tempfile
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowtide.cli.endings import UsageError
from lowtide.cli.options import whole_number
from lowtide.cli.planning.profile import WITHOUT
from lowtide.cli.training import train
from lowtide.compat.argparse import Subparsers
from lowtide.process.versions import version_of

if TYPE_CHECKING:
    from lowtide.planner.answers.shared_run import SharedRun
    from lowtide.planner.estimate import Estimate


def add_parser(subparsers: Subparsers, method: str | None) -> argparse.ArgumentParser:
    """Add the subcommand to `lowtide`'s parser, with that of a method beneath it, which is returned."""
    description = (
        "Run a few steps of a method, which takes the options that `lowtide METHOD` takes, and compare the peak with "
        "the predicted one. Nothing is saved."
    )
    own, group = train.add_command(subparsers, "measure", method, description)
    if group is not None:
        steps = whole_number(2, ", since the first step makes the optimizer's states;")
        group.add_argument("--steps", type=steps, default=3, metavar="N", help="steps to run [%(default)s]")
        group.add_argument(
            "--share",
            type=Path,
            metavar="FILE",
            help="add a line to this file that can be made public: shapes, versions, device, both peaks, nothing else",
        )
    own.set_defaults(run=run)
    return own


def run(arguments: argparse.Namespace) -> int:
    """Measure some steps; the exit status.

    Raises:
        ValueError: anything that the user can mend; OSError likewise.
    """
    if arguments.share is not None:
        check_can_be_added_to(arguments.share)
    with tempfile.TemporaryDirectory() as folder:
        given = train.read_run(arguments, **WITHOUT, max_steps=arguments.steps, output_dir=folder)
        trainer = given.trainer(given.config())
        trainer.train()
    if not trainer.is_world_process_zero():
        return 0
    from lowtide.memory.allocators.measure import bytes_text, peak_held_bytes
    from lowtide.trainers.predictions import predicted

    measured = peak_held_bytes(trainer.args.device)
    (found,) = predicted(trainer, [{}])
    if isinstance(found, ValueError):
        raise found
    of = found.peak_bytes if trainer.args.device.type == "cpu" else found.reserved_bytes
    made = _described(given, trainer, found, of, measured)
    said = f"predicted {bytes_text(of)} ({made.error:+.1%})"
    print(f"Measured {bytes_text(measured)}, {said}, in {arguments.steps} steps.")
    if arguments.share is not None:
        with arguments.share.open("a", encoding="utf-8") as file:
            file.write(made.line() + "\n")
        print(f"Added to {arguments.share}; this is all of it:\n{made.line()}")
        print("docs/predicted-and-measured.md says how it becomes part of the public table.")
    return 0


def check_can_be_added_to(file: Path) -> None:
    """Find out before the run whether a line can be added to a file, which is not made.

    Raises:
        UsageError: naming the file and the system's reason.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.exists():
            with file.open("a", encoding="utf-8"):
                pass
        else:
            with tempfile.TemporaryFile(dir=file.parent):
                pass
    except OSError as error:
        reason = error.strerror or str(error)
        raise UsageError(f"--share {str(file)!r} cannot be written: {reason}. Name another file") from error


def _described(given: Any, trainer: Any, found: Estimate, of: int, measured: int) -> SharedRun:
    import torch

    from lowtide.memory.allocators.measure import system_memory_bytes
    from lowtide.planner.answers.shared_run import (
        PACKAGES,
        SharedRun,
        options_of,
        public_device,
        public_version,
        published_name,
        shape_of,
    )
    from lowtide.trainers.profiling import heaviest_micro_batch

    device, adapters = trainer.args.device, given.adapters
    on_gpu = device.type == "cuda"
    shape, rows = shape_of(trainer.model.config), heaviest_micro_batch(trainer)
    stored = next((str(p.dtype) for p in trainer.model.parameters() if not p.requires_grad), "")
    stored = stored or str(next(trainer.model.parameters()).dtype)
    versions = {"python": platform.python_version(), **{name: version_of(name) for name in PACKAGES}}
    versions = {name: public_version(version) for name, version in versions.items()}
    name = torch.cuda.get_device_name(device) if on_gpu else f"cpu {platform.machine()}"
    return SharedRun(
        date=date.today().isoformat(),
        versions={name: version for name, version in versions.items() if version},
        method=given.method,
        model=published_name(shape),
        shape=shape,
        trained={
            "adapters": adapters.use_peft,
            "rank": adapters.lora_r if adapters.use_peft else 0,
            "stored": stored.removeprefix("torch."),
            "bits": 4 if adapters.load_in_4bit else 8 if adapters.load_in_8bit else 0,
        },
        options=options_of(trainer.args, given.method),
        rows={"rows": len(rows), "longest": max(rows, default=0), "tokens": sum(rows)},
        device=public_device(name),
        device_bytes=torch.cuda.get_device_properties(device).total_memory if on_gpu else system_memory_bytes(),
        steps=trainer.state.global_step,
        predicted_bytes=of,
        measured_bytes=measured,
        phase=found.phase,
    )
