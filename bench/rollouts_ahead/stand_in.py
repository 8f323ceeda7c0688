"""A server that stands in for vLLM: lowtide's own, around lowtide's own generator, in threads of this process."""

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lowtide.engine.forward import install
from lowtide.rollout.generators.generator import Request
from lowtide.rollout.generators.ragged import RaggedGenerator
from lowtide.rollout.generators.vllm.facts import SHAPES
from lowtide.rollout.generators.vllm.secret import kept_secret
from lowtide.rollout.generators.vllm.server import PROTOCOL, Server, Service, handler_of
from lowtide.rollout.generators.vllm.turns import Job, WrittenTurn


class StandIn:
    """An engine that writes by the weights that it was sent.

    Args:
        seconds: that it waits for before each batch, as if writing took longer.

    Attributes:
        busy: the seconds of each batch that it wrote.
    """

    def __init__(self, model: Any, tokenizer: Any, seconds: float) -> None:
        install(model)
        self.model, self.seconds = model, seconds
        self.generator = RaggedGenerator(tokenizer, None)
        self.busy: list[float] = []

    def begin(self) -> None:
        pass

    @torch.no_grad()
    def load(self, weights: dict[str, Tensor]) -> None:
        own = self.model.state_dict()
        for name, weight in weights.items():
            own[name].copy_(weight)

    def end(self) -> None:
        pass

    def put_adapter(self, name: str, data: bytes) -> None:
        raise ValueError("it takes no adapters")

    def drop_adapter(self, name: str) -> None:
        pass

    @torch.no_grad()
    def write(self, jobs: Sequence[Job]) -> list[list[WrittenTurn]]:
        began = time.perf_counter()
        time.sleep(self.seconds)
        answers = []
        for turns, sampling, _ in jobs:
            found = self.generator.generate(
                self.model, [Request(each.token_ids, 1, each.seed) for each in turns], sampling
            )
            answers.append([WrittenTurn(one.token_ids, one.logprobs, one.finish) for [one] in found])
        self.busy.append(time.perf_counter() - began)
        return answers


@contextlib.contextmanager
def standing_in(engine: StandIn) -> Iterator[str]:
    """The address of a server of it, while it lasts."""
    config = engine.model.config
    info: dict[str, Any] = {"server": "lowtide", "protocol": PROTOCOL, "model": "stand-in", "regex": None}
    info |= {"dtype": "float32", "adapters": {"rank": 0, "count": 0}}
    info |= {"max_model_length": config.max_position_embeddings, "shapes": {n: getattr(config, n) for n in SHAPES}}
    service, server = Service(engine, info), Server(("127.0.0.1", 0))
    with kept_secret(server.port) as secret:
        server.RequestHandlerClass = handler_of(service, secret)
        threads = [threading.Thread(target=each, daemon=True) for each in (server.serve_forever, service.run)]
        for each in threads:
            each.start()
        try:
            yield f"http://127.0.0.1:{server.port}"
        finally:
            service.stop()
            server.shutdown()
            server.server_close()
