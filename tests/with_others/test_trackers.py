"""Real trackers, offline: what a run reports is read back, and is what the run itself wrote down."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.references.parity_world import build_model, sums, tokenizer

STEPS = 3
OFFLINE = {
    "tensorboard": {},
    "wandb": {"WANDB_MODE": "offline"},
    "trackio": {"TRACKIO_DIR": "trackio"},
    "mlflow": {"MLFLOW_TRACKING_URI": "sqlite:///mlflow.db"},
}
"""What `docs/trackers.md` sets where there is no network."""
OF_TRAINER = {"total_flos", "step", "epoch"}
"""In the trainer's log, and reported under another name or not at all."""

BLOCK = 1 << 15

Read = Callable[[Path], dict[str, list[float]]]


def tensorboard(folder: Path) -> dict[str, list[float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (events,) = (folder / "out").rglob("events.out.tfevents.*")
    found = EventAccumulator(str(events))
    found.Reload()
    tags: Any = found.Tags()
    assert any("memory/phase" in tag for tag in tags["tensors"])
    assert any("args" in tag for tag in tags["tensors"])
    return {tag: [each.value for each in found.Scalars(tag)] for tag in tags["scalars"]}


def wandb(folder: Path) -> dict[str, list[float]]:
    from wandb.proto import wandb_internal_pb2

    (path,) = (folder / "wandb").glob("offline-run-*/*.wandb")
    found: dict[str, list[Any]] = {}
    for data in records_of(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        for item in record.history.item:
            found.setdefault("/".join(item.nested_key) or item.key, []).append(json.loads(item.value_json))
    assert "backward" in found.pop("train/memory/phase")
    return {name: values for name, values in found.items() if all(isinstance(each, float | int) for each in values)}


def records_of(log: bytes) -> Iterator[bytes]:
    """Of a file of wandb, which is LevelDB's log behind 7 bytes: chunks in blocks of 32 KiB, each with a checksum, a
    length and what part of a record it is."""
    place, record = 7, b""
    while place + 7 <= len(log):
        if (left := BLOCK - place % BLOCK) < 7:
            place += left
            continue
        length, kind = struct.unpack_from("<HB", log, place + 4)
        record += log[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole record, or its last part
            yield record
            record = b""


def trackio(folder: Path) -> dict[str, list[float]]:
    import sqlite3

    found: dict[str, list[float]] = {}
    (path,) = (folder / "trackio").glob("chats*.db")
    for (metrics,) in sqlite3.connect(path).execute("SELECT metrics FROM metrics ORDER BY step"):
        for name, value in json.loads(metrics).items():
            found.setdefault(name, []).append(value)
    assert "backward" in found.pop("train/memory/phase")
    return {name: values for name, values in found.items() if all(isinstance(each, float | int) for each in values)}


def mlflow(folder: Path) -> dict[str, list[float]]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    (run,) = client.search_runs([each.experiment_id for each in client.search_experiments()])
    assert run.data.params["max_steps"] == str(STEPS)
    found = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
    return {named(name): [each.value for each in history] for name, history in found.items()}


def named(logged: str) -> str:
    """What other trackers than MLflow call a number of the trainer's log."""
    return f"eval/{logged.removeprefix('eval_')}" if logged.startswith("eval_") else f"train/{logged}"


READERS: dict[str, Read] = {"tensorboard": tensorboard, "wandb": wandb, "trackio": trackio, "mlflow": mlflow}


@pytest.mark.parametrize("name", READERS)
def test_what_a_run_reports_is_what_it_wrote_down(name, tmp_path):
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"needs {name}: make test-others")
    build_model("llama").save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    rows = [json.dumps({"prompt": question, "completion": answer}) for question, answer in sums(24)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows), encoding="utf-8")
    options = {
        "model": "model", "dataset": "rows.jsonl", "eval_dataset": "rows.jsonl", "output_dir": "out",
        "max_steps": STEPS, "logging_steps": 1, "eval_strategy": "steps", "eval_steps": STEPS, "save_steps": STEPS,
        "per_device_train_batch_size": 4, "use_cpu": "true", "bf16": "false", "report_to": name, "run_name": "first",
        **({"project": "chats"} if name == "trackio" else {}),
    }  # fmt: skip
    words = [word for option, value in options.items() for word in (f"--{option}", str(value))]
    done = subprocess.run(
        [sys.executable, "-m", "lowtide", "sft", *words],
        cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False, env={**os.environ, **OFFLINE[name]},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    state = json.loads((tmp_path / "out" / f"checkpoint-{STEPS}" / "trainer_state.json").read_text(encoding="utf-8"))
    written: dict[str, list[float]] = {}
    for entry in state["log_history"]:
        for logged, value in entry.items():
            if logged not in OF_TRAINER and isinstance(value, float | int):
                written.setdefault(named(logged), []).append(value)
    found = READERS[name](tmp_path)
    assert len(written["train/loss"]) == STEPS
    assert {"train/memory/peak", "train/grad_norm", "eval/loss"} <= written.keys()
    for logged, values in written.items():
        assert len(found[logged]) >= len(values), logged
        assert all(math.isclose(*pair, rel_tol=1e-6) for pair in zip(found[logged], values, strict=False)), logged
