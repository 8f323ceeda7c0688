"""The demo of sequence to sequence: questions as sources, their answers as targets, for a tiny BART."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from tokenizers import processors
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    BartConfig,
    BartForConditionalGeneration,
    PreTrainedTokenizerFast,
)

from lowtide.demo.answers import BATCH, MOST_TOKENS
from lowtide.demo.data import Question
from lowtide.demo.model import END, PAD, make_tokenizer
from lowtide.terminal import Console


def pair_of_texts(question: Question) -> Iterator[dict[str, Any]]:
    """A question and its answer: `{"source": ..., "target": ...}`."""
    yield {"source": question.text, "target": question.answer}


def make_encoder_decoder(seed: int) -> tuple[BartForConditionalGeneration, PreTrainedTokenizerFast]:
    """A BART of two layers on each side with random weights, 0.4 million parameters, and its tokenizer, which ends each
    text with the end token."""
    tokenizer = make_tokenizer()
    vocabulary = tokenizer.get_vocab()
    end = vocabulary[END]
    backend: Any = tokenizer.backend_tokenizer
    backend.post_processor = processors.TemplateProcessing(single=f"$A {END}", special_tokens=[(END, end)])
    tokenizer.padding_side = "right"
    torch.manual_seed(seed)
    config = BartConfig(
        vocab_size=len(vocabulary),
        d_model=96,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=192,
        decoder_ffn_dim=192,
        max_position_embeddings=64,
        dropout=0.0,
        init_std=0.05,
        pad_token_id=vocabulary[PAD],
        bos_token_id=end,
        eos_token_id=end,
        decoder_start_token_id=end,
        forced_eos_token_id=None,
    )
    return BartForConditionalGeneration(config), tokenizer


@torch.inference_mode()
def targets_of(folder: Path, questions: Sequence[Question], description: str) -> list[str]:
    """What the model in `folder` writes for each question, decoded greedily."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype="float32").eval()
    batches = [questions[start : start + BATCH] for start in range(0, len(questions), BATCH)]
    found: list[str] = []
    for batch in track(batches, description, console=Console(stderr=True)):
        texts = [each.text for each in batch]
        inputs = tokenizer(texts, padding=True, return_tensors="pt", return_token_type_ids=False)
        written = model.generate(**inputs, do_sample=False, num_beams=1, max_new_tokens=MOST_TOKENS)
        found += tokenizer.batch_decode(written, skip_special_tokens=True)
    return found
