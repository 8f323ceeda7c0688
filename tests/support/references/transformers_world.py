"""How lowtide's trainers and transformers' own are compared, from the same weights on the same rows in one order."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tests.support.runs.on_a_cpu import ON_A_CPU

STEPS, FEWER_STEPS = 20, 12
"""Of classifiers, whose loss is to fall; and of the others."""
SAME: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "max_steps": STEPS,
    "learning_rate": 2e-3,
    "lr_scheduler_type": "linear",
    "warmup_steps": 3,
    "weight_decay": 0.01,
    **ON_A_CPU,
    "optim": "adamw_torch",
    "max_grad_norm": 1.0,
    "seed": 7,
}
"""What both are told of a classifier's run."""


def logged(trainer: Any, name: str) -> np.ndarray:
    """[steps]: what a training logged of each step."""
    return np.array([entry[name] for entry in trainer.state.log_history if "loss" in entry])


def check_weights(ours: Any, reference: Any, *, learnt: float) -> None:
    """Two trainings had the same losses, which fell by so much, and end with the same weights."""
    found, expected = logged(ours, "loss"), logged(reference, "loss")
    assert len(expected) == STEPS
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    assert found[-1] < found[0] - learnt
    for (name, mine), other in zip(ours.model.named_parameters(), reference.model.parameters(), strict=True):
        if name.endswith(("key.bias", "k_lin.bias", "key_proj.bias")):
            continue  # softmax does not see it: its gradient is rounding, which AdamW makes large
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


def check_training(ours: Any, reference: Any) -> None:
    """Trains both: losses and gradients' norms agree at every step, and so does the evaluation afterwards."""
    reference.train()
    ours.train()
    expected = logged(reference, "loss")
    assert len(logged(ours, "loss")) == len(expected) == FEWER_STEPS
    assert expected.std() > 1e-3 * expected.mean(), "nothing was learnt, so nothing was compared"
    np.testing.assert_allclose(logged(ours, "loss"), expected, rtol=1e-4)
    np.testing.assert_allclose(logged(ours, "grad_norm"), logged(reference, "grad_norm"), rtol=1e-3)
    torch.testing.assert_close(ours.evaluate()["eval_loss"], reference.evaluate()["eval_loss"], rtol=1e-4, atol=0.0)
