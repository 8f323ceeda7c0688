"""A byte-level BPE tokenizer of vocabulary 32,000 with a ChatML template, trained in code on the rows themselves.

Nothing is downloaded. The trained tokenizer is kept in a temporary folder, named after what it was trained on.
"""

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

VOCABULARY = 32_000
CHATML = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def cache_folder() -> Path:
    return Path(os.environ.get("LOWTIDE_BENCH_CACHE", Path(tempfile.gettempdir()) / "lowtide-bench"))


def tokenizer_for(rows: list[dict[str, Any]]) -> Path:
    """Returns the folder of a tokenizer trained on all strings in `rows`, training it on the first call."""
    texts = [text for row in rows for text in strings_in(row)]
    digest = hashlib.sha256(json.dumps([texts, CHATML, VOCABULARY]).encode()).hexdigest()[:16]
    folder = cache_folder() / f"tokenizer-{digest}"
    if not folder.exists():
        scratch = Path(tempfile.mkdtemp(dir=_made(folder.parent)))
        train(texts).save_pretrained(scratch)
        scratch.replace(folder)
    return folder


def load_tokenizer(folder: Path):
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(folder)


def train(texts: list[str]):
    """Returns a fast tokenizer with the special tokens of ChatML and a padding token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHATML
    )


def strings_in(value: Any) -> list[str]:
    """Returns every string inside nested lists and dicts, in order."""
    if isinstance(value, str):
        return [value]
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for child in children for text in strings_in(child)]


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder
