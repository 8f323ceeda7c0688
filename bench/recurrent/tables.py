"""Recurrent layers without padding beside the padded computation, as docs/benchmarks.md has them."""

from typing import Any

from bench.measuring.measure import GIGABYTE
from bench.measuring.results import dated, described

TITLES = {
    "rows": "a step of 16 rows of 50 to 500 tokens",
    "group": "a step of 8 completions of one prompt",
    "rollouts": "32 completions of 8 prompts",
}


def recurrent_section(results: dict[str, Any]) -> str:
    """Returns what was measured of recurrent layers: both ways side by side, then lowtide and TRL."""
    measured = results["measured"]
    rows = [_row(what, model, of) for what in TITLES for model, of in measured.get(what, {}).get("models", {}).items()]
    lines = [
        "## Recurrent layers",
        "",
        "Models of three recurrent layers and one of attention, in float32. Without padding, rows lie end to end, a",
        "prompt is computed once, and completions are written by lowtide's own generator. With padding, rows and",
        "prompts are padded and repeated, and transformers' `generate` writes. The fastest run; the peak is",
        "above the model. [Recurrent layers](padding-free.md#recurrent-layers) explains how.",
        "",
        "| | layers | padded | without padding | speed | target | peak, padded | peak, without |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
        *rows,
        "",
    ]
    if (beside := measured.get("trl")) is not None:
        lines += [f"Supervised fine-tuning of a Qwen3.5 of 24M parameters beside TRL: {beside['text']}.", ""]
    if (beside := measured.get("experts")) is not None:
        lines += [
            f"[Adapters of a layer's 64 experts](memory/adapters.md#routed-experts) beside PEFT: {beside['text']}.",
            "",
        ]
    lines += [
        f"{described(results['hardware'])}. {dated(results['versions'])}. Measured with `python -m bench.recurrent`.",
        "",
    ]
    return "\n".join(lines)


def _row(what: str, model: str, of: dict[str, Any]) -> str:
    padded, ragged = of["padded"], of["ragged"]
    cells = [TITLES[what], model, *(f"{min(run['seconds']):.2f} s" for run in (padded, ragged))]
    cells += [f"**{of['speed']:.2f}x**", f"{of['target']}x"]
    cells += [f"{run['above_start_bytes'] / GIGABYTE:.2f} GB" for run in (padded, ragged)]
    return f"| {' | '.join(cells)} |"
