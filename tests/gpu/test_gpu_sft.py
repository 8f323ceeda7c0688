"""Supervised fine-tuning on CUDA: the numbers of a CPU run in float32, and a peak that the vocabulary hardly moves."""

import pytest
import torch
from transformers import Gemma2Config

from lowtide.ops.logits.linear_logprobs import CHUNK_BYTES
from tests.support.runs.cuda_sft import SHAPE, build, losses, rows, train

FAMILIES = {
    "llama": {},
    "gemma2": {"family": Gemma2Config, "sliding_window": 16},  # soft-caps in attention and head, and windows
}
PRECISIONS = {
    "float32": ({"bf16": False, "tf32": False}, 1e-4),
    "bfloat16": ({"bf16": True}, 2e-2),
    "float16": ({"bf16": False, "fp16": True}, 5e-2),  # its scaler may skip the first steps
}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_losses_are_those_of_a_cpu_in_float32(family, precision, tmp_path):
    dataset, (options, tolerance) = rows(64, 40, 500), PRECISIONS[precision]
    on_gpu = train(tmp_path / "gpu", build(**FAMILIES[family]), dataset, **options)
    on_cpu = train(tmp_path / "cpu", build(**FAMILIES[family]), dataset, use_cpu=True)
    assert on_gpu.model.device.type == "cuda"
    torch.testing.assert_close(losses(on_gpu), losses(on_cpu), rtol=tolerance, atol=0)
    assert losses(on_gpu)[-1] < losses(on_gpu)[0]


def test_ragged_equals_padded(tmp_path):
    dataset = rows(64, 40, 500)
    ragged, padded = (
        train(tmp_path / str(free), build(), dataset, bf16=False, tf32=False, padding_free=free)
        for free in (True, False)
    )
    torch.testing.assert_close(losses(ragged), losses(padded), rtol=1e-4, atol=0)


def test_a_token_budget_leaves_the_numbers_alone(tmp_path):
    dataset = rows(64, 40, 500)
    whole, cut = (
        train(tmp_path / str(budget), build(), dataset, bf16=False, tf32=False, tokens_per_microbatch=budget)
        for budget in (None, 60)
    )
    torch.testing.assert_close(losses(whole), losses(cut), rtol=1e-4, atol=0)


def test_the_peak_beside_the_states_holds_one_chunk_of_logits(tmp_path):
    longest, vocab = 2048, 65536  # a batch has about 8,000 tokens: 1 GB of logits in bfloat16, 2 GB in float32
    dataset = rows(16, longest, 5000)
    model = build(vocab, tie_word_embeddings=False)
    parameters = sum(p.numel() for p in model.parameters())
    torch.cuda.reset_peak_memory_stats()
    train(tmp_path, model, dataset, bf16=True, max_steps=2)
    beside_states = torch.cuda.max_memory_allocated() - 16 * parameters
    head_in_bfloat16 = 2 * vocab * SHAPE["hidden_size"]
    activations = 64 * 8 * longest * SHAPE["hidden_size"]
    assert beside_states < CHUNK_BYTES["cuda"] + 3 * head_in_bfloat16 + activations + (64 << 20)


def test_evaluation_builds_no_logits(tmp_path, peak_above_start):
    dataset, vocab = rows(16, 2000, 5000), 65536
    trainer = train(tmp_path, build(vocab), dataset, bf16=True, max_steps=1, per_device_eval_batch_size=16)
    peak = peak_above_start(lambda: trainer.evaluate(dataset))
    assert peak < CHUNK_BYTES["cuda"] + 3 * 2 * vocab * SHAPE["hidden_size"] + (64 << 20)
