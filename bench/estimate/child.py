"""One run of `bench.estimate`, in a process of its own: trains a few steps as a user's script would, or predicts."""

import json
import tempfile
from pathlib import Path
from typing import Any

from bench.compare.child import say
from bench.estimate.cases import CASES, MODELS, EstimateCase
from bench.estimate.tasks import TASKS
from bench.inputs.preferences import longtail_labelled, longtail_pairs
from bench.inputs.rows import longtail_rows
from bench.inputs.tokenizer import load_tokenizer, tokenizer_for
from bench.measuring.arguments import specification
from bench.measuring.measure import PhasePeaks, reset_high_water_mark
from bench.memory.child import four_bits, quantized
from bench.online.cases import generated
from bench.online.child import even_tokens
from bench.sharded_estimate.cases import CASES as SHARDED_CASES
from lowtide.memory.allocators.host_heap import trim_heap

STEPS = 2
ROWS = {"kto": longtail_labelled, "bco": longtail_labelled, "sft": longtail_rows, "gkd": longtail_rows}
NAMES = {"reward": "Reward", "online_dpo": "OnlineDPO", **{name: task.public for name, task in TASKS.items()}}
"""Of the methods whose classes are not their name in capitals."""


def main(spec: dict[str, Any]) -> None:
    case, device = (CASES | SHARDED_CASES)[spec["case"]], spec["device"]
    found = measured(case, device, spec["weights"]) if spec["what"] == "measure" else predicted(case, device)
    say("result", **found)


def measured(case: EstimateCase, device: str, weights: str) -> dict[str, Any]:
    """The resident peak of the whole process; on CUDA what torch's allocator reserved and handed out at most. In bytes.

    Args:
        weights: a folder with the model in bfloat16, for what quantizes as it loads.
    """
    import torch

    import lowtide

    trainer_class = getattr(lowtide, NAMES.get(case.method, case.method.upper()) + "Trainer")
    with tempfile.TemporaryDirectory() as folder:
        inputs = data(case)
        rewarded = rewards(case, inputs["processing_class"]) | teacher(case)
        model = model_of(case, device, weights)
        args = config_of(case, device, folder)
        trainer = trainer_class(model, args=args, **inputs, **rewarded, peft_config=adapters(case))
        phases = PhasePeaks()
        trainer.phases.listeners.append(phases)
        trainer.train()
        phases(trainer.phases.now, "")
    if device == "cpu":
        return {"peak_bytes": max(phases.bytes.values()), "phases": phases.bytes}
    return {"peak_bytes": torch.cuda.max_memory_reserved(), "allocated_bytes": torch.cuda.max_memory_allocated()}


def config_of(case: EstimateCase, device: str, folder: str) -> Any:
    import lowtide

    task = TASKS.get(case.method)
    longest = task.longest if task else ("max_completion_length" if case.writes else "max_length",)
    common = {
        "output_dir": folder,
        "max_steps": STEPS,
        "per_device_train_batch_size": case.rows,
        **dict.fromkeys(longest, case.max_length),
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": device == "cpu",
        "fused_layers": False,  # as the runs that are recorded
    }
    kind = getattr(lowtide, NAMES.get(case.method, case.method.upper()) + "Config")
    if device in ("cpu", "cuda"):
        return kind(**common | dict(case.options))
    found = kind(**common | {name: value for name, value in case.options.items() if name != "bf16"})
    found.bf16 = case.options.get("bf16", True)  # transformers would look for a GPU here
    return found


def data(case: EstimateCase) -> dict[str, Any]:
    """Rows and tokenizer; the same rows to evaluate on where that is asked for."""
    from datasets import Dataset

    if case.writes:
        return {
            "train_dataset": Dataset.from_list(generated(60, 0.35, seed=38)[:64]),
            "processing_class": load_tokenizer(Path(tokenizer_for(longtail_rows()))),
        }
    task = TASKS.get(case.method)
    rows = task.rows(64) if task else ROWS.get(case.method, longtail_pairs)()[:64]
    if case.ranks > 1:  # ranks take the heaviest micro-batch in each step: not all engines rehearse it
        heaviest = sorted(rows, key=lambda row: len(json.dumps(row)))[-case.rows :]
        rows = heaviest * (len(rows) // case.rows)
    dataset = Dataset.from_list(rows)
    evaluated = {"eval_dataset": dataset} if "eval_strategy" in case.options else {}
    tokenizer = task.tokenizer(rows) if task else load_tokenizer(Path(tokenizer_for(longtail_rows())))
    return {"train_dataset": dataset, "processing_class": tokenizer} | evaluated


def rewards(case: EstimateCase, tokenizer: Any) -> dict[str, Any]:
    """What rewards completions."""
    if not case.writes:
        return {}
    if case.reward_model is None:
        return {"reward_funcs": even_tokens}
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_config(described_reward(case))
    return {"reward_funcs": model, "reward_processing_classes": tokenizer}


def described_reward(case: EstimateCase) -> Any:
    from transformers import AutoConfig

    assert case.reward_model is not None
    return AutoConfig.for_model(**MODELS[case.reward_model], num_labels=1)


def described(case: EstimateCase) -> Any:
    from transformers import AutoConfig

    task = TASKS.get(case.method)
    values = {"num_labels": 1} if case.method == "reward" else task.config_values if task else {}
    return AutoConfig.for_model(**MODELS[case.model], **values)


def teacher(case: EstimateCase) -> dict[str, Any]:
    """Whom a student learns from."""
    if case.teacher is None:
        return {}
    from transformers import AutoModelForCausalLM

    return {"teacher_model": AutoModelForCausalLM.from_config(described_teacher(case))}


def described_teacher(case: EstimateCase) -> Any:
    from transformers import AutoConfig

    assert case.teacher is not None
    return AutoConfig.for_model(**MODELS[case.teacher])


def model_of(case: EstimateCase, device: str, weights: str) -> Any:
    import torch

    if case.four_bit:
        model = quantized(Path(weights), device)
        trim_heap(near=1)
        reset_high_water_mark()  # making and quantizing weights takes more than keeping them, and is not predicted
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        return model
    import transformers

    torch.manual_seed(0)  # ranks make the same weights
    task = TASKS.get(case.method)
    head = task.head if task else "SequenceClassification" if case.method == "reward" else "CausalLM"
    return getattr(transformers, f"AutoModelFor{head}").from_config(described(case), dtype=getattr(torch, case.dtype))


def adapters(case: EstimateCase) -> Any:
    if not case.lora:
        return None
    from peft import LoraConfig

    kind = "SEQ_CLS" if case.method == "reward" else "CAUSAL_LM"
    return LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type=kind)


def predicted(case: EstimateCase, device: str) -> dict[str, Any]:
    """The same run's estimate, and how long it took."""
    import time

    from lowtide.planner.devices import device_named
    from lowtide.planning import estimate

    with tempfile.TemporaryDirectory() as folder:
        inputs = data(case)
        options = config_of(case, device, folder)
        options.model_init_kwargs = {"dtype": case.dtype}
        rewarded = {} if case.reward_model is None else {"reward_funcs": described_reward(case)}
        rewarded |= {} if case.teacher is None else {"teacher_model": described_teacher(case)}
        began = time.perf_counter()
        found = estimate(
            options,
            described(case),
            dataset=inputs["train_dataset"],
            processing_class=inputs["processing_class"],
            peft_config=adapters(case),
            quantization_config=four_bits() if case.four_bit else None,
            device=device,
            world_size=case.ranks,
            **rewarded,
        )
        seconds = time.perf_counter() - began
    peak = found.peak_bytes if device == "cpu" else found.reserved_bytes
    allocated = found.tensor_bytes + sum(device_named(device).workspaces)
    return {"peak_bytes": peak, "allocated_bytes": allocated, "phase": found.phase, "seconds": seconds}


if __name__ == "__main__":
    main(specification(__doc__))
