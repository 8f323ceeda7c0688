"""vLLM's own server, as far as it can be trained with."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest
from peft import get_peft_model

from lowtide.engine.forward import install
from lowtide.rollout.generators.vllm.limits import Limits
from lowtide.rollout.generators.vllm.remote import VLLMServerGenerator
from tests.support.references.parity_world import lora
from tests.support.vllm.vllm_world import (
    CACHE_BYTES,
    REQUESTS,
    SAMPLING,
    TOLERANCE,
    ServerProcess,
    distance,
    moved,
    needs_vllm,
    save,
    small_model,
)

pytestmark = needs_vllm
RECEIVER = "lowtide.rollout.generators.vllm.worker.WeightReceiver"


def test_a_vllm_serve_takes_weights_and_writes_by_them(tmp_path: Path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # What `vllm serve` starts; that command looks for a package named vllm, and the CPU build's is named otherwise.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", save(tmp_path)]
    command += ["--host", "127.0.0.1"]
    command += ["--port", str(port), "--dtype", "float32", "--max-model-len", "192", "--enforce-eager"]
    command += ["--kv-cache-memory-bytes", str(CACHE_BYTES), "--logprobs-mode", "processed_logprobs"]
    command += ["--worker-extension-cls", RECEIVER, "--enable-lora", "--max-lora-rank", "8", "--max-loras", "2"]
    environment = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    server = ServerProcess(command, environment, r"(Application startup complete)")
    try:
        model = small_model()
        generator = VLLMServerGenerator(f"http://127.0.0.1:{port}", model, timeout=60, bucket_bytes=100_000)
        for version in range(2):
            generator.sync(model, version)
            assert distance(model, generator.generate(model, REQUESTS, SAMPLING)) < TOLERANCE
            moved(model)
        model = get_peft_model(small_model(), lora())
        install(model)
        for _ in range(2):  # the second takes the place of the first
            adapted = VLLMServerGenerator(f"http://127.0.0.1:{port}", model, timeout=60, limits=Limits(checked_every=1))
            assert adapted.copied.merged is None
            for version in range(4):
                adapted.sync(model, version)
                assert distance(model, adapted.generate(model, REQUESTS, SAMPLING)) < TOLERANCE
                moved(model, "lora_")
        with pytest.raises(ValueError, match="serves another model"):
            VLLMServerGenerator(f"http://127.0.0.1:{port}", small_model(hidden_size=128), timeout=60)
    finally:
        server.kill()
