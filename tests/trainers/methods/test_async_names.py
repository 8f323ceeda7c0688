"""GRPO under the names of TRL's asynchronous trainer."""

from __future__ import annotations

import inspect
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import lowtide
from lowtide.rollout.generators.vllm.limits import Limits
from lowtide.run.options.configs import ConfigState
from tests.support.runs.on_a_cpu import ON_A_CPU
from tests.support.runs.online_runs import online, weights
from tests.support.vllm.writing_server import Writes, writing_server


def config(folder: Path, **options: Any) -> Any:
    return lowtide.AsyncGRPOConfig(output_dir=str(folder), **ON_A_CPU, **options)


@pytest.mark.slow
def test_it_trains_as_grpo_does_beside_a_server(tmp_path):
    sizes: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "num_generations": 2,
        "max_completion_length": 4,
        "max_steps": 3,
    }
    same: dict[str, Any] = {
        "max_staleness": 4,
        "use_vllm": True,
        "vllm_mode": "server",
        "lr_scheduler_type": "constant",
    }
    same |= {"vllm_importance_sampling_mode": "token_truncate"}
    found = []
    for method, options in (("AsyncGRPO", {}), ("GRPO", same)):
        with writing_server(Writes()) as server:
            url: Any = {"vllm_server_base_url": server.url}
            trainer = online(tmp_path / method, method, **sizes, **options, **url, learning_rate=2e-3)
            trainer.train()
            found.append((weights(trainer), [each.get("loss") for each in trainer.state.log_history]))
    assert isinstance(trainer, lowtide.GRPOTrainer)
    assert all(torch.equal(found[0][0][name], value) for name, value in found[1][0].items())
    assert found[0][1] == found[1][1]


def test_arguments_come_in_the_order_of_trls():
    module = pytest.importorskip("trl.experimental.async_grpo", reason="the comparison needs the bench extra (trl)")
    theirs, ours = (list(inspect.signature(each.AsyncGRPOTrainer).parameters) for each in (module, lowtide))
    known = [name for name in theirs if name not in ("rollout_worker", "weight_transfer")]
    assert ours[: len(known)] == known


def test_what_trl_has_there_alone_is_read(tmp_path):
    asked = {"token_budget": 100, "dtype": "bfloat16", "model_init_kwargs": {"revision": "x"}, "max_inflight_tasks": 6}
    read = config(tmp_path, **asked)
    assert (read.tokens_per_microbatch, read.model_init_kwargs) == (100, {"dtype": "bfloat16", "revision": "x"})
    assert read.server_limits == Limits(600, 1800, 6, retries=2, pause=5.0, checked_every=10, adapters_held=3)
    assert config(tmp_path, token_budget=-1).tokens_per_microbatch is None
    assert config(tmp_path, dtype="bfloat16", model_init_kwargs={"dtype": "float16"}).model_init_kwargs["dtype"] == (
        "float16"
    )


def test_it_travels_to_another_process(tmp_path):
    made = config(tmp_path, max_staleness=2)
    assert pickle.loads(pickle.dumps(made)).max_staleness == 2
    state: Any = ConfigState.of(made).config()
    assert (type(state), state.max_staleness, state.windows_ahead) == (lowtide.GRPOConfig, 2, 1)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"use_vllm": False}, "which a server does: set use_vllm=True"),
        ({"vllm_server_port": 9}, "vllm_server_port=9 has no effect, since vllm_server_base_url="),
        ({"token_budget": 5, "tokens_per_microbatch": 6}, "token_budget=5 is an older name of tokens_per_microbatch"),
        ({"max_inflight_tasks": 0}, "max_inflight_tasks=0 must be at least 1, or -1"),
        ({"weight_sync_timeout": 0}, "weight_sync_timeout=0 must be above 0"),
        ({"dtype": "int8"}, "dtype='int8' is not one of"),
    ],
)
def test_what_cannot_work_is_refused(options, text, tmp_path):
    with pytest.raises(ValueError, match=text):
        config(tmp_path, **options)


@pytest.mark.parametrize("name", ["max_inflight_tasks", "request_timeout", "vllm_server_retries"])
def test_limits_of_a_server_are_refused_without_one(name, tmp_path):
    limit: dict[str, Any] = {name: 4}
    with pytest.raises(ValueError, match=f"{name}=4 is for a server that writes: set use_vllm=True"):
        lowtide.GRPOConfig(output_dir=str(tmp_path), **ON_A_CPU, **limit)
