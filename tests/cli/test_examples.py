"""The run files that are shipped, and the tables of methods, agree with the options and methods that there are."""

from pathlib import Path

import pytest

from lowtide.cli import train
from lowtide.cli.adapters import AdapterOptions
from lowtide.cli.layout import LAYOUT
from lowtide.cli.run_file import read_run_file
from lowtide.methods import METHODS
from lowtide.trainers.public import trainer_class

EXAMPLES = sorted(Path(__file__).parents[2].glob("examples/*.yaml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_a_shipped_run_file_is_one(path, tmp_path):
    config = train.config_of(path.name.split("_")[0].removesuffix(".yaml"))
    values = read_run_file(path, train._options(config))
    train._only(AdapterOptions, values).check()
    train._only(train.RunOptions, values).check()
    config(**{name: value for name, value in values.items() if name in train.option_names(config)})


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_its_command_and_its_trainer(name):
    config, trainer = train.config_of(name), trainer_class(METHODS[name])
    assert issubclass(config, METHODS[name].options)
    assert (trainer.method, trainer.config) == (METHODS[name], config)


def test_the_help_lists_options_that_exist_and_each_once():
    listed = [name for names in LAYOUT.values() for name in names]
    assert len(listed) == len(set(listed))
    there = {option for name in METHODS for option in train._options(train.config_of(name))}
    assert set(listed) <= there
