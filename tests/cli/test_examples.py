"""The run files that are shipped, and the tables of methods, agree with the options and methods that there are."""

from pathlib import Path

import pytest

from lowtide.cli import main, train
from lowtide.cli.adapters import AdapterOptions
from lowtide.cli.layout import LAYOUT
from lowtide.cli.options import options_of
from lowtide.cli.run_file import read_run_file
from lowtide.methods import METHODS
from lowtide.trainers.sft import SFTConfig

OPTIONS = options_of(SFTConfig) | options_of(train.RunOptions) | options_of(AdapterOptions)
EXAMPLES = sorted(Path(__file__).parents[2].glob("examples/*.yaml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_a_shipped_run_file_is_one(path, tmp_path):
    values = read_run_file(path, OPTIONS)
    train._only(AdapterOptions, values).check()
    train._only(train.RunOptions, values).check(padding_free=True)
    SFTConfig(**{name: value for name, value in values.items() if name in train._names(SFTConfig)})


def test_every_method_has_its_command_and_its_trainer():
    assert set(main.METHODS) == set(train.TRAINERS) == set(METHODS)


def test_the_help_lists_options_that_exist_and_each_once():
    listed = [name for names in LAYOUT.values() for name in names]
    assert len(listed) == len(set(listed))
    assert set(listed) <= set(OPTIONS)
