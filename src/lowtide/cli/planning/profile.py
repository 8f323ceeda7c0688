"""`lowtide profile sft --config run.yaml --steps 5`: real steps of a run, and where their memory went.

Takes what `lowtide sft` takes, trains a few steps without saving anything, and writes `profile.json`, `profile.png` and
a page to look at, `profile.html`.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowtide.cli.options import whole_number
from lowtide.cli.training import train
from lowtide.compat.argparse import Subparsers
from lowtide.escaping import shown

if TYPE_CHECKING:
    from lowtide.planner.estimate import Estimate
    from lowtide.planner.profiling.profile import Profile

WITHOUT = {
    "save_strategy": "no",
    "eval_strategy": "no",
    "load_best_model_at_end": False,
    "report_to": "none",
    "push_to_hub": False,
    "memory_report": None,
    "eval_dataset": None,
    "eval_split": None,
}
"""What of a run is no part of its steps."""
FOLDER = "profile-report"
"""Where it is written, unless --output_dir says otherwise."""


def add_parser(subparsers: Subparsers, method: str | None) -> argparse.ArgumentParser:
    """Add the subcommand to `lowtide`'s parser, with that of a method beneath it, which is returned."""
    description = (
        "Run a few steps of a method, which takes the options that `lowtide METHOD` takes, and write what "
        "its tensors held over time: profile.json, profile.png and profile.html in --output_dir (profile-report)."
    )
    own, group = train.add_command(subparsers, "profile", method, description)
    if group is not None:
        group.add_argument("--steps", type=whole_number(), default=5, metavar="N", help="steps to run [%(default)s]")
        group.add_argument("--output", dest="output_dir", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    own.set_defaults(run=run)
    return own


def run(arguments: argparse.Namespace) -> int:
    """Profile some steps; the exit status.

    Raises:
        ValueError: anything that the user can mend; OSError likewise.
    """
    folder = Path(getattr(arguments, "output_dir", FOLDER))  # the run's own, in its file, is left alone
    given = train.read_run(arguments, **WITHOUT, max_steps=arguments.steps, output_dir=str(folder))
    import torch

    from lowtide.memory.allocators.measure import bytes_text, peak_held_bytes
    from lowtide.planner.profiling.profile import ProfiledRun, compared, profile_of, totals
    from lowtide.trainers.profiling import record

    trainer = given.trainer(given.config())
    recording = record(trainer)
    if not trainer.is_world_process_zero():
        return 0
    device = trainer.args.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    profile = profile_of(
        recording,
        ProfiledRun(
            method=given.method.upper() if given.method != "reward" else "reward",
            model=str(given.what.model),
            device=name,
            torch=torch.__version__,
            steps=trainer.state.global_step,
            process_bytes=peak_held_bytes(device),
        ),
    )
    profile = _predicted(profile, trainer)
    _write(profile, folder)
    when = f"step {profile.peak_step}" if profile.peak_step else "the rehearsal"
    parts = ", ".join(f"{name} {bytes_text(size)}" for name, size in profile.at_peak.items())
    print(f"Tensors held {bytes_text(profile.peak_bytes)} at most, in {profile.peak_phase} of {when}: {parts}.")
    for name, size in totals(profile).items():
        print(f"{name.capitalize()}: {size}")
    for advice in profile.advice[:1]:
        effect = advice.peak_bytes and profile.predicted_bytes and compared(advice.peak_bytes, profile.predicted_bytes)
        told = f"; predicted peak of tensors {effect}" if effect else ""
        print(f"To change first: {advice.text}, for the {advice.category} ({advice.saves}){told}.")
    print(shown(f"Written: profile.html, profile.png and profile.json in {folder}"))
    return 0


def _write(profile: Profile, folder: Path) -> None:
    from lowtide.planner.profiling.profile_page import write_html
    from lowtide.planner.profiling.profile_plot import write_png

    profile.write_json(folder / "profile.json")
    write_png(profile, folder / "profile.png")
    write_html(profile, folder / "profile.html")


def _predicted(profile: Profile, trainer: Any) -> Profile:
    """A profile with what an estimate says of the run, and of each change that would help."""
    from lowtide.terminal import Console
    from lowtide.trainers.predictions import advised
    from lowtide.trainers.profiling import heaviest_micro_batch

    with Console(stderr=True).status("Estimating what changes would do"):
        advice, now = advised(trainer, profile.at_peak, heaviest_micro_batch(trainer), each=5)
    if isinstance(now, ValueError):
        return dataclasses.replace(profile, not_predicted=str(now).split("\n")[0], advice=advice)
    return dataclasses.replace(
        profile, predicted=_of_tensors(now), predicted_process_bytes=_held(now, profile.run.device), advice=advice
    )


def _of_tensors(estimate: Estimate) -> dict[str, dict[str, int]]:
    """For each phase, the bytes of tensors by category when it holds most."""
    from lowtide.planner.estimate import BESIDE_TENSORS

    return {
        phase: {name: size for name, size in sizes.items() if name not in BESIDE_TENSORS and size}
        for phase, sizes in estimate.phases.items()
    }


def _held(estimate: Estimate, device: str) -> int:
    """The peak of what holds tensors: the process on a CPU, what the allocator reserves on CUDA."""
    return estimate.peak_bytes if device == "cpu" else estimate.reserved_bytes
