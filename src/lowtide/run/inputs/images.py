"""What a run does with images of rows: whether there is a processor for them, and what they cannot go with."""

from __future__ import annotations

from typing import Any

from torch import nn

from lowtide.data.batches.images import ImageReader
from lowtide.data.formats.images import shows_images
from lowtide.engine.forward import causal_model
from lowtide.engine.virtual_tokens import prompt_config
from lowtide.engine.vision import encodes_images, position_rule


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
    reader = ImageReader(processing_class, position_rule(model))
    config: Any = causal_model(model).config
    if getattr(config, "image_token_id", reader.mark) != reader.mark:
        raise ValueError(
            f"the processor writes token {reader.mark} for an image and the model looks for {config.image_token_id}: "
            "they do not belong together"
        )
    return reader


def check_images(model: nn.Module, args: Any, title: str) -> None:
    """Refuses what rows with images cannot go with.

    Raises:
        ValueError: names the option, and what to do.
    """
    sharding = args.sharding
    split = {
        "sp_size, cp_size": sharding.sequence_parallel > 1,
        "tp_size": sharding.tensor_parallel > 1,
        "pipeline_parallel_size": sharding.pipeline_parallel > 1,
        "fsdp": sharding.cuts_weights and not sharding.by_deepspeed,
        "deepspeed": sharding.by_deepspeed,
    }
    for name, chosen in split.items():
        if chosen:
            raise ValueError(
                f"{name}: a model is not split over ranks yet where rows show images, as those of {title} do, since "
                "ranks whose rows show none would not run the vision tower: leave it out, and train on whole copies"
            )
    prompt = prompt_config(model)
    if prompt is not None:
        raise ValueError(
            f"{type(prompt).__name__} puts virtual tokens before rows, which those of {title}, with images, do not "
            "go with yet: take LoraConfig"
        )


def check_takes_images(
    dataset: Any,
    title: str,
    model: nn.Module,
    reader: ImageReader | None,
    *,
    method: str,
    takes: bool,
    prepared: bool = False,
) -> None:
    """Refuses rows with images that nothing would read, of a model that could.

    Raises:
        ValueError: says what is missing.
    """
    if not encodes_images(model) or (takes and reader is not None and not prepared):
        return
    first = next(iter(dataset.with_format("arrow")), None) if hasattr(dataset, "with_format") else None
    row = {} if first is None else {name: first[name][0].as_py() for name in first.column_names}
    if not shows_images(list(row), row):
        return
    if not takes:
        raise ValueError(
            f"{title} has images, and {method} takes text alone: lowtide trains on images by SFT, DPO, CPO, KTO, BCO, "
            "reward modelling, GRPO and RLOO"
        )
    if prepared:
        raise ValueError(
            f"{title} has images, and rows with images are prepared by lowtide: leave out skip_prepare_dataset, and a "
            "data_collator that makes pixels of them"
        )
    raise ValueError(
        f"{title} has images, and processing_class is a tokenizer, which reads none: pass the model's processor "
        "(AutoProcessor.from_pretrained)"
    )
