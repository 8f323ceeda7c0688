"""Score only the answers, without padding: the collator that TRL had until 0.19, in `SFTTrainer`.

The second script of the Hugging Face article "Improving Hugging Face Training Efficiency Through Packing with Flash
Attention 2" with its imports changed, and with a tiny model and its data made on the spot in place of a download.
For new code, rows with `prompt` and `completion` need neither a template nor a collator, see docs/sft.md.
Runs on a CPU in seconds: `python examples/completion_only_collator.py`.
"""

import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from tiny import questions, save_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import is_flash_attn_2_available

from lowtide import DataCollatorForCompletionOnlyLM, SFTConfig, SFTTrainer

torch.manual_seed(0)
folder = Path(tempfile.mkdtemp())
dataset = Dataset.from_list(questions(320))


def formatting_prompts_func(example):
    output_texts = []
    for i in range(len(example["instruction"])):
        text = f"### Question: {example['instruction'][i]}\n ### Answer: {example['output'][i]}"
        output_texts.append(text)
    return output_texts


name = save_model(folder / "model", formatting_prompts_func(dataset[:]))
model = AutoModelForCausalLM.from_pretrained(
    name,
    dtype=torch.bfloat16 if torch.cuda.is_available() else torch.float32,
    attn_implementation="flash_attention_2" if is_flash_attn_2_available() else "sdpa",
)
tokenizer = AutoTokenizer.from_pretrained(name)
tokenizer.pad_token = tokenizer.eos_token

# What the template's first tokens are depends on the text before it, so they are left out.
response_template = " ### Answer:"
response_template_ids = tokenizer.encode(response_template, add_special_tokens=False)[2:]
collator = DataCollatorForCompletionOnlyLM(response_template_ids, tokenizer=tokenizer, padding_free=True)

trainer = SFTTrainer(
    model,
    train_dataset=dataset,
    args=SFTConfig(
        output_dir=str(folder / "run"),
        gradient_checkpointing=True,
        per_device_train_batch_size=8,
        num_train_epochs=1,
        learning_rate=1e-2,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
    ),
    formatting_func=formatting_prompts_func,
    data_collator=collator,
)
trainer.train()
