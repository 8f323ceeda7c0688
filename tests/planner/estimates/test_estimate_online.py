"""What is predicted of a run whose policy writes: its phases, and the reward models beside it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig

import lowtide
from lowtide.demo.model import make_tokenizer
from lowtide.planner.answers.row_lengths import rows_of
from lowtide.planner.devices import device_named
from lowtide.planner.estimate import Estimate, estimate_run
from lowtide.planner.tracing.fake_run import VLLM_NOT_COUNTED, FakeRun
from lowtide.planner.tracing.reward_models import DescribedRewards
from lowtide.planning import estimate_method
from lowtide.run.options.configs import method_of

SIZES: dict[str, Any] = {
    "vocab_size": 500,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
POLICY = LlamaConfig(**SIZES)
SCORER = LlamaConfig(**{**SIZES, "hidden_size": 48, "num_hidden_layers": 3}, num_labels=1)
PROMPTS = [7, 11, 5, 9]
CPU = device_named("cpu")


def run_of(
    folder: Any, method: str = "GRPO", reward: Any = None, inputs: Any = None, model: Any = POLICY, **options: Any
) -> FakeRun:
    always = {"output_dir": str(folder), "use_cpu": True, "report_to": "none", "save_strategy": "no"}
    small = {"per_device_train_batch_size": 4, "max_completion_length": 12}
    more = {"num_generations": 4} if method == "GRPO" else {}
    config = getattr(lowtide, f"{method}Config")(**always | small | more | options)
    rows = Dataset.from_list(rows_of(PROMPTS, writes=True))
    rewards = DescribedRewards.of(reward)
    return FakeRun(method_of(config), config, model, rows, prepared=True, rewards=rewards, **(inputs or {}))


def estimated(folder: Any, method: str = "GRPO", reward: Any = None, inputs: Any = None, **options: Any) -> Estimate:
    return estimate_run(run_of(folder, method, reward, inputs, **options), CPU, beside=0)


def scorer() -> nn.Module:
    return AutoModelForSequenceClassification.from_config(copy.deepcopy(SCORER))


def weight_bytes(model: nn.Module) -> int:
    return sum(each.numel() * each.element_size() for each in (*model.parameters(), *model.buffers()))


def same_length(completions: list, **_: Any) -> list[float]:
    return [1.0] * len(completions)


@pytest.mark.slow
@pytest.mark.parametrize("reward", [SCORER, scorer], ids=["config", "model"])
def test_the_weights_of_a_reward_model_are_in_all_phases(reward, tmp_path):
    found = estimated(tmp_path, reward=reward() if reward is scorer else reward)
    weights = weight_bytes(scorer())
    assert weights > 0
    assert [held["reward"] for held in found.phases.values()] == [weights] * len(found.phases)
    assert found.peak_bytes - estimated(tmp_path).peak_bytes >= weights


def test_rewarding_is_a_phase_between_writing_and_scoring(tmp_path):
    phases = [*estimated(tmp_path, reward=[same_length, SCORER], beta=0.1).phases]
    order = ["generate", "reward", "score"]
    assert [phase for phase in phases if phase in order] == order


@pytest.mark.slow
def test_the_forward_of_a_reward_model_is_counted(tmp_path):
    short = estimated(tmp_path, reward=SCORER).phases["reward"]["activations"]
    long = estimated(tmp_path, reward=SCORER, max_completion_length=24).phases["reward"]["activations"]
    assert 1.5 * short < long < 3 * short


@pytest.mark.slow
def test_a_reward_that_is_a_function_takes_nothing(tmp_path):
    without = estimated(tmp_path)
    assert "reward" not in without.phases
    for reward in (same_length, "length", ["format", same_length]):
        assert estimated(tmp_path, reward=reward) == without


@pytest.mark.slow
def test_a_reward_model_by_its_name_is_counted_in_the_dtype_of_its_files(tmp_path):
    model = scorer().to(torch.bfloat16)
    model.save_pretrained(tmp_path / "scorer")
    found = estimated(tmp_path, reward=str(tmp_path / "scorer"))
    assert found.phases["generate"]["reward"] < 0.51 * weight_bytes(scorer())
    (described,) = DescribedRewards.of([str(tmp_path / "scorer")]).models
    assert described.dtype == torch.bfloat16


@pytest.mark.slow
def test_a_reward_model_that_cannot_be_described_is_named(tmp_path):
    quantized = LlamaConfig(**SIZES, quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    for reward, name in ((nn.Linear(2, 1), "Linear"), (quantized, "llama")):
        (note,) = estimated(tmp_path, reward=reward).notes
        assert note.startswith(f"reward model {name} is not counted")


@pytest.mark.slow
def test_two_micro_batches_of_a_reward_model_take_no_more_than_one(tmp_path, monkeypatch):
    whole = estimated(tmp_path, reward=SCORER, num_generations=4)
    monkeypatch.setattr("lowtide.planner.tracing.reward_models.TOKENS", 30)
    cut = estimated(tmp_path, reward=SCORER, num_generations=4)
    assert cut.phases["reward"]["activations"] < whole.phases["reward"]["activations"]


@pytest.mark.slow
def test_keys_of_a_deep_model_are_held_in_all_layers(tmp_path):
    deep = LlamaConfig(**{**SIZES, "num_hidden_layers": 12})
    for every in (1, 2):
        keys = estimated(tmp_path, model=deep, checkpointing_every=every).phases["generate"]["keys"]
        assert keys == 2 * 12 * SIZES["num_key_value_heads"] * 8 * 4 * (11 + 4 * 12)


@pytest.mark.slow
def test_generate_of_transformers_repeats_prompts(tmp_path):
    own, theirs = (
        estimated(tmp_path, generation_backend=each).phases["generate"]["keys"] for each in ("lowtide", "transformers")
    )
    token = 2 * SIZES["num_hidden_layers"] * SIZES["num_key_value_heads"] * 8 * 4  # bytes of its keys and values
    assert own == token * (11 + 4 * 12)
    assert theirs == token * 4 * (11 + 12)


def linear_numbers(model: nn.Module) -> int:
    return sum(each.weight.numel() for each in model.modules() if isinstance(each, nn.Linear))


def test_a_copy_to_write_by_is_counted_where_gradients_will_be(tmp_path):
    found = estimated(tmp_path, bf16=True)
    policy = AutoModelForCausalLM.from_config(POLICY)
    assert found.phases["generate"]["weights"] == weight_bytes(policy) + 2 * linear_numbers(policy)
    assert found.phases["backward"]["weights"] == weight_bytes(policy)


@pytest.mark.slow
def test_a_copy_with_merged_adapters_is_counted_when_asked_for(tmp_path):
    lora = {"peft_config": LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear")}
    own, merged = (
        estimated(tmp_path, inputs=lora, generation_weights=each).phases["generate"]["weights"]
        for each in ("auto", "copy")
    )
    policy = AutoModelForCausalLM.from_config(POLICY)
    layers = sum(each.weight.numel() for each in policy.model.modules() if isinstance(each, nn.Linear))
    assert merged - own == 4 * layers


@pytest.mark.slow
def test_merged_experts_are_counted_when_asked_for(tmp_path):
    sizes = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}
    mixture = AutoConfig.for_model("qwen3_moe", **SIZES, **sizes)
    stacks = ["experts.gate_up_proj", "experts.down_proj"]
    adapters = LoraConfig(task_type="CAUSAL_LM", target_modules=[], target_parameters=stacks)
    own, merged = (
        estimated(tmp_path, model=mixture, inputs={"peft_config": adapters}, generation_weights=each).phases["generate"]
        for each in ("trained", "copy")
    )
    numbers = sum(each.numel() for each in AutoModelForCausalLM.from_config(mixture).parameters() if each.dim() == 3)
    assert merged["weights"] - own["weights"] == 4 * numbers


@pytest.mark.slow
def test_a_budget_of_keys_lets_prompts_run_beside_what_is_written(tmp_path):
    long = {"max_completion_length": 64, "gradient_checkpointing": False}
    whole = estimated(tmp_path, **long).phases["generate"]
    cut = estimated(tmp_path, tokens_per_generation_batch=11 + 4 * 64, **long).phases["generate"]
    assert cut["keys"] == whole["keys"]
    assert cut["activations"] >= whole["activations"]


@pytest.mark.parametrize(
    ("method", "options", "scores"),
    [
        ("GRPO", {}, False),
        ("GRPO", {"beta": 0.1}, True),
        ("GRPO", {"top_entropy_quantile": 0.5}, True),
        ("RLOO", {"num_generations": 4}, True),
        ("OnlineDPO", {}, True),
        ("PPO", {"kl_coef": 0.0}, True),
        ("PPO", {}, True),
    ],
)
def test_what_is_scored_before_an_update_is_counted(method, options, scores, tmp_path):
    assert ("score" in estimated(tmp_path, method, **options).phases) is scores


@pytest.mark.slow
def test_the_memory_of_vllm_is_not_counted_and_that_is_said(tmp_path):
    assert VLLM_NOT_COUNTED in estimated(tmp_path, use_vllm=True).notes
    server = {"vllm_mode": "server", "vllm_server_base_url": "http://localhost:1"}
    assert VLLM_NOT_COUNTED not in estimated(tmp_path, use_vllm=True, **server).notes
    assert VLLM_NOT_COUNTED not in estimated(tmp_path).notes


def test_the_policy_of_vllm_is_scored_and_holds_no_keys(tmp_path):
    found = estimated(tmp_path, use_vllm=True)
    assert "score" in found.phases
    assert "keys" not in found.phases["generate"]


@pytest.mark.slow
def test_a_budget_counts_the_reward_model(tmp_path):
    tokenizer = make_tokenizer()
    described = AutoConfig.for_model("llama", **{**SIZES, "vocab_size": len(tokenizer)})
    rows = Dataset.from_list([{"prompt": f"{number} + 1 ="} for number in range(8)])
    small = {"output_dir": str(tmp_path / "run"), "max_completion_length": 8, "use_cpu": True, "report_to": "none"}
    small |= {"per_device_train_batch_size": 4, "num_generations": 4, "save_strategy": "no"}
    made = lowtide.GRPOTrainer(
        AutoModelForCausalLM.from_config(described),
        reward_funcs=scorer(),
        reward_processing_classes=tokenizer,
        args=lowtide.GRPOConfig(**small, memory_budget="16GiB"),
        train_dataset=rows,
        processing_class=tokenizer,
    )
    with_function = estimate_method("grpo", described, rows, config=small, processing_class=tokenizer)
    assert made.predicted_bytes - with_function.peak_bytes >= weight_bytes(scorer())


@pytest.mark.slow
def test_a_second_adapter_adds_its_weights_and_no_activations(tmp_path):
    adapters = {"peft_config": LoraConfig(r=8, target_modules=["q_proj", "down_proj"])}
    plain, two = (
        estimated(tmp_path, "PPO", inputs=adapters, value_adapter=second, gradient_checkpointing=False)
        for second in (False, True)
    )
    lora = sum(4 * 8 * (wide + 32) for wide in (32, 64)) * SIZES["num_hidden_layers"]
    head, other = 4 * 33, 2 * 4 * 33  # as trained and in the base; what shares the trunk has both too
    for phase, held in two.phases.items():
        assert held["weights"] - plain.phases[phase]["weights"] == pytest.approx(lora, abs=head + other)
    for phase in ("forward", "head", "backward"):
        assert two.phases[phase]["activations"] == pytest.approx(plain.phases[phase]["activations"], rel=0.01)
    last = two.phases["optimizer"]
    assert last["optimizer"] - plain.phases["optimizer"]["optimizer"] == pytest.approx(2 * lora, rel=0.1)


def test_what_ranks_share_has_a_second_adapter_too(tmp_path):
    adapters = {"peft_config": LoraConfig(r=8, target_modules=["q_proj"])}
    names = {each.name for each in run_of(tmp_path, "PPO", inputs=adapters, value_adapter=True).layout().parameters}
    assert any(".default." in name for name in names)
    assert {name.replace(".default.", ".value_function.") for name in names if ".default." in name} <= names
