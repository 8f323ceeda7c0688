"""Images in a forward: the vision tower runs once for each distinct image of a micro-batch.

Its features take the places of the image's tokens, in as many segments as show the image. The model's own forward puts
them there (`mm_encoder_outputs` of transformers). What a tower works out from the sizes of images is worked out on the
host, where they are known, so that no forward waits for a device and a forward can be traced without values.

Where ranks share weights or gradients, a layer's forward and backward are of all of them together. So there a
micro-batch that shows no image runs the tower too, on a blank image, the smallest that it takes. No token is one of
it, so that it changes no number and its gradients are zeros.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers.utils.generic import ModelOutput

from lowtide.compat.torch import FakeTensor, without_modes
from lowtide.compat.transformers import PACKS_PATCHES, packed_layout
from lowtide.engine.attention import keep_plan, masks_built
from lowtide.engine.heads.head import body
from lowtide.ops.image_positions import GRID
from lowtide.ragged import SegmentImage

IMAGES = "images"
"""The keyword argument in which the images of a micro-batch travel to the model's forward."""
PIXELS, PIXEL_MASK = "pixel_values", "pixel_attention_mask"
"""Inputs of an image: its patches, tiles or pixels; and which pixels of its tiles are not padding."""

TYPES = ("mm_token_type_ids", "token_type_ids")
"""Arguments of a model's forward that say which tokens are of images, 1, and which are text, 0."""
PACKS_TILES = ("idefics3", "smolvlm")
"""Model types whose tower takes the tiles of all images end to end, each with the mask of its pixels."""
PROJECTS_LATER = ("llama4",)
"""Model types whose forward reads the states of the tower, and projects them itself."""

RUNS_TOWER = "_lowtide_runs_tower"
"""The attribute of a model that says whether its tower runs in forwards that show no image too."""


@dataclass(frozen=True)
class ShownImages:
    """The images of a micro-batch, or a blank one, which no token is of."""

    inputs: Sequence[Mapping[str, Tensor]]
    """What the vision tower takes of the distinct ones, in as few calls as their shapes allow; all but the pixels in
    host memory."""
    tokens: tuple[int, ...]
    """How many tokens each distinct one fills."""
    order: tuple[int, ...]
    """For each place that shows an image, in the order of tokens, which of the distinct ones."""


def shown_images(images: Iterable[SegmentImage], device: torch.device) -> dict[str, ShownImages]:
    """The keyword arguments of a model's forward for images, in the order of their tokens; none where there are none.

    Args:
        device: where the model runs; pixels are copied there.
    """
    groups: dict[Any, dict[int, SegmentImage]] = {}
    order = []
    for image in images:
        groups.setdefault(_shapes(image.inputs), {}).setdefault(image.key, image)
        order.append(image.key)
    if not order:
        return {}
    distinct = {key: image for group in groups.values() for key, image in group.items()}
    number = {key: place for place, key in enumerate(distinct)}
    inputs = [_joined([image.inputs for image in group.values()], device) for group in groups.values()]
    tokens = tuple(image.tokens for image in distinct.values())
    return {IMAGES: ShownImages(inputs, tokens, tuple(number[key] for key in order))}


def _along(inputs: Mapping[str, Tensor]) -> int:
    """The axis on which the inputs of images are joined: tiles with masks of pixels stand in rows, [1, tiles, ...]."""
    return 1 if PIXEL_MASK in inputs and inputs[PIXELS].ndim == 5 else 0


def _shapes(inputs: Mapping[str, Tensor]) -> tuple[Any, ...]:
    """The same for images that one call of a tower takes end to end."""
    along = _along(inputs)
    return tuple((name, value.dtype, value.shape[:along], value.shape[along + 1 :]) for name, value in inputs.items())


def _joined(each: Sequence[Mapping[str, Tensor]], device: torch.device) -> dict[str, Tensor]:
    along = _along(each[0])
    inputs = {PIXELS: torch.cat([values[PIXELS] for values in each], along).to(device, non_blocking=True)}
    with without_modes():
        return inputs | {
            name: torch.cat([values[name] for values in each], along) for name in each[0] if name != PIXELS
        }


def run_tower(model: nn.Module, always: bool) -> None:
    """Says whether the tower of a model, not wrapped, runs in forwards that show no image too."""
    vars(model)[RUNS_TOWER] = always


@contextlib.contextmanager
def running_tower(model: nn.Module, always: bool) -> Iterator[None]:
    """`run_tower`, while it lasts."""
    before = bool(vars(model).get(RUNS_TOWER))
    run_tower(model, always)
    try:
        yield
    finally:
        run_tower(model, before)


def image_inputs(
    model: Any, token_ids: Int[Tensor, "rows tokens"], images: Iterable[SegmentImage]
) -> dict[str, ShownImages | Tensor]:
    """The keyword arguments of a model's forward for images: as `shown_images`, or a blank one where there are none and
    the tower of the model, not wrapped, runs all the same; and which tokens are of images, where it is told."""
    images, device = [*images], token_ids.device
    shown = shown_images(images, device)
    if not shown and vars(model).get(RUNS_TOWER):
        shown = blank_image(model, device)
    return {**shown, **kinds_of_tokens(model, token_ids, images)}


def kinds_of_tokens(
    model: Any, token_ids: Int[Tensor, "rows tokens"], images: Iterable[SegmentImage]
) -> dict[str, Tensor]:
    """The arguments of a model's forward that say which tokens are of images; none where it takes none."""
    inner: Any = body(model)
    name = _told_kinds_as(type(inner).forward)
    if name is None or not hasattr(inner, "get_image_features"):
        return {}
    kinds = torch.zeros_like(token_ids)
    for token in {token for image in images for token in image.marked}:
        kinds.masked_fill_(token_ids == token, 1)
    return {name: kinds}


@functools.lru_cache
def _told_kinds_as(forward: Callable[..., Any]) -> str | None:
    """The argument of a forward that says which tokens are of images."""
    return next((each for each in TYPES if each in inspect.signature(forward).parameters), None)


def blank_image(model: Any, device: torch.device) -> dict[str, ShownImages]:
    """The keyword arguments of a model's forward for the smallest image that its tower takes, which no token is of.

    Args:
        model: a vision-language model, not wrapped.

    Raises:
        ValueError: what the tower of this type of model takes is not known.
    """
    inner: Any = body(model)
    vision = inner.config.vision_config
    patches = getattr(getattr(inner, "visual", None), "patch_embed", None)
    if patches is not None and hasattr(vision, "spatial_merge_size"):
        merge, size = vision.spatial_merge_size, patches.patch_size
        pixels = torch.zeros(merge * merge, patches.in_channels * patches.temporal_patch_size * size**2, device=device)
        with without_modes():
            shape = {GRID: torch.tensor([[1, merge, merge]])}
    elif hasattr(inner, "connector") and hasattr(inner.config, "scale_factor"):
        side = inner.config.scale_factor * vision.patch_size
        pixels = torch.zeros(1, 1, vision.num_channels, side, side, device=device)
        with without_modes():
            shape = {PIXEL_MASK: torch.ones(1, 1, side, side, dtype=torch.long)}
    else:
        raise ValueError(
            f"lowtide does not know how small an image the vision tower of model type {inner.config.model_type} takes, "
            "which ranks that share weights run it on where their rows show none: train on whole copies (leave fsdp "
            "and deepspeed out), and please report the model type"
        )
    return {IMAGES: ShownImages([{PIXELS: pixels, **shape}], (), ())}


@dataclass
class EncodedImages(ModelOutput):
    """What a model's own forward reads of its encoded images, where lowtide calls the tower."""

    pooler_output: Any = None
    """The features that take the places of tokens."""
    deepstack_features: Any = None
    """Features that layers of the language model add at those places; one entry a layer."""


def encoded_images(model: Any, images: ShownImages) -> dict[str, Any]:
    """What the body of a model takes as `mm_encoder_outputs`: features of images in the order of their tokens.

    Args:
        model: the body of a vision-language model.

    Raises:
        ValueError: the tower gives another number of features than there are tokens, or none that are known.
    """
    outputs = [_encoded(model, inputs) for inputs in images.inputs]
    read_as = "last_hidden_state" if model.config.model_type in PROJECTS_LATER else "pooler_output"
    if getattr(outputs[0], read_as, None) is None:
        raise ValueError(f"model type {model.config.model_type} encodes images in a way that lowtide does not know")

    def placed(read: Callable[[Any], Any]) -> Any:
        parts = [read(each) for each in outputs]
        if isinstance(parts[0], tuple) and isinstance(parts[0][0], int):  # (layer, its features)
            return parts[0][0], _in_places(model, [features for _, features in parts], images)
        return _in_places(model, parts, images)

    layers = len(getattr(outputs[0], "deepstack_features", None) or ())
    found = copy.copy(outputs[0])
    for name in ("last_hidden_state", "hidden_states", "attentions"):
        if name != read_as and getattr(found, name, None) is not None:
            setattr(found, name, None)  # large, and not read
    setattr(found, read_as, placed(lambda output: getattr(output, read_as)))
    if layers:
        found.deepstack_features = [placed(lambda output, n=n: output.deepstack_features[n]) for n in range(layers)]
    return {"image": found}


def _in_places(model: Any, parts: Sequence[Any], images: ShownImages) -> Any:
    """Features of the distinct images as those of the places that show them; one tensor or a list of them, as the tower
    gives them."""
    features = torch.cat([_flat(each) for each in parts])
    if not images.tokens:  # of a blank image backward reaches the tower all the same
        features = features[:0]
    if len(features) != sum(images.tokens):
        if isinstance(features, FakeTensor):
            raise ValueError(
                f"the run cannot be traced without values, since the vision tower of model type "
                f"{model.config.model_type} reads the sizes of images off the device. Memory of such a model is not "
                "predicted; measure it with a short run (--max_steps 2 --memory_report report.json)"
            )
        raise ValueError(
            f"the vision tower of model type {model.config.model_type} gives {len(features)} features for images that "
            f"fill {sum(images.tokens)} tokens: processor and model do not belong together"
        )
    if images.order != tuple(range(len(images.tokens))):
        each = features.split(images.tokens)
        features = torch.cat([each[number] for number in images.order])
    return features if isinstance(parts[0], Tensor) else [features]


def _flat(features: Any) -> Float[Tensor, "tokens hidden"]:
    return features.flatten(0, -2) if isinstance(features, Tensor) else torch.cat([_flat(each) for each in features])


def _encoded(model: Any, inputs: Mapping[str, Tensor]) -> Any:
    pixels, kind = inputs[PIXELS], model.config.model_type
    if GRID in inputs and kind in PACKS_PATCHES:
        tower = model.visual
        with without_modes():
            layout = packed_layout(tower, inputs[GRID])
            bounds = {name: value for name, value in layout.items() if name.startswith("cu_")}
            layout = {name: v.to(pixels.device) if isinstance(v, Tensor) else v for name, v in layout.items()}
            for name, value in bounds.items():
                keep_plan(layout[name], value.tolist())
        found = tower(pixels.to(tower.dtype), grid_thw=inputs[GRID], **layout)
        layers = getattr(found, "deepstack_features", None)
        return EncodedImages([found.pooler_output], layers and [[layer] for layer in layers])
    if kind in PACKS_TILES:
        with without_modes():
            size = model.config.vision_config.patch_size  # a patch is seen that holds pixels which are no padding
            seen = inputs[PIXEL_MASK][0].unfold(1, size, size).unfold(2, size, size).sum((-1, -2)) > 0
            masks = contextlib.nullcontext() if seen.all() else masks_built()  # tiles are whole, but for odd sizes
        with masks:
            tiles, seen = pixels[0].to(model.dtype), seen.to(pixels.device)
            states = model.vision_model(pixel_values=tiles, patch_attention_mask=seen).last_hidden_state
        return EncodedImages(model.connector(states))
    taken = inspect.signature(model.get_image_features).parameters
    with masks_built():
        given = {name: value.to(pixels.device) for name, value in inputs.items() if name in taken}
        return model.get_image_features(**given, return_dict=True)
