"""The demo of pretraining: questions with their answers as texts, a tokenizer that is learned from them, and a model
that begins with random weights and learns to continue a question."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import set_seed

from lowtide.demo.data import Question, make_questions
from lowtide.engine.weights.loading import load_model, load_tokenizer
from lowtide.methods import METHODS
from lowtide.run.inputs.beginning import beginning_of
from lowtide.run.options.configs import config_class

AT_A_TIME = 100
MOST_TOKENS = 24
SIZES = {
    **{"hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 24},
    **{"num_key_value_heads": 4, "max_position_embeddings": 256, "tie_word_embeddings": True},
}
TOKENS = 290
"""Of the tokenizer: bytes, two special tokens, and the most frequent pieces, such as `What is` and `, so`."""


def sentence_rows(question: Question) -> Iterator[dict[str, Any]]:
    """A question and its answer as one text: `{"text": ...}`."""
    yield {"text": f"{question.text} {question.answer}."}


def save_beginning(folder: Path, seed: int) -> None:
    """Makes a folder with the config of a Qwen3 of two layers and a tokenizer that is learned from the texts."""
    texts = Dataset.from_list([row for question in make_questions(0, seed)[0] for row in sentence_rows(question)])
    options: dict[str, Any] = {"model_type": "qwen3", "config_overrides": SIZES, "train_tokenizer": TOKENS}
    options |= {"output_dir": str(folder.parent), "max_length": 128, "use_cpu": True}
    args = config_class(METHODS["pretrain"])(**options)
    Path(beginning_of(args, texts)).rename(folder)


@torch.inference_mode()
def continued(folder: Path, questions: Sequence[Question], seed: int) -> list[str]:
    """How the model in `folder` continues each question, up to the first full stop, decoded greedily."""
    set_seed(seed)  # as training, which begins with the same weights
    model: Any = load_model(str(folder)).eval()
    tokenizer = load_tokenizer(str(folder))
    tokenizer.padding_side = "left"
    found: list[str] = []
    for start in range(0, len(questions), AT_A_TIME):
        texts = [question.text for question in questions[start : start + AT_A_TIME]]
        inputs = tokenizer(texts, padding=True, return_tensors="pt", return_token_type_ids=False)
        output = model.generate(**inputs, do_sample=False, max_new_tokens=MOST_TOKENS)
        written = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        found += [text.partition(".")[0].strip() for text in written]
    return found
