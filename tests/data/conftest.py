"""A small byte-level tokenizer with ChatML templates, and a cache of `datasets` that each test has for itself."""

import copy

import datasets
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.support.texts.chatml import CHATML, MARKED_CHATML

CORPUS = [
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May.",
    "How many clips did Natalia sell altogether in April and May?",
    "user assistant system The weather is fine; the answer is 42, and the ledger says so.",
]


@pytest.fixture(scope="session")
def trained_tokenizer():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHATML
    )


@pytest.fixture
def tokenizer(trained_tokenizer):
    """A tokenizer that a test may change."""
    return copy.deepcopy(trained_tokenizer)


@pytest.fixture
def marked_tokenizer(tokenizer):
    """The same, with generation marks in its template."""
    tokenizer.chat_template = MARKED_CHATML
    return tokenizer


@pytest.fixture
def datasets_cache(tmp_path, monkeypatch):
    """The folder in which `datasets` caches for this test."""
    folder = tmp_path / "datasets-cache"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder)
    datasets.disable_progress_bars()
    yield folder
    datasets.enable_progress_bars()
