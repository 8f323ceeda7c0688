"""What the project takes from the inside of liger-kernel."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any


def patches() -> Mapping[str, Any]:
    """By model type, the function that puts Liger's kernels into a model; its parameters say which there are."""
    from liger_kernel.transformers import monkey_patch

    return monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN


def kernels_of(kind: str) -> dict[str, bool]:
    """The kernels that a model type can have, and whether they are on by default."""
    known = inspect.signature(patches()[kind]).parameters
    return {name: each.default is True for name, each in known.items()}


def patch_model(model: Any, **kernels: bool) -> None:
    """Puts kernels into one model. The functions of `patches` choose by the class alone and patch it for all models."""
    from liger_kernel.transformers import monkey_patch

    monkey_patch._apply_liger_kernel_to_instance(model=model, **kernels)
