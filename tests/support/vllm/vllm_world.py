"""What tests with a real vLLM share: a model whose heads its CPU kernels know, and a server in a process of its own."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from lowtide.rollout.generators.generator import Request, Sampling
from tests.support.references.parity_world import SMALL, sums, tokenizer

WITHOUT = "needs vLLM (0.30 to 0.32), which wants an environment of its own: make test-vllm"
needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason=WITHOUT)
START_SECONDS = 150
CACHE_BYTES = 64 << 20
SAMPLING = Sampling(24, temperature=0.8, stop_ids=(2,))
REQUESTS = [Request([5, 6, 7, 8], 3, seed=1), Request([9, 10, 11], 2, seed=2)]
TOLERANCE = 2e-5
"""Between vLLM's log-probabilities and the model's, in float32, nats."""


def small_model(**more: Any) -> PreTrainedModel:
    """Two layers, with heads of 32: the smallest that vLLM's CPU kernels take."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(**SMALL | {"model_type": "llama", "head_dim": 32} | more)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def save(folder: Path, **more: Any) -> str:
    """A folder with such a model and its tokenizer."""
    small_model(**more).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


def distance(model: torch.nn.Module, completions: list, sampling: Sampling = SAMPLING) -> float:
    """How far the log-probabilities of completions are from those of the model's dense forward."""
    worst = 0.0
    for request, group in zip(REQUESTS, completions, strict=True):
        for each in group:
            ids = torch.tensor([[*request.prompt_ids, *each.token_ids]])
            with torch.no_grad():
                logits = model(ids).logits[0].float() / (sampling.temperature or 1.0)
            start = len(request.prompt_ids)
            own = torch.log_softmax(logits, -1)[start - 1 : -1].gather(1, ids[0, start:, None])[:, 0]
            worst = max(worst, (own - torch.tensor(each.logprobs)).abs().max().item())
    return worst


def moved(model: torch.nn.Module, names: str = "") -> None:
    """Changes the weights whose names have this in them."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if names in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)


def prompts(count: int = 16) -> list[dict[str, str]]:
    return [{"prompt": question} for question, _ in sums(count)]


class ServerProcess:
    """A server, and what it printed."""

    def __init__(self, command: list[str], environment: dict[str, str], ready: str) -> None:
        self.process = subprocess.Popen(
            command,
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.lines: list[str] = []
        self.ready, self.url = re.compile(ready), ""
        self._told = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()
        if not self._told.wait(START_SECONDS) or not self.url:
            self.kill()
            raise AssertionError("the server did not start:\n" + "".join(self.lines[-60:]))

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if found := self.ready.search(line):
                self.url = found[1]
                self._told.set()
        self._told.set()

    def kill(self) -> None:
        """With its workers, if it has any."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def serving(model: str, *more: str) -> Iterator[ServerProcess]:
    """`lowtide vllm-serve` with a model."""
    command = [sys.executable, "-m", "lowtide", "vllm-serve", "--model", model, "--port", "0", "--dtype", "float32"]
    command += ["--max_model_length", "192", "--kv_cache_bytes", str(CACHE_BYTES), *more]
    server = ServerProcess(command, {}, r"lowtide serves .* at (http://\S+)")
    try:
        yield server
    finally:
        server.kill()
