"""A tiny model folder and a file of dialogues, made once."""

from pathlib import Path

import pytest

from lowtide.cli.main import main
from lowtide.demo.data import dialogue_rows, make_questions, write_rows
from lowtide.demo.model import save


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save(folder, seed=0)
    return folder


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("data") / "train.jsonl"
    write_rows((row for each in make_questions(10, seed=0)[0][:64] for row in dialogue_rows(each)), path)
    return path


@pytest.fixture
def sft(model, data, tmp_path, capsys):
    """Runs `lowtide sft` for two steps on the model and data; gives status, standard output and error."""

    def run(*words: str, steps: int = 2) -> tuple[int, str, str]:
        always = ["--max_steps", str(steps), "--use_cpu", "--disable_tqdm", "--per_device_train_batch_size", "4"]
        given = {"model": model, "dataset": data, "output_dir": tmp_path / "run"}
        for name, value in given.items():
            if not any(word.startswith((f"--{name}", "--config")) for word in words):
                always += [f"--{name}", str(value)]
        status = main(["sft", *always, *words])
        out, err = capsys.readouterr()
        return status, out, err

    return run
