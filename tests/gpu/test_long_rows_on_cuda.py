"""Rows in pieces on CUDA: the numbers of whole rows, and a peak that does not grow with them."""

import functools

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, Gemma2Config, GptOssConfig, LlamaConfig, Qwen3Config

from tests.support.runs.cuda_sft import build, losses, rows, train

FAMILIES = {
    "llama": {"family": LlamaConfig},
    "windows": {"family": Qwen3Config, "use_sliding_window": True, "sliding_window": 100, "max_window_layers": 0},
    "soft-caps": {"family": Gemma2Config, "sliding_window": 64},
    "sinks": {"family": GptOssConfig, "sliding_window": 64, "num_local_experts": 4, "router_aux_loss_coef": 0.0},
}
PRECISIONS = {"float32": ({"bf16": False, "tf32": False}, 2e-4), "bfloat16": ({"bf16": True}, 2e-2)}
SGD = {"optim": "sgd", "learning_rate": 0.1, "max_steps": 4, "per_device_train_batch_size": 4}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("storage", ["device", "host"])
@pytest.mark.parametrize("family", FAMILIES)
def test_pieces_give_the_numbers_of_whole_rows(family, storage, precision, tmp_path):
    options, tolerance = PRECISIONS[precision]
    dataset = rows(16, 700, 500)
    whole, cut = (
        train(tmp_path / name, build(**FAMILIES[family]), dataset, **SGD, **options, **more)
        for name, more in (
            ("whole", {}),
            ("cut", {"tokens_per_microbatch": 256, "chain_storage": storage}),
        )
    )
    torch.testing.assert_close(losses(cut), losses(whole), rtol=tolerance, atol=0)
    norms = [torch.tensor([e["grad_norm"] for e in t.state.log_history if "grad_norm" in e]) for t in (cut, whole)]
    torch.testing.assert_close(*norms, rtol=10 * tolerance, atol=0)


def test_keys_wait_on_the_host(tmp_path, peak_above_start):
    """A row of 65,536 tokens, whose keys and values and their gradients take some 200 MB."""
    row = torch.randint(2, 50, (65_536,), generator=torch.Generator().manual_seed(0)).tolist()
    dataset = Dataset.from_dict({"input_ids": [row], "labels": [row]})
    wide = {"num_hidden_layers": 6, "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4}
    options = {**SGD, "per_device_train_batch_size": 1, "max_steps": 2, "bf16": True, "tokens_per_microbatch": 4096}
    found = {}
    for storage in ("device", "host"):
        run = functools.partial(
            train, tmp_path / storage, build_wide(**wide), dataset, **options, chain_storage=storage
        )
        found[storage] = peak_above_start(run)
    layer = 65_536 * 2 * 4 * 64 * 2  # keys and values of a layer, in bytes
    assert found["host"] < found["device"] - 6 * layer


def build_wide(**changes):
    torch.manual_seed(0)
    config = {"vocab_size": 500, "intermediate_size": 512, "head_dim": 64, "max_position_embeddings": 65_536}
    return AutoModelForCausalLM.from_config(LlamaConfig(**config, **changes))
