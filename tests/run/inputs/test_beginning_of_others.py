"""The folder in which a run's first model is made is a run's own, or is left alone."""

from pathlib import Path

import pytest
from datasets import Dataset

from lowtide import PretrainConfig
from lowtide.run.inputs.beginning import FOLDER, beginning_of

ROWS = Dataset.from_list([{"text": "some words and others"}] * 4)
SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}


def made(folder: Path, **changes: int) -> str:
    options = {"model_type": "llama", "train_tokenizer": 270, "config_overrides": {**SIZES, **changes}}
    return beginning_of(PretrainConfig(output_dir=str(folder), use_cpu=True, report_to="none", **options), ROWS)


def test_a_folder_of_a_user_is_refused_and_stays(tmp_path):
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match="no run made what lies there"):
        made(tmp_path)
    assert (tmp_path / FOLDER / "thesis.txt").read_text() == "years of work"


def test_a_folder_of_a_run_is_taken_again_or_replaced_unless_it_holds_more(tmp_path):
    folder = Path(made(tmp_path))
    first = (folder / "config.json").stat().st_mtime_ns
    assert Path(made(tmp_path)) == folder
    assert (folder / "config.json").stat().st_mtime_ns == first
    made(tmp_path, hidden_size=32)
    assert '"hidden_size": 32' in (folder / "config.json").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == [FOLDER]
    (folder / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match="no run made what lies there"):
        made(tmp_path, hidden_size=16)
    assert (folder / "thesis.txt").exists()
