"""One run of one contestant of `bench.vision`: trains a few steps, and prints what it took."""

import importlib
import random
import tempfile
from typing import Any

from bench.compare.child import clock, differences, say
from bench.inputs.generated import lognormal_lengths, word_source
from bench.measuring.arguments import specification
from bench.measuring.measure import PeakMeter
from bench.vision.cases import CASES, OURS

BATCH = 8
SIDE = 112
"""Pixels of an image's side: 64 patches, which fill 16 tokens."""
VOCABULARY = 30_000
SPECIAL = ("[PAD]", "[UNK]", "<|im_start|>", "<|im_end|>")
VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|> {{ message['role'] }} {% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %} {{ part['text'] }} "
    "{% endif %}{% endfor %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)


def rows_of(number: int) -> list[dict[str, Any]]:
    """Two images, a question and an answer of log-normal length (median 60 words, sigma 1.0)."""
    import numpy as np
    from PIL import Image

    rng, pixels = random.Random(0), np.random.default_rng(0)
    draw = word_source(rng)
    lengths = lognormal_lengths(60, 1.0, rng, rows=number, shortest=4, longest=900)

    def picture() -> Any:
        return Image.fromarray(pixels.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8))

    def said(role: str, words: list[str], images: int = 0) -> list[dict[str, Any]]:
        parts = [{"type": "image", "text": None}] * images + [{"type": "text", "text": " ".join(words)}]
        return [{"role": role, "content": parts}]

    return [
        {
            "images": [picture(), picture()],
            "prompt": said("user", draw(12), images=2),
            "completion": said("assistant", draw(length)),
        }
        for length in lengths
    ]


def processor_of(rows: list[dict[str, Any]]) -> Any:
    """Qwen2.5-VL's, without videos, over a tokenizer to which each word is a token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    from bench.vision.processor import WithoutVideos

    texts = [m["content"][-1]["text"] for row in rows for m in (*row["prompt"], *row["completion"])]
    words = ["user", "assistant", *sorted({word for text in texts for word in text.split()})]
    vocabulary = {word: number for number, word in enumerate((*SPECIAL, *VISION, *words))}
    assert len(vocabulary) <= VOCABULARY
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens([*SPECIAL, *VISION])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]", eos_token="<|im_end|>", chat_template=TEMPLATE
    )
    images = Qwen2VLImageProcessorPil(min_pixels=SIDE * SIDE, max_pixels=SIDE * SIDE)
    return WithoutVideos(images, tokenizer, *VISION[2:], chat_template=TEMPLATE)


def model_of() -> Any:
    """A Qwen2.5-VL of seeded weights."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    torch.manual_seed(0)
    return AutoModelForImageTextToText.from_config(AutoConfig.for_model(**described()))


def described() -> dict[str, Any]:
    """Its configuration."""
    token = {name: len(SPECIAL) + number for number, name in enumerate(VISION)}
    return {
        "model_type": "qwen2_5_vl",
        "text_config": {
            **{"vocab_size": VOCABULARY, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 6},
            **{"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 4096},
            **{"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 3, "tie_word_embeddings": True},
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 12, 12]},
        },
        "vision_config": {
            **{"depth": 6, "hidden_size": 320, "intermediate_size": 864, "num_heads": 8, "out_hidden_size": 512},
            "fullatt_block_indexes": [2, 5],
        },
        "image_token_id": token["<|image_pad|>"],
        "video_token_id": token["<|video_pad|>"],
        "vision_start_token_id": token["<|vision_start|>"],
        "vision_end_token_id": token["<|vision_end|>"],
        "tie_word_embeddings": True,
    }


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    """Seconds and real tokens of the timed steps, and the run's peak."""
    from datasets import Dataset

    ours, frozen = spec["contestant"] == OURS, CASES[spec["case"]].get("freeze", False)
    library = importlib.import_module("lowtide" if ours else "trl")
    config, trainer_of = library.SFTConfig, library.SFTTrainer
    steps, timer, meter = spec["warmup"] + spec["timed"], clock("cpu"), PeakMeter("cpu")
    rows, model = rows_of(32 * BATCH), model_of()
    processor, dataset = processor_of(rows), Dataset.from_list(rows)
    with tempfile.TemporaryDirectory() as folder:
        flags = {"output_dir": folder, "per_device_train_batch_size": BATCH, "max_steps": steps, "use_cpu": True}
        flags |= {"train_sampling_strategy": "sequential", "save_strategy": "no", "report_to": "none"}
        flags |= {"disable_tqdm": True, "max_length": None, "bf16": False, "logging_steps": 1}
        meter.start()
        if frozen and not ours:
            for name, parameter in model.model.visual.named_parameters():
                parameter.requires_grad_(name.startswith("merger"))
        own = {"freeze_vision_tower": frozen, "rehearsal": False} if ours else {}
        args = config(**flags, **own)
        trainer = trainer_of(model=model, args=args, train_dataset=dataset, processing_class=processor)
        trainer.add_callback(timer)
        result = trainer.train()
        memory = meter.stop()
    seen = [0, *(entry["num_tokens"] for entry in trainer.state.log_history if "num_tokens" in entry)]
    parameters = sum(p.numel() for p in model.parameters())
    return {
        "step_seconds": differences(timer.ends)[-spec["timed"] :],
        "step_tokens": differences(seen)[-spec["timed"] :],
        "loss": result.training_loss,
        "parameters": parameters,
        "multiplied_parameters": parameters,
        **memory,
    }


if __name__ == "__main__":
    say("result", **measure(specification(__doc__)))
