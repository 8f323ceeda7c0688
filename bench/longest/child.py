"""One run of `bench.longest`, in a process of its own: trains single rows of a length, or says that they do not fit."""

import tempfile
from typing import Any

from bench.compare.child import clock, differences, say
from bench.inputs.rows import longtail_rows
from bench.inputs.shapes import Shape, build_model
from bench.inputs.tokenizer import load_tokenizer, tokenizer_for
from bench.longest.cases import CASES, LongCase, flags, shape
from bench.measuring.arguments import specification
from bench.memory.child import adapters, common
from lowtide.memory.allocators.out_of_memory import is_out_of_memory


def main(spec: dict[str, Any]) -> None:
    try:
        seconds = measured(CASES[spec.pop("case")], **spec)
    except Exception as error:
        if not is_out_of_memory(error) and not str(error).startswith("out of memory"):
            raise
        print(error, flush=True)
        say("result", fits=False, seconds=[])
    else:
        say("result", fits=True, seconds=seconds)


def measured(case: LongCase, length: int, layers: int, steps: int, device: str) -> list[float]:
    """The seconds of each step but the first."""
    import torch
    from datasets import Dataset

    import lowtide

    model = build_model(Shape(shape(layers), device, "bfloat16"))
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 32_000, (steps, length), generator=generator)
    timer = clock(device)
    with tempfile.TemporaryDirectory() as folder:
        args = lowtide.SFTConfig(**common(device, folder) | flags(case, length) | {"max_steps": steps})
        trainer = lowtide.SFTTrainer(
            model,
            args=args,
            train_dataset=Dataset.from_dict({"input_ids": tokens.tolist()}),
            processing_class=load_tokenizer(tokenizer_for(longtail_rows())),
            peft_config=adapters() if case.lora else None,
            callbacks=[timer],
        )
        trainer.train()
    return differences(timer.ends)


if __name__ == "__main__":
    main(specification(__doc__))
