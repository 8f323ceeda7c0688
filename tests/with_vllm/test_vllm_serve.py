"""vLLM's own server, as far as it can be trained with."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from lowtide.rollout.generators.vllm.remote import VLLMServerGenerator
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
    command += ["--worker-extension-cls", RECEIVER]
    server = ServerProcess(command, {"VLLM_SERVER_DEV_MODE": "1"}, r"(Application startup complete)")
    try:
        model = small_model()
        generator = VLLMServerGenerator(f"http://127.0.0.1:{port}", model, timeout=60, bucket_bytes=100_000)
        for version in range(2):
            generator.sync(model, version)
            assert distance(model, generator.generate(model, REQUESTS, SAMPLING)) < TOLERANCE
            moved(model)
        with pytest.raises(ValueError, match="serves another model"):
            VLLMServerGenerator(f"http://127.0.0.1:{port}", small_model(hidden_size=128), timeout=60)
    finally:
        server.kill()
