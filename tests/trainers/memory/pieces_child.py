"""Trains a small model with a `memory_budget` that is as large as the predicted peak of its longest row whole, which
leaves nothing for what a prediction may miss. Prints as JSON what was chosen, the tokens of rows that ran in pieces,
and peaks.

The arguments: a folder, and the tokens of the longest row.
"""

import json
import sys
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, LlamaConfig

import lowtide
from lowtide.demo.model import make_tokenizer
from lowtide.memory.allocators.measure import peak_resident_bytes
from lowtide.step.cut import Part


def main(folder: str, tokens: int) -> None:
    torch.set_num_threads(1)
    config = LlamaConfig(
        vocab_size=1000, hidden_size=256, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=tokens,
    )  # fmt: skip
    rows = [[token % 999 + 1 for token in range(length)] for length in (tokens, tokens // 8)]
    data = Dataset.from_dict({"input_ids": rows, "labels": rows})
    options: dict[str, Any] = {
        "output_dir": folder, "max_steps": 2, "per_device_train_batch_size": 2, "max_length": None, "use_cpu": True,
        "gradient_checkpointing": False, "checkpointing_policy": "full", "checkpointing_every": 1,
        "activation_offloading": False, "mlp_tile_tokens": None, "optimizer_in_backward": False, "bf16": False,
        "report_to": "none", "save_strategy": "no", "disable_tqdm": True,
        "dataset_kwargs": {"skip_prepare_dataset": True},
    }  # fmt: skip
    whole = lowtide.estimate(lowtide.SFTConfig(**options | {"tokens_per_microbatch": tokens}), config, data)
    made = lowtide.SFTTrainer(
        AutoModelForCausalLM.from_config(config),
        lowtide.SFTConfig(**options, memory_budget=whole.peak_bytes),
        train_dataset=data,
        processing_class=make_tokenizer(),
    )
    cut, of = [], Part.of

    def noted(batch: Any, pieces: Any = (), *more: Any) -> Part:
        if pieces:
            cut.append(batch.tokens)
        return of(batch, pieces, *more)

    Part.of = noted  # type: ignore[method-assign]
    made.train()
    found = {"settings": made.planned.settings, "predicted": made.planned.peak_bytes, "cut": cut}
    print(json.dumps(found | {"peak": peak_resident_bytes(), "whole": whole.peak_bytes}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
