"""`python -m tests.support.vllm.colocated_vllm FOLDER named|made`: GRPO with vLLM in the process that trains, which
prints what it logged as JSON. In a process of its own, since vLLM changes torch for good."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM

import lowtide
from lowtide.rollout.generators.generator import Request, Sampling
from lowtide.rollout.generators.vllm.colocated import VLLMColocatedGenerator
from lowtide.rollout.generators.vllm.label import StaleWeights
from tests.support.references.parity_world import lora, tokenizer
from tests.support.vllm.vllm_world import prompts, save, small_model

MARK = "LOGGED "


def main(folder: Path, named: bool) -> None:
    """Trains a saved model, or one that was made in code, with adapters."""
    training = lowtide.GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(save(folder / "model")) if named else small_model(),
        reward_funcs=lambda completions, **_: [-len(each) / 20 for each in completions],
        args=lowtide.GRPOConfig(
            output_dir=str(folder / "out"),
            max_steps=3,
            learning_rate=2e-3,
            per_device_train_batch_size=8,
            num_generations=4,
            max_completion_length=16,
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            use_cpu=True,
            bf16=False,
            use_vllm=True,
            vllm_max_model_length=192,
            vllm_gpu_memory_utilization=0.12,
        ),
        train_dataset=Dataset.from_list(prompts()),
        processing_class=tokenizer(),
        peft_config=None if named else lora(),
    )
    generator = training.maker.generator
    assert isinstance(generator, VLLMColocatedGenerator)
    training.train()
    print(MARK + json.dumps({"logs": training.state.log_history, "stale": stale(training, generator)}))


def stale(training: lowtide.GRPOTrainer, generator: VLLMColocatedGenerator) -> str:
    """What is said of weights that changed since they were copied."""
    generator.sync(training.model, 3)
    generator.generate(training.model, [Request([5, 6])], Sampling(4))
    with torch.no_grad():
        next(p for p in training.model.parameters() if p.requires_grad).add_(1.0)
    try:
        generator.generate(training.model, [Request([5, 6])], Sampling(4))
    except StaleWeights as error:
        return str(error)
    return ""


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] == "named")
