"""One run of `bench.memory`, in a process of its own: trains two steps of one row of the table.

The second step finds the optimizer's states there; its times are the ones that are reported, as the first has the
rehearsal in it. The cores' time beside the clock's: other processes on the machine hardly change it.
"""

import importlib
import tempfile
from pathlib import Path
from typing import Any

from bench.compare.child import clock, differences, say
from bench.inputs.rows import longtail_rows
from bench.inputs.shapes import QWEN_05B, Shape, build_model, parameter_counts
from bench.inputs.tokenizer import load_tokenizer, tokenizer_for
from bench.measuring.arguments import specification
from bench.measuring.measure import PeakMeter, resident_bytes
from bench.memory.cases import CASES, MemoryCase, flags
from lowtide.engine.weights.loading import release_file
from lowtide.memory.allocators.host_heap import trim_heap

STEPS = 2


def main(spec: dict[str, Any]) -> None:
    if "save" in spec:
        build_model(Shape(QWEN_05B, device="cpu", dtype=spec["dtype"])).save_pretrained(spec["save"])
        say("result")
    else:
        say("result", **measure(CASES[spec["case"]], **{name: spec[name] for name in spec if name != "case"}))


def measure(case: MemoryCase, batch: int, length: int, device: str, weights: str) -> dict[str, Any]:
    """Returns the peak of two steps, less what the process held when everything was imported, in bytes.

    Making or loading the model is not part of it.

    Args:
        weights: a folder with the model in bfloat16, for what quantizes as it loads.
    """
    import torch
    from datasets import Dataset

    package = importlib.import_module(case.package)
    trainer_class, config_class = package.SFTTrainer, package.SFTConfig
    for name in ("peft", "transformers.models.qwen2.modeling_qwen2", *case.needs):
        importlib.import_module(name)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 32_000, (STEPS * batch, length), generator=generator)
    dataset = Dataset.from_dict({"input_ids": tokens.tolist()})
    tokenizer = load_tokenizer(tokenizer_for(longtail_rows()))
    meter, timer = PeakMeter(device), clock(device)
    imports = resident_bytes("VmRSS") if device == "cpu" else 0
    model = quantized(Path(weights), device) if case.four_bit else build_model(Shape(QWEN_05B, device, case.dtype))
    parameters = parameter_counts(model)[0]
    trim_heap(near=1)
    meter.start()  # not before: making or quantizing weights takes more than keeping them
    with tempfile.TemporaryDirectory() as output_dir:
        args = config_class(**common(device, output_dir) | flags(case, batch, length))
        trainer = trainer_class(
            model=model,
            args=args,
            train_dataset=dataset,
            processing_class=tokenizer,
            callbacks=[timer],
            **({"peft_config": adapters()} if case.lora else {}),
        )
        outcome = trainer.train()
    memory = meter.stop()
    return {
        "parameters": parameters,
        "imports_bytes": imports,
        "peak_bytes": memory["peak_bytes"] - imports,
        "reserved_bytes": memory.get("reserved_bytes"),
        "step_seconds": differences(timer.ends)[-1],
        "step_cpu_seconds": differences(timer.cpu_ends)[-1],
        "loss": outcome.training_loss,
    }


def common(device: str, output_dir: str) -> dict[str, Any]:
    """What all rows have: two steps, in order, nothing written; both libraries' own precision on CUDA."""
    precision = {"use_cpu": True, "bf16": False} if device == "cpu" else {"bf16": True}
    return {
        "output_dir": output_dir,
        "max_steps": STEPS,
        "train_sampling_strategy": "sequential",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        **precision,
    }


def adapters() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")


def four_bits() -> Any:
    """How QLoRA stores weights."""
    import torch
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )


def quantized(weights: Path, device: str) -> Any:
    """The model with its linear layers in 4 bits."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        weights, quantization_config=four_bits(), dtype=torch.bfloat16, device_map=device
    )
    release_file(model)  # as the trainer does; here it belongs to loading, which is not measured
    return model


if __name__ == "__main__":
    main(specification(__doc__))
