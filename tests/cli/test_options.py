"""Dataclass fields as options: conversion by type hint, from text and from YAML."""

import argparse
import re
from dataclasses import dataclass, field
from enum import Enum

import pytest

from lowtide import SFTConfig
from lowtide.cli.endings import UsageError
from lowtide.cli.options import add_options, read_options
from lowtide.option_values import options_of


class Pace(Enum):
    NO = "no"
    STEPS = "steps"


@dataclass
class Config:
    count: int | None = 3
    rate: float = 0.1
    flag: bool = False
    maybe: bool | None = None
    name: str = "x"
    report: str | list[str] | None = "none"
    layers: list[str] | None = None
    extra: dict | str | None = None
    pace: Pace | str = "steps"
    loss: str = field(default="nll", metadata={"choices": ["nll", "dft"], "help": "Which 100%% loss."})
    folder: object = None
    alias: str | None = field(default=None, metadata={"aliases": ["older_name"]})


OPTIONS = options_of(Config)


@pytest.mark.parametrize(
    ("name", "given", "value"),
    [
        ("count", "7", 7),
        ("count", 7, 7),
        ("count", "none", None),
        ("count", None, None),
        ("rate", "2e-5", 2e-5),
        ("rate", 1, 1.0),
        ("flag", "true", True),
        ("flag", "No", False),
        ("flag", True, True),
        ("maybe", "null", None),
        ("name", 2024, "2024"),
        ("name", "none", "none"),
        ("report", "none", "none"),
        ("report", None, "none"),
        ("report", ["wandb", "mlflow"], ["wandb", "mlflow"]),
        ("layers", "q_proj", ["q_proj"]),
        ("layers", ["q_proj", "v_proj"], ["q_proj", "v_proj"]),
        ("extra", '{"a": 1}', {"a": 1}),
        ("extra", {"a": 1}, {"a": 1}),
        ("pace", False, "no"),
        ("pace", "steps", "steps"),
        ("loss", "dft", "dft"),
        ("layers", '["a", "b"]', ["a", "b"]),
        ("layers", "[MASK]", ["[MASK]"]),
        ("layers", "[qv]_proj", ["[qv]_proj"]),
    ],
)
def test_values_become_what_the_field_takes(name, given, value):
    converted = OPTIONS[name].convert(given)
    assert converted == value
    assert type(converted) is type(value)


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("count", "many", "count='many' must be a whole number or none"),
        ("count", True, "count=True must be a whole number or none"),
        ("count", 2.5, "count=2.5 must be a whole number or none"),
        ("rate", "fast", "rate='fast' must be a number"),
        ("rate", None, "rate=None must be a number"),
        ("flag", "maybe", "flag='maybe' must be true or false"),
        ("flag", 2, "flag=2 must be true or false"),
        ("name", [1], "name=[1] must be text"),
        ("pace", "step", "pace='step' is not one of no, steps; did you mean 'steps'?"),
        ("loss", "null", "loss='null' is not one of nll, dft; did you mean 'nll'?"),
    ],
)
def test_others_are_refused_with_what_it_takes(name, given, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        OPTIONS[name].convert(given)


def test_a_field_for_objects_is_no_option():
    assert "folder" not in OPTIONS


def parse(*words: str) -> dict:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_options(parser, OPTIONS.values())
    return read_options(parser.parse_args(words), OPTIONS)


def test_only_what_is_given_is_read():
    assert parse() == {}
    assert parse("--rate", "3", "--flag", "--layers", "a", "b") == {"rate": 3.0, "flag": True, "layers": ["a", "b"]}


def test_switches_are_set_and_unset():
    assert parse("--flag", "false")["flag"] is False
    assert parse("--no_flag")["flag"] is False
    assert parse("--no_maybe", "--maybe")["maybe"] is True


def test_an_older_name_is_the_same_option():
    assert parse("--older_name", "y") == {"alias": "y"}


def test_the_option_is_named_where_its_value_is_none():
    with pytest.raises(UsageError, match=r"^--rate='x' must be a number$"):
        parse("--rate", "x")


def test_help_shows_text_and_default(capsys):
    parser = argparse.ArgumentParser()
    add_options(parser, [OPTIONS["loss"]])
    with pytest.raises(SystemExit):
        parser.parse_args(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "--loss {nll,dft} Which 100% loss. [nll]" in shown


def test_every_default_of_the_config_is_a_value_of_its_option():
    options = options_of(SFTConfig)
    assert len(options) > 100
    for option in options.values():
        assert option.convert(option.default) == option.default, option.name
