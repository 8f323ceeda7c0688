"""One run of `bench.streamed`, in a process of its own: loads the model, and trains a few steps."""

import importlib
import tempfile
from typing import Any

from bench.compare.child import clock, differences, say
from bench.inputs.rows import longtail_rows
from bench.inputs.tokenizer import load_tokenizer, tokenizer_for
from bench.measuring.arguments import specification
from bench.measuring.measure import PeakMeter, PhasePeaks, resident_bytes
from bench.memory.child import adapters, four_bits
from bench.streamed.cases import CASES, StreamedCase

BATCH, LENGTH, PAIR = 2, 1024, 256
"""Rows of a step and their tokens; and those of either side of DPO's one pair, prompt included."""


def main(spec: dict[str, Any]) -> None:
    say("result", **measure(CASES[spec["case"]], spec["steps"], spec["weights"]))


def measure(case: StreamedCase, steps: int, weights: str) -> dict[str, Any]:
    """Returns the peak of loading and some steps, less what the process held when everything was imported, in bytes."""
    import lowtide

    for name in ("peft", "transformers.models.qwen2.modeling_qwen2"):
        importlib.import_module(name)
    trainer_class, config_class = getattr(lowtide, f"{case.method}Trainer"), getattr(lowtide, f"{case.method}Config")
    dataset = rows(case.method, steps)
    tokenizer = load_tokenizer(tokenizer_for(longtail_rows()))
    timer, meter = clock("cpu"), PeakMeter("cpu")
    imports = resident_bytes("VmRSS")
    meter.start()
    with tempfile.TemporaryDirectory(dir=".") as output_dir:
        args = config_class(
            output_dir=output_dir,
            max_steps=steps,
            per_device_train_batch_size=BATCH if case.method == "SFT" else BATCH // 2,
            tokens_per_microbatch=LENGTH if case.lora and case.method == "SFT" else None,
            max_length=LENGTH,
            train_sampling_strategy="sequential",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            logging_steps=1,
            rehearsal=False,
            use_cpu=True,
            bf16=False,
            model_init_kwargs={"dtype": case.dtype, **({"quantization_config": four_bits()} if case.four_bit else {})},
            **case.options,
        )
        trainer = trainer_class(
            model=weights,
            args=args,
            train_dataset=dataset,
            processing_class=tokenizer,
            callbacks=[timer],
            **({"peft_config": adapters()} if case.lora else {}),
            **({"ref_model": weights} if case.own_reference else {}),
        )
        phases = PhasePeaks()
        trainer.phases.listeners.append(phases)
        outcome = trainer.train()
        phases("end", "")
    return {
        "imports_bytes": imports,
        "peak_bytes": max(meter.stop()["peak_bytes"], *phases.bytes.values()) - imports,
        "phases": {name: size - imports for name, size in phases.bytes.items()},
        "step_seconds": differences(timer.ends),
        "step_cpu_seconds": differences(timer.cpu_ends),
        "losses": [each["loss"] for each in trainer.state.log_history if "loss" in each],
        "loss": outcome.training_loss,
    }


def rows(method: str, steps: int) -> Any:
    """Rows of random tokens; a pair of DPO has as many on both sides, prompt included."""
    import torch
    from datasets import Dataset

    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 32_000, (steps * BATCH, LENGTH), generator=generator)
    if method == "SFT":
        return Dataset.from_dict({"input_ids": tokens.tolist()})
    prompts = tokens[::2, : PAIR // 4]
    chosen, rejected = tokens[::2, PAIR // 4 : PAIR - 1], tokens[1::2, PAIR // 4 : PAIR - 1]
    named = {"prompt_ids": prompts, "chosen_ids": chosen, "rejected_ids": rejected}
    return Dataset.from_dict({name: each.tolist() for name, each in named.items()})


if __name__ == "__main__":
    main(specification(__doc__))
