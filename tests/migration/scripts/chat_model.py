"""A base model made to chat: a template cloned from another tokenizer, callbacks, and prompts with completions."""

import sys

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from lowtide import (
    BEMACallback,
    LogCompletionsCallback,
    RichProgressCallback,
    SFTConfig,
    SFTTrainer,
    clone_chat_template,
    init_zero_verbose,
)

if __name__ == "__main__":
    name, data, output = sys.argv[1:4]
    init_zero_verbose()
    model = AutoModelForCausalLM.from_pretrained(name, dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(name)
    model, tokenizer, added_tokens = clone_chat_template(model, tokenizer, name, resize_to_multiple_of=8)

    dataset = load_dataset(data)
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(
            output_dir=output, max_steps=2, eval_strategy="steps", eval_steps=1, use_cpu=True, report_to="none"
        ),
        train_dataset=dataset["train"],
        eval_dataset=dataset["test"],
        processing_class=tokenizer,
        callbacks=[RichProgressCallback(), BEMACallback(update_freq=1)],
    )
    completions = LogCompletionsCallback(trainer, GenerationConfig(max_new_tokens=4), num_prompts=2)
    trainer.add_callback(completions)
    trainer.train()
    trainer.save_model(output)
