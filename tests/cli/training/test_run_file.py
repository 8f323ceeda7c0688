"""Run files: YAML read with its lines, and written whole."""

import pytest
import yaml

from lowtide import SFTConfig
from lowtide.cli.endings import UsageError
from lowtide.cli.training.run_file import read_run_file, write_run_file
from lowtide.cli.training.train import RunOptions
from lowtide.option_values import options_of

OPTIONS = options_of(SFTConfig) | options_of(RunOptions)


def read(tmp_path, text: str) -> dict:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return read_run_file(path, OPTIONS)


def test_values_are_converted_by_their_fields(tmp_path):
    text = "learning_rate: 2e-5\nmax_length: null\neval_strategy: no\npacking: true\nwarmup-steps: 3\n"
    assert read(tmp_path, text) == {
        "learning_rate": 2e-5,
        "max_length": None,
        "eval_strategy": "no",
        "packing": True,
        "warmup_steps": 3.0,
    }


@pytest.mark.parametrize(
    ("text", "value"), [("true", True), ("false", False), ("full_shard offload", "full_shard offload")]
)
def test_an_engine_is_switched_on_or_named(text, value, tmp_path):
    assert read(tmp_path, f"fsdp: {text}\n") == {"fsdp": value}


def test_names_of_trl_are_taken(tmp_path):
    assert read(tmp_path, "model_name_or_path: m\ndataset_name: d\n") == {"model": "m", "dataset": "d"}


@pytest.mark.parametrize("name", ["run_name", "output_dir", "model", "dataset", "eval_dataset", "chat_template_path"])
@pytest.mark.parametrize("text", ["2024-01-01", "2024-01-01 10:00:00", "yes", "no", "on", "1e5", "0o17", "017", "1:30"])
def test_text_stays_as_it_is_written(name, text, tmp_path):
    assert read(tmp_path, f"{name}: {text}\n") == {name: text}
    assert read(tmp_path, f"{name}: '{text}'\n") == {name: text}


@pytest.mark.parametrize("text", ["2024-01-01", "yes", "1:30", "7"])
def test_text_in_a_list_or_a_mapping_stays_as_it_is_written(text, tmp_path):
    assert read(tmp_path, f"report_to: [{text}, none]\n") == {"report_to": [text, "none"]}
    assert read(tmp_path, f"report_to: {text}\n") == {"report_to": text}
    assert read(tmp_path, "model_init_kwargs: {revision: 2024-01-01}\n") == {
        "model_init_kwargs": {"revision": "2024-01-01"}
    }


def test_what_stands_for_nothing_or_for_a_switch_still_does(tmp_path):
    text = "run_name: null\nhub_model_id: ~\noptimizer_in_backward: yes\nmax_steps: 1.0e+3\nwarmup_steps: 1_0\n"
    assert read(tmp_path, text) == {
        "run_name": None,
        "hub_model_id": None,
        "optimizer_in_backward": True,
        "max_steps": 1000,
        "warmup_steps": 10.0,
    }


def test_a_number_is_what_it_looks_like(tmp_path):
    assert read(tmp_path, "max_steps: 017\n") == {"max_steps": 17}
    with pytest.raises(UsageError, match="max_steps='1:30' must be a whole number"):
        read(tmp_path, "max_steps: 1:30\n")


def test_an_empty_file_gives_nothing(tmp_path):
    assert read(tmp_path, "# nothing\n") == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed: 1\n\nlearing_rate: 3\n", "line 3: there is no option 'learing_rate'; did you mean 'learning_rate'?"),
        ("7: 3\n", "line 1: there is no option 7"),
        ("seed: 1\nmax_length: long\n", "line 2: max_length='long' must be a whole number or none"),
        ("seed: 1\nseed: 2\n", "line 2: seed is given twice"),
        ("model: m\nmodel_name_or_path: n\n", "line 2: model is given twice"),
        ("- seed\n", "line 1: expected `option: value` lines"),
        ("seed: [1\nmax_length: 3\n", "line 2 is not YAML: expected ',' or ']', but got ':'"),
        ("seed: !!python/object:os.system 1\n", "is not YAML: could not determine a constructor"),
    ],
)
def test_what_means_nothing_is_refused_with_its_line(tmp_path, text, message):
    with pytest.raises(UsageError) as error:
        read(tmp_path, text)
    assert str(error.value).startswith(str(tmp_path / "run.yaml"))
    assert message in str(error.value)


def test_a_file_that_is_missing_or_no_text(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no file .*nowhere\.yaml"):
        read_run_file(tmp_path / "nowhere.yaml", OPTIONS)
    (tmp_path / "run.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="is not text"):
        read_run_file(tmp_path / "run.yaml", OPTIONS)


def test_what_is_written_is_everything_and_reads_back(tmp_path):
    path = tmp_path / "run.yaml"
    values = {"model": "m", "learning_rate": 1e-5, "max_length": None, "model_init_kwargs": {"dtype": "bfloat16"}}
    write_run_file(path, values, OPTIONS, method="sft")
    assert set(yaml.safe_load(path.read_text())) == set(OPTIONS) - {"hub_token"}
    read = read_run_file(path, OPTIONS)
    assert {name: read[name] for name in values} == values
    assert all(read[name] == option.default for name, option in OPTIONS.items() if name in read and name not in values)


def test_secrets_are_not_written(tmp_path):
    path = tmp_path / "run.yaml"
    write_run_file(path, {"model": "m", "hub_token": "hf_secret"}, OPTIONS, method="sft")
    assert "hf_secret" not in path.read_text()


def test_columns_are_named_on_the_command_line_and_in_a_run_file(tmp_path):
    (tmp_path / "odd.csv").write_text("User Question;Bot Answer\nwhy;so\n")
    (tmp_path / "held.jsonl").write_text('{"prompt": "when", "completion": "now"}\n')
    columns = options_of(RunOptions)["columns"]
    file = tmp_path / "run.yaml"
    file.write_text("columns: {prompt: User Question, completion: Bot Answer}\n")
    named = [columns.convert("prompt=User Question,completion=Bot Answer")]
    named += [read_run_file(file, options_of(RunOptions))["columns"]]
    for each in named:
        given = RunOptions(dataset=str(tmp_path / "odd.csv"), eval_dataset=str(tmp_path / "held.jsonl"), columns=each)
        rows, held = given.load(evaluates=True, texts=())
        assert list(rows) == [{"prompt": "why", "completion": "so"}]
        assert held is not None
        assert list(held) == [{"prompt": "when", "completion": "now"}]  # which needs none
