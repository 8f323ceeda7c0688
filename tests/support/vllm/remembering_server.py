"""lowtide's server for vLLM around an engine that only remembers."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any

import torch

from lowtide.rollout.generators.vllm.secret import kept_secret
from lowtide.rollout.generators.vllm.server import PROTOCOL, Server, Service, handler_of
from lowtide.rollout.generators.vllm.turns import WrittenTurn
from tests.support.models.tiny_llama import VOCAB

INFO = {
    **{"server": "lowtide", "protocol": PROTOCOL, "model": "m", "max_model_length": 64, "regex": None},
    **{"dtype": "float32", "adapters": {"rank": 0, "count": 0}},
    "shapes": {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "model_type": "llama"},
}


class Remembers:
    """An engine that has weights, and writes the number of what it was asked."""

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self.adapters: dict[str, bytes] = {}
        self.asked: list = []
        self.logprobs = 2

    def begin(self) -> None:
        self.adapters = {}
        self.coming: dict[str, torch.Tensor] = {}

    def load(self, weights: dict[str, torch.Tensor]) -> None:
        self.coming |= weights

    def end(self) -> None:
        self.weights |= self.coming

    def write(self, jobs: Any) -> list[list[WrittenTurn]]:
        self.asked.append(jobs)
        return [
            [WrittenTurn([n + 3, 2], [-1.0] * self.logprobs, "stop") for n, _ in enumerate(turns)] for turns, *_ in jobs
        ]

    def put_adapter(self, name: str, data: bytes) -> None:
        self.adapters[name] = data

    def drop_adapter(self, name: str) -> None:
        del self.adapters[name]


class Running:
    """A server in threads of this process."""

    def __init__(self, handler: type[BaseHTTPRequestHandler]) -> None:
        self.server = Server(("127.0.0.1", 0))
        self.server.RequestHandlerClass = handler
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@contextlib.contextmanager
def serving(service: Service) -> Iterator[Running]:
    """A server while it lasts."""
    running = Running(BaseHTTPRequestHandler)
    stack = contextlib.ExitStack()
    secret = stack.enter_context(kept_secret(running.server.port))
    running.server.RequestHandlerClass = handler_of(service, secret)
    threading.Thread(target=service.run, daemon=True).start()
    try:
        yield running
    finally:
        service.stop()
        running.stop()
        stack.close()
