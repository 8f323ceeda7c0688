"""Data reshaped by hand before training, as older scripts do: prompts, templates, pairs taken apart, packing."""

import sys

from datasets import load_dataset
from transformers import AutoTokenizer

from lowtide import (
    DataCollatorForLanguageModeling,
    KTOConfig,
    KTOTrainer,
    SFTConfig,
    SFTTrainer,
    apply_chat_template,
    is_conversational,
    maybe_apply_chat_template,
    maybe_convert_to_chatml,
    maybe_extract_prompt,
    maybe_unpair_preference_dataset,
    pack_dataset,
    truncate_dataset,
)

if __name__ == "__main__":
    name, data, output = sys.argv[1:4]
    tokenizer = AutoTokenizer.from_pretrained(name)
    common = {"max_steps": 2, "use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no"}

    pairs = load_dataset(data, split="train").map(maybe_extract_prompt)
    assert is_conversational(pairs[0])
    pairs = pairs.map(maybe_apply_chat_template, fn_kwargs={"processing_class": tokenizer})
    singles = maybe_unpair_preference_dataset(pairs)
    trainer = KTOTrainer(
        name,
        args=KTOConfig(output_dir=output, **common),
        train_dataset=singles,
        processing_class=tokenizer,
    )
    trainer.train()

    talks = load_dataset(data, split="train").map(
        lambda row: maybe_convert_to_chatml(
            {"conversations": [{"from": m["role"], "value": m["content"]} for m in row["chosen"]]}
        ),
        remove_columns=["chosen", "rejected"],
    )
    texts = talks.map(apply_chat_template, fn_kwargs={"processing_class": tokenizer}, remove_columns=["messages"])
    tokens = texts.map(lambda row: {"input_ids": tokenizer(row["text"])["input_ids"]}, remove_columns=["text"])
    packed = pack_dataset(truncate_dataset(tokens, 64), seq_length=64)
    trainer = SFTTrainer(
        name,
        args=SFTConfig(output_dir=output, dataset_kwargs={"skip_prepare_dataset": True}, **common),
        data_collator=DataCollatorForLanguageModeling(pad_token_id=tokenizer.pad_token_id, padding_free=True),
        train_dataset=packed,
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.save_model(output)
