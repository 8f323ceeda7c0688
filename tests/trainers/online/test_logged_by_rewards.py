"""What reward functions log on two ranks, which log differently."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch.distributed as dist

from tests.support.ranks.processes import run_ranks
from tests.support.ranks.sharded_training import meeting_place, rank_of
from tests.support.runs.online_runs import even_tokens, online


def logging_reward(completion_ids: list[list[int]], log_metric: Any, log_extra: Any, **_: Any) -> list[float]:
    if dist.get_rank() == 0:
        log_metric("of_both", 1.0)
        log_metric("of_first", 7.0)
    else:
        for _ in range(3):
            log_metric("of_both", 5.0)
        log_extra("said", [f"{len(ids)} tokens" for ids in completion_ids])
    return even_tokens(completion_ids)


def rank_main(rank: int, folder: str) -> None:
    place = Path(folder)
    options = {"num_generations": 2, "per_device_train_batch_size": 4, "max_steps": 1, "log_completions": True}
    with rank_of(place, rank, 2):
        trainer = online(place / "run", arguments={"reward_funcs": logging_reward}, **options)
        trainer.train()
        if rank == 0:
            (place / "logs.json").write_text(json.dumps(trainer.state.log_history))


@pytest.mark.slow
def test_calls_of_all_ranks_count_alike_and_a_rank_that_did_not_log_has_none(tmp_path):
    run_ranks(rank_main, str(meeting_place(tmp_path)))
    logged = json.loads((tmp_path / "logs.json").read_text())[0]
    assert logged["of_both"] == (1.0 + 3 * 5.0) / 4
    assert logged["of_first"] == 7.0
    [path] = tmp_path.glob("run/completions/*.parquet")
    rows = pq.read_table(path).to_pylist()
    assert len(rows) == 8
    assert [row["said"] is None for row in rows] == [True] * 4 + [False] * 4
    assert logged["reward"] == pytest.approx(sum(row["logging_reward"] for row in rows) / 8)
