"""The peak of a run on conversations of several rounds, as it is predicted and as tensors really hold it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, LlamaConfig

import lowtide
from lowtide import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer
from tests.support.memory.live_bytes import LivingBytes
from tests.support.runs.preference_runs import make_tokenizer

pytestmark = pytest.mark.slow
DROPPING = (
    "{% for m in messages %}{{ m['role'][0] }}:"
    "{% if m['role'] == 'assistant' and loop.last %}[{{ m.thinking }}]{% endif %}{{ m['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def talk(rounds: int, thought: int) -> list[dict[str, str]]:
    turn = [{"role": "user", "content": "And then?" * 2, "thinking": ""}]
    return [*turn, {"role": "assistant", "content": "It is so." * 3, "thinking": "well " * thought}] * rounds


def chats() -> list[dict[str, Any]]:
    return [{"messages": talk(10, 16 + number)} for number in range(2)]


def pairs() -> list[dict[str, Any]]:
    made = [(talk(6, 16 + number), talk(2, 10)) for number in range(2)]
    return [{"prompt": one[:1], "chosen": one[1:], "rejected": other[1:]} for one, other in made]


CASES: dict[str, Any] = {
    "chats": (SFTTrainer, SFTConfig, chats, {"assistant_only_loss": True, "gradient_checkpointing": False}),
    "pairs": (DPOTrainer, DPOConfig, pairs, {"gradient_checkpointing": False}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_peak_of_rounds_is_predicted(case: str, tmp_path: Path) -> None:
    kind, config_class, make, options = CASES[case]
    tokenizer, made = make_tokenizer(), Dataset.from_list(make())
    tokenizer.chat_template = DROPPING
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=4096,
    )
    args = config_class(
        output_dir=str(tmp_path),
        per_device_train_batch_size=2,
        max_steps=1,
        max_length=None,
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        rehearsal=False,
        **options,
    )
    predicted = lowtide.estimate(args, config, dataset=made, processing_class=tokenizer)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    run = kind(model, args=args, train_dataset=made, processing_class=tokenizer)
    living = LivingBytes()
    with living, living.during("all"):
        run.train()
    assert predicted.tensor_bytes == pytest.approx(living.peaks["all"], rel=0.04)
