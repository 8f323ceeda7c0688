"""The optimizer steps in the backward of a step's only micro-batch, each parameter as its gradient is complete."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from lowtide.engine.forward import causal_model
from lowtide.memory.allocators.out_of_memory import is_out_of_memory
from lowtide.memory.optimizers.narrow_step import unwrap_optimizer
from lowtide.memory.optimizers.optimizer_in_backward import OptimizerInBackward


class InBackward:
    """Steps the optimizer in the backward of a step's only micro-batch; more than one are stepped after, as ever."""

    def __init__(self, optimizer: Any, model: nn.Module, max_grad_norm: float) -> None:
        inner = unwrap_optimizer(optimizer)
        host_states = getattr(inner, "host_states", None)
        more = {} if host_states is None else {"step": host_states.step_alone}
        self.steps = OptimizerInBackward(inner, direct=lambda: _direct(model), **more)
        self.max_grad_norm = max_grad_norm
        self.norm: Tensor | None = None
        """Of the last step's gradients, before they were clipped; None where nothing was clipped."""

    @contextlib.contextmanager
    def stepping(self) -> Iterator[None]:
        """Around a micro-batch.

        Raises:
            ValueError: memory ran out when some parameters were stepped, so the step cannot be repeated.
        """
        scale = None
        if self.max_grad_norm:
            self.norm = self.steps.total_norm
            scale = self.steps.clip_coefficient(self.max_grad_norm)
        try:
            with self.steps.armed(scale):
                yield
        except Exception as error:
            if self.steps.started and is_out_of_memory(error):
                raise ValueError(
                    f"out of memory in backward, when some parameters were stepped and others not: {error}. Resume "
                    "from the last checkpoint with a smaller tokens_per_microbatch"
                ) from None
            raise


def _direct(model: nn.Module) -> set[Tensor]:
    """The weights whose gradients the fused head and the embedding add in place."""
    inner: Any = causal_model(model)
    modules = (inner.get_input_embeddings(), inner.get_output_embeddings())
    return {module.weight for module in modules if isinstance(getattr(module, "weight", None), nn.Parameter)}
