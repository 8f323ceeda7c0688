"""`python -m bench.layer_cost CASE`: what a decoder layer costs on a GPU, without one.

A step of 16 rows of 1,024 tokens (4 of QLoRA and of hybrids), checkpointed, in bfloat16, as the planner traces it: the
operations that the device would be asked for, the bytes that they move, and their floating-point operations. Counted of
a layer is what one in the middle takes in forward, recomputation and backward; views and memory that is only taken are
free. The seconds are the planner's roofline (`lowtide.planner.speed`), nothing is measured. With `--host` the time is
measured that the host takes for such a layer, beside one of transformers and PEFT (`bench.layer_cost.host`).
"""

import argparse
import json
import sys
from dataclasses import replace
from typing import Any, NamedTuple

from bench.inputs.hybrid import ATTENTION, HYBRID, RECURRENT
from bench.layer_cost.host import host_cost
from bench.measuring import results
from bench.side_by_side.cases import CONTESTANTS

SUMMARY = "Count what a decoder layer costs on a GPU: operations, bytes, products, from the planner's trace."
TOKENS = 1024
RANK = 16
RECORDED = ("lowtide", "lowtide-stock")
"""Contestants of `bench.side_by_side` whose steps are predicted."""
MOST_OFF = 0.15
"""By which a predicted step may be off."""


class Case(NamedTuple):
    """A model, and how it is trained."""

    model: str | dict[str, Any]
    """A name that lowtide has the shape of, or what `AutoConfig.for_model` takes."""
    adapters: bool = True
    four_bits: bool = False
    rows: int = 16
    more: dict[str, Any] = {}  # noqa: RUF012
    """Options beside those of all cases."""


CASES = {
    "llama-8b-lora": Case("meta-llama/Llama-3.1-8B"),
    "llama-8b-float8": Case("meta-llama/Llama-3.1-8B", more={"base_dtype": "float8"}),
    "llama-8b-qlora": Case("meta-llama/Llama-3.1-8B", four_bits=True, rows=4),
    "qwen-0.5b-lora": Case("Qwen/Qwen2.5-0.5B"),
    "qwen-0.5b-full": Case("Qwen/Qwen2.5-0.5B", adapters=False),
    "llama-8b-full": Case("meta-llama/Llama-3.1-8B", adapters=False),
    "llama-8b-full-float8": Case("meta-llama/Llama-3.1-8B", adapters=False, more={"float8_products": True}),
    "hybrid-recurrent-lora": Case(HYBRID | RECURRENT, rows=4),
    "hybrid-attention-lora": Case(HYBRID | ATTENTION, rows=4),
}
"""The last two have the recurrent layers of a hybrid alone, and its attention layers alone."""


def layer_cost(name: str, device_name: str = "h200", **options: Any) -> dict[str, float]:
    """Traces a case.

    Args:
        name: of `CASES`.
        device_name: as `lowtide plan --device` takes it; a CUDA device.
        options: further ones of the run.

    Returns:
        `operations_per_layer`, `gigabytes_per_layer` (10^9 bytes, read and written), `layers_teraflops` (all layers of
        a step), `teraflops` (the whole step), `predicted_seconds` (of a step).

    Raises:
        ValueError: the device is unknown, or an option is.
    """
    from lowtide.planner.devices import device_named
    from lowtide.planner.tracing.unroll import MIDDLE, TRACED_LAYERS

    device = device_named(device_name)
    if device.kind != "cuda":
        raise ValueError(f"--device {device_name}: layers are counted as on CUDA; name a GPU, such as h200")
    run = _run(CASES[name], device, options)
    few = run.traced_layers(TRACED_LAYERS, device)
    layers = run.model.layers
    one = {each: count for each, count in few.costs["layers"].by_layer[MIDDLE].items() if not each.view}
    whole = replace(few, costs={part: each.unrolled(layers) for part, each in few.costs.items()})
    step = sum(whole.costs[part].flops for part in ("layers", "optimizer"))
    return {
        "operations_per_layer": sum(one.values()),
        "gigabytes_per_layer": sum(each.bytes * count for each, count in one.items()) / 1e9,
        "layers_teraflops": whole.costs["layers"].flops / 1e12,
        "teraflops": (step + whole.head_share * whole.costs["head"].flops) / 1e12,
        "predicted_seconds": whole.tokens / whole.tokens_per_second(device),
    }


def _run(case: Case, device: Any, options: dict[str, Any]) -> Any:
    """The run of a case, for a trace."""
    from peft import LoraConfig
    from transformers import AutoConfig

    from lowtide.planner.answers.known_models import known_config
    from lowtide.planner.answers.row_lengths import row_lengths
    from lowtide.planner.answers.ways import FourBits
    from lowtide.planner.candidate import PlannedRun
    from lowtide.run.options.configs import method_named

    named, method = case.model, method_named("sft")
    described = known_config(named) if isinstance(named, str) else AutoConfig.for_model(**named)
    assert described is not None
    requested = {
        "rehearsal": False,
        "save_strategy": "no",
        "eval_strategy": "no",
        "bf16": True,
        "gradient_checkpointing": True,
        "model_init_kwargs": {"dtype": "bfloat16"},
        "per_device_train_batch_size": case.rows,
        **case.more,
    }
    adapters = LoraConfig(task_type="CAUSAL_LM", r=RANK, lora_alpha=RANK, target_modules="all-linear")
    run = PlannedRun(
        method,
        described,
        requested,
        device,
        peft_config=adapters if case.adapters else None,
        quantization_config=FourBits() if case.four_bits else None,
        prepared=True,
    )
    return run.faked(row_lengths(f"{TOKENS}x{case.rows}", method).rows(), options)


class Recorded(NamedTuple):
    """A step that a GPU made, and what is predicted of it."""

    run: str
    gpu: str
    measured_seconds: float
    predicted_seconds: float

    @property
    def error(self) -> float:
        """Of the prediction, as a share of what was measured."""
        return self.predicted_seconds / self.measured_seconds - 1


def recorded() -> list[Recorded]:
    """The steps of equal rows that lowtide made in `bench.side_by_side`, predicted by this version's trace."""
    found = []
    for record in (each for each in results.recorded() if each["kind"] == results.SIDE_BY_SIDE):
        gpu = record["hardware"]["gpu"]
        for run, figures in record["runs"].items():
            case, who = run.split(", ")
            if case in CASES and who in RECORDED and figures.get("equal_tokens_per_second"):
                measured = CASES[case].rows * TOKENS / figures["equal_tokens_per_second"]
                cost = layer_cost(case, gpu.removeprefix("NVIDIA ").lower(), **CONTESTANTS[who].flags)
                found.append(Recorded(run, gpu, measured, cost["predicted_seconds"]))
    return found


def main(argv: list[str] | None = None) -> int:
    """Traces and prints."""
    parser = argparse.ArgumentParser(prog="python -m bench.layer_cost", description=SUMMARY)
    parser.add_argument("case", choices=CASES, nargs="?")
    parser.add_argument("--device", default="h200", help="whose rates the seconds are of (default: h200)")
    parser.add_argument("--stock", action="store_true", help="layers as transformers and PEFT have them, not fused")
    parser.add_argument("--host", action="store_true", help="time the host's part instead, beside layers as they were")
    parser.add_argument("--recorded", action="store_true", help="predict the steps that were measured on a GPU instead")
    parser.add_argument("--json", action="store_true", help="print one object")
    options = parser.parse_args(argv)
    if options.recorded:
        return _report(recorded(), as_json=options.json)
    if options.case is None:
        parser.error(f"name a case ({', '.join(CASES)}), or take --recorded")
    try:
        if options.host:
            found = host_cost(CASES[options.case].adapters)
        else:
            found = layer_cost(options.case, options.device, fused_layers=not options.stock)
    except ValueError as reason:
        parser.error(str(reason))
    if options.json:
        print(json.dumps(found))
    else:
        for figure, value in found.items():
            print(f"{figure} {value:.4g}")
    return 0


def _report(steps: list[Recorded], *, as_json: bool) -> int:
    if as_json:
        print(json.dumps({step.run: step._asdict() | {"error": step.error} for step in steps}))
    else:
        for step in steps:
            seconds = f"measured {step.measured_seconds:.3f} s, predicted {step.predicted_seconds:.3f} s"
            print(f"{step.run} on {step.gpu}: {seconds}, {step.error:+.0%}")
    return 0 if all(abs(step.error) <= MOST_OFF for step in steps) else 1


if __name__ == "__main__":
    sys.exit(main())
