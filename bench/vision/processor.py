"""Qwen2.5-VL's processor without videos, in a module of its own so that it can be pickled."""

from typing import Any

from transformers import ProcessorMixin
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor


class WithoutVideos(Qwen2_5_VLProcessor):
    """Videos would need torchvision."""

    def __init__(
        self,
        image_processor: Any = None,
        tokenizer: Any = None,
        image_token: str = "",
        video_token: str = "",
        chat_template: Any = None,
    ) -> None:
        self.image_token, self.video_token = image_token, video_token
        self.image_token_id, self.video_token_id = tokenizer.convert_tokens_to_ids([image_token, video_token])
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)
