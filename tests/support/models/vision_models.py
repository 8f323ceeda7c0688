"""Tiny vision-language models of two families, their processors, and rows with images, all built in code."""

from __future__ import annotations

import io
import random
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn
from transformers import AutoConfig, AutoModelForImageTextToText, ProcessorMixin
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.support.models.encoders import with_larger_weights
from tests.support.texts.byte_tokenizer import byte_tokenizer

SPECIAL = (
    *("<pad>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
    *("<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>"),
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
)
VOCABULARY = 3 + 256 + len(SPECIAL)
ID = {token: 259 + number for number, token in enumerate(SPECIAL)}
IMAGE_MARKS = {"qwen2_5_vl": "<|vision_start|><|image_pad|><|vision_end|>", "idefics3": "<image>"}
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}{% generation %}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{{ part['text'] }}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endgeneration %}{% else %}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}IMAGE{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "pad_token_id": ID["<pad>"],
    "bos_token_id": None,
    "eos_token_id": 0,
}


def _qwen_config() -> Any:
    return AutoConfig.for_model(
        "qwen2_5_vl",
        text_config={
            **TEXT,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
        },
        vision_config={
            **{"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "out_hidden_size": 32},
            **{"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 16},
            "fullatt_block_indexes": [1],
        },
        image_token_id=ID["<|image_pad|>"],
        video_token_id=ID["<|video_pad|>"],
        vision_start_token_id=ID["<|vision_start|>"],
        vision_end_token_id=ID["<|vision_end|>"],
        tie_word_embeddings=False,
    )


def _idefics_config() -> Any:
    return AutoConfig.for_model(
        "idefics3",
        text_config={**TEXT, "model_type": "llama"},
        vision_config={
            **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
            **{"image_size": 16, "patch_size": 4},
        },
        image_token_id=ID["<image>"],
        scale_factor=2,
        pad_token_id=ID["<pad>"],
        tie_word_embeddings=False,
    )


CONFIGS = {"qwen2_5_vl": _qwen_config, "idefics3": _idefics_config}
FAMILIES = tuple(CONFIGS)


class QwenProcessor(Qwen2_5_VLProcessor):
    """Qwen2.5-VL's without videos, whose processor needs torchvision."""

    def __init__(self, image_processor=None, tokenizer=None, chat_template=None, **kwargs):
        self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
        self.image_token_id, self.video_token_id = (
            tokenizer.convert_tokens_to_ids(token) for token in (self.image_token, self.video_token)
        )
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)


def vision_model(family: str = "qwen2_5_vl", seed: int = 0, config: Any = None) -> Any:
    """A tiny float32 model whose attention is far from uniform."""
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config or CONFIGS[family](), dtype=torch.float32)
    return with_larger_weights(model)


def processor(family: str = "qwen2_5_vl") -> Any:
    """With a template that writes the family's mark of an image."""
    tokenizer = byte_tokenizer(pad="<pad>", more=SPECIAL)
    tokenizer.model_max_length = 10_000
    template = TEMPLATE.replace("IMAGE", IMAGE_MARKS[family])
    tokenizer.chat_template = template
    if family == "qwen2_5_vl":
        images = Qwen2VLImageProcessorPil(patch_size=4, min_pixels=8 * 8, max_pixels=24 * 24)
        return QwenProcessor(images, tokenizer, chat_template=template)
    images = Idefics3ImageProcessorPil(size={"longest_edge": 32}, max_image_size={"longest_edge": 16})
    return Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=template)


def picture(seed: int, width: int = 16, height: int = 16) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def stored(image: Image.Image) -> dict[str, Any]:
    """An image as `datasets` stores it."""
    file = io.BytesIO()
    image.save(file, "PNG")
    return {"bytes": file.getvalue(), "path": None}


def with_pictures(conversation: list[dict[str, Any]], pictures: list[Image.Image]) -> list[dict[str, Any]]:
    """A conversation with its images inside, as processors of transformers take it."""
    left = iter(pictures)
    return [
        {
            **message,
            "content": [
                {"type": "image", "image": next(left)} if part["type"] == "image" else part
                for part in message["content"]
            ],
        }
        for message in conversation
    ]


def padded(made: Any, conversations: list[list[dict[str, Any]]], pictures: list[list[Image.Image]]) -> Any:
    """What a processor makes of conversations: a padded batch."""
    talks = [with_pictures(*pair) for pair in zip(conversations, pictures, strict=True)]
    options = {"padding": True, "padding_side": "right", "add_special_tokens": False}
    return made.apply_chat_template(
        talks, tokenize=True, return_dict=True, return_tensors="pt", processor_kwargs=options
    )


def tower(model: Any) -> nn.Module:
    """The vision tower of a model of either family."""
    return model.model.visual if hasattr(model.model, "visual") else model.model.vision_model


def user(*parts: Any) -> dict[str, Any]:
    """A message of texts, and of images where a part is None."""
    content = [{"type": "image", "text": None} if part is None else {"type": "text", "text": part} for part in parts]
    return {"role": "user", "content": content}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": [{"type": "text", "text": text}]}


def rows(count: int, images: int = 2, seed: int = 0) -> list[dict[str, Any]]:
    """Conversations about images of several sizes."""
    rng = random.Random(seed)
    made = []
    for number in range(count):
        sizes = [(8 * rng.randint(1, 3), 8 * rng.randint(1, 3)) for _ in range(images)]
        pictures = [picture(100 * seed + 10 * number + place, *size) for place, size in enumerate(sizes)]
        question = user("Look: ", *([None] * images), f" What is number {number}?" + "?" * rng.randint(0, 9))
        answers = [assistant("It is " + "a" * rng.randint(1, 12)), assistant("It was " + "b" * rng.randint(1, 12))]
        made.append({"images": pictures, "prompt": [question], "chosen": [answers[0]], "rejected": [answers[1]]})
    return made


def conversations(count: int, images: int = 2, seed: int = 0) -> list[dict[str, Any]]:
    """The same as `messages`."""
    return [{"images": row["images"], "messages": row["prompt"] + row["chosen"]} for row in rows(count, images, seed)]
