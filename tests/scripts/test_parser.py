"""`TrlParser` and the argument classes: the values that TRL's give from the same command line and file."""

import dataclasses
import os
import sys

import pytest
import trl  # the bench extra
from transformers import HfArgumentParser
from trl.scripts.utils import DatasetConfig as TheirDatasetConfig

import lowtide

ARGUMENTS = ("ScriptArguments", "ModelConfig", "DatasetMixtureConfig")
CONFIGS = [name for name in lowtide.__all__ if name.endswith("Config") and name[:3].isupper()] + ["RewardConfig"]


@dataclasses.dataclass
class Mine:
    count: int
    rate: float = 0.1
    name: str | None = None
    flag: bool = True


@pytest.mark.parametrize("name", [*ARGUMENTS, "DatasetConfig"])
def test_the_defaults_are_trls(name):
    ours, theirs = getattr(lowtide, name), getattr(trl, name, TheirDatasetConfig)
    defaults = [
        {field.name: (field.default, field.default_factory) for field in dataclasses.fields(each)}
        for each in (ours, theirs)
    ]
    assert {key: defaults[0][key][0] for key in defaults[1]} == {key: value[0] for key, value in defaults[1].items()}
    assert set(defaults[0]) - set(defaults[1]) <= {"torch_dtype"}


COMMANDS = [
    "--dataset_name d --model_name_or_path m --use_peft --lora_r 8",
    "--dataset_name d --dataset-test-split validation --load_in_4bit true --no_flag",
    "--lora_target_modules all-linear",
    "--lora_target_modules q_proj v_proj --bnb_4bit_quant_storage none",
    "--dtype bfloat16 --attn_implementation flash_attention_2 --model_revision v1",
    "--dataset_config None --test_split_size 0.1 --streaming",
    "--test_split_size None",
]


@pytest.mark.parametrize("words", COMMANDS)
def test_a_command_line_gives_what_trls_gives(words):
    words = words.replace("--no_flag", "")
    found = [
        library.TrlParser([getattr(library, name) for name in ARGUMENTS]).parse_args_and_config(words.split())
        for library in (lowtide, trl)
    ]
    for ours, theirs in zip(*found, strict=True):
        values = dataclasses.asdict(ours)
        assert {name: values[name] for name in dataclasses.asdict(theirs)} == dataclasses.asdict(theirs)


BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]\n" for old, new in zip("abcdef", "bcdefg", strict=True)
)
FILE = """
env:
  LOWTIDE_TEST_A: text
  LOWTIDE_TEST_B: 3
count: 5
rate: 2e-5
name: null
"""


def parsed(library, monkeypatch, words, **how):
    """What is parsed, and the environment that the file set."""
    for name in ("LOWTIDE_TEST_A", "LOWTIDE_TEST_B"):
        monkeypatch.delenv(name, raising=False)
    found = library.TrlParser(Mine).parse_args_and_config(words, **how)
    return found, {name: value for name, value in os.environ.items() if name.startswith("LOWTIDE_TEST_")}


@pytest.mark.parametrize("words", ["--config {}", "--config {} --count 7 --name x", "--count 7 --config {} --no_flag"])
def test_a_file_is_read_as_trls(tmp_path, monkeypatch, words):
    path = tmp_path / "run.yaml"
    path.write_text(FILE)
    words = words.format(path).split()
    assert parsed(lowtide, monkeypatch, words) == parsed(trl, monkeypatch, words)
    assert parsed(lowtide, monkeypatch, words)[1] == {"LOWTIDE_TEST_A": "text", "LOWTIDE_TEST_B": "3"}


@pytest.mark.parametrize(
    "how",
    [
        {"return_remaining_strings": True},
        {"return_remaining_strings": True, "separate_remaining_strings": True},
        {"fail_with_unknown_args": False},
    ],
)
def test_what_no_option_takes_is_returned_as_by_trls(tmp_path, monkeypatch, how):
    path = tmp_path / "run.yaml"
    path.write_text(FILE + "beta: 0.1\n")
    words = ["--config", str(path), *(["--gamma", "1"] if "return_remaining_strings" in how else [])]
    assert parsed(lowtide, monkeypatch, words, **how) == parsed(trl, monkeypatch, words, **how)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1, 2]", "line 1: expected `option: value` lines"),
        ("count: 1\n[a, b]: 2\n", "line 2: a key is a list: write the option's name"),
        ("count: 1\ncount: 2\n", "line 2: count is given twice"),
        ("count: [1\n", "line 2 is not YAML"),
        ("a: &a [*a]\n", "line 1 is not YAML: an alias stands in what it names"),
        (BOMB, "is not YAML: aliases make it more than 1,000,000 values"),
        ("env: [A]\n", "`env` is .*it must be a mapping"),
        ("env: {A: [1]}\n", "env: A is .1.; a variable holds one value"),
        ("count: 1\nbeta: 0.1\n", "has the keys beta, which are no options"),
    ],
)
def test_a_file_that_means_nothing_is_refused(tmp_path, text, message):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        lowtide.TrlParser(Mine).parse_args_and_config([f"--config={path}"])


def test_a_date_is_text_and_a_merged_mapping_gives_defaults(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("<<: {name: x, count: 1}\nname: 2024-01-01\n")
    expected = Mine(count=1, name="2024-01-01")
    assert lowtide.TrlParser(Mine).parse_args_and_config([f"--config={path}"]) == (expected,)
    assert lowtide.TrlParser(Mine).parse_yaml_file(path) == (expected,)


@pytest.mark.parametrize("text", ["count: 1\n[a, b]: 2\n", "a: &a [*a]\n", "count: 1\ncount: 2\n"])
def test_what_transformers_reads_a_file_by_has_the_same_rules(tmp_path, text):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"run\.yaml, line [12]"):
        lowtide.TrlParser(Mine).parse_yaml_file(path)


def test_a_field_named_config_is_refused_and_subcommands_get_the_files_values(tmp_path):
    taken = dataclasses.make_dataclass("Taken", [("config", str, "x")])
    with pytest.raises(ValueError, match="Taken has a field `config`"):
        lowtide.TrlParser(taken)
    path = tmp_path / "run.yaml"
    path.write_text("count: 5\n")
    parser = lowtide.TrlParser()
    own = parser.add_subparsers(dest="command", parser_class=lowtide.TrlParser).add_parser("sft", dataclass_types=Mine)
    own.set_defaults_with_config(count=5)
    assert own.parse_args_and_config([]) == (Mine(5),)
    assert parser.set_defaults_with_config(count=6, other=1) == ["--other", "1"]
    assert own.parse_args_and_config([]) == (Mine(6),)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("parser", [lowtide.TrlParser, HfArgumentParser])
def test_every_config_comes_from_a_command_line(tmp_path, monkeypatch, name, parser):
    length = {"max_length": 64} if hasattr(getattr(lowtide, name), "max_length") else {}
    words = f"--output_dir {tmp_path} --learning_rate 1e-3 --use_cpu --no_gradient_checkpointing"
    words += "".join(f" --{option} {value}" for option, value in length.items())
    words += ' --report_to none --lr_scheduler_type cosine_with_restarts --lr_scheduler_kwargs {"num_cycles":2}'
    monkeypatch.setattr(sys, "argv", ["script.py"])
    made = parser([lowtide.ScriptArguments, getattr(lowtide, name), lowtide.ModelConfig])
    assert "--learning_rate" in made.format_help()
    _, config, _ = made.parse_args_into_dataclasses(words.split())
    expected = getattr(lowtide, name)(
        output_dir=str(tmp_path),
        learning_rate=1e-3,
        use_cpu=True,
        gradient_checkpointing=False,
        **length,
        report_to="none",
        lr_scheduler_type="cosine_with_restarts",
        lr_scheduler_kwargs={"num_cycles": 2},
    )
    assert config.to_dict() == expected.to_dict()


def test_datasets_come_from_the_file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("datasets:\n- {path: a, fraction: 0.5}\n- {path: b, columns: [text]}\n")
    [mixture] = lowtide.TrlParser(lowtide.DatasetMixtureConfig).parse_args_and_config(["--config", str(path)])
    assert mixture.datasets == [lowtide.DatasetConfig("a", fraction=0.5), lowtide.DatasetConfig("b", columns=["text"])]
