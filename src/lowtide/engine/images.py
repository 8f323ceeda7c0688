"""Images in a forward: the vision tower runs once for each distinct image of a micro-batch.

Its features take the places of the image's tokens, in as many segments as show the image. The model's own forward puts
them there (`mm_encoder_outputs` of transformers).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowtide.engine.attention import masks_built
from lowtide.ragged import SegmentImage

IMAGES = "images"
"""The keyword argument in which the images of a micro-batch travel to the model's forward."""


@dataclass(frozen=True)
class ShownImages:
    """The images of a micro-batch."""

    inputs: Mapping[str, Tensor]
    """What the vision tower takes of the distinct ones, end to end."""
    tokens: tuple[int, ...]
    """How many tokens each distinct one fills."""
    order: tuple[int, ...]
    """For each place that shows an image, in the order of tokens, which of the distinct ones."""


def shown_images(images: Iterable[SegmentImage], device: torch.device) -> dict[str, ShownImages]:
    """The keyword arguments of a model's forward for images, in the order of their tokens; none where there are none.

    Args:
        device: where the model runs; the images are copied there.
    """
    distinct: dict[int, SegmentImage] = {}
    order = []
    for image in images:
        distinct.setdefault(image.key, image)
        order.append(image.key)
    if not distinct:
        return {}
    number = {key: place for place, key in enumerate(distinct)}
    each = [image.inputs for image in distinct.values()]
    along = 1 if each[0]["pixel_values"].ndim == 5 else 0  # [rows, tiles, ...], of models that cut images into tiles
    inputs = {
        name: torch.cat([values[name] for values in each], along).to(device, non_blocking=True) for name in each[0]
    }
    tokens = tuple(image.tokens for image in distinct.values())
    return {IMAGES: ShownImages(inputs, tokens, tuple(number[key] for key in order))}


def encoded_images(model: Any, images: ShownImages) -> dict[str, Any]:
    """What the body of a model takes as `mm_encoder_outputs`: features of images in the order of their tokens.

    Args:
        model: the body of a vision-language model.

    Raises:
        ValueError: the tower gives another number of features than there are tokens.
    """
    with masks_built():  # a tower pads within images, where it pads
        found = model.get_image_features(**images.inputs, return_dict=True)
    pooled = found.pooler_output
    features = pooled.flatten(0, -2) if isinstance(pooled, Tensor) else torch.cat(tuple(pooled))
    if len(features) != sum(images.tokens):
        raise ValueError(
            f"the vision tower of model type {model.config.model_type} gives {len(features)} features for images that "
            f"fill {sum(images.tokens)} tokens: processor and model do not belong together"
        )
    if images.order != tuple(range(len(images.tokens))):
        parts = features.split(images.tokens)
        features = torch.cat([parts[number] for number in images.order])
    found.pooler_output = [features]
    return {"image": found}
