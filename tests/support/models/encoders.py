"""What trainers of small encoders share in tests."""

from typing import Any

from torch import nn

STEPS: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "max_steps": 3,
    "learning_rate": 1e-3,
    "lr_scheduler_type": "constant",
    "logging_steps": 1,
    "use_cpu": True,
    "bf16": False,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
    "rehearsal": False,
}
"""Options of a short run."""


def with_larger_weights(model: Any) -> Any:
    """A model whose matrices are drawn large enough for attention to be far from uniform."""
    for name, p in model.named_parameters():
        if "norm" not in name.lower() and p.ndim > 1:
            nn.init.normal_(p, std=0.1)
    return model
