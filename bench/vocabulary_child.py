"""One run of `bench.vocabulary`, in a process of its own: a few DPO steps, and the resident peak of the last.

Called with a JSON specification as its only argument. The first step creates the gradients and the optimizer's
states; only the last is measured, so that building the model and preparing the rows do not count.
"""

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.cases import CASES
from bench.child import say
from bench.contestants import DEFAULTS, common_flags
from bench.measure import PeakMeter
from bench.shapes import SHAPES, build_model, parameter_counts
from bench.tokenizer import load_tokenizer

STEPS = 3
STATE_BYTES = 20
"""Bytes a parameter: float32 weight, gradient and AdamW's two moments of the policy, and the reference's weight."""


def last_step_meter(meter: PeakMeter):
    """Returns a callback that starts the meter when the last step begins."""
    from transformers import TrainerCallback

    class LastStep(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == STEPS - 1:
                meter.start()

    return LastStep()


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
        trainer = DPOTrainer(
            model=model,
            args=DPOConfig(**common_flags(DEFAULTS["lowtide"], shape, STEPS, output_dir)),
            train_dataset=dataset,
            processing_class=tokenizer,
            callbacks=[last_step_meter(meter)],
        )
        trainer.train()
        peak = meter.stop()["peak_bytes"]
    parameters = parameter_counts(model)[0]
    states = STATE_BYTES * parameters
    return {
        "vocabulary": spec["vocabulary"],
        "parameters": parameters,
        "imports_bytes": imports,
        "peak_bytes": peak,
        "states_bytes": states,
        "above_states_bytes": peak - imports - states,
    }


if __name__ == "__main__":
    say("result", **measure(json.loads(sys.argv[1])))
