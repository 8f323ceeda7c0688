"""Completions are kept and printed whatever they, and what rewards say of them, consist of."""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from lowtide.terminal import Console
from lowtide.trainers.online.completions_log import columns_of, plain, table
from tests.support.runs.online_runs import online

TEXTS = (
    "a\ud800b",
    "\udfff",
    "[/bold]",
    "[red]x\\",
    "\\",
    "\x00\x1b[2J\r\b",
    "日本 \U0001f600",
    "[link=x",
    "",
    ":smile:",
)
VALUES = {
    "numbers and texts": [1, "one", None, 2.5],
    "a number that no column holds": [10**30, 1, None, 2],
    "lists and numbers": [[1], 1, None, {"a": 1}],
    "halves of pairs": ["\ud800", "x", None, "\udc00"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", VALUES)
def test_what_rewards_say_is_kept_of_whatever_kind(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    values = VALUES[name]

    def reward(completions: list[str], log_extra: Any, **_: Any) -> list[float]:
        log_extra("said", [values[number % 4] for number in range(len(completions))])
        return [float(number) for number in range(len(completions))]

    trainer = online(tmp_path, log_completions=True, max_steps=1, arguments={"reward_funcs": reward})
    trainer.train()
    [path] = tmp_path.glob("completions/*.parquet")
    said = pq.read_table(path)["said"].to_pylist()
    assert said == [None if each is None else str(each).encode("utf-8", "replace").decode() for each in values] * 2
    assert "completions at step 1" in capsys.readouterr().out


def hostile(rng: random.Random) -> str:
    return "".join(rng.choice(TEXTS) for _ in range(rng.randrange(6)))


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "cp1252"])
def test_every_text_can_be_printed(encoding: str):
    rng = random.Random(0)
    for _ in range(100):
        rows = [{"prompt": hostile(rng), "completion": hostile(rng), f"[/{hostile(rng)}]": 1.0} for _ in range(1)]
        file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
        Console(file=file).print(table(rows, 1))
        file.flush()


def test_rows_without_a_column_have_none_there():
    assert columns_of([{"a": 1}, {"a": 2, "b": "x"}]).to_pydict() == {"a": [1, 2], "b": [None, "x"]}


def test_texts_are_printed_as_they_are():
    file = io.StringIO()
    Console(file=file, width=200).print(table([{"prompt": ":smile: [red]x[/red]", "completion": "\\[x]"}], 1))
    assert ":smile: [red]x[/red]" in file.getvalue()
    assert "\\[x]" in file.getvalue()


def test_values_that_rewards_log_are_plain_before_ranks_exchange_them():
    """Tensors would be on their rank's device, and other values may not be read elsewhere."""

    class Own:
        def __str__(self) -> str:
            return "own"

    values = [torch.tensor([1, 2]), torch.tensor(0.5), Own(), {"a": (1, Own())}, "text", None, True]
    assert [plain(each) for each in values] == [[1, 2], 0.5, "own", {"a": [1, "own"]}, "text", None, True]
