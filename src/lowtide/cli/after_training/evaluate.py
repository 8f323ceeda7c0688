"""`lowtide evaluate RUN`: the loss on held-out data with the method's metrics, and the tasks of lm-eval.

Tasks run on the ragged engine: a context is computed once for all its choices.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lowtide.cli.after_training.held_out import losses, method_of
from lowtide.cli.endings import UsageError
from lowtide.cli.options import whole_number
from lowtide.compat.argparse import Subparsers
from lowtide.escaping import shown
from lowtide.spelling import nearest

PICTURES = (".png", ".svg")
DTYPES = ("auto", "float32", "bfloat16", "float16")


def add_parser(subparsers: Subparsers) -> None:
    """Add the subcommand to `lowtide`'s parser."""
    parser = subparsers.add_parser(
        "evaluate",
        help="the loss of a trained model on held-out data, and tasks of lm-eval",
        description="Measure a trained model: its loss on datasets with the metrics of its method (--data), and tasks "
        "of the Language Model Evaluation Harness (--tasks, which needs the extra lowtide[eval]), where a context is "
        "computed once for all its choices.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "model", metavar="RUN", help="a run's output_dir, a checkpoint, an adapter, a model's folder, or a hub name"
    )
    parser.add_argument("--beside", nargs="+", default=[], metavar="M", help="further models to measure, as the base")
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write all results as JSON")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="also draw the metrics: a .png or .svg file")
    parser.add_argument("--json", action="store_true", help="print JSON in the place of tables")
    parser.add_argument("--device", metavar="D", help="such as cpu or cuda:1 (default: a GPU where there is one)")
    data = parser.add_argument_group("held-out data")
    data.add_argument("--data", nargs="+", default=[], metavar="DATA", help="files, folders or hub names")
    data.add_argument(
        "--method", metavar="M", help="whose loss and metrics (default: that of RUN's run.yaml, or sft without one)"
    )
    data.add_argument("--ref_model", metavar="M", help="the reference, of dpo and its kin (default: where RUN began)")
    tasks = parser.add_argument_group("tasks")
    tasks.add_argument("--tasks", nargs="+", default=[], metavar="TASK", help="names of lm-eval's tasks")
    tasks.add_argument("--include_path", type=Path, metavar="DIR", help="a folder with tasks of your own")
    tasks.add_argument("--num_fewshot", type=whole_number(0), metavar="N", help="examples before each question")
    tasks.add_argument("--limit", type=whole_number(), metavar="N", help="only the first questions of each task")
    tasks.add_argument("--apply_chat_template", action="store_true", help="ask questions as messages of a user")
    tasks.add_argument("--dtype", choices=DTYPES, default="auto", help="of the weights (default: as they are stored)")
    tasks.add_argument(
        "--max_length", type=whole_number(), metavar="N", help="tokens of context and choice (default: the model's)"
    )
    tasks.add_argument(
        "--tokens_per_batch", type=whole_number(), default=4096, metavar="N", help="of a forward (default: 4096)"
    )
    tasks.add_argument("--trust_remote_code", action="store_true", help="run Python code that comes with the model")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure, show, and write; the exit status.

    Raises:
        ValueError: a model, a dataset or a task can't be used, or there is nothing to measure.
    """
    if not arguments.data and not arguments.tasks:
        raise UsageError("there is nothing to measure: give datasets by --data, or names of tasks by --tasks")
    if arguments.tasks and find_spec("lm_eval") is None:
        raise UsageError("--tasks requires lm-eval, which is not installed: pip install 'lowtide[eval]'")
    _check_output(arguments.output, arguments.data)
    _check_output(arguments.picture, arguments.data, "--picture")
    if arguments.picture is not None and arguments.picture.suffix.lower() not in PICTURES:
        raise UsageError(f"--picture {arguments.picture}: name a file that ends in {' or '.join(PICTURES)}")
    from lowtide.cli.after_training.loaded_run import device_of, folder_of

    device_of(arguments.device)
    models = [folder_of(each) for each in (arguments.model, *arguments.beside)]
    found: dict[str, Any] = {}
    measured: dict[str, dict[str, dict[str, float]]] = {}
    if arguments.data:
        method, file = method_of(models[0], arguments.method)
        options = {"device": arguments.device, "ref_model": arguments.ref_model}
        found["method"] = method
        found["data"] = {each: losses(each, method, file, arguments.data, **options) for each in models}
        measured = {
            f"{name} ({method})": {each: of[name] for each, of in found["data"].items()}
            for name in found["data"][models[0]]
        }
    if arguments.tasks:
        found["tasks"] = {each: _tasks(each, arguments) for each in models}
        measured |= {
            name: {each: _numbers(of[name]) for each, of in found["tasks"].items()}
            for name in found["tasks"][models[0]]
        }
    for name, numbers in () if arguments.json else measured.items():
        _show(name, numbers)
    text = json.dumps(found, indent=2, default=str)
    if arguments.output is not None:
        from lowtide.trainers.checkpoints.durable import write_text

        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        write_text(arguments.output, text + "\n")
    if arguments.picture is not None:
        from lowtide.cli.after_training.evaluation_plot import write_picture

        arguments.picture.parent.mkdir(parents=True, exist_ok=True)
        write_picture(measured, arguments.picture, f"Evaluation of {models[0]}")
    if arguments.json:
        print(text)
    elif arguments.output or arguments.picture:
        print(shown(f"Written: {', '.join(str(each) for each in (arguments.output, arguments.picture) if each)}"))
    return 0


def _check_output(output: Path | None, data: Sequence[str], option: str = "--output") -> None:
    """Refuses a file to write that is a folder, or one of those that are measured on."""
    if output is None:
        return
    if output.is_dir():
        raise UsageError(f"{option} {output} is a folder: name a file")
    if output.exists() and any(Path(each).exists() and output.samefile(each) for each in data):
        raise UsageError(f"{option} {output} is a file of --data, whose rows would be lost: name another")


def _tasks(model: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """By task, lm-eval's results of a model."""
    from lm_eval import simple_evaluate

    from lowtide.cli.after_training.loaded_run import load_run
    from lowtide.cli.after_training.ragged_lm import RaggedLM
    from lowtide.engine.probe import probe

    manager = _manager(arguments)
    loaded = load_run(
        model, dtype=arguments.dtype, device=arguments.device, trust_remote_code=arguments.trust_remote_code
    )
    lm = RaggedLM(
        loaded.model,
        loaded.tokenizer,
        probe(loaded.model),
        loaded.generator,
        arguments.tokens_per_batch,
        max_length=arguments.max_length,
    )
    results: Any = simple_evaluate(
        lm,
        tasks=arguments.tasks,
        num_fewshot=arguments.num_fewshot,
        limit=arguments.limit,
        apply_chat_template=arguments.apply_chat_template,
        task_manager=manager,
        log_samples=False,
    )
    return dict(results["results"])


def _manager(arguments: argparse.Namespace) -> Any:
    """lm-eval's tasks, and those of the folder that is named; only these where they are all that is asked for.

    Raises:
        UsageError: a task is not there; names the nearest.
    """
    from lm_eval.tasks import TaskManager

    own, known = arguments.include_path, set[str]()
    if own is not None:
        if not own.is_dir():
            raise UsageError(f"--include_path: there is no folder {str(own)!r}")
        manager = TaskManager(include_path=str(own), include_defaults=False)
        known = set(manager.all_tasks)
        if known >= set(arguments.tasks):
            return manager
    manager = TaskManager(include_path=None if own is None else str(own))
    for name in arguments.tasks:
        if name not in manager.all_tasks and not manager.match_tasks([name]):
            raise UsageError(f"there is no task {name!r}{nearest(name, known) or nearest(name, manager.all_tasks)}")
    return manager


def _numbers(results: Mapping[str, Any]) -> dict[str, float]:
    """Of a task; the filter's name is left out where there is none."""
    numbers = {name.removesuffix(",none"): value for name, value in results.items() if isinstance(value, float)}
    return {name: value for name, value in numbers.items() if value == value}


def _show(title: str, found: Mapping[str, Mapping[str, float]]) -> None:
    """A table: a line for each metric, a column for each model."""
    from rich.table import Table
    from rich.text import Text

    from lowtide.terminal import Console

    table = Table(title=Text(title), title_justify="left")
    table.add_column("metric")
    for model in found:
        table.add_column(Text(model), justify="right")
    for name in dict.fromkeys(name for numbers in found.values() for name in numbers):
        table.add_row(Text(name), *(f"{of[name]:.4g}" if name in of else "" for of in found.values()))
    Console().print(table)
