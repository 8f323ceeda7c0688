"""`lowtide sft --model M --dataset D`, and the other methods: from options to a saved model.

Options are the fields of the method's config class, and few more: model, data and adapters. They come from the
command line and, beneath it, from a run file (`--config`). All of them are written to the output folder as a run file.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import inspect
import os
import shlex
import sys
from collections.abc import Collection, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, TypeVar

from lowtide.cli.commands import commands
from lowtide.cli.endings import UsageError
from lowtide.cli.options import add_options, read_options
from lowtide.cli.training.adapters import AdapterOptions
from lowtide.cli.training.first_rows import check_columns
from lowtide.cli.training.launch import CHOSEN, OF_PROCESSES
from lowtide.cli.training.option_table import CommandOptions, written_options
from lowtide.cli.training.run_file import command_of, read_run_file, write_run_file
from lowtide.compat.argparse import ArgumentGroup, Subparsers
from lowtide.compat.hub import go_offline_if_unreachable
from lowtide.data.sources.places import check_place
from lowtide.engine.weights.places import check_model_place
from lowtide.methods import METHODS
from lowtide.methods.shared.options import ReferenceOptions
from lowtide.option import Group, option
from lowtide.option_values import Option, options_of
from lowtide.process.deferred_imports import without_collection
from lowtide.trainers.checkpoints.output_folder import check_is_checkpoint, check_output, checkpoints_of
from lowtide.users_functions import check_no_file

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from transformers import TrainingArguments

    from lowtide.run.options.training import TrainingConfig

T = TypeVar("T")
Loaded: TypeAlias = "tuple[Dataset | IterableDataset, Dataset | IterableDataset | None]"
"""The rows to train on, and those to evaluate on."""
RUN_FILE = "run.yaml"
OF_MODELS = (
    *("model", "ref_model", "value_model", "teacher_model_name_or_path", "generator_model_name_or_path"),
    *("reward_model_path", "sft_model_path"),
)
"""The options that name a model."""
OF_FUNCTIONS = ("reward_funcs", "tools", "environment_factory", "rollout_func", "judge")
"""The options that name functions by their paths."""
ROWS = {
    "lowtide gpus": "",
    "lowtide check": "",
    **dict.fromkeys(("lowtide plan", "lowtide estimate"), "(--dataset D | --lengths L) "),
}
"""How the usage of a command names its rows, where it is not by `--dataset D`."""


@dataclasses.dataclass(kw_only=True)
class RunOptions:
    """What is trained, and on what. The aliases are TRL's names."""

    group: ClassVar[Group] = Group.DATA

    model: str | None = option(
        None, "The model to train: a folder, or a name on the hub.", aliases=["model_name_or_path"]
    )
    dataset: str | None = option(
        None, "The rows: a JSONL, JSON, CSV or Parquet file, a folder, or a hub name.", aliases=["dataset_name"]
    )
    datasets: list[str | dict] | None = option(
        None,
        "Several datasets as one: paths, or mappings (JSON on the command line) of path, name, data_dir, data_files, "
        "split, columns and fraction, the share of the mixture.",
    )
    columns: dict | None = option(
        None,
        "Columns of the rows by the names that they are to have: prompt=Question,completion=Answer, or JSON; a mapping "
        "in a run file.",
    )
    test_split_size: float | None = option(None, "Share (below 1) or number of the rows that are kept for evaluation.")
    output_dir: str | None = option(
        None, "Folder for the model, its checkpoints and run.yaml. None: named after the model."
    )
    dataset_config: str | None = option(None, "Configuration of a dataset on the hub.")
    dataset_split: str = option("train", "Split to train on.", aliases=["dataset_train_split"])
    dataset_streaming: bool = option(
        False, "Read rows while training, in place of preparing them first.", aliases=["streaming"]
    )
    model_revision: str | None = option(None, "Branch, tag or commit of a model on the hub.")
    model_init_kwargs: dict | None = option(None, "Further arguments of `from_pretrained`.")
    dtype: str | None = option(
        None,
        "What weights are stored in; float32 if left out.",
        group=Group.MEMORY,
        choices=["float32", "bfloat16", "float16", "auto"],
    )
    attn_implementation: str | None = option(
        None,
        "Attention of the padded path (padding_free=false); without padding the report names what is used.",
        group=Group.MEMORY,
    )
    eval_dataset: str | None = option(None, "Rows to evaluate on, like `dataset`.", group=Group.SAVING)
    eval_split: str | None = option(
        None,
        "Split to evaluate on. None: 'train' of `eval_dataset`, or without one 'test' of `dataset`.",
        group=Group.SAVING,
        aliases=["dataset_test_split"],
    )
    resume_from_checkpoint: str | None = option(
        None,
        "A checkpoint's folder, or 'latest': the last whole one of `output_dir`, if there is one.",
        group=Group.SAVING,
    )

    def check(self, *, begins_at_random: bool = False, has_rows: bool | None = None) -> None:
        """Refuses what cannot work.

        Args:
            begins_at_random: whether other options say which model there is.
            has_rows: whether rows are known without a dataset; None where they cannot be.

        Raises:
            UsageError: an option is missing, or has no effect.
        """
        if self.output_dir is not None and not self.output_dir.strip():
            raise UsageError("--output_dir is empty: name a folder, or leave it out")
        rows = self.dataset or self.datasets or has_rows
        for name, given in (("model", self.model or begins_at_random), ("dataset", rows)):
            if not given:
                without = "; or, without rows, their --lengths" if name == "dataset" and has_rows is not None else ""
                raise UsageError(f"--{name} is missing: give it, or `{name}:` in the file of --config{without}")
        if self.test_split_size is not None and (self.eval_dataset or self.eval_split):
            named = "eval_dataset" if self.eval_dataset else "eval_split"
            raise UsageError(
                f"test_split_size={self.test_split_size} takes rows for evaluation out of those to train on, and "
                f"{named} names others: give one of the two"
            )

    def check_places(self) -> None:
        """Refuses paths where no rows are.

        Raises:
            FileNotFoundError, ValueError: naming the path.
        """
        for entry in self.datasets or [{"path": self.dataset, "name": self.dataset_config}]:
            given = {"path": entry} if isinstance(entry, str) else entry
            path = str(given.get("path") or "")
            if path and not path.startswith("{") and not {"data_dir", "data_files"} & given.keys():
                check_place(path, configured=given.get("name") is not None)
        if self.eval_dataset:
            check_place(self.eval_dataset)

    def read(self) -> dict[str, Any]:
        """What the run reads, by option."""
        paths = [each.get("path") if isinstance(each, dict) else each for each in self.datasets or ()]
        return {
            **{name: getattr(self, name) for name in ("model", "dataset", "eval_dataset")},
            **{f"datasets ({path})": path for path in paths},
        }

    def model_init(self) -> dict[str, Any]:
        """Arguments of `from_pretrained`, as far as they are given."""
        init = {"revision": self.model_revision, "dtype": self.dtype, "attn_implementation": self.attn_implementation}
        return {name: value for name, value in init.items() if value is not None} | (self.model_init_kwargs or {})

    def load(self, *, evaluates: bool, texts: Collection[str]) -> Loaded:
        """The rows to train on, and those to evaluate on if there are any, with the names of columns asked for.

        Args:
            texts: columns of CSV files that are read as text, by these names.
        """
        from lowtide.data.formats.text_columns import in_the_file
        from lowtide.data.sources.columns import with_columns, with_columns_there

        load = self._load_mixture if self.datasets else self._load
        rows, evaluated = load(in_the_file(texts, self.columns), evaluates=evaluates)
        if not self.columns:
            return rows, evaluated
        if evaluated is not None:
            evaluated = with_columns_there(evaluated, self.columns)
        return with_columns(rows, self.columns), evaluated

    def _load(self, texts: Collection[str], *, evaluates: bool) -> Loaded:
        """The same from `dataset`, with the names that columns have in it."""
        from lowtide.data.sources.load import load_rows
        from lowtide.data.sources.mixtures import split_off

        assert self.dataset is not None
        load = functools.partial(load_rows, texts=texts)
        rows = load(self.dataset, split=self.dataset_split, name=self.dataset_config, streaming=self.dataset_streaming)
        if self.test_split_size is not None:
            splits = split_off(rows, self.test_split_size)
            return splits["train"], splits["test"]
        if self.eval_dataset is not None:
            return rows, load(self.eval_dataset, split=self.eval_split or "train")
        if evaluates or self.eval_split:
            return rows, load(self.dataset, split=self.eval_split or "test", name=self.dataset_config)
        return rows, None

    def _load_mixture(self, texts: Collection[str], *, evaluates: bool) -> Loaded:
        """The same from `datasets`."""
        from lowtide.data.sources.load import load_rows
        from lowtide.data.sources.mixtures import load_mixture

        if self.dataset:
            print(f"--dataset {self.dataset} is not read, since `datasets` is given.", file=sys.stderr)
        splits = load_mixture(
            self.datasets or [], streaming=self.dataset_streaming, test_split_size=self.test_split_size, texts=texts
        )
        if self.eval_dataset is not None:
            return splits["train"], load_rows(self.eval_dataset, split=self.eval_split or "train", texts=texts)
        if evaluates and "test" not in splits:
            raise UsageError("there are no rows to evaluate on: set test_split_size, or name them by --eval_dataset")
        return splits["train"], splits.get("test")


@dataclasses.dataclass(kw_only=True)
class ReferenceModel:
    """Which reference a policy is compared with."""

    group: ClassVar[Group] = Group.REFERENCE

    ref_model: str | None = option(
        None, "The reference: a folder, or a name on the hub. None: the model as it is before training."
    )


@dataclasses.dataclass(kw_only=True)
class Judge:
    """What compares the two completions of a prompt."""

    judge: str | None = option(
        None, "What says which of two completions is better, by its path (my_module.MyJudge), in place of rewards."
    )


@dataclasses.dataclass(kw_only=True)
class ValueModel:
    """Where the policy's value head starts."""

    value_model: str | None = option(
        None, "A classifier with one label whose head the value head starts from: a folder, or a name on the hub."
    )


OF_ARGUMENTS: dict[str, type] = {"ref_model": ReferenceModel, "judge": Judge, "value_model": ValueModel}
"""By an argument of a method's trainer: the options that a command has for it."""


@dataclasses.dataclass(kw_only=True)
class Rewarding:
    """What rewards the completions that a policy writes."""

    reward_funcs: list[str] | None = option(
        None,
        "What rewards completions: paths of functions (my_module.my_reward), built-in ones (exact_answer, format, "
        "length, ...), or reward models (a folder, or a name on the hub).",
        aliases=["reward_model_name_or_path"],
    )


@dataclasses.dataclass(kw_only=True)
class Tools:
    """What the policy can call while it writes, and what else may write."""

    tools: list[str] | None = option(None, "Functions that the policy can call, by their paths (my_module.my_tool).")
    environment_factory: str | None = option(None, "What makes the environment of a completion, by its path.")
    rollout_func: str | None = option(None, "What writes completions in the generator's place, by its path.")


def trainer_arguments(method: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """What a method's trainer takes beside model, options and data, of the options that are given."""
    kinds = trainer_options(config_of(method))
    given = {name: values[name] for kind in kinds for name in option_names(kind) & values.keys()}
    if {"tools", "environment_factory", "rollout_func", "judge"} & given.keys():
        from lowtide.users_functions import find_function

        for name in ("environment_factory", "rollout_func", "judge"):
            if given.get(name) is not None:
                given[name] = find_function(given[name], name)
        if isinstance(given.get("judge"), type):
            given["judge"] = given["judge"]()
        if given.get("tools"):
            given["tools"] = [find_function(path, "tools") for path in given["tools"]]
    return given


def trainer_options(config: Any) -> list[type]:
    """The options of a method's command that are arguments of its trainer."""
    from lowtide.methods.online.rollouts import RewardedOptions, RolloutOptions

    arguments = {"ref_model"} if issubclass(config, ReferenceOptions) else {*config.method.arguments}
    own = [kind for name, kind in OF_ARGUMENTS.items() if name in arguments]
    online = {RewardedOptions: Rewarding, RolloutOptions: Tools}
    return [*own, *(options for kind, options in online.items() if issubclass(config, kind))]


def add_parser(subparsers: Subparsers, method: str, *, command: str = "lowtide") -> argparse.ArgumentParser:
    """Add a method's subcommand to a parser: that of `command`."""
    taken = options_of_command(method)
    summary = METHODS.row(method).summary
    parser = subparsers.add_parser(
        method,
        help=summary,
        usage=f"{command} {method} --model M {ROWS.get(command, '--dataset D ')}[--config {RUN_FILE}] [--OPTION ...]",
        description=f"{summary[:1].upper()}{summary[1:]}. "
        "An option of a run file is one of the command line, which wins.",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=40, width=110),
    )
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="a run file: YAML with options, such as an earlier run's"
    )
    if command == "lowtide":  # these are read before the parser is made
        processes = parser.add_argument_group("processes")
        for name, (metavar, help) in OF_PROCESSES.items():
            processes.add_argument(f"--{name}", metavar=metavar, help=help)
    for title, listed in taken.listed.items():
        add_options(parser.add_argument_group(title), [taken.options[name] for name in listed])
    add_options(parser, [taken.options[name] for name in (*taken.others, *taken.refused)], shown=False)
    parser.epilog = "Also accepted, as transformers.TrainingArguments documents them: " + ", ".join(taken.others)
    parser.set_defaults(run=run, method=method, options=taken.options)
    return parser


def declared_options(method: str) -> CommandOptions:
    """The options that a method's command takes, as the classes declare them."""
    config: Any = config_of(method)
    sources = (config, RunOptions, *trainer_options(config), AdapterOptions)
    options = {name: each for source in sources for name, each in options_of(source).items()}
    without_help = {*config.refused, *config.without_effect}
    listed = _groups(method, config, {name: each for name, each in options.items() if name not in without_help})
    own = tuple(field.name for field in dataclasses.fields(METHODS[method].options))
    return CommandOptions(options, listed, tuple(name for name in options if name in without_help), own)


def _groups(method: str, config: Any, options: Mapping[str, Option]) -> dict[str, tuple[str, ...]]:
    """The options that `--help` lists, by the titles of its groups. The method's own are the second group, those of its
    own class first."""
    own = [name for kind in trainer_options(config) for name in options_of(kind)]
    own += [name for kind in METHODS[method].options.__mro__ for name in inspect.get_annotations(kind)]
    order = dict.fromkeys([*options_of(RunOptions), *config.inherited_groups, *own, *options])
    listed = [options[name] for name in order if name in options]
    first, *rest = [(group.value, [each for each in listed if each.group is group]) for group in Group]
    of_method = METHODS[method].title, [each for each in listed if each.group is None and each.name in own]
    return {title: tuple(each.name for each in listed) for title, listed in (first, of_method, *rest) if listed}


@dataclasses.dataclass(frozen=True)
class TrainingCommand:
    """A run as a command line and its file ask for it."""

    method: str
    values: Mapping[str, Any]
    """The options that are given, but for `resume_from_checkpoint`."""
    what: RunOptions
    adapters: AdapterOptions

    @property
    def output(self) -> Path:
        return Path(self.values["output_dir"])

    @property
    def writes(self) -> bool:
        """Whether the policy writes the completions."""
        return "rollout_func" in options_of_command(self.method).options

    def config(self, **changes: Any) -> TrainingArguments:
        """The method's config, with some options changed."""
        config_class: Any = config_of(self.method)
        chosen = {
            name: value for name, value in {**self.values, **changes}.items() if name in option_names(config_class)
        }
        return config_class(**chosen | {"model_init_kwargs": self.what.model_init()})

    def load(self, *, evaluates: bool, what: RunOptions | None = None) -> Loaded:
        """The rows to train on, and those to evaluate on if there are any.

        Args:
            what: these, in place of the run's own.
        """
        from lowtide.data.formats.text_columns import text_columns

        return (what or self.what).load(evaluates=evaluates, texts=text_columns(self.values, writes=self.writes))

    def trainer(self, config: TrainingArguments) -> Any:
        """The method's trainer, its model and data loaded."""
        from lowtide.run.edge import out_of_memory_while
        from lowtide.trainers.public import trainer_class

        with out_of_memory_while("preparing the dataset"):
            train_rows, eval_rows = self.load(evaluates=config.eval_strategy != "no")
        return trainer_class(METHODS[self.method])(
            model=self.what.model,
            args=config,
            train_dataset=train_rows,
            eval_dataset=eval_rows,
            peft_config=self.adapters.peft_config(),
            quantization_config=self.adapters.quantization_config(bf16=bool(config.bf16), fp16=bool(config.fp16)),
            **trainer_arguments(self.method, self.values),
        )


def add_command(
    subparsers: Subparsers, command: str, method: str | None, description: str, *, needs_method: bool = True
) -> tuple[argparse.ArgumentParser, ArgumentGroup | None]:
    """Add a command that a method follows, whose options it takes; without `needs_method` one may follow.

    Returns:
        the method's parser beneath it, with a group for the command's own options; without a method, the command's.
    """
    parser = subparsers.add_parser(command, help=commands()[command], description=description)
    methods = parser.add_subparsers(metavar="METHOD", title="methods", required=needs_method)
    if method is None:
        for name, row in METHODS.rows.items():
            methods.add_parser(name, help=row.summary)
        return parser, None
    own = add_parser(methods, method, command=f"lowtide {command}")
    return own, own.add_argument_group(command)


def output_folder(asked: str | None, model: str | None, method: str) -> str:
    """Where a run writes: the folder that is asked for, or one named after its model and method."""
    return os.path.expanduser(asked) if asked else f"{Path(model or 'model').name}-{method}"


def read_run(arguments: argparse.Namespace, *, has_rows: bool | None = None, **changes: Any) -> TrainingCommand:
    """The run that is asked for, with some options changed; its output folder is there.

    Args:
        has_rows: whether its rows are known without a dataset; None where they cannot be.

    Raises:
        UsageError: an option is missing, contradicts another, or the output folder cannot be written.
    """
    options: Mapping[str, Option] = arguments.options
    values = read_run_file(arguments.config, options) if arguments.config else {}
    values |= read_options(arguments, options) | changes
    what, adapters = _only(RunOptions, values), _only(AdapterOptions, values)
    what.check(begins_at_random=bool(values.get("config_name") or values.get("model_type")), has_rows=has_rows)
    adapters.check()
    values["output_dir"] = output_folder(what.output_dir, what.model, arguments.method)
    values.pop("resume_from_checkpoint", None)
    models = {name: value for name, value in values.items() if "model" in name}
    check_output(Path(values["output_dir"]), what.read() | models)
    if not has_rows:
        what.check_places()
    for name in OF_MODELS:
        if isinstance(values.get(name), str):
            check_model_place(values[name], name)
    for name in OF_FUNCTIONS:
        for path in [values[name]] if isinstance(values.get(name), str) else values.get(name) or ():
            check_no_file(path, name)
    return TrainingCommand(arguments.method, values, what, adapters)


def run(arguments: argparse.Namespace) -> int:
    """Train, save, and say where; the exit status.

    Raises:
        ValueError: anything that the user can mend; OSError likewise.
    """
    given = read_run(arguments)
    checkpoint = _checkpoint(given.what.resume_from_checkpoint, given.output)
    check_columns(given)
    go_offline_if_unreachable([*(given.values.get(name) for name in OF_MODELS), given.what.dataset])
    from lowtide.trainers.checkpoints.lock import only_run_in

    config = given.config()
    with only_run_in(given.output) if config.process_index == 0 else contextlib.nullcontext():
        return _trained(given, config, arguments.options, checkpoint)


def _trained(given: TrainingCommand, config: Any, options: Mapping[str, Option], checkpoint: str | bool | None) -> int:
    from transformers.utils.logging import disable_progress_bar

    from lowtide.ranks.failures import leave
    from lowtide.trainers.callbacks.last_evaluation import LastEvaluation, last_evaluation

    if config.process_index > 0:  # the first rank shows what all of them do
        disable_progress_bar()
    output, run_file = given.output, given.output / RUN_FILE
    again = ["lowtide", given.method, "--config", str(run_file), *_on_processes(config)]
    trainer = given.trainer(config)
    settings = {**given.values, **trainer.planned.settings}
    trainer.card.dataset_name = given.what.dataset
    trainer.card.command = [*command_of(settings, options, method=given.method), *_on_processes(config)]
    trainer.stopping.resumes_with = lambda checkpoint: shlex.join([*again, "--resume_from_checkpoint", checkpoint])
    if config.should_save:  # what was asked for: the config has filled fields in
        write_run_file(run_file, settings, options, method=given.method)
    if trainer.eval_dataset is not None:
        trainer.add_callback(LastEvaluation)
    trainer.train(resume_from_checkpoint=checkpoint)
    if trainer.trained_nothing:
        _say(f"Nothing was trained: {trainer.last_checkpoint} is at the end of this run, or beyond it.", config)
    trainer.save_model()
    if trainer.eval_dataset is not None:
        _say(", ".join(f"{k} {v:.4g}" for k, v in last_evaluation(trainer).items() if isinstance(v, float)), config)
    if config.push_to_hub:
        trainer.push_to_hub(dataset_name=given.what.dataset)
    _say(f"The model is in {output}; this repeats the run: {shlex.join(again)}", config)
    for what, words in _next(trainer, output):
        _say(f"  {what}: {shlex.join(words)}", config)
    leave()
    return 0


def _next(trainer: Any, output: Path) -> Iterator[tuple[str, list[str]]]:
    """What is done with a trained model next, and the commands that do it."""
    from lowtide.cli.after_training.gguf_export.families import FAMILIES
    from lowtide.engine.heads.language_model import LanguageModel

    method, writes = trainer.method, trainer.method.head is LanguageModel
    if writes:
        yield "talk with it", ["lowtide", "chat", str(output)]
    if method.writes is None and not method.taught:
        yield "its loss on other rows", ["lowtide", "evaluate", str(output), "--data", "FILE"]
    if writes and trainer.model.config.model_type in FAMILIES:
        yield "a file for llama.cpp and Ollama", ["lowtide", "export", str(output), "--gguf", "q8_0"]


def _checkpoint(wanted: str | None, output: Path) -> str | bool | None:
    """What to resume from: the folder that is named, or True for the last whole checkpoint of the output folder."""
    if wanted is None or wanted.lower() == "false":
        return None
    if wanted.lower() in ("latest", "true"):
        if not checkpoints_of(output):
            print(f"No checkpoint in {output} yet: starting from the beginning.", file=sys.stderr)
            return None
        return True
    check_is_checkpoint(Path(wanted), output)
    return wanted


def config_of(method: str) -> type[TrainingConfig]:
    """The method's config class; what it is made of is imported when it is first asked for."""
    if "lowtide.run.options.configs" not in sys.modules:
        with without_collection():
            import_module("lowtide.run.options.configs")
    from lowtide.run.options.configs import config_class

    return config_class(METHODS[method])


def options_of_command(method: str) -> CommandOptions:
    """The options that a method's command takes."""
    return written_options(method) or declared_options(method)


def option_names(config: type) -> set[str]:
    return {field.name for field in dataclasses.fields(config) if field.init}


def _only(config: type[T], values: Mapping[str, Any]) -> T:
    """An options class from those of the values that are its own."""
    return config(**{name: value for name, value in values.items() if name in option_names(config)})


def _on_processes(config: TrainingArguments) -> list[str]:
    """The words that run a command on as many processes as these."""
    if config.world_size == 1:
        return []
    chosen = ["--accelerate_config", os.environ[CHOSEN]] if CHOSEN in os.environ else []
    return ["--num_processes", str(config.world_size), *chosen]


def _say(text: str, config: TrainingArguments) -> None:
    if config.process_index == 0:
        print(text)
