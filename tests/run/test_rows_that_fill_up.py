"""Rows that only fill up an evaluation's last batch count in no metric of tools or of the generator."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.runs.online_runs import online, prompts

GROUP = 4
OWN, ALL = GROUP, 2 * GROUP
"""Completions that count, of those that are written."""
SAMPLED = tuple(
    f"sampling/{name}"
    for name in (
        *(f"sampling_logp_difference/{of}" for of in ("mean", "max")),
        *(f"importance_sampling_ratio/{of}" for of in ("min", "mean", "max")),
    )
)


def rollout_func(given: list[str], *_: Any, **__: Any) -> dict[str, list]:
    """Completions of three tokens each, the later the less likely to who wrote them."""
    return {
        "prompt_ids": [[1, 2, 3]] * len(given),
        "completion_ids": [[4, 5, 6 + number] for number in range(len(given))],
        "logprobs": [[-0.5 * (number + 1)] * 3 for number in range(len(given))],
    }


@pytest.fixture
def maker(tmp_path, monkeypatch):
    """Makes rollouts that another program is said to have written."""
    writer = SimpleNamespace(sync=lambda *_: None)
    monkeypatch.setattr("lowtide.run.writing.make_vllm_generator", lambda *_: (writer, "nobody"))
    options = {"use_vllm": True, "vllm_importance_sampling_mode": "token_truncate"}
    return online(tmp_path, "GRPO", arguments={"rollout_func": rollout_func}, **options).maker


def metrics(maker: Any, completions: int, reported: int | None) -> dict[str, float]:
    maker.reported = reported
    rows = [row for row in prompts(ALL // GROUP) for _ in range(GROUP)][:completions]
    return maker.make(rows, (0, 0, 0), group=GROUP, version=0).metrics


def test_they_count_in_no_sampling_metric(maker):
    found, alone, whole = metrics(maker, ALL, OWN), metrics(maker, OWN, None), metrics(maker, ALL, None)
    for name in SAMPLED:
        assert found[name] == pytest.approx(alone[name]), name
    assert whole[SAMPLED[0]] != pytest.approx(alone[SAMPLED[0]])


def test_they_count_in_no_metric_of_tools(maker, monkeypatch):
    write = maker.rewarded
    calls = [(number, number % 2) for number in range(ALL)]

    def with_tools(rows: Any, *given: Any) -> Any:
        return replace(write(rows, *given), calls=calls[: len(rows)])

    monkeypatch.setattr(maker, "rewarded", with_tools)
    found, whole = metrics(maker, ALL, OWN), metrics(maker, ALL, None)
    assert found["tools/call_frequency"] == pytest.approx((0 + 1 + 2 + 3) / OWN)
    assert found["tools/failure_frequency"] == pytest.approx(2 / 6)
    assert whole["tools/call_frequency"] == pytest.approx(28 / ALL)
