"""The run files that are shipped, and the tables of methods, agree with the options and methods that there are."""

import argparse
from pathlib import Path

import pytest

from lowtide.cli import train
from lowtide.cli.layout import LAYOUT
from lowtide.methods import METHODS
from lowtide.trainers.public import trainer_class

EXAMPLES = sorted(Path(__file__).parents[2].glob("examples/*.yaml"))


def parser_of(method: str) -> argparse.ArgumentParser:
    """The one of the method's command, whose default `options` are all that it knows."""
    return train.add_parser(argparse.ArgumentParser().add_subparsers(), method)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_a_shipped_run_file_is_one(path, tmp_path):
    method = path.name.split("_")[0].removesuffix(".yaml")
    given = train.read_run(parser_of(method).parse_args(["--config", str(path)]), output_dir=str(tmp_path))
    assert isinstance(given.config(), train.config_of(method))


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_its_command_and_its_trainer(name):
    config, trainer = train.config_of(name), trainer_class(METHODS[name])
    assert issubclass(config, METHODS[name].options)
    assert (trainer.method, trainer.config) == (METHODS[name], config)


def test_the_help_lists_options_that_exist_and_each_once():
    listed = [name for names in LAYOUT.values() for name in names]
    assert len(listed) == len(set(listed))
    there = {option for name in METHODS for option in parser_of(name).get_default("options")}
    assert set(listed) <= there
