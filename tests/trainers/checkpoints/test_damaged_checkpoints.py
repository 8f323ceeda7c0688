"""What is wrong with a checkpoint is found before training and said by file; the last whole one is found."""

from __future__ import annotations

import json
import pickle
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
from peft import LoraConfig

from lowtide.trainers.checkpoints.choosing import last_whole
from lowtide.trainers.checkpoints.manifest import MANIFEST, seal
from lowtide.trainers.checkpoints.soundness import damage
from tests.support.marks import slow_but
from tests.support.matrix.matrix import make
from tests.support.runs.small_runs import SAVING, assert_same, small, trained, weights

FILES = ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "run_state.json", "trainer_state.json")


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run of four steps, with checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("run")
    trained(folder, max_steps=4)
    return folder


@pytest.fixture
def copied(run, tmp_path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "run"))


class Evil:
    """What would run a command when it is loaded."""

    def __init__(self, folder: Path):
        self.mark = folder / "executed"

    def __reduce__(self):
        return Path.touch, (self.mark,)


def break_file(path: Path, how: str) -> None:
    whole = path.read_bytes()
    if how == "empty":
        path.write_bytes(b"")
    elif how == "truncated":
        path.write_bytes(whole[: len(whole) // 2])
    elif how == "garbage":
        path.write_bytes(bytes(range(256)) * 40)
    elif how == "flipped":
        middle = len(whole) // 2
        path.write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
    elif how == "evil":
        torch.save({"state": Evil(path.parent), "param_groups": []}, path)
    elif how == "missing":
        path.unlink()


@pytest.mark.parametrize(
    "how", slow_but(["truncated", "missing"], ["empty", "truncated", "garbage", "flipped", "missing"])
)
@pytest.mark.parametrize("name", FILES)
def test_damage_is_said_of_its_file(name, how, copied):
    break_file(copied / "checkpoint-4" / name, how)
    assert damage(copied / "checkpoint-4").keys() == {name}
    assert damage(copied / "checkpoint-2") == {}
    chosen = last_whole(copied)
    assert chosen is not None
    assert chosen.folder == copied / "checkpoint-2"
    assert chosen.passed_over[0].startswith(f"checkpoint-4 ({name}: ")


@pytest.mark.parametrize("how", ["empty", "truncated", "garbage"])
@pytest.mark.parametrize("name", FILES)
def test_damage_is_found_without_a_manifest(name, how, copied):
    (copied / "checkpoint-4" / MANIFEST).unlink()
    break_file(copied / "checkpoint-4" / name, how)
    assert damage(copied / "checkpoint-4").keys() == {name}


def test_a_flipped_bit_of_a_tensor_is_found_without_a_manifest(copied):
    """A file of torch.save has checksums of its own."""
    (copied / "checkpoint-4" / MANIFEST).unlink()
    path = copied / "checkpoint-4" / "optimizer.pt"
    with zipfile.ZipFile(path) as archive:
        record = max(archive.infolist(), key=lambda each: each.file_size)
    data = bytearray(path.read_bytes())
    data[record.header_offset + record.file_size // 2 + 128] ^= 1
    path.write_bytes(data)
    assert "not those that were written" in damage(copied / "checkpoint-4")["optimizer.pt"]


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth"])
@pytest.mark.parametrize("sealed", [True, False])
def test_a_file_that_would_run_code_is_not_loaded(name, sealed, copied):
    """An attacker can write a manifest too."""
    folder = copied / "checkpoint-4"
    break_file(folder / name, "evil")
    seal(folder) if sealed else (folder / MANIFEST).unlink()
    with pytest.raises(ValueError, match=rf"{name}: it holds Python objects other than tensors"):
        small(copied).train(resume_from_checkpoint=str(folder))
    (folder / name).write_bytes(pickle.dumps(Evil(folder)))
    assert name in damage(folder)
    assert not (folder / "executed").exists()


def test_training_goes_on_from_the_last_whole_one_and_says_so(copied, run, tmp_path, caplog):
    break_file(copied / "checkpoint-4" / "optimizer.pt", "truncated")
    again = small(copied)
    again.train(resume_from_checkpoint=True)
    assert again.resumption.folder == str(copied / "checkpoint-2")
    assert "passed over: checkpoint-4 (optimizer.pt: it has" in caplog.text
    expected = small(tmp_path / "expected")
    expected.train(resume_from_checkpoint=str(run / "checkpoint-2"))
    assert_same(weights(again), weights(expected))
    assert damage(copied / "checkpoint-4") == {}  # written anew


def test_a_damaged_one_that_is_named_is_refused(copied):
    break_file(copied / "checkpoint-4" / "scheduler.pt", "garbage")
    with pytest.raises(
        ValueError, match=r"checkpoint-4 cannot be resumed from: scheduler\.pt: .* resume_without_states=True"
    ):
        small(copied).train(resume_from_checkpoint=str(copied / "checkpoint-4"))
    told = small(copied, resume_without_states=True)
    told.train(resume_from_checkpoint=str(copied / "checkpoint-4"))
    assert (told.resumption.left_out, len(told.run.losses)) == (("scheduler.pt",), 1)


def test_no_whole_checkpoint_is_an_error(copied):
    for step in (2, 4):
        break_file(copied / f"checkpoint-{step}" / "model.safetensors", "truncated")
    with pytest.raises(
        ValueError, match=r"no checkpoint in .* is whole: checkpoint-4 \(model\.safetensors: .*checkpoint-2"
    ):
        small(copied).train(resume_from_checkpoint=True)


def test_files_that_no_run_reads_may_be_changed(copied):
    folder = copied / "checkpoint-4"
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "training_args.bin").unlink()
    (folder / "README.md").write_text("mine")
    assert damage(folder) == {}


def test_a_damaged_manifest_is_said(copied):
    (copied / "checkpoint-4" / MANIFEST).write_text("{")
    assert damage(copied / "checkpoint-4").keys() == {MANIFEST}


def test_damaged_adapters_are_found(tmp_path):
    peft_config = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    make("SFT", output_dir=str(tmp_path), peft_config=peft_config, **SAVING | {"max_steps": 2}).train()
    folder = tmp_path / "checkpoint-2"
    assert damage(folder) == {}
    (folder / MANIFEST).unlink()
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        whole = (folder / name).read_bytes()
        break_file(folder / name, "truncated")
        assert damage(folder).keys() == {name}
        (folder / name).write_bytes(whole)


def test_a_best_model_that_is_damaged_by_then_is_said(copied):
    trainer = small(copied)
    trainer.state.best_model_checkpoint = str(copied / "checkpoint-2")
    break_file(copied / "checkpoint-2" / "model.safetensors", "truncated")
    with pytest.raises(
        ValueError, match=r"the best model cannot be loaded, since .*checkpoint-2 is not whole: model\.safe"
    ):
        trainer._load_best_model()


def test_a_manifest_has_all_files(run):
    entries = json.loads((run / "checkpoint-2" / MANIFEST).read_text())["files"]
    files = {path.name: path.stat().st_size for path in (run / "checkpoint-2").iterdir() if path.name != MANIFEST}
    assert {name: entry["bytes"] for name, entry in entries.items()} == files
