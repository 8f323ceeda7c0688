"""How a run is spread over devices: the simplest way where it fits, and more where it must."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from datasets import Dataset
from transformers import LlamaConfig

import lowtide
from lowtide.planner.answers.row_lengths import rows_of
from lowtide.planner.plan import Plan, PlanError
from lowtide.planner.tracing_process import tracing_here

MODEL = LlamaConfig(
    vocab_size=1024, hidden_size=512, intermediate_size=1536, num_hidden_layers=16, num_attention_heads=8,
    num_key_value_heads=8, max_position_embeddings=1 << 20,
)  # fmt: skip
"""Its states are 850 MiB; a process takes 512 MiB of a GPU beside tensors."""
FEW: dict[str, Any] = {
    "per_device_train_batch_size": 1,
    "gradient_checkpointing": True,
    "checkpointing_policy": "full",
    "checkpointing_every": 1,
    "activation_offloading": False,
    "mlp_tile_tokens": None,
    "dataset_kwargs": {"skip_prepare_dataset": True},
}
"""With all of them set there is little to choose, and to trace."""


def planned(budget: str, length: int = 128, nodes: int = 1, **given: Any) -> Plan:
    more = {name: given.pop(name) for name in ("host_memory", "devices", "explain") if name in given}
    with tracing_here():
        return lowtide.plan(
            "sft", MODEL, Dataset.from_list(rows_of([length] * 8)), budget,
            **{"devices": "8xH100", "nodes": nodes, "explain": False, **more}, config=FEW | given,
        )  # fmt: skip


@pytest.mark.slow
def test_what_fits_one_device_has_whole_copies():
    plan = planned("4GiB")
    assert plan.chosen.way == "whole copies"
    assert not plan.settings
    assert plan.spread is not None
    assert plan.spread.host_bytes < 1 << 20  # the rows of a step
    assert plan.spread.tokens_per_second > 8 * 1000
    assert yaml.safe_load(plan.to_yaml())["num_processes"] == 8


@pytest.mark.slow
def test_states_that_fit_only_in_shards_are_sharded():
    plan = planned("800MiB")
    assert plan.chosen.way == "FSDP2"
    assert plan.settings == {"fsdp": True}
    assert plan.chosen.peak_bytes <= 800 << 20


@pytest.mark.slow
def test_shards_go_to_the_hosts_where_nothing_else_fits():
    plan = planned("620MiB")
    assert plan.settings == {"fsdp": True, "fsdp_config": {"offload_params": True}}
    assert plan.spread is not None
    assert plan.spread.host_bytes > 700 << 20
    message = r"FSDP2, in host memory is left out: the host of a node would hold .* and has 100.0 MiB"
    with pytest.raises(PlanError, match=message):
        planned("620MiB", host_memory="100MiB")


@pytest.mark.slow
def test_a_row_too_long_for_a_device_is_split():
    length = 32_768
    whole: dict[str, Any] = {"tokens_per_microbatch": length}  # rows in pieces would do as well
    with pytest.raises(PlanError):
        planned("2GiB", length, parallelism_config={"sp_size": 1}, fsdp=True, **whole)
    plan = planned("2GiB", length, **whole)
    sizes = plan.settings["parallelism_config"]
    assert sizes["sp_size"] > 1
    assert plan.settings["gradient_accumulation_steps"] == sizes["sp_size"]  # a step has as many rows as without
    assert plan.chosen.peak_bytes <= 2 << 30


@pytest.mark.slow
def test_a_row_too_long_for_a_device_that_runs_it_alone_is_cut():
    length = 32_768
    plan = planned("2GiB", length, parallelism_config={"sp_size": 1}, fsdp=True)
    assert plan.settings["tokens_per_microbatch"] < length
    assert plan.chosen.peak_bytes <= 2 << 30
    assert plan.settings["chain_storage"] == "host"
    assert plan.spread is not None
    assert plan.spread.host_bytes > 1 << 30


@pytest.mark.slow
def test_what_fits_nothing_is_one_message_with_the_least():
    message = r"nothing fits 540.0 MiB on each of 2 H100-80GB, .* smallest peak found"
    with pytest.raises(PlanError, match=message) as error:
        planned("540MiB", devices="2xH100")
    assert error.value.peak_bytes > 540 << 20
    assert error.value.settings["fsdp"] is True


def test_the_engine_that_a_user_names_is_kept():
    plan = planned("8GiB", fsdp=True)
    assert plan.chosen.way == "FSDP2"
    assert "fsdp" not in plan.settings
    assert plan.requested["fsdp"] is True


def test_sizes_that_do_not_make_the_devices_are_refused():
    with pytest.raises(ValueError, match="is 3, and there are 8 processes"):
        planned("8GiB", parallelism_config={"dp_shard_size": 3})


def test_a_pipeline_is_refused_which_is_not_predicted():
    with pytest.raises(ValueError, match="leave pipeline_parallel_size out"):
        planned("8GiB", pipeline_parallel_size=2)


@pytest.mark.slow
def test_nodes_multiply_and_say_what_a_token_costs():
    plan = planned("800MiB", nodes=4, explain=True)
    assert plan.spread is not None
    assert plan.spread.cluster.devices == 32
    assert plan.spread.cost is not None
    assert plan.spread.tokens_per_second > 0
    assert "num_processes" not in yaml.safe_load(plan.to_yaml())
    assert plan.launch("run.yaml").startswith("torchrun --nnodes 4 --nproc_per_node 8 ")


@pytest.mark.parametrize("more", [{"nodes": 2}, {"host_memory": "1GiB"}])
def test_nodes_need_devices(more):
    with pytest.raises(ValueError, match="need `devices`"):
        lowtide.plan("sft", MODEL, Dataset.from_list(rows_of([8])), "1GiB", device="l4", **more)


@pytest.mark.slow
def test_traces_that_compare_with_one_node_are_not_counted(monkeypatch):
    monkeypatch.delitem(FEW, "gradient_checkpointing")  # which one node takes, and two do not
    compared, alone = (planned("850MiB", 512, 2, explain=explain, devices="2xH100") for explain in (True, False))
    assert compared.spread is not None
    assert compared.spread.cost is not None
    assert compared.traces == alone.traces
