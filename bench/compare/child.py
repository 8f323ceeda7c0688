"""One run of one contestant, in a process of its own: trains a few steps and prints what it took.

Called by `bench.compare` with a JSON specification as its only argument, in which `flags` may be further ones of the
config. Lines that begin with `MARK` are for the parent (a finished step, the result); everything else is the library's
own output, shown if the run fails.
"""

import copy
import importlib
import json
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.compare.contestants import Contestant, common_flags
from bench.compare.methods import METHODS, Method
from bench.inputs.rows import CASES
from bench.inputs.shapes import (
    KNOWN_SHAPES,
    Shape,
    build_model,
    build_reward_model,
    build_teacher,
    parameter_counts,
    recomputed_parameters,
)
from bench.inputs.tokenizer import load_tokenizer
from bench.measuring.arguments import specification
from bench.measuring.measure import PeakMeter, hardware, matmul_rate, now
from bench.measuring.processes import MARK


def say(kind: str, **facts: Any) -> None:
    print(MARK + json.dumps({"kind": kind, **facts}), flush=True)


def clock(device: str):
    """Returns a callback that notes when each step ended."""
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        def __init__(self):
            self.ends: list[float] = []
            self.cpu_ends: list[float] = []

        def on_step_end(self, args, state, control, **kwargs):
            self.ends.append(now(device))
            self.cpu_ends.append(time.process_time())
            say("step", number=len(self.ends))

    return Clock()


def measure_contestant(spec: dict[str, Any], rows: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """Trains `warmup + timed` steps; returns seconds and real tokens of the timed ones, and the run's peak.

    Args:
        rows: what is trained on; by default the rows of the case.
    """
    from datasets import Dataset

    method, shape = METHODS[spec["method"]], KNOWN_SHAPES[spec["shape"]]
    contestant = method.contestants[spec["contestant"]]
    package = importlib.import_module(contestant.package)
    config_class, trainer_class = getattr(package, method.config), getattr(package, method.trainer)
    dataset = Dataset.from_list(CASES[spec["method"]][spec["case"]].rows() if rows is None else rows)
    tokenizer = load_tokenizer(Path(spec["tokenizer"]))
    model = (
        build_reward_model(shape, tokenizer.pad_token_id, contestant.fastest_attention)
        if method.rewards
        else build_model(shape, contestant.fastest_attention)
    )
    steps, timer, meter = spec["warmup"] + spec["timed"], clock(shape.device), PeakMeter(shape.device)
    with tempfile.TemporaryDirectory() as output_dir:
        args = config_class(
            **common_flags(contestant, shape, steps, output_dir) | contestant.flags | spec.get("flags", {})
        )
        meter.start()
        trainer = trainer_class(
            model=model,
            args=args,
            train_dataset=dataset,
            processing_class=tokenizer,
            callbacks=[timer],
            **reference_for(method, contestant, model),
            **teacher_for(method, contestant, shape),
            **adapters_for(method),
        )
        result = trainer.train()
        memory = meter.stop()
    total, multiplied = parameter_counts(model)
    timed = slice(-spec["timed"], None)
    return {
        "step_seconds": differences(timer.ends)[timed],
        "step_cpu_seconds": differences(timer.cpu_ends)[timed],
        "step_tokens": tokens_by_step(method, contestant, in_tokens(trainer.train_dataset, tokenizer), steps)[timed],
        "loss": result.training_loss,
        "parameters": total,
        "multiplied_parameters": multiplied,
        "recomputed_parameters": recomputed_parameters(model),
        **memory,
    }


def reference_for(method: Method, contestant: Contestant, model: Any) -> dict[str, Any]:
    """The copy that TRL is given where lowtide makes its own; see `methods.py`."""
    given = method.reference and contestant.package == "trl"
    return {"ref_model": copy.deepcopy(model)} if given else {}


def teacher_for(method: Method, contestant: Contestant, shape: Shape) -> dict[str, Any]:
    """The teacher of a method that has one, alike in both libraries."""
    return {"teacher_model": build_teacher(shape, contestant.fastest_attention)} if method.teacher else {}


def adapters_for(method: Method) -> dict[str, Any]:
    """The adapters of a method that trains some, alike in both libraries."""
    from peft import LoraConfig

    return {"peft_config": LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")} if method.adapters else {}


def in_tokens(dataset: Any, tokenizer: Any) -> Any:
    """Prepared rows; those of a trainer that renders conversations batch by batch are rendered here.

    Such a trainer also computes what the template writes behind the last end of a turn. Nobody reads that, and lowtide
    leaves it out: neither is credited with it.
    """
    if "messages" not in dataset.column_names or "input_ids" in dataset.column_names:
        return dataset

    def rendered(row: dict[str, Any]) -> dict[str, list[int]]:
        tokens = tokenizer.apply_chat_template(row["messages"], return_dict=False)
        return {"input_ids": tokens[: len(tokens) - tokens[::-1].index(tokenizer.eos_token_id)]}

    return dataset.map(rendered)


def differences(values: list[float]) -> list[float]:
    return [after - before for before, after in pairwise(values)]


def tokens_by_step(method: Method, contestant: Contestant, dataset: Any, steps: int) -> list[int]:
    """Returns the real tokens of each step, from the rows that the trainer prepared, in their order."""
    if len(dataset) < steps * contestant.rows:
        raise ValueError(
            f"{steps} steps of {contestant.rows} rows need {steps * contestant.rows} rows, and the case has "
            f"{len(dataset)} after preparation: take fewer --timed steps, or raise ROWS in "
            "bench/inputs/generated.py or bench/inputs/preferences.py"
        )
    counts = [method.count_tokens(dataset[index]) for index in range(steps * contestant.rows)]
    return [sum(counts[step * contestant.rows :][: contestant.rows]) for step in range(steps)]


def measure_machine(shape: Shape) -> dict[str, Any]:
    """Returns the hardware and its matmul rate in the shape's precision."""
    rate = matmul_rate(shape.device, shape.dtype)
    return {"hardware": hardware(shape.device), "matmul_flops_per_second": rate}


def main(spec: dict[str, Any]) -> None:
    if spec["contestant"] is None:
        say("result", **measure_machine(KNOWN_SHAPES[spec["shape"]]))
    else:
        say("result", **measure_contestant(spec))


if __name__ == "__main__":
    main(specification(__doc__))
