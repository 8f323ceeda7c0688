"""Each parameter is stepped in backward as its gradient arrives, and the gradient is freed.

So the gradients of a model never exist all at once: with one micro-batch a step, a layer's or two do. From LOMO
(arXiv 2306.09782) and torch's tutorial on post-accumulate hooks; here with one ordinary optimizer (`narrow_step`), so
it works for any whose parameters are independent, and checkpoints and schedulers do not know of it.

Exact: the same steps from the same gradients. Clipping by the global norm needs the norm before the first step, hence
a pass of its own over the same micro-batches, as in LOMO: `norm_pass`, then `armed(scale=clip_coefficient(...))`.
The gradients must be complete when they arrive: on one process, or reduced before they are accumulated.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import Any, cast

import torch
from torch import Tensor

from lowtide.memory.optimizers.narrow_step import check_separable, group_of_each, step_alone, unwrap_optimizer

Direct = Collection[Tensor] | Callable[[], Collection[Tensor]]
StepAlone = Callable[[Any, dict[str, Any], Tensor], None]
PART = 1 << 22
"""Numbers of a gradient whose norm is taken at a time, where that is in another dtype: torch makes a copy of them."""


class OptimizerInBackward:
    """Steps an optimizer's parameters inside the backward of the last micro-batch of a step.

    Args:
        optimizer: an ordinary one, maybe wrapped by accelerate. Its own `step()`, called afterwards as ever, finds no
            gradients and changes nothing.
        direct: parameters (or a function that gives them) whose gradient is added to `.grad` in place, where autograd
            does not say when it is complete; they are stepped at the end. Those are the weights of a fused head and
            of an embedding that adds the rows of its tokens.
        step: how one parameter of a group is stepped.

    Raises:
        ValueError: the optimizer cannot step one parameter at a time.
    """

    def __init__(self, optimizer: Any, *, direct: Direct = (), step: StepAlone = step_alone):
        self.optimizer = unwrap_optimizer(optimizer)
        check_separable(self.optimizer)
        self.started = False
        """Whether the last `armed()` has stepped anything. Then the step cannot be repeated after a failure."""
        self._direct, self._step = direct, step
        self._norms: list[Tensor] = []

    @contextlib.contextmanager
    def armed(self, scale: float | Tensor | None = None) -> Iterator[None]:
        """Around the forward and backward of the last micro-batch: steps what gets its gradient, at the end the rest.

        After an exception nothing more is stepped, see `started`.

        Args:
            scale: multiplies each gradient before its step.

        Raises:
            ValueError: a gradient went on growing after its parameter was stepped.
        """
        self.started = False
        groups = group_of_each(self.optimizer)

        def take(parameter: Tensor) -> None:
            self.started = True
            if scale is not None:
                grad = cast(Tensor, parameter.grad)
                grad.mul_(scale.to(grad.device) if isinstance(scale, Tensor) else scale)
            self._step(self.optimizer, groups[parameter], parameter)

        with self._taking(groups, take):
            yield

    @contextlib.contextmanager
    def norm_pass(self) -> Iterator[None]:
        """Around the last micro-batch of a pass that only measures: `total_norm` is known afterwards, and all
        gradients are freed."""
        self._norms = []

        def take(parameter: Tensor) -> None:
            self._norms.append(_norm(cast(Tensor, parameter.grad)))

        with self._taking(group_of_each(self.optimizer), take):
            yield

    @property
    def total_norm(self) -> Tensor:
        """[]: the norm of all gradients of the last `norm_pass`, as `torch.nn.utils.clip_grad_norm_` returns."""
        if not self._norms:
            return torch.tensor(0.0)
        return torch.linalg.vector_norm(torch.stack([norm.to(self._norms[0].device) for norm in self._norms]))

    def clip_coefficient(self, max_norm: float) -> Tensor:
        """[]: what `torch.nn.utils.clip_grad_norm_` multiplies gradients by, from the last `norm_pass`."""
        return (max_norm / (self.total_norm + 1e-6)).clamp(max=1.0)

    @contextlib.contextmanager
    def _taking(self, parameters: Collection[Tensor], take: Callable[[Tensor], None]) -> Iterator[None]:
        """Hands each parameter to `take` once, when its gradient is there, and frees that."""
        direct = set(self._direct() if callable(self._direct) else self._direct)
        taken: set[Tensor] = set()

        @torch.no_grad()
        def hook(parameter: Tensor) -> None:
            if parameter in taken:
                raise ValueError(
                    f"a parameter of shape {tuple(parameter.shape)} got a part of its gradient after it was stepped, "
                    "as one does that reentrant checkpoints share: use `use_reentrant=False`, or name it in `direct`"
                )
            taken.add(parameter)
            take(parameter)
            parameter.grad = None

        with contextlib.ExitStack() as hooks:
            for parameter in parameters:
                if parameter.requires_grad and parameter not in direct:
                    hooks.callback(parameter.register_post_accumulate_grad_hook(hook).remove)
            yield
        for parameter in parameters:
            if parameter.grad is not None:
                hook(parameter)


def _norm(gradient: Tensor) -> Tensor:
    """[]: in float32 at least."""
    dtype = torch.promote_types(gradient.dtype, torch.float32)
    if gradient.dtype == dtype:
        return torch.linalg.vector_norm(gradient)
    parts = [torch.linalg.vector_norm(part, dtype=dtype) for part in gradient.reshape(-1).split(PART)]
    return torch.linalg.vector_norm(torch.stack(parts))
