"""`python -m bench.published`: peaks that others have published, beside what lowtide predicts for the same settings.

Nothing is measured here: theirs are what they wrote, ours are predictions (`lowtide.estimate`) for lowtide's own step
with their settings. Where settings differ, or are not published, the table says so. Returns 1 where a difference is
above 10% though all settings are known and no buffer is named that explains it.
"""

import argparse
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.measuring.results import PUBLISHED, merged, versions, write
from bench.published.cases import CASES, Published
from bench.published.tables import cells, missed

NAME = "published-peaks"
HARDWARE = {"gpu": "predicted"}
"""Nothing is measured, so no machine matters."""


def main(argv: list[str] | None = None) -> int:
    """Predicts, prints and records."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.published", description="Compare predicted peaks with those that others have published."
    )
    parser.add_argument("--only", nargs="*", choices=CASES, metavar="CASE", help=f"of {'; '.join(CASES)}")
    parser.add_argument("--no-record", dest="record", action="store_false", help="print only")
    options, console = parser.parse_args(argv), Console()
    runs = []
    from lowtide.planner.tracing_process import tracing_here

    for name in options.only or CASES:
        with tracing_here():
            run = {"case": name, **predicted(CASES[name])}
        runs.append(run)
        console.print(*cells(run), sep="  ")
    table = Table("case", "published", "predicted", "difference", "most of it", "reason", title="all predictions")
    for run in runs:
        table.add_row(*cells(run))
    console.print(table)
    if options.record:
        for run in runs:
            record(run)
    return int(any(missed(run) for run in runs))


def predicted(case: Published) -> dict[str, Any]:
    """What lowtide takes with their settings, in bytes."""
    from peft import LoraConfig

    from lowtide import SFTConfig, estimate
    from lowtide.planner.answers.known_models import known_config
    from lowtide.planner.answers.ways import FourBits
    from lowtide.planner.estimate import BESIDE_TENSORS

    config = SFTConfig(
        output_dir="published",
        use_cpu=True,
        report_to="none",
        per_device_train_batch_size=len(case.lengths),
        model_init_kwargs=dict(case.weights),
        rehearsal=False,
        save_strategy="no",
        **case.options,
    )
    described = known_config(case.model)
    assert described is not None
    inputs: dict[str, Any] = {}
    if case.lora:
        targets = case.lora if isinstance(case.lora, str) else list(case.lora)
        inputs["peft_config"] = LoraConfig(task_type="CAUSAL_LM", r=case.rank, lora_alpha=16, target_modules=targets)
    if case.four_bits:
        inputs["quantization_config"] = FourBits(bnb_4bit_use_double_quant=case.double)
    spread = {} if case.ranks == 1 else {"world_size": case.ranks, "sharding": "fsdp2"}
    found = estimate(config, described, lengths=list(case.lengths), device=case.device, **spread, **inputs)
    if case.reserved:
        phase, bytes, held = found.phase, found.reserved_bytes, dict(found.phases[found.phase])
        held.pop("runtime", None)
    else:
        left_out = {*BESIDE_TENSORS, *case.apart}
        tensors = {
            phase: {name: size for name, size in each.items() if size and name not in left_out}
            for phase, each in found.phases.items()
        }
        phase = max(tensors, key=lambda each: sum(tensors[each].values()))
        bytes, held = sum(tensors[phase].values()), tensors[phase]
    return {
        "predicted_bytes": bytes,
        "published_bytes": int(case.published * case.unit),
        "phase": phase,
        "held": held,
    }


def record(run: dict[str, Any]) -> None:
    """Writes a prediction over that of the same case."""
    runs = merged(NAME, HARDWARE, run, ("case",))
    write(NAME, {"kind": PUBLISHED, "hardware": HARDWARE, "runs": runs, "versions": versions()})


if __name__ == "__main__":
    sys.exit(main())
