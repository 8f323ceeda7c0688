"""One run of `bench.vocabulary`, in a process of its own: a few DPO steps, and the peaks of the last two.

Called with a JSON specification as its only argument. The first steps create the optimizer's states, and building the
model and preparing the rows do not count. In the measured steps the gradients are there from the beginning, as in any
micro-batch but the first, so that whatever is held beyond the states is what the step itself takes.
"""

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.compare.child import say
from bench.compare.contestants import COMMON, common_flags
from bench.inputs.rows import CASES
from bench.inputs.shapes import SHAPES, build_model, parameter_counts
from bench.inputs.tokenizer import load_tokenizer
from bench.measuring.arguments import specification
from bench.measuring.measure import PeakMeter

RESIDENT_STEP, TENSORS_STEP, STEPS = 2, 3, 4
STATE_BYTES = 20
"""Bytes a parameter: float32 weight, gradient and AdamW's two moments of the policy, and the reference's weight."""


def step_meters(resident: PeakMeter, trace: Path):
    """Returns a callback that measures one step's resident peak, and the most that tensors hold in the next.

    The two are apart because the profiler, which knows each tensor, takes memory for that itself.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile
    from transformers import TrainerCallback

    class StepMeters(TrainerCallback):
        profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        peaks: dict[str, int]

        def on_step_begin(self, args, state, control, model: Any = None, **kwargs):
            if state.global_step >= RESIDENT_STEP:
                for parameter in model.parameters():
                    parameter.grad = torch.zeros_like(parameter)
            if state.global_step == RESIDENT_STEP:
                resident.start()
            elif state.global_step == TENSORS_STEP:
                self.profiler.start()

        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == RESIDENT_STEP + 1:
                self.peaks = resident.stop()
            elif state.global_step == TENSORS_STEP + 1:
                self.profiler.stop()
                self.profiler.export_chrome_trace(str(trace))
                self.peaks["tensor_bytes"] = most_allocated(trace)

    return StepMeters()


def most_allocated(trace: Path) -> int:
    """Returns the most bytes that tensors made since the profiler's start held at one time."""
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    return max(event["args"]["Total Allocated"] for event in events if event["name"] == "[memory]")


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    from datasets import Dataset

    from lowtide import DPOConfig, DPOTrainer

    shape = SHAPES["llama-22m"]
    shape = replace(shape, config=shape.config | {"vocab_size": spec["vocabulary"]})
    dataset = Dataset.from_list(CASES["dpo"]["longtail"].rows())
    tokenizer = load_tokenizer(Path(spec["tokenizer"]))
    meter = PeakMeter(shape.device)
    meter.start()
    imports = meter.start_bytes
    model = build_model(shape)
    with tempfile.TemporaryDirectory() as output_dir:
        meters = step_meters(meter, Path(output_dir) / "trace.json")
        trainer = DPOTrainer(
            model=model,
            args=DPOConfig(**common_flags(COMMON["lowtide"], shape, STEPS, output_dir)),
            train_dataset=dataset,
            processing_class=tokenizer,
            callbacks=[meters],
        )
        trainer.train()
    parameters = parameter_counts(model)[0]
    states = STATE_BYTES * parameters
    return {
        "vocabulary": spec["vocabulary"],
        "parameters": parameters,
        "states_bytes": states,
        "tensors_above_states_bytes": meters.peaks["tensor_bytes"],
        "resident_above_states_bytes": meters.peaks["peak_bytes"] - imports - states,
        "imports_bytes": imports,
        "peak_bytes": meters.peaks["peak_bytes"],
    }


if __name__ == "__main__":
    say("result", **measure(specification(__doc__)))
