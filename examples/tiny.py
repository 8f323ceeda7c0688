"""A tiny model and its tokenizer in a folder, so that the examples run offline and in seconds.

Any other model's folder, or its name on the hub, may stand in its place.
"""

import random
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast


def questions(count: int, seed: int = 0) -> list[dict[str, str]]:
    """Rows of very different lengths: a few numbers as the instruction, the same in order as the output."""
    generator = random.Random(seed)
    rows = [[generator.randint(0, 99) for _ in range(generator.randint(1, 20))] for _ in range(count)]
    return [{"instruction": f"sort {_words(row)}", "output": _words(sorted(row))} for row in rows]


def _words(numbers: list[int]) -> str:
    return " ".join(map(str, numbers))


def save_model(folder: Path, texts: list[str]) -> str:
    """Save a tokenizer trained on the texts, and a model of random weights for it; gives the folder."""
    bytes_pairs = Tokenizer(models.BPE())
    bytes_pairs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_pairs.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=["</s>"], initial_alphabet=alphabet, show_progress=False
    )
    bytes_pairs.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_pairs, eos_token="</s>")
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)
