"""What a run does with images of rows: whether there is a processor for them, and what they cannot go with."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from lowtide.compat.transformers import attends_both_ways
from lowtide.data.batches.images import ImageReader
from lowtide.data.formats.images import shows_images
from lowtide.engine.forward import causal_model
from lowtide.engine.image_proof import ShownRow
from lowtide.engine.images import blank_image
from lowtide.engine.virtual_tokens import prompt_config
from lowtide.engine.vision import encodes_images, position_rule
from lowtide.process.ways_out import in_python

IMAGE_MODELS = frozenset(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
"""Model types that take images beside text."""
PICTURES = ((64, 48), (40, 96))
"""Width and height of the pictures that a model is proved with."""
OLDEST = (5, 23)
"""The version of transformers from which on vision-language models are known to give the padded rows' numbers."""


def is_processor(processing_class: Any) -> bool:
    """Whether what came as `processing_class` reads images, and not text alone."""
    return hasattr(processing_class, "image_processor") and hasattr(processing_class, "tokenizer")


def image_reader(model: nn.Module, processing_class: Any) -> ImageReader | None:
    """What makes images ready for a model; None where the model, or the processor, takes text alone.

    Raises:
        ValueError: model and processor do not belong together, or positions are counted in a way that is not known.
    """
    if not (encodes_images(model) and is_processor(processing_class)):
        return None
    config: Any = causal_model(model).config
    reader = ImageReader(processing_class, position_rule(model), getattr(config, "image_token_id", None))
    if reader.place != reader.mark:
        reader.ready(_picture(0))
    return reader


def rows_to_prove(reader: ImageReader) -> list[ShownRow]:
    """Small rows with images of two sizes, as the processor makes them; of two in a row, where it takes several.

    Raises:
        ValueError: the processor cannot make one ready.
    """
    mark, pictures = reader.processor.image_token, [_picture(0), _picture(1)]
    rows = [ShownRow(*reader.row(f"Look: {mark} This is a picture.", [each])) for each in pictures]
    with contextlib.suppress(ValueError):  # a processor that takes one image a row
        rows.append(ShownRow(*reader.row(f"Two: {mark} and {mark} These are pictures.", pictures)))
    return rows


def _picture(number: int) -> dict[str, Any]:
    """A picture as it is stored."""
    width, height = PICTURES[number]
    pixels = np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return {"bytes": file.getvalue(), "path": None}


def check_images(model: nn.Module, args: Any, title: str, *, writes: bool) -> None:
    """Refuses what rows with images cannot go with.

    Args:
        writes: completions of rows are written.

    Raises:
        ValueError: names the option, and what to do.
    """
    if (*map(int, transformers.__version__.split(".")[:2]),) < OLDEST:
        raise ValueError(
            f"the rows of {title} show images, and with transformers {transformers.__version__} vision-language models "
            f"do not give the numbers of padded rows here: install transformers {'.'.join(map(str, OLDEST))} or newer"
        )
    sharding = args.sharding
    split = {
        "sp_size, cp_size": (sharding.sequence_parallel > 1, "tokens of a batch are not split beside their images"),
        "tp_size": (sharding.tensor_parallel > 1, "matrices of vision towers are not split"),
        "pipeline_parallel_size": (sharding.pipeline_parallel > 1, "a vision tower is no stage"),
    }
    for name, (chosen, reason) in split.items():
        if chosen:
            raise ValueError(
                f"{name}: {reason} yet, and the rows of {title} show images: leave it out, and shard by fsdp=True or "
                "train on whole copies"
            )
    if sharding.by_deepspeed and sharding.cuts_weights and writes:
        raise ValueError(
            f"deepspeed: ZeRO-3 gathers weights in the order of the forward before, and the rows of {title} show "
            "images, after which ranks that write completions run the vision tower unequally often: take stage 2, or "
            "fsdp=True"
        )
    if spreads_weights(args):
        blank_image(causal_model(model), torch.device("meta"))
    prompt = prompt_config(model)
    if prompt is not None:
        raise ValueError(
            f"{type(prompt).__name__} puts virtual tokens before rows, which those of {title}, with images, do not "
            "go with yet: take LoraConfig"
        )


def check_reads_alike(model: nn.Module, other: nn.Module, name: str) -> None:
    """Refuses a model to compare with that does not take the images of rows as the model does that is trained.

    Args:
        name: the argument that it came in.

    Raises:
        ValueError: says in what they differ.
    """
    if not encodes_images(other):
        raise ValueError(
            f"rows show images, and {name} ({type(causal_model(other)).__name__}) reads text alone: pass a "
            "vision-language model of the type of the model that is trained"
        )
    ours, theirs = _reads(model), _reads(other)
    for what, value in ours.items():
        if theirs[what] != value:
            raise ValueError(
                f"rows show images, and {name} has another {what} ({theirs[what]}) than the model that is trained "
                f"({value}), so that the same pixels and tokens mean something else to it: pass a model of one family"
            )


def _reads(model: nn.Module) -> dict[str, Any]:
    """What makes the same of an image: by the names of a config."""
    config: Any = causal_model(model).config
    names = ("patch_size", "temporal_patch_size", "spatial_merge_size")
    own = {name: getattr(config, name, None) for name in ("model_type", "image_token_id", "scale_factor")}
    own["use_bidirectional_attention"] = attends_both_ways(config)
    return own | {name: getattr(config.vision_config, name, None) for name in names}


def spreads_weights(args: Any) -> bool:
    """Whether each forward or backward of a layer is one of all ranks, which share its weights or its gradients."""
    return args.sharding.cuts_weights or args.sharding.by_deepspeed


def check_takes_images(
    dataset: Any,
    title: str,
    model: nn.Module,
    reader: ImageReader | None,
    *,
    method: str,
    takes: bool,
    prepared: bool = False,
    unread: str = "",
) -> None:
    """Refuses rows with images that nothing would read.

    Args:
        unread: why there is no reader, where the model and its processor are to blame.

    Raises:
        ValueError: says what is missing.
    """
    if takes and reader is not None and not prepared:
        return
    kind = causal_model(model).config.model_type
    if not encodes_images(model) and kind not in IMAGE_MODELS:
        return  # a model of text, whose rows say so
    first = next(iter(dataset.with_format("arrow")), None) if hasattr(dataset, "with_format") else None
    row = {} if first is None else {name: first[name][0].as_py() for name in first.column_names}
    if not shows_images(list(row), row):
        return
    if not takes:
        raise ValueError(
            f"{title} has images, and {method} takes text alone: lowtide trains on images by SFT, distillation, DPO, "
            "CPO, TPO, ORPO, KTO, BCO, reward modelling, GRPO, RLOO, online DPO and PPO"
        )
    if not encodes_images(model):
        raise ValueError(
            f"{title} has images, and model type {kind} takes them in a way that lowtide does not know: train it on "
            "text alone, or take another model"
        )
    if unread:
        raise ValueError(f"{title} has images: {unread}")
    if prepared:
        raise ValueError(
            f"{title} has images, and rows with images are prepared by lowtide: leave out skip_prepare_dataset, and a "
            "data_collator that makes pixels of them"
        )
    raise ValueError(
        f"{title} has images, and {in_python('processing_class', 'what is saved beside the model')} is a tokenizer, "
        "which reads none: save the model's processor beside it"
        f"{in_python(', or pass AutoProcessor.from_pretrained(...)')}"
    )
