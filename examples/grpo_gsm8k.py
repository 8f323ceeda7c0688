"""GRPO on the school mathematics of GSM8K, with a reward that compares the final number.

    python examples/grpo_gsm8k.py openai/gsm8k --config_name main --model Qwen/Qwen2.5-0.5B-Instruct
    python examples/grpo_gsm8k.py train.jsonl --model Qwen/Qwen2.5-0.5B-Instruct

The data is a file of GSM8K's rows, `question` and `answer`, or a name on the hub. A right answer ends with `#### 72`.
The reward `exact_answer` reads it from there, and the completion's from what it marks as its answer. `--prompts` writes
the prompts to a file and stops, for `lowtide grpo --config examples/grpo.yaml`.
"""

import argparse

from lowtide import GRPOConfig, GRPOTrainer
from lowtide.data.sources.load import load_rows

ASK = "Solve the problem step by step. Write the final number alone on the last line, after ####."

parser = argparse.ArgumentParser(description="GRPO on GSM8K")
parser.add_argument("data", help="a file of GSM8K's rows, or a name on the hub")
parser.add_argument("--config_name", help="configuration of a dataset on the hub: main")
parser.add_argument("--model", default="Qwen/Qwen2.5-0.5B-Instruct")
parser.add_argument("--output_dir", default="run-grpo")
parser.add_argument("--max_steps", type=int, default=500)
parser.add_argument("--max_completion_length", type=int, default=400)
parser.add_argument("--per_device_train_batch_size", type=int, default=32)
parser.add_argument("--prompts", metavar="FILE", help="write the prompts to a JSONL file, and stop")
arguments = parser.parse_args()


def as_prompt(row: dict) -> dict:
    """A conversation for the policy; `answer` stays a column, which the reward reads."""
    return {"prompt": [{"role": "system", "content": ASK}, {"role": "user", "content": row["question"]}]}


rows = load_rows(arguments.data, name=arguments.config_name).map(as_prompt, remove_columns="question")
if arguments.prompts:
    rows.to_json(arguments.prompts)
    raise SystemExit(0)

trainer = GRPOTrainer(
    model=arguments.model,
    reward_funcs="exact_answer",
    args=GRPOConfig(
        output_dir=arguments.output_dir,
        max_steps=arguments.max_steps,
        per_device_train_batch_size=arguments.per_device_train_batch_size,  # completions: a quarter as many prompts
        num_generations=4,
        max_completion_length=arguments.max_completion_length,
        tokens_per_microbatch=8192,
        learning_rate=1e-6,
        log_completions=True,
        num_completions_to_print=4,
        logging_steps=10,
    ),
    train_dataset=rows,
)
trainer.train()
trainer.save_model()
