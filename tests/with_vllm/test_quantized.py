"""What `lowtide export --quantize` writes, read by vLLM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from lowtide.cli.main import main
from tests.support.vllm.quantized_vllm import COUNT, PROMPT
from tests.support.vllm.vllm_world import needs_vllm, save

pytestmark = needs_vllm
ROOT = Path(__file__).parents[2]
IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
NATS = 0.02
"""Between log-probabilities of two computations in bfloat16."""


@pytest.mark.parametrize("kind", ["int8", "int8_dynamic"])
def test_a_quantized_folder_is_served(tmp_path: Path, kind: str):
    pytest.importorskip("torchao", reason="needs torchao: make test-vllm")
    folder = tmp_path / "quantized"
    assert main(["export", save(tmp_path / "run"), "--quantize", kind, "--output", str(folder)]) == 0
    command = [sys.executable, "-m", "tests.support.vllm.quantized_vllm", str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | IN_PROCESS, capture_output=True, text=True, timeout=600, check=False
    )
    line = next((line for line in done.stdout.splitlines() if line.startswith("WRITTEN ")), None)
    assert line is not None, done.stdout[-3000:] + done.stderr[-6000:]
    tokens, logprobs = json.loads(line.removeprefix("WRITTEN "))
    assert len(tokens) == COUNT
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    with torch.no_grad():
        logits = model(torch.tensor([[*PROMPT, *tokens]])).logits[0, len(PROMPT) - 1 : -1].float()
    wanted = torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(logprobs), wanted, atol=NATS, rtol=0)
