"""What workers of vLLM are extended by, so that their weights can be replaced (`--worker-extension-cls`)."""

from __future__ import annotations

import base64
from typing import Any

from torch import Tensor

from lowtide.compat.vllm import begin_weights, end_weights, load_weights
from lowtide.rollout.generators.vllm.facts import shapes_of
from lowtide.rollout.generators.vllm.weights import Assembly, from_bytes

RECEIVER = "lowtide.rollout.generators.vllm.worker.WeightReceiver"


class WeightReceiver:
    """Methods of a worker that `collective_rpc` calls by name; a `vllm serve` gives them text alone."""

    model_config: Any

    def lowtide_begin(self) -> None:
        """Weights follow; until they are complete, these are nobody's."""
        self._lowtide_label: dict[str, Any] | None = None
        self._lowtide_assembly = Assembly()
        begin_weights(self)

    def lowtide_load(self, weights: dict[str, Tensor]) -> None:
        """Some weights, under the names of checkpoints."""
        load_weights(self, weights)

    def lowtide_load_text(self, bucket: str) -> None:
        """A bucket as safetensors in base64."""
        load_weights(self, self._lowtide_assembly.take(from_bytes(base64.b64decode(bucket))))

    def lowtide_end(self, run: str = "", version: str = "0", copy: str = "0") -> None:
        """These were all; the words are the label of the weights."""
        end_weights(self)
        self._lowtide_label = {"run": run, "version": int(version), "copy": int(copy)}

    def lowtide_shapes(self) -> dict[str, Any]:
        """What tells the model from others."""
        return shapes_of(self.model_config)

    def lowtide_label(self) -> dict[str, Any] | None:
        """The label of the weights."""
        return getattr(self, "_lowtide_label", None)
