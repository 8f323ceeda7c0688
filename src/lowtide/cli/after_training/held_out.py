"""The loss of a trained model on datasets, with its method's metrics: what the method's trainer finds."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowtide.cli.endings import UsageError
from lowtide.methods import METHODS
from lowtide.spelling import nearest

if TYPE_CHECKING:
    import torch

RUN_FILE = "run.yaml"
BESIDE = ("tokens_per_microbatch", "per_device_eval_batch_size", "bf16", "fp16", "padding_free", "chat_template_path")
"""Options of a run that its evaluation keeps, beside those of the method."""
NOT_METRICS = ("runtime", "samples_per_second", "steps_per_second", "epoch")


def method_of(run: str, given: str | None) -> tuple[str, Path | None]:
    """The method of a run, and its run file; supervised fine-tuning of a folder without one.

    Raises:
        UsageError: there is no such method, or it is measured otherwise.
    """
    places = (Path(run) / RUN_FILE, Path(run).resolve().parent / RUN_FILE)
    file = next((path for path in places if path.is_file()), None) if Path(run).is_dir() else None
    named = re.search(r"`lowtide (\S+) --config`", file.read_text(encoding="utf-8")) if file is not None else None
    method = given or (named[1] if named else "sft")
    if method not in METHODS:
        raise UsageError(f"--method {method}: there is no such method{nearest(method, METHODS)}")
    if METHODS[method].writes is not None or METHODS[method].taught:
        raise UsageError(
            f"--data measures a loss, and {method} learns from rewards or a teacher: measure its model by --method "
            "sft, or write completions by `lowtide generate`"
        )
    return method, file if named and named[1] == method else None


def losses(
    run: str, method: str, file: Path | None, data: Sequence[str], *, device: str | None, ref_model: str | None = None
) -> dict[str, dict[str, float]]:
    """By dataset, what an evaluation finds.

    Args:
        run: the folder of a model or an adapter, or a name on the hub.
        file: the run file whose options of the method are kept.
        data: files, folders or names on the hub.
        ref_model: the reference of a method that compares with one; None for the model that the run began with.

    Raises:
        ValueError: the data or the model can't be used.
    """
    from transformers import PrinterCallback

    from lowtide.cli.training.run_file import read_run_file
    from lowtide.cli.training.train import config_of, options_of_command
    from lowtide.data.sources.columns import with_columns_there
    from lowtide.data.sources.load import load_rows
    from lowtide.option_values import options_of
    from lowtide.trainers.public import trainer_class

    values = {} if file is None else read_run_file(file, options_of_command(method).options)
    names = {*options_of(METHODS[method].options), *BESIDE}
    config: Any = config_of(method)
    kept = {name: value for name, value in values.items() if name in names}
    arguments = _reference(method, values, ref_model)
    columns = values.get("columns") or {}
    rows = {_name(path, data): with_columns_there(load_rows(path), columns) for path in data}
    with tempfile.TemporaryDirectory() as folder:
        args = config(
            output_dir=folder,
            report_to="none",
            disable_tqdm=True,
            save_strategy="no",
            use_cpu=device == "cpu",
            per_device_train_batch_size=1,  # no step is taken
            **kept,
        )
        check_device(device, args.device)
        first: Any = next(iter(rows.values()))
        few = first.select(range(min(2, len(first))))  # a trainer has rows to train on, which are not read here
        trainer = trainer_class(METHODS[method])(
            model=run, args=args, train_dataset=few, eval_dataset=rows, **arguments
        )
        trainer.remove_callback(PrinterCallback)  # what is found is shown once, by the command
        return {name: _metrics(trainer.evaluate(name)) for name in rows}


def check_device(asked: str | None, taken: torch.device) -> None:
    """Refuses a device that is not the one that a trainer takes.

    Raises:
        UsageError: says how to get to another.
    """
    if asked is None:
        return
    from torch import device as device_named

    device = device_named(asked)
    if device.type != taken.type or (device.index or 0) != (taken.index or 0):
        ways = (
            f": give --device {device.type} with CUDA_VISIBLE_DEVICES={device.index}" if device.type == "cuda" else ""
        )
        raise UsageError(f"--data measures on {taken}, and not on --device {asked}{ways}")


def _reference(method: str, values: Mapping[str, Any], given: str | None) -> dict[str, Any]:
    """Whom the policy is compared with: trained, it must not be compared with itself."""
    if not METHODS[method].compares:
        if given is not None:
            raise UsageError(f"--ref_model has no effect with {method}, which compares with none: drop it")
        return {}
    reference = given or values.get("ref_model") or values.get("model")
    if reference is None:
        raise UsageError(
            f"{method} compares a policy with a reference, and there is no {RUN_FILE} that names it: give the "
            "model that training began with by --ref_model"
        )
    return {"ref_model": reference}


def _name(path: str, data: Sequence[str]) -> str:
    """What a dataset is called: its file's name, where no other has it."""
    short = Path(path).stem
    return short if sum(Path(each).stem == short for each in data) == 1 else path


def _metrics(found: Mapping[str, float]) -> dict[str, float]:
    named = {name.removeprefix("eval_"): value for name, value in found.items()}
    return {name: value for name, value in named.items() if name not in NOT_METRICS and isinstance(value, float | int)}
