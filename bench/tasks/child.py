"""One run of one contestant of `bench.tasks`: trains a few steps, and prints what it took."""

import importlib
import tempfile
from typing import Any

from bench.compare.child import clock, differences, say
from bench.measuring.arguments import specification
from bench.measuring.measure import PeakMeter
from bench.tasks import encoders, pairs
from bench.tasks.cases import GROUPED, OURS, PAIRS

BATCH = 16


def theirs(task: str, model: Any, rows: list[dict[str, Any]], tokenizer: Any, flags: dict[str, Any]) -> Any:
    """transformers' Trainer as its examples have it, and the tokens of each batch that its collator made."""
    if task == PAIRS:
        return pairs.theirs(model, rows, tokenizer, flags)
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

    name = pairs.NAME if task == PAIRS else encoders.NAMES[task]
    config, trainer = (getattr(lowtide, name + part) for part in ("Config", "Trainer"))
    args = config(**flags, rehearsal=False)
    made = trainer(model, args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    if task == PAIRS:
        lengths = [pairs.tokens_of(row) for row in rows]
    else:
        lengths = [len(row.get("tokens") or row["text"].split()) + 2 for row in rows]
    return made, [sum(lengths[at : at + BATCH]) for at in range(0, len(lengths), BATCH)]


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    """Seconds and real tokens of the timed steps, and the run's peak."""
    task, contestant = spec["task"], spec["contestant"]
    importlib.import_module("lowtide" if contestant == OURS else "transformers.trainer")
    steps, timer, meter = spec["warmup"] + spec["timed"], clock("cpu"), PeakMeter("cpu")
    if task == PAIRS:
        rows, model = pairs.rows_of(64 * BATCH), pairs.model_of()
        tokenizer = pairs.words_tokenizer(rows)
    else:
        rows, model = encoders.rows_of(task, 64 * BATCH), encoders.model_of(task)
        tokenizer = encoders.words_tokenizer(rows)
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
