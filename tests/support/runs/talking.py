"""A trainer of the demo's tiny model on one short conversation, for callbacks to watch."""

from pathlib import Path
from typing import Any

from datasets import Dataset

from lowtide import SFTConfig, SFTTrainer
from lowtide.demo.model import make_model, make_tokenizer

TALK = {
    "prompt": [{"role": "user", "content": "1 + 1"}],
    "completion": [{"role": "assistant", "content": "2"}],
}


def trainer(folder: Path, *callbacks: Any, **options: Any) -> SFTTrainer:
    tokenizer = make_tokenizer()
    rows = Dataset.from_list([TALK] * 4)
    args = SFTConfig(output_dir=str(folder), max_steps=2, use_cpu=True, report_to="none", **options)
    return SFTTrainer(
        make_model(tokenizer, 0),
        args=args,
        train_dataset=rows,
        eval_dataset=rows,
        processing_class=tokenizer,
        callbacks=list(callbacks),
    )
