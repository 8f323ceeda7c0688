"""`python -m bench.published`: peaks that others have published, beside what lowtide predicts for the same settings.

Nothing is measured here: theirs are what they wrote, ours are predictions (`lowtide.estimate`) for lowtide's own step
with their settings. Where settings differ, or are not published, the table says so. Returns 1 where a difference is
above 10% though all settings are known and no buffer is named that explains it.
"""

import argparse
import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.processes import ROOT
from bench.published_cases import CASES, GIB, TORCHTITAN, TORCHTUNE, UNSLOTH, Published
from bench.results import PUBLISHED, dated, merged, versions, write

NAME = "published-peaks"
HARDWARE = {"gpu": "predicted"}
"""Nothing is measured, so no machine matters."""
WITHIN = 0.1
TITLES = {
    TORCHTUNE: "torchtune, Llama-3.1-8B",
    TORCHTITAN: "torchtitan, Llama-3.1-8B on 8 H100",
    UNSLOTH: "Unsloth",
}
PAGE = ROOT / "docs" / "published-peaks.md"
MARK, END = "<!-- written by `make docs` from bench/results -->", "<!-- /peaks -->"


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


def missed(run: Mapping[str, Any]) -> bool:
    """Whether a difference is too large, and unexplained."""
    case = CASES[run["case"]]
    return case.strict and not case.differs and abs(difference(run)) > WITHIN


def difference(run: Mapping[str, Any]) -> float:
    """Of the prediction, as a share of what is published."""
    return run["predicted_bytes"] / run["published_bytes"] - 1


def cells(run: Mapping[str, Any]) -> tuple[str, ...]:
    """Of a table's row."""
    case = CASES[run["case"]]
    unit = "GiB" if case.unit == GIB else "GB"
    largest = sorted(run["held"].items(), key=lambda each: -each[1])[:3]
    return (
        run["case"],
        f"{case.published:g} {unit}",
        f"{run['predicted_bytes'] / case.unit:.1f} {unit}",
        f"{difference(run):+.0%}",
        ", ".join(f"{name} {size / case.unit:.1f}" for name, size in largest),
        case.differs or "settings are the same",
    )


def record(run: dict[str, Any]) -> None:
    """Writes a prediction over that of the same case."""
    runs = merged(NAME, HARDWARE, run, ("case",))
    write(NAME, {"kind": PUBLISHED, "hardware": HARDWARE, "runs": runs, "versions": versions()})


def tables(result: Mapping[str, Any]) -> list[str]:
    """The lines of the page's tables."""
    lines = []
    for source, title in TITLES.items():
        runs = [run for run in result["runs"] if run["case"] in CASES and CASES[run["case"]].source == source]
        lines += ["", f"## {title}", "", f"Source: <{source}>", ""]
        lines += ["| | published | predicted for lowtide | difference | most of the prediction | settings |"]
        lines += ["|---|---:|---:|---:|---|---|", *(f"| {' | '.join(cells(run))} |" for run in runs)]
    return [*lines, "", f"{dated(result['versions'])}. From `python -m bench.published`.", ""]


if __name__ == "__main__":
    sys.exit(main())
