"""One run of one contestant of `bench.tasks`: trains a few steps, and prints what it took."""

import importlib
import random
import tempfile
from typing import Any

from bench.arguments import specification
from bench.child import clock, differences, say
from bench.generated import lognormal_lengths, word_source
from bench.measure import PeakMeter
from bench.tasks import GROUPED, OURS

BATCH = 16
LONGEST = 510
"""Words of the longest row: with its two special tokens it fills the model's 512 positions."""
VOCABULARY = 30_000
SIZES = {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "intermediate_size": 2048}
LABELS = ("O", "B-PER", "I-PER", "B-ORG", "I-ORG", "B-LOC", "I-LOC")
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def rows_of(task: str, number: int) -> list[dict[str, Any]]:
    """Rows of log-normal lengths (median 60 words, sigma 1.0)."""
    rng = random.Random(0)
    draw = word_source(rng)
    texts = [draw(length) for length in lognormal_lengths(60, 1.0, rng, rows=number, shortest=4, longest=LONGEST)]
    if task == "masked-lm":
        return [{"text": " ".join(words)} for words in texts]
    return [{"tokens": words, "ner_tags": [rng.randrange(len(LABELS)) for _ in words]} for words in texts]


def words_tokenizer(rows: list[dict[str, Any]]) -> Any:
    """A tokenizer to which each word is a token."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = sorted({word for row in rows for word in row.get("tokens") or row["text"].split()})
    vocabulary = {word: number for number, word in enumerate((*SPECIAL, *words))}
    assert len(vocabulary) <= VOCABULARY
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    ends = [(name, vocabulary[name]) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", "[CLS] $A [SEP] $B [SEP]", ends)
    names = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **{f"{name}_token": text for name, text in names.items()}
    )


def model_of(task: str) -> Any:
    """The BERT of a task, of seeded weights."""
    import torch
    from transformers import BertConfig, BertForMaskedLM, BertForTokenClassification

    torch.manual_seed(0)
    labels = {"num_labels": len(LABELS), "id2label": dict(enumerate(LABELS))} if task != "masked-lm" else {}
    config = BertConfig(vocab_size=VOCABULARY, **SIZES, **labels)
    return (BertForMaskedLM if task == "masked-lm" else BertForTokenClassification)(config)


def theirs(task: str, model: Any, rows: list[dict[str, Any]], tokenizer: Any, flags: dict[str, Any]) -> Any:
    """transformers' Trainer as its examples have it, and the tokens of each batch that its collator made."""
    from datasets import Dataset
    from transformers import (
        DataCollatorForLanguageModeling,
        DataCollatorForTokenClassification,
        Trainer,
        TrainingArguments,
    )

    def tokenized(row: dict[str, Any]) -> dict[str, Any]:
        if task == "masked-lm":
            return dict(tokenizer(row["text"], truncation=True, max_length=512))
        found = tokenizer(row["tokens"], is_split_into_words=True, truncation=True, max_length=512)
        words = found.word_ids()
        labels = [
            -100 if word is None or word == before else row["ner_tags"][word]
            for before, word in zip([None, *words], words, strict=False)
        ]
        return {**found, "labels": labels}

    dataset = Dataset.from_list(rows)
    dataset = dataset.map(tokenized, remove_columns=dataset.column_names)
    kind = DataCollatorForLanguageModeling if task == "masked-lm" else DataCollatorForTokenClassification
    collate, counts = kind(tokenizer), []

    def counted(rows: list[dict[str, Any]]) -> Any:
        counts.append(sum(len(row["input_ids"]) for row in rows))
        return collate(rows)

    return Trainer(model, TrainingArguments(**flags), data_collator=counted, train_dataset=dataset), counts


def ours(task: str, model: Any, rows: list[dict[str, Any]], tokenizer: Any, flags: dict[str, Any]) -> Any:
    """lowtide's trainer of the task, and the tokens of each batch, which are those of the rows in their order."""
    from datasets import Dataset

    import lowtide

    names = {"masked-lm": "MaskedLM", "token-classification": "TokenClassification"}
    config, trainer = (getattr(lowtide, names[task] + part) for part in ("Config", "Trainer"))
    args = config(**flags, rehearsal=False)
    made = trainer(model, args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    lengths = [len(row.get("tokens") or row["text"].split()) + 2 for row in rows]
    return made, [sum(lengths[at : at + BATCH]) for at in range(0, len(lengths), BATCH)]


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    """Seconds and real tokens of the timed steps, and the run's peak."""
    task, contestant = spec["task"], spec["contestant"]
    importlib.import_module("lowtide" if contestant == OURS else "transformers.trainer")
    steps, timer, meter = spec["warmup"] + spec["timed"], clock("cpu"), PeakMeter("cpu")
    rows, model = rows_of(task, 64 * BATCH), model_of(task)
    tokenizer = words_tokenizer(rows)
    with tempfile.TemporaryDirectory() as folder:
        flags = {"output_dir": folder, "per_device_train_batch_size": BATCH, "max_steps": steps, "use_cpu": True}
        flags |= {"train_sampling_strategy": "group_by_length" if contestant == GROUPED else "sequential"}
        flags |= {"save_strategy": "no", "report_to": "none", "disable_tqdm": True}
        meter.start()
        trainer, counts = (ours if contestant == OURS else theirs)(task, model, rows, tokenizer, flags)
        trainer.add_callback(timer)
        result = trainer.train()
        memory = meter.stop()
    parameters = sum(p.numel() for p in model.parameters())
    timed = slice(steps - spec["timed"], steps)
    return {
        "step_seconds": differences(timer.ends)[-spec["timed"] :],
        "step_tokens": counts[timed],
        "loss": result.training_loss,
        "parameters": parameters,
        "multiplied_parameters": parameters,
        **memory,
    }


if __name__ == "__main__":
    say("result", **measure(specification(__doc__)))
