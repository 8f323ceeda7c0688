"""The task of encoder-decoders: its rows, tokenizer and model, a T5 of the shape of t5-small."""

import random
from typing import Any

from bench.inputs.generated import lognormal_lengths, word_source

NAME = "Seq2Seq"
LONGEST = 511
"""Words of the longest source; its end token makes 512."""
SHARE = 4
"""Words of a source for each of its target."""
VOCABULARY = 32_128
SPECIAL = ("<pad>", "</s>", "<unk>")


def rows_of(number: int) -> list[dict[str, Any]]:
    """Sources of log-normal lengths (median 60 words, sigma 1.0), and targets of a quarter of their words."""
    rng = random.Random(0)
    draw = word_source(rng)
    texts = [draw(length) for length in lognormal_lengths(60, 1.0, rng, rows=number, shortest=4, longest=LONGEST)]
    return [{"source": " ".join(words), "target": " ".join(words[::SHARE])} for words in texts]


def words_tokenizer(rows: list[dict[str, Any]]) -> Any:
    """A tokenizer to which each word is a token, and which ends each text."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = sorted({word for row in rows for word in row["source"].split()})
    vocabulary = {word: number for number, word in enumerate((*SPECIAL, *words))}
    assert len(vocabulary) <= VOCABULARY
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 1)])
    names = {f"{name}_token": text for name, text in zip(("pad", "eos", "unk"), SPECIAL, strict=True)}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def model_of() -> Any:
    """Of seeded weights; 60 million parameters."""
    import torch
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    ids: dict[str, Any] = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
    return T5ForConditionalGeneration(T5Config(vocab_size=VOCABULARY, **ids))


def theirs(model: Any, rows: list[dict[str, Any]], tokenizer: Any, flags: dict[str, Any]) -> Any:
    """transformers' Seq2SeqTrainer as its examples have it, and the tokens of each batch that its collator made."""
    from datasets import Dataset
    from transformers import DataCollatorForSeq2Seq, Seq2SeqTrainer, Seq2SeqTrainingArguments

    def tokenized(row: dict[str, Any]) -> dict[str, Any]:
        source = tokenizer(row["source"], truncation=True, max_length=LONGEST + 1)
        return {**source, "labels": tokenizer(text_target=row["target"])["input_ids"]}

    dataset = Dataset.from_list(rows)
    dataset = dataset.map(tokenized, remove_columns=dataset.column_names)
    collate, counts = DataCollatorForSeq2Seq(tokenizer, model), []

    def counted(rows: list[dict[str, Any]]) -> Any:
        counts.append(sum(len(row["input_ids"]) + len(row["labels"]) for row in rows))
        return collate(rows)

    args = Seq2SeqTrainingArguments(**flags)
    return Seq2SeqTrainer(model, args, data_collator=counted, train_dataset=dataset), counts


def tokens_of(row: dict[str, Any]) -> int:
    """Of a source and its target, with their end tokens."""
    return len(row["source"].split()) + len(row["target"].split()) + 2
