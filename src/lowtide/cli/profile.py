"""`lowtide profile sft --config run.yaml --steps 5`: real steps of a run, and where their memory went.

Takes what `lowtide sft` takes, trains a few steps without saving anything, and writes `profile.json`, `profile.png` and
a page to look at, `profile.html`.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lowtide.cli import train
from lowtide.cli.adapters import AdapterOptions
from lowtide.compat.argparse import Subparsers

if TYPE_CHECKING:
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
UNTRACEABLE = (ValueError, RuntimeError, NotImplementedError)
"""How an estimate says that it cannot trace a run."""


class Prediction(NamedTuple):
    """What an estimate says of a run, taken apart as a recording is."""

    phases: Mapping[str, Mapping[str, int]]
    """For each phase, the bytes of tensors by category when it holds most."""
    process_bytes: int
    """The peak of what holds them: the process on a CPU, what the allocator reserves on CUDA."""

    @property
    def tensor_bytes(self) -> int:
        """The peak of tensors."""
        return max(sum(sizes.values()) for sizes in self.phases.values())


def add_parser(subparsers: Subparsers, method: str | None) -> argparse.ArgumentParser:
    """Add the subcommand to `lowtide`'s parser, with that of a method beneath it, which is returned."""
    description = (
        "Run a few steps of a method, which takes the options that `lowtide METHOD` takes, and write what "
        "its tensors held over time: profile.json, profile.png and profile.html in --output_dir (profile-report)."
    )
    own, group = train.add_command(subparsers, "profile", method, description)
    if group is not None:
        group.add_argument("--steps", type=_at_least_one, default=5, metavar="N", help="steps to run [%(default)s]")
        group.add_argument("--output", dest="output_dir", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    own.set_defaults(run=run)
    return own


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 on, not {text!r}")
    return int(text)


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
    profile = _predicted(profile, given, trainer)
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
    print(f"Written: profile.html, profile.png and profile.json in {folder}")
    return 0


def _write(profile: Profile, folder: Path) -> None:
    from lowtide.planner.profiling.profile_page import write_html
    from lowtide.planner.profiling.profile_plot import write_png

    profile.write_json(folder / "profile.json")
    write_png(profile, folder / "profile.png")
    write_html(profile, folder / "profile.html")


def _predicted(profile: Profile, given: train.TrainingCommand, trainer: Any) -> Profile:
    """A profile with what an estimate says of the run, and of each change that would help."""
    from rich.console import Console

    from lowtide.planner.advice import advise
    from lowtide.trainers.profiling import heaviest_micro_batch

    rows = heaviest_micro_batch(trainer)
    with Predictor(trainer, given) as predictor:
        try:
            predicted = predictor({})
        except UNTRACEABLE as error:
            reason, advice = str(error).split("\n")[0], advise(trainer.site, profile.at_peak, rows)
            return dataclasses.replace(profile, not_predicted=reason, advice=advice)

        def peak(settings: Mapping[str, Any]) -> int | None:
            try:
                return (predictor(settings) if settings else predicted).tensor_bytes
            except UNTRACEABLE:
                return None

        with Console(stderr=True).status("Estimating what changes would do"):
            advice = advise(trainer.site, profile.at_peak, rows, peak, each=5)
    return dataclasses.replace(
        profile, predicted=predicted.phases, predicted_process_bytes=predicted.process_bytes, advice=advice
    )


class Predictor:
    """What estimates say of a run with some options changed.

    They are made in a process of their own, which neither holds the run's model nor takes the run with it if one fails.
    """

    def __init__(self, trainer: Any, given: train.TrainingCommand) -> None:
        self.trainer, self.command = trainer, given
        self.pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Predictor:
        return self

    def __exit__(self, *error: object) -> None:
        if self.pool is not None:
            self.pool.shutdown()

    def __call__(self, settings: Mapping[str, Any]) -> Prediction:
        """An estimate of the run with these settings.

        Raises:
            ValueError: the lengths of the rows are not known beforehand, or the options do not go together.
            RuntimeError: the run cannot be traced.
        """
        from lowtide.engine.forward import causal_model
        from lowtide.planner.advice import with_settings
        from lowtide.trainers.profiling import lengths_of

        lengths = lengths_of(self.trainer.train_dataset)
        if lengths is None:
            raise ValueError("the lengths of the rows are not known beforehand")
        own = {field.name for field in dataclasses.fields(AdapterOptions)}
        adapters = dataclasses.replace(
            self.command.adapters, **{name: settings[name] for name in own & settings.keys()}
        )
        config = with_settings(self.trainer.args, {name: settings[name] for name in settings.keys() - own})
        described = causal_model(self.trainer.model).config
        device = self.trainer.args.device.type
        if self.pool is None:
            self.pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
        try:
            return self.pool.submit(_estimate, config, described, lengths, adapters.peft_config(), device).result()
        except BrokenExecutor:
            self.pool = None
            raise


def _estimate(config: Any, described: Any, lengths: list[Any], peft_config: Any, device: str) -> Prediction:
    from lowtide.planner.estimate import BESIDE_TENSORS
    from lowtide.planning import estimate

    found = estimate(config, described, lengths=lengths, peft_config=peft_config, device=device)
    phases = {
        phase: {name: size for name, size in sizes.items() if name not in BESIDE_TENSORS and size}
        for phase, sizes in found.phases.items()
    }
    return Prediction(phases, found.peak_bytes if device == "cpu" else found.reserved_bytes)
