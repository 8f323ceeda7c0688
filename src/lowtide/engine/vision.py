"""What a vision-language model has beside its language model: a tower that encodes images, a projector, and positions.

The tower is what images pass through first; the projector makes its states as wide as the language model's embeddings.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from lowtide.compat.torch import FakeTensor
from lowtide.engine.forward import causal_model
from lowtide.engine.heads.head import body
from lowtide.ops.image_positions import GRID, GridPositions
from lowtide.ragged import SegmentImage

TOWERS = ("visual", "vision_model", "vision_tower", "vision_encoder")
"""What transformers calls the tower in the body of a model."""
PROJECTORS = ("merger", "deepstack_merger_list")
"""What it calls projectors within towers; others stand beside them."""
PLACES = "image_embeds_position_mask"
"""The argument of a forward that is told where images stand, and does not see it by their tokens (Kosmos-2)."""
UNKNOWN_POSITIONS = (
    "model type {kind} counts the positions of images in a way that lowtide does not know; please report the model type"
)


def encodes_images(model: nn.Module) -> bool:
    """Whether a model has a vision tower whose features its forward takes, in the places of image tokens."""
    inner: Any = body(causal_model(model))
    takes_places = PLACES in inspect.signature(type(inner).forward).parameters
    return hasattr(inner, "get_image_features") and _tower(inner) is not None and not takes_places


def tower_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """The weights of the vision tower, without those of the projector."""
    tower = _tower(body(causal_model(model)))
    assert tower is not None, "there is no vision tower"
    for name, parameter in tower.named_parameters():
        if name.split(".")[0] not in PROJECTORS:
            yield parameter


def freeze_tower(model: nn.Module) -> None:
    """Leaves the vision tower as it is in training: nothing is kept for its backward, which does not run.

    Raises:
        ValueError: the model has none.
    """
    if not encodes_images(model):
        raise ValueError(
            f"freeze_vision_tower=True needs a vision-language model, and {type(causal_model(model)).__name__} has no "
            "vision tower: leave it out"
        )
    for parameter in tower_parameters(model):
        parameter.requires_grad_(False)


def stop_at_frozen_tower(model: nn.Module) -> None:
    """Keeps backward out of a vision tower that is not trained, once transformers has checkpointing enabled.

    With it, transformers makes what all input embeddings give require a gradient, those of towers too, so that layers
    of a frozen tower would be computed again and gone back through, for nothing.
    """
    if not encodes_images(model) or any(p.requires_grad for p in tower_parameters(model)):
        return
    inner: Any = causal_model(model)
    if any(getattr(module, "gradient_checkpointing", False) for module in inner.modules()):
        inner.disable_input_require_grads()
        inner.get_input_embeddings().register_forward_hook(lambda _, __, embedded: embedded.requires_grad_())


def position_rule(model: nn.Module) -> GridPositions | None:
    """How a model counts positions where they have several axes; None where they have one.

    Raises:
        ValueError: it counts them in a way that is not known.
    """
    inner: Any = body(causal_model(model))
    if not hasattr(inner, "get_rope_index"):
        return None
    merge = getattr(inner.config.vision_config, "spatial_merge_size", None)
    if merge is None:
        raise ValueError(UNKNOWN_POSITIONS.format(kind=inner.config.model_type))
    rule = GridPositions(merge)
    if isinstance(next(inner.parameters()), FakeTensor):
        return rule
    grid = torch.tensor([[1, 2 * merge, 3 * merge]])
    image = SegmentImage({GRID: grid}, start=2, tokens=6, key=0)
    kinds = torch.tensor([[0, 0, *[1] * 6, 0, 0, 0]], dtype=torch.int)
    try:
        found, _ = inner.get_rope_index(torch.zeros_like(kinds).long(), mm_token_type_ids=kinds, image_grid_thw=grid)
        known = torch.equal(found[:, 0].cpu(), rule.positions(kinds.shape[1], [image]))
    except (TypeError, ValueError, RuntimeError, AttributeError, LookupError):
        known = False
    if not known:
        raise ValueError(UNKNOWN_POSITIONS.format(kind=inner.config.model_type))
    return rule


def _tower(inner: Any) -> nn.Module | None:
    return next((getattr(inner, name) for name in TOWERS if isinstance(getattr(inner, name, None), nn.Module)), None)
