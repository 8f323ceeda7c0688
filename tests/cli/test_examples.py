"""The run files that are shipped, and the tables of methods, agree with the options and methods that there are."""

import argparse
import re
from dataclasses import fields
from pathlib import Path

import pytest
from transformers import TrainingArguments

from lowtide.cli.training import train
from lowtide.methods import METHODS
from lowtide.run.options.inherited_groups import INHERITED_GROUPS
from lowtide.trainers.public import trainer_class

EXAMPLES = sorted(Path(__file__).parents[2].glob("examples/*.yaml"))


def parser_of(method: str) -> argparse.ArgumentParser:
    """The one of the method's command, whose default `options` are all that it knows."""
    return train.add_parser(argparse.ArgumentParser().add_subparsers(), method)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_a_shipped_run_file_is_one(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for rows in re.findall(r"\S+\.jsonl", path.read_text()):
        (tmp_path / rows).write_text("{}\n")
    method = path.name.split("_")[0].removesuffix(".yaml")
    given = train.read_run(parser_of(method).parse_args(["--config", str(path)]), output_dir=str(tmp_path))
    assert isinstance(given.config(), train.config_of(method))


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_its_command_and_its_trainer(name):
    config, trainer = train.config_of(name), trainer_class(METHODS[name])
    assert issubclass(config, METHODS[name].options)
    assert (trainer.method, trainer.config) == (METHODS[name], config)


@pytest.mark.parametrize("name", METHODS)
def test_the_help_lists_each_option_of_lowtides_own_once_in_its_group(name):
    parser, config = parser_of(name), train.config_of(name)
    text = parser.format_help()
    listed = [line.split()[0][2:] for line in text.splitlines() if line.startswith("  --")]
    assert len(listed) == len(set(listed))
    hidden = {*config.refused, *config.without_effect}
    of_transformers = {each.name for each in fields(TrainingArguments)}
    assert set(train.options_of_command(name).options) - of_transformers - hidden <= set(listed)
    also = set(str(parser.epilog).split(": ")[1].split(", "))  # "as transformers.TrainingArguments documents them"
    assert also <= of_transformers
    assert set(INHERITED_GROUPS) - hidden <= set(listed)


def test_an_option_is_in_the_group_of_its_declaration_or_else_of_the_class_that_declared_it_first():
    groups = {group.title: [each.dest for each in group._group_actions] for group in parser_of("dpo")._action_groups}
    assert [*dict.fromkeys(groups["model and data"])][:2] == ["model", "dataset"]
    assert "ref_model_storage" in groups["reference"]  # by its class
    assert "padding_free" in groups["memory and precision"]  # by its declaration
    assert "learning_rate" in groups["training"]  # declared again by the method, and of TrainingArguments
    assert {"beta", "max_length"} <= set(groups["direct preference optimization"])
    assert list(groups).index("direct preference optimization") == list(groups).index("model and data") + 1
