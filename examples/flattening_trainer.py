"""No padding in the plain `transformers.Trainer`: each batch is one sequence, and no row sees its neighbours.

The first script of the Hugging Face article "Improving Hugging Face Training Efficiency Through Packing with Flash
Attention 2" with its imports changed, and with a tiny model and its data made on the spot in place of a download.
Where flash-attention is installed the model uses it, elsewhere `sdpa`; both keep the rows of a batch apart.
Runs on a CPU in seconds: `python examples/flattening_trainer.py`.
"""

import json
import tempfile
from pathlib import Path

import torch
from datasets import load_dataset
from tiny import questions, save_model
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments
from transformers.utils import is_flash_attn_2_available

from lowtide import DataCollatorWithFlattening

torch.manual_seed(0)
folder = Path(tempfile.mkdtemp())
texts = [f"{row['instruction']}: {row['output']}</s>" for row in questions(320)]
name = save_model(folder / "model", texts)

model = AutoModelForCausalLM.from_pretrained(
    name,
    dtype=torch.bfloat16 if torch.cuda.is_available() else torch.float32,
    attn_implementation="flash_attention_2" if is_flash_attn_2_available() else "sdpa",
)

# Rows of token ids, as a preprocessing step would have left them.
tokenizer = AutoTokenizer.from_pretrained(name)
rows = folder / "rows.jsonl"
rows.write_text("".join(json.dumps({"input_ids": tokenizer(text)["input_ids"]}) + "\n" for text in texts))
train_dataset = load_dataset("json", data_files=str(rows))["train"]

data_collator = DataCollatorWithFlattening()
batch = data_collator([train_dataset[row] for row in range(8)])
longest = batch["max_length_q"]
print(f"a batch of 8 rows is {batch['input_ids'].shape[1]} tokens; padded it would be {8 * longest}")

train_args = TrainingArguments(
    output_dir=str(folder / "run"),
    per_device_train_batch_size=8,
    num_train_epochs=1,
    learning_rate=1e-2,
    logging_steps=10,
    save_strategy="no",
    report_to="none",
)
trainer = Trainer(args=train_args, model=model, train_dataset=train_dataset, data_collator=data_collator)
trainer.train()
