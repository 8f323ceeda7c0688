"""GRPO against a real server: what it writes is the policy's, step by step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from datasets import Dataset
from transformers import AutoModelForCausalLM

import lowtide
from lowtide.engine.forward import install
from lowtide.rollout.generators.vllm.http import ServerError
from lowtide.rollout.generators.vllm.label import StaleWeights
from lowtide.rollout.generators.vllm.limits import Limits
from lowtide.rollout.generators.vllm.remote import VLLMServerGenerator
from lowtide.rollout.generators.vllm.weights import Copies, buckets, to_bytes
from tests.support.references.parity_world import lora, tokenizer
from tests.support.vllm.vllm_world import (
    REQUESTS,
    SAMPLING,
    TOLERANCE,
    ServerProcess,
    distance,
    moved,
    needs_vllm,
    prompts,
    save,
    serving,
    small_model,
)

pytestmark = needs_vllm


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with serving(save(tmp_path_factory.mktemp("served")), "--max_lora_rank", "8") as running:
        yield running


def test_what_it_writes_is_by_the_weights_of_each_step(server: ServerProcess):
    model = small_model()
    generator = VLLMServerGenerator(server.url, model, timeout=60, bucket_bytes=50_000)
    found = []
    for version in range(3):
        generator.sync(model, version)
        found.append(generator.generate(model, REQUESTS, SAMPLING))
        assert distance(model, found[-1]) < TOLERANCE
        moved(model)
    assert [[each.token_ids for each in group] for group in found[0]] != [
        [each.token_ids for each in group] for group in found[1]
    ]
    assert all(each.finish == "stop" or len(each.token_ids) == 24 for group in found[0] for each in group)


def test_seeds_make_completions_again_whatever_else_is_written(server: ServerProcess):
    model = small_model()
    generator = VLLMServerGenerator(server.url, model, timeout=60)
    generator.sync(model, 0)
    together = generator.generate(model, REQUESTS, SAMPLING)
    alone = generator.generate(model, REQUESTS[1:], SAMPLING)
    assert [each.token_ids for each in together[1]] == [each.token_ids for each in alone[0]]
    assert len({tuple(each.token_ids) for each in together[0]}) > 1


def test_only_blocks_that_changed_travel_again(server: ServerProcess):
    model = small_model()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("self_attn" in name)
    generator = VLLMServerGenerator(server.url, model, timeout=60)
    generator.sync(model, 0)
    moved(model, "self_attn")
    moved(model, "lm_head")  # frozen, and written to all the same
    sent: list[int] = []
    send = generator.backend.send
    generator.backend.send = lambda label, bucket: (sent.append(len(bucket)), send(label, bucket))[1]  # type: ignore
    generator.sync(model, 1)
    assert distance(model, generator.generate(model, REQUESTS, SAMPLING)) < TOLERANCE
    assert sum(sent) < 0.8 * 4 * sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("dora", [False, True])
def test_adapters_travel_alone_or_merged(server: ServerProcess, dora: bool):
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules="all-linear", use_dora=dora, rank_pattern={"q_proj": 2})
    model = get_peft_model(small_model(), config)
    install(model)
    generator = VLLMServerGenerator(server.url, model, timeout=60, limits=Limits(checked_every=1))
    assert (generator.copied.merged is None) == (not dora)
    for version in range(4):
        generator.sync(model, version)
        assert distance(model, generator.generate(model, REQUESTS, SAMPLING)) < TOLERANCE
        moved(model, "lora_")


def test_a_base_of_another_run_is_told_and_sent_again(server: ServerProcess, caplog):
    from peft import get_peft_model

    model = get_peft_model(small_model(), lora())
    install(model)
    generator = VLLMServerGenerator(server.url, model, timeout=60, limits=Limits(checked_every=1))
    generator.sync(model, 0)
    base = small_model()
    moved(base)
    weights = to_bytes(next(buckets(Copies().lacking(base))))
    label = generator.label
    assert label is not None
    generator.backend.begin(label)
    generator.backend.send(label, weights)
    generator.backend.end(label, 1)  # with this run's label, by which alone nothing would be told
    moved(model, "lora_")
    generator.sync(model, 1)
    assert "All weights are sent again" in caplog.text
    assert distance(model, generator.generate(model, REQUESTS, SAMPLING)) < TOLERANCE


def test_two_runs_on_one_server_are_told(server: ServerProcess):
    model = small_model()
    first, second = (VLLMServerGenerator(server.url, model, timeout=60) for _ in range(2))
    first.sync(model, 0)
    second.sync(model, 0)
    with pytest.raises(StaleWeights, match="a server of its own"):
        first.generate(model, REQUESTS, SAMPLING)


def test_another_model_is_refused(server: ServerProcess):
    with pytest.raises(ValueError, match=r"serves another model .* hidden_size of 64, .* of 128"):
        VLLMServerGenerator(server.url, small_model(hidden_size=128), timeout=60)


def trainer(folder: Path, url: str, **more):
    peft = more.pop("peft_config", None)
    callbacks = more.pop("callbacks", None)
    given = {
        "max_steps": 4,
        "learning_rate": 2e-3,
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 16,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        "use_vllm": True,
        "vllm_mode": "server",
        "vllm_server_base_url": url,
        "vllm_server_timeout": 60,
    }
    return lowtide.GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(save(folder / "model")),
        reward_funcs=lambda completions, **_: [-len(each) / 20 for each in completions],
        args=lowtide.GRPOConfig(output_dir=str(folder / "out"), **given | more),
        train_dataset=Dataset.from_list(prompts()),
        processing_class=tokenizer(),
        peft_config=peft,
        callbacks=callbacks,
    )


@pytest.mark.parametrize("adapters", [False, True])
def test_grpo_trains_against_it(server: ServerProcess, tmp_path: Path, adapters: bool):
    training = trainer(tmp_path, server.url, peft_config=lora() if adapters else None, num_iterations=2)
    training.train()
    logs = [entry for entry in training.state.log_history if "loss" in entry]
    assert len(logs) == 4
    differences = [entry["sampling/sampling_logp_difference/max"] for entry in logs if "reward" in entry]
    assert differences
    assert max(differences) < 1e-4
    assert all(abs(entry["sampling/importance_sampling_ratio/mean"] - 1) < 1e-3 for entry in logs if "reward" in entry)


def test_a_server_that_dies_in_the_middle_is_told(tmp_path: Path):
    from transformers import TrainerCallback

    with serving(save(tmp_path / "served")) as server:

        class Killer(TrainerCallback):
            def on_step_end(self, args, state, control, **kwargs):
                if state.global_step == 2:
                    server.kill()

        training = trainer(tmp_path, server.url, callbacks=[Killer()])
        with pytest.raises(ServerError, match="cannot be reached, or went away"):
            training.train()
    assert training.state.global_step == 2
