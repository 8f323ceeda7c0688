"""One run of `bench.large`, in a process of its own: trains a few steps of a large shape on a GPU, or predicts them."""

import tempfile
from pathlib import Path
from typing import Any

from bench.compare.child import clock, differences, say
from bench.large.cases import CASES, LargeCase
from bench.measuring.arguments import specification
from bench.memory.child import adapters

VALUES = 1 << 22
"""Random numbers that all weights are made of, over and over."""


def main(spec: dict[str, Any]) -> None:
    case = CASES[spec["case"]]
    say("result", **(predicted(case, spec["device"]) if spec["what"] == "predict" else measured(case)))


def measured(case: LargeCase) -> dict[str, Any]:
    """What torch's allocator handed out and reserved at most, loading included, in bytes, and the seconds of steps."""
    import torch
    from datasets import Dataset

    import lowtide

    generator = torch.Generator().manual_seed(0)
    count = case.steps * case.rows
    tokens = torch.randint(3, 32_000, (count, case.length), generator=generator).tolist()
    timer = clock("cuda")
    with tempfile.TemporaryDirectory() as folder:
        model: Any = made(case)
        if case.four_bits:  # is quantized as it is loaded
            model.save_pretrained(folder)
            model = folder
        torch.cuda.reset_peak_memory_stats()
        trainer = lowtide.SFTTrainer(
            model,
            args=config_of(case, str(Path(folder) / "run"), bf16=True),
            train_dataset=Dataset.from_dict({"input_ids": tokens, "labels": tokens}),
            quantization_config=quantization(case),
            peft_config=adapters() if case.lora else None,
            callbacks=[timer],
        )
        trainer.train()
    return {
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "seconds": differences(timer.ends),
    }


def predicted(case: LargeCase, device: str) -> dict[str, Any]:
    from transformers import AutoConfig

    from lowtide.planner.devices import device_named
    from lowtide.planning import estimate

    with tempfile.TemporaryDirectory() as folder:
        config = config_of(case, folder)
        config.bf16 = True  # transformers would look for a GPU here
        found = estimate(
            config,
            AutoConfig.for_model(**case.shape),
            lengths=[case.length] * case.rows,
            device=device,
            quantization_config=quantization(case),
            peft_config=adapters() if case.lora else None,
        )
    return {
        "allocated_bytes": found.tensor_bytes + sum(device_named(device).workspaces),
        "reserved_bytes": found.reserved_bytes,
        "host_bytes": found.host_bytes,
    }


def config_of(case: LargeCase, folder: str, **more: Any) -> Any:
    import lowtide

    return lowtide.SFTConfig(
        folder,
        max_steps=case.steps,
        per_device_train_batch_size=case.rows,
        max_length=None,
        model_init_kwargs={"dtype": "bfloat16"},
        dataset_kwargs={"skip_prepare_dataset": True},
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        fused_layers=False,  # as the runs that are recorded
        **case.options,
        **more,
    )


def quantization(case: LargeCase) -> Any:
    from transformers import BitsAndBytesConfig

    if not case.four_bits:
        return None
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype="bfloat16")


def made(case: LargeCase) -> Any:
    """The model in bfloat16, its weights the same numbers over and over: where it is trained, or on the host from where
    it is streamed."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    device = "cpu" if "trained_weights" in case.options else "cuda"
    with no_init_weights(), torch.device(device):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**case.shape), dtype=torch.bfloat16)
    values = (torch.randn(VALUES, device=device) * 0.02).bfloat16()
    for weight in model.parameters():
        if weight.dim() == 1:
            weight.data.fill_(1.0)
            continue
        for part in weight.data.view(-1).split(VALUES):
            part.copy_(values[: len(part)])
    return model


if __name__ == "__main__":
    main(specification(__doc__))
