"""Tiny models of families whose processors have traits of their own, with these processors, built in code.

Qwen3-VL adds features to layers of its language model, LLaVA-NeXT cuts images into tiles by their shape, Gemma 3 writes
another token than it fills, and image tokens of Gemma 3, and of some of Gemma 4, attend to each other both ways.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText, ProcessorMixin
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.gemma4.processing_gemma4 import Gemma4Processor
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

from tests.support.models.encoders import with_larger_weights
from tests.support.models.vision_families import FAMILIES, TEXT, TOWER, TYPE_OF
from tests.support.models.vision_models import TEMPLATE
from tests.support.texts.byte_tokenizer import byte_tokenizer

SPECIAL = (
    *("<pad>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
    *("<image>", "<start_of_image>", "<end_of_image>", "<soft>"),
)
ID = {token: 259 + number for number, token in enumerate(SPECIAL)}


class Qwen3Processor(Qwen3VLProcessor):
    """Qwen3-VL's without videos, whose processor needs torchvision."""

    def __init__(self, image_processor=None, tokenizer=None, chat_template=None, **kwargs):
        self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
        self.image_token_id, self.video_token_id = ID[self.image_token], ID[self.video_token]
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)


class StillGemma4Processor(Gemma4Processor):
    """Gemma 4's without videos and sounds."""

    def __init__(self, image_processor=None, tokenizer=None, chat_template=None, **kwargs):
        self.image_seq_length, self.image_token, self.image_token_id = 70, "<soft>", ID["<soft>"]
        self.boi_token, self.eoi_token = "<start_of_image>", "<end_of_image>"
        self.boa_token = self.eoa_token = "none"
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)


def _tokenizer(mark: str) -> Any:
    tokenizer = byte_tokenizer(pad="<pad>", more=SPECIAL)
    tokenizer.model_max_length = 10_000
    tokenizer.chat_template = TEMPLATE.replace("IMAGE", mark)
    return tokenizer


def _qwen3() -> Any:
    tokenizer = _tokenizer("<|vision_start|><|image_pad|><|vision_end|>")
    images = Qwen2VLImageProcessorPil(patch_size=4, min_pixels=8 * 8, max_pixels=24 * 24)
    return Qwen3Processor(images, tokenizer, chat_template=tokenizer.chat_template)


def _llava_next() -> Any:
    tokenizer = _tokenizer("<image>")
    images = LlavaNextImageProcessorPil(
        size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}, image_grid_pinpoints=PINPOINTS
    )
    how = {"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return LlavaNextProcessor(images, tokenizer, chat_template=tokenizer.chat_template, **how)


def _gemma3() -> Any:
    tokenizer: Any = _tokenizer("<start_of_image>")
    tokenizer.boi_token, tokenizer.eoi_token, tokenizer.image_token = "<start_of_image>", "<end_of_image>", "<soft>"
    tokenizer.boi_token_id, tokenizer.image_token_id = ID["<start_of_image>"], ID["<soft>"]
    images = Gemma3ImageProcessorPil(size={"height": 16, "width": 16})
    return Gemma3Processor(images, tokenizer, chat_template=tokenizer.chat_template, image_seq_length=4)


def _gemma4() -> Any:
    tokenizer = _tokenizer("<soft>")
    images = Gemma4ImageProcessorPil(patch_size=4, max_soft_tokens=70, pooling_kernel_size=3)
    return StillGemma4Processor(images, tokenizer, chat_template=tokenizer.chat_template)


PINPOINTS = [[16, 32], [32, 16], [32, 32], [16, 48]]
PROCESSORS = {
    "qwen3_vl": (_qwen3, "<|image_pad|>"),
    "llava_next": (_llava_next, "<image>"),
    "gemma3": (_gemma3, "<soft>"),
    "gemma4": (_gemma4, "<soft>"),
    "gemma4_vision": (_gemma4, "<soft>"),
}


def processed_family(name: str) -> tuple[Any, Any]:
    """A tiny float32 model, and its processor."""
    made, (processor, place) = copy.deepcopy(FAMILIES[name]), PROCESSORS[name]
    own = {**made.own, "image_token_id": ID[place]}
    if name == "llava_next":
        own["vision_feature_select_strategy"] = "default"
    if name == "qwen3_vl":
        own["video_token_id"] = ID["<|video_pad|>"]
    text = {**TEXT, **made.text, "max_position_embeddings": 2048, "pad_token_id": ID["<pad>"], "eos_token_id": 0}
    tower = {**TOWER, **made.tower}
    kind = TYPE_OF.get(name, name)
    config = AutoConfig.for_model(kind, text_config=text, vision_config=tower, tie_word_embeddings=False, **own)
    torch.manual_seed(0)
    model = with_larger_weights(AutoModelForImageTextToText.from_config(config, dtype=torch.float32))
    return model, processor()
