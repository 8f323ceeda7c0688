"""What workers of vLLM are extended by, so that their weights can be replaced (`--worker-extension-cls`)."""

from __future__ import annotations

import base64
import json
import os
from dataclasses import asdict
from typing import Any

from torch import Tensor

from lowtide.compat.vllm import begin_weights, end_weights, load_weights
from lowtide.rollout.generators.vllm.adapters import AdapterFolders, told_of
from lowtide.rollout.generators.vllm.facts import AdapterRoom, adapter_room, dtype_of, shapes_of
from lowtide.rollout.generators.vllm.weights import Assembly, from_bytes

RECEIVER = "lowtide.rollout.generators.vllm.worker.WeightReceiver"


class WeightReceiver:
    """Methods of a worker that `collective_rpc` calls by name; a `vllm serve` gives them text alone."""

    model_config: Any
    vllm_config: Any

    def lowtide_begin(self) -> None:
        """Weights follow; until they are complete, these are nobody's."""
        self._lowtide_held: list[dict[str, Any]] = []
        self._lowtide_folders = getattr(self, "_lowtide_folders", AdapterFolders())
        self._lowtide_folders.drop_all()
        self._lowtide_assembly = Assembly()
        begin_weights(self)

    def lowtide_load(self, weights: dict[str, Tensor]) -> None:
        """Some weights, under the names of checkpoints."""
        load_weights(self, weights)

    def lowtide_load_text(self, bucket: str) -> None:
        """A bucket as safetensors in base64."""
        load_weights(self, self._lowtide_assembly.take(from_bytes(base64.b64decode(bucket))))

    def lowtide_end(self, label: str = "{}") -> None:
        """These were all; their label is JSON."""
        end_weights(self)
        self._lowtide_held = [json.loads(label)]

    def lowtide_put_adapter(self, name: str, adapter: str) -> str:
        """An adapter's file in base64, on the weights that are here; returns where vLLM reads it."""
        data = base64.b64decode(adapter)
        _, label = told_of(data)
        path = self._lowtide_folders.put(name, data)
        self._lowtide_held.append(label)
        return path

    def lowtide_drop_adapter(self, name: str, label: str) -> None:
        """Deletes an adapter's file, after vLLM has unloaded it."""
        self._lowtide_folders.drop(name)
        self._lowtide_held = [each for each in self._lowtide_held if each != json.loads(label)]

    def lowtide_facts(self) -> dict[str, Any]:
        """What tells the model from others, what it computes in, and whether there is room for adapters, of which
        vLLM's own server is told while it runs only where its environment allows it."""
        allowed = os.environ.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "").lower() in ("1", "true")
        room = adapter_room(self.vllm_config) if allowed else AdapterRoom()
        return {"shapes": shapes_of(self.model_config), "dtype": dtype_of(self.model_config), "adapters": asdict(room)}

    def lowtide_labels(self) -> list[dict[str, Any]]:
        """The labels of the weights and of the adapters on them."""
        return getattr(self, "_lowtide_held", [])
