"""lowtide's GRPO and RLOO against TRL 1.16's: steps from the same weights, on the same completions.

A `rollout_func` writes the same completions in both libraries, which depend on the prompt and on how often it was
asked. TRL pads and repeats prompts; so this compares prefix sharing, groups that are kept together, advantages, every
loss and every option with the plain computation inside a real run.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM

from tests.support.references.parity_world import (
    ACCUMULATED,
    COMMON,
    EXTREMES,
    assert_metrics_agree,
    build_model,
    lora,
    runs_of,
    sums,
    tokenizer,
    trained_alike,
    trained_before,
    user,
)

trl = pytest.importorskip("trl", reason="parity is against trl==1.16.0: install the bench extra")
lowtide = pytest.importorskip("lowtide")
grpo_module = pytest.importorskip("trl.trainer.grpo_trainer")
gmpo_module = pytest.importorskip("trl.experimental.gmpo")
rloo_module = pytest.importorskip("trl.trainer.rloo_trainer")

SETTINGS = {
    **{name: value for name, value in COMMON.items() if name != "train_sampling_strategy"},
    **{"learning_rate": 1e-3, "per_device_train_batch_size": 8, "max_completion_length": 24},
}


@dataclass(frozen=True)
class Case:
    """One way to train; `flags` go to both libraries, `ours` to lowtide alone."""

    flags: dict[str, Any] = field(default_factory=dict)
    ours: dict[str, Any] = field(default_factory=dict)
    method: str = "GRPO"
    lora: bool = False
    came: bool = False
    """Whether the adapters come with the model, trained."""
    model: str = "llama"
    chat: bool = False
    tools: bool = False
    """Some tokens are of an environment."""
    two: bool = False
    """Two reward functions, of which one does not apply to all."""


def flags(**given: Any) -> Case:
    return Case({"num_generations": 4, **given})


SEVERAL = {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "num_iterations": 2}
"""Steps that learn from what an earlier policy wrote."""
WITH_VLLM = {"use_vllm": True, "num_generations": 4}
"""A `rollout_func` writes all the same; what it says of its log-probabilities is taken for vLLM's."""
TYPES = ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "vespo")
CASES = {
    **{name: flags(loss_type=name) for name in TYPES},
    "luspo": flags(loss_type="luspo", importance_sampling_level="sequence"),
    "luspo of tokens": flags(loss_type="luspo"),
    **{f"{name}, several iterations": flags(loss_type=name, **SEVERAL) for name in (*TYPES, "luspo") if name != "bnpo"},
    "bnpo, several iterations": flags(loss_type="bnpo", **SEVERAL | {"gradient_accumulation_steps": 1}),
    "gspo": flags(loss_type="grpo", importance_sampling_level="sequence", epsilon=3e-4, epsilon_high=4e-4, **SEVERAL),
    "two-sided clipping": flags(delta=1.5, epsilon_high=0.28, **SEVERAL),
    "no reward scaling": flags(scale_rewards="none"),
    "rewards scaled by the batch": flags(scale_rewards="batch"),
    "reference": flags(beta=0.1),
    "reference, several iterations": flags(beta=0.1, **SEVERAL),
    "reference, without bias correction": flags(beta=0.1, use_bias_correction_kl=False),
    "reference that follows": flags(beta=0.1, sync_ref_model=True, ref_model_sync_steps=2),
    "lora": Case({"num_generations": 4, "learning_rate": 5e-3}, lora=True),
    "lora with a reference": Case({"num_generations": 4, "beta": 0.1, "learning_rate": 5e-3}, lora=True),
    "lora trained before": Case({"num_generations": 4, "beta": 0.1, "learning_rate": 5e-3}, lora=True, came=True),
    "truncated completions masked": flags(mask_truncated_completions=True),
    "truncated completions masked, grpo": flags(mask_truncated_completions=True, loss_type="grpo"),
    "tokens of highest entropy": flags(top_entropy_quantile=0.3),
    "entropy bonus": flags(entropy_coef=0.1),
    "entropy bonus, adaptive": flags(entropy_coef=0.05, use_adaptive_entropy=True, entropy_target=5.0),
    "off-policy completions masked": flags(off_policy_mask_threshold=0.01, **SEVERAL),
    "two rewards": Case({"num_generations": 4, "reward_weights": [1.0, 0.3]}, two=True),
    "two rewards, normalized first": Case(
        {"num_generations": 4, "multi_objective_aggregation": "normalize_then_sum"}, two=True
    ),
    "temperature": flags(temperature=0.7, beta=0.05),
    "conversations": Case({"num_generations": 4}, chat=True),
    "tokens of an environment": Case({"num_generations": 4}, tools=True),
    "tied head": Case({"num_generations": 4}, model="tied"),
    "mixture of experts": Case({"num_generations": 4, "router_aux_loss_coef": 0.0}, model="mixtral"),
    "accumulated": flags(gradient_accumulation_steps=2, loss_type="grpo"),
    "padded by us": Case({"num_generations": 4}, {"padding_free": False}),
    "prompts repeated": Case({"num_generations": 4}, {"prefix_sharing": False}),
    "within a token budget": Case({"num_generations": 4, "beta": 0.1}, {"tokens_per_microbatch": 130}),
    "one group": flags(num_generations=8),
    **{
        f"vllm, {mode}": Case(WITH_VLLM | {"vllm_importance_sampling_mode": mode, **bounds})
        for mode, bounds in {
            "token_truncate": {"vllm_importance_sampling_clip_min": 0.8, "vllm_importance_sampling_clip_max": 1.5},
            "token_mask": {"vllm_importance_sampling_clip_min": 0.5},
            "sequence_truncate": {},
            "sequence_mask": {"vllm_importance_sampling_clip_max": 50.0},
        }.items()
    },
    "vllm, several iterations": Case(WITH_VLLM | SEVERAL | {"vllm_importance_sampling_mode": "token_truncate"}),
    "vllm, vespo": Case(WITH_VLLM | {"loss_type": "vespo", "vllm_importance_sampling_mode": "token_mask"}),
    "vllm, vespo, several iterations": Case(
        WITH_VLLM | SEVERAL | {"loss_type": "vespo", "vllm_importance_sampling_mode": "token_truncate"}
    ),
    "vllm, off-policy completions masked": Case(
        WITH_VLLM | {"off_policy_mask_threshold": 0.05, "vllm_importance_sampling_mode": "token_truncate"}
    ),
    "vllm, not corrected": Case(WITH_VLLM | {"vllm_importance_sampling_correction": False}),
    "vllm, tokens of an environment": Case(
        WITH_VLLM | {"vllm_importance_sampling_mode": "sequence_truncate"}, tools=True
    ),
    "vllm, truncated completions masked": Case(
        WITH_VLLM | {"vllm_importance_sampling_mode": "sequence_truncate", "mask_truncated_completions": True}
    ),
    "gmpo": Case({"num_generations": 4}, method="GMPO"),
    "gmpo, several iterations": Case({"num_generations": 4, **SEVERAL}, method="GMPO"),
    "gmpo, narrow": Case({"num_generations": 4, "epsilon": 2e-3, "epsilon_high": 4e-3, **SEVERAL}, method="GMPO"),
    "gmpo with a reference": Case({"num_generations": 4, "beta": 0.1}, method="GMPO"),
    "gmpo, lora": Case({"num_generations": 4, "learning_rate": 5e-3}, method="GMPO", lora=True),
    "gmpo within a token budget": Case({"num_generations": 4}, {"tokens_per_microbatch": 130}, method="GMPO"),
    "rloo": Case({"num_generations": 4}, method="RLOO"),
    "rloo, two completions": Case({}, method="RLOO"),
    "rloo without a reference": Case({"num_generations": 4, "beta": 0.0}, method="RLOO"),
    "rloo, several iterations": Case({"num_generations": 4, **SEVERAL}, method="RLOO"),
    "rloo, normalized": Case({"num_generations": 4, "normalize_advantages": True}, method="RLOO"),
    "rloo, clipped rewards": Case({"num_generations": 4, "reward_clip_range": (-0.4, 0.4)}, method="RLOO"),
    "rloo, lora": Case({"num_generations": 4, "learning_rate": 5e-3}, method="RLOO", lora=True),
    "rloo, lora trained before": Case(
        {"num_generations": 4, "learning_rate": 5e-3}, method="RLOO", lora=True, came=True
    ),
    "rloo, two rewards": Case({"num_generations": 4}, method="RLOO", two=True),
}
QUICK = ("grpo, several iterations", "rloo")
LONG = ("grpo", "gmpo", "reference", "lora", "rloo", "dapo, several iterations", "rloo, several iterations")


class Writer:
    """A `rollout_func`: completions of random tokens, some of which end; the same again from a new writer."""

    def __init__(self, tools: bool, vllm: bool) -> None:
        self.asked: dict[str, int] = {}
        self.tools, self.vllm = tools, vllm

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        made: dict[str, Any] = {"prompt_ids": [], "completion_ids": [], "logprobs": []}
        masks = []
        for prompt in prompts:
            text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
            times = self.asked[text] = self.asked.get(text, 0) + 1
            rng = random.Random(f"{text} {times}")
            ids = [rng.randrange(3, 300) for _ in range(rng.randint(2, 24))]
            ids += [tokenizer().eos_token_id] * (rng.random() < 0.6)
            ids = ids[:24]
            encoded: Any = (
                tokenizer()(prompt)["input_ids"]
                if isinstance(prompt, str)
                else tokenizer().apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
            )
            made["prompt_ids"].append(encoded)
            made["completion_ids"].append(ids)
            made["logprobs"].append([self.logprob(rng) for _ in ids])
            masks.append([int(rng.random() < 0.8) for _ in ids[:-1]] + [1])
        return made | ({"env_mask": masks} if self.tools else {})

    def logprob(self, rng: random.Random) -> float:
        """Of a token; of vLLM's, about that of the model, but for some that it does not say."""
        if not self.vllm:
            return -rng.random() * 8
        return float("nan") if rng.random() < 0.05 else -5.8 + rng.gauss(0, 0.5)


class NoVLLM:
    """In the place of what holds vLLM's weights, in both libraries."""

    def __init__(self, *args: Any, **named: Any) -> None:
        self.synced: list[int] = []

    def sync_weights(self) -> None:
        pass

    def sync(self, model: Any, version: int) -> None:
        self.synced.append(version)


def brief(completions: list[Any], **kwargs: Any) -> list[float]:
    """A reward that differs within a group.

    It is a whole number of sixteenths. So equal rewards of a group have an advantage of 0 in TRL too, which computes in
    float32: of others 1e-8 would be left there, and AdamW makes a whole step of it.
    """
    return [-len(str(each)) / 16 for each in completions]


def vowels(completion_ids: list[list[int]], number: list[int], **kwargs: Any) -> list[float | None]:
    """A reward that applies to some completions alone, and reads a column."""
    return [
        None if len(ids) % 3 == 0 else (sum(ids) + n) % 7 / 7 for ids, n in zip(completion_ids, number, strict=True)
    ]


def rows(count: int, chat: bool) -> list[dict[str, Any]]:
    questions = [question for question, _ in sums(count)]
    return [{"prompt": [user(q)] if chat else q, "number": n} for n, q in enumerate(questions)]


def build_trainer(library: Any, case: Case, folder: Any, steps: int, more: dict[str, Any] | None = None) -> Any:
    place = gmpo_module if case.method == "GMPO" and library is trl else library
    config = getattr(place, f"{case.method}Config")(
        output_dir=str(folder), **SETTINGS | {"max_steps": steps} | case.flags | (more or {})
    )
    arguments: dict[str, Any] = {}
    if case.lora:
        torch.manual_seed(1)
        arguments["peft_config"] = lora()
    model: Any = AutoModelForCausalLM.from_pretrained(saved(case.model, folder))  # TRL loads its reference from there
    if case.came:
        model = trained_before(model, arguments.pop("peft_config"))
    writer = Writer(case.tools, bool(case.flags.get("use_vllm")))
    if library is lowtide or case.method != "RLOO":
        arguments["rollout_func"] = writer
    trainer = getattr(place, f"{case.method}Trainer")(
        model=model,
        reward_funcs=[brief, vowels] if case.two else brief,
        args=config,
        train_dataset=Dataset.from_list(rows(40, case.chat)),
        processing_class=tokenizer(),
        **arguments,
    )
    if library is not lowtide and case.method == "RLOO":  # which has no rollout_func
        put_writer_into(trainer, writer)
    return trainer


def saved(model: str, folder: Any) -> str:
    """The folder of a model that is saved."""
    build_model(model).save_pretrained(str(folder / "model"))
    return str(folder / "model")


def put_writer_into(trainer: Any, writer: Writer) -> None:
    def generate(prompts: list[Any]) -> tuple[Any, Any, Any]:
        made = writer(prompts, trainer)
        texts = trainer.processing_class.batch_decode(made["completion_ids"], skip_special_tokens=True)
        return made["prompt_ids"], made["completion_ids"], texts

    trainer._generate = generate


UNLIKE = ("step_time",)
OF_MASKED = tuple(f"sampling/importance_sampling_ratio/{of}" for of in ("min", "mean", "max"))
"""TRL counts completions that are masked with a ratio of 1."""


@runs_of(CASES, QUICK, LONG)
def test_steps_agree_with_trl(name, steps, tmp_path, monkeypatch):
    """The loss, the gradient's norm and the metrics of every step."""
    case = CASES[name]
    for module in (grpo_module, rloo_module):  # groups stay together here; TRL deals a window's completions out
        monkeypatch.setattr(module, "shuffle_sequence_dict", lambda batch: batch)
    monkeypatch.setattr(grpo_module, "VLLMGeneration", NoVLLM)
    monkeypatch.setattr("lowtide.run.writing.make_vllm_generator", lambda *_: (NoVLLM(), "nobody"))
    theirs = build_trainer(trl, case, tmp_path / "theirs", steps)
    ours = build_trainer(lowtide, case, tmp_path / "ours", steps, case.ours)
    expected, actual = trained_alike(theirs, ours, steps)
    scale = max(expected["loss"].abs().max().item(), 0.1)
    torch.testing.assert_close(actual["grad_norm"], expected["grad_norm"], rtol=2e-3, atol=1e-5)
    torch.testing.assert_close(actual["loss"], expected["loss"], rtol=1e-4, atol=1e-4 * scale)
    accumulated = case.flags.get("gradient_accumulation_steps", 1) > 1
    unlike = [*UNLIKE, *EXTREMES * accumulated, *OF_MASKED * case.flags.get("mask_truncated_completions", False)]
    if case.tools:
        unlike.append("num_tokens")
    assert_metrics_agree(actual, expected, unlike=unlike, near=ACCUMULATED if accumulated else {})
