"""lowtide's server for vLLM around a model that writes: lowtide's own generator, on the weights that are sent."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from safetensors.torch import load
from torch import nn

from lowtide.engine.forward import install
from lowtide.rollout.generators.generator import Request
from lowtide.rollout.generators.ragged import RaggedGenerator
from lowtide.rollout.generators.vllm.server import PROTOCOL, Service
from lowtide.rollout.generators.vllm.turns import WrittenTurn
from tests.support.references.parity_world import build_model, tokenizer
from tests.support.vllm.remembering_server import Running, serving

LONGEST = 256


class Writes:
    """An engine that writes.

    Attributes:
        copies: how often weights were sent.
        adapters: that it has, by name, as files.
        max_lora_rank: of the adapters that it takes; 0: none.
        service: whose engine it is.
        before: called with the number of the request before it is answered.
        after: called with (number, what was written), and returns what is answered.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self.model: Any = build_model("llama").double() if model is None else model
        install(self.model)
        self.generator = RaggedGenerator(tokenizer(), None)
        self.copies = self.asked = 0
        self.adapters: dict[str, bytes] = {}
        self.max_lora_rank = 0
        self.service: Service | None = None
        self.before: Callable[[int], object] = lambda number: None
        self.after: Callable[[int, list[WrittenTurn]], list[WrittenTurn]] = lambda number, found: found

    def begin(self) -> None:
        self.copies += 1
        self.adapters = {}

    def put_adapter(self, name: str, data: bytes) -> None:
        self.adapters[name] = data

    def drop_adapter(self, name: str) -> None:
        del self.adapters[name]

    @contextlib.contextmanager
    def _adapted(self, name: str | None) -> Iterator[None]:
        """With an adapter merged into the weights for a while, as its file has it."""
        factors = {} if name is None else load(self.adapters[name])
        own, before = dict(self.model.named_parameters()), {}
        for key in (key for key in factors if ".lora_A." in key):
            weight = own[key.removeprefix("base_model.model.").replace(".lora_A.", ".")]
            before[weight] = weight.clone()
            weight += factors[key.replace(".lora_A.", ".lora_B.")].to(weight) @ factors[key].to(weight)
        try:
            yield
        finally:
            for weight, value in before.items():
                weight.copy_(value)

    @torch.no_grad()
    def load(self, weights: dict[str, torch.Tensor]) -> None:
        own = dict(self.model.named_parameters())
        for name, weight in weights.items():
            own[name].copy_(weight)

    def end(self) -> None:
        pass

    @torch.no_grad()
    def write(self, jobs: Any) -> list[list[WrittenTurn]]:
        answers = []
        for turns, sampling, adapter in jobs:
            self.asked += 1
            self.before(self.asked)
            requests = [Request(turn.token_ids, 1, turn.seed) for turn in turns]
            with self._adapted(adapter):
                found = self.generator.generate(self.model, requests, sampling)
            written = [WrittenTurn(list(one.token_ids), list(one.logprobs), one.finish) for [one] in found]
            answers.append(self.after(self.asked, written))
        return answers


@contextlib.contextmanager
def writing_server(engine: Writes, regex: str | None = None) -> Iterator[Running]:
    """A server of it while it lasts, which says that completions must match something."""
    config = engine.model.config
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "model_type")
    shapes = {name: getattr(config, name) for name in names}
    info: dict[str, Any] = {"server": "lowtide", "protocol": PROTOCOL, "model": "m", "max_model_length": LONGEST}
    info |= {"dtype": str(engine.model.dtype).removeprefix("torch."), "shapes": shapes}
    info |= {"regex": regex, "adapters": {"rank": engine.max_lora_rank, "count": 3}}
    engine.service = Service(engine, info)
    with serving(engine.service) as running:
        yield running


def rollout_threads() -> list[str]:
    """The threads that write windows beside training."""
    return [each.name for each in threading.enumerate() if each.name == "lowtide-rollouts"]
