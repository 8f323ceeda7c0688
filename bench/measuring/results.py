"""What was measured, as numbers and as JSON files in bench/results/: one file a method, model and machine."""

import importlib.metadata
import json
import re
import statistics
import subprocess
from datetime import date
from pathlib import Path
from typing import Any

import lowtide
from bench.measuring.processes import ROOT

FOLDER = ROOT / "bench" / "results"
COMPARISON = "comparison"
MEMORY = "memory"
VOCABULARY = "vocabulary"
ACCUMULATION = "accumulation"
ESTIMATE = "estimate"
LONGEST = "longest"
LONG_PIECES = "longest in pieces"
PLANNING = "planning"
GENERATION = "generation"
ONLINE = "online"
SHARDED = "sharded"
EXCHANGE = "exchange"
SHARDED_PEAK = "sharded-peak"
BESIDE_REPLICAS = "sharded beside replicas"
GATHERING = "gathering"
TASKS = "tasks"
VISION = "vision"
SHARDED_ESTIMATE = "sharded estimate"
DEVICES = "devices"
HEADS = "attention heads"
LOSSES = "losses"
RECIPES = "recipes"
CHAINS = "chains"
PUBLISHED = "published"
STREAMED = "streamed"
BFLOAT16 = "bfloat16"
LARGE = "large"
START = "start"
CONVERSATIONS = "conversations"
AHEAD = "rollouts ahead"
SIDE_BY_SIDE = "side by side"
RECURRENT = "recurrent"
EVALUATION = "evaluation"
FRONT_DOOR = "front door"
BASE_DTYPE = "base dtype"
FLOPS_PER_PARAMETER = 6
"""Of a token's forward and backward; a recomputed forward is not work that was asked for, and is counted apart."""
FORWARD_FLOPS = 2
"""Of a forward alone."""


def summarise(runs: dict[tuple[str, str], list[dict[str, Any]]], matmul_rate: float) -> dict[str, dict[str, Any]]:
    """Returns, by case and contestant, the medians over a contestant's turns; peaks are the highest of them."""
    cases: dict[str, dict[str, Any]] = {}
    for (case, contestant), turns in runs.items():
        tokens = turns[0]["step_tokens"]
        assert all(turn["step_tokens"] == tokens for turn in turns), "turns of one contestant saw different rows"
        seconds = statistics.median(statistics.mean(turn["step_seconds"]) for turn in turns)
        rate = statistics.mean(tokens) / seconds
        flops = FLOPS_PER_PARAMETER * rate
        again = FORWARD_FLOPS * rate * turns[0].get("recomputed_parameters", 0)
        cases.setdefault(case, {})[contestant] = {
            "seconds_per_step": seconds,
            "tokens_per_second": rate,
            "peak_above_start_bytes": max(turn["above_start_bytes"] for turn in turns),
            "matmul_share": flops * turns[0]["parameters"] / matmul_rate,
            "matmul_share_without_embedding": flops * turns[0]["multiplied_parameters"] / matmul_rate,
            "matmul_share_with_recomputation": (flops * turns[0]["parameters"] + again) / matmul_rate,
            "turns": turns,
        }
    return cases


def different_rows(cases: dict[str, dict[str, Any]], comparable: set[str]) -> list[str]:
    """Returns a line for each of the `comparable` contestants that trained on other tokens than the first did."""
    lines = []
    for case, contestants in cases.items():
        tokens = {name: contestants[name]["turns"][0]["step_tokens"] for name in contestants if name in comparable}
        first = next(iter(tokens), None)
        lines += [
            f"{case}: {name} trained on {counts} tokens a step, {first} on {tokens[first]}: not the same rows"
            for name, counts in tokens.items()
            if first is not None and counts != tokens[first]
        ]
    return lines


def ratios(contestant: dict[str, Any], other: dict[str, Any]) -> tuple[float, float]:
    """Returns how many times the other's tokens a second, and which share of its peak above the start."""
    speed = contestant["tokens_per_second"] / other["tokens_per_second"]
    return speed, contestant["peak_above_start_bytes"] / other["peak_above_start_bytes"]


def versions() -> dict[str, str]:
    """Returns the date, the libraries' versions and lowtide's commit, marked where files differ from it."""
    libraries = ("torch", "transformers", "trl", "accelerate", "datasets", "peft")
    commit = git("rev-parse", "--short=10", "HEAD")
    changed = git("status", "--porcelain", "--untracked-files=no", "src") != ""
    return {
        "date": date.today().isoformat(),
        **{library: importlib.metadata.version(library) for library in libraries},
        "lowtide": lowtide.__version__,  # a source tree may not be installed
        "lowtide_commit": commit + " with changes" * changed,
    }


def record(results: dict[str, Any]) -> Path:
    """Writes the results over an earlier run's of the same method, model and machine; returns the file."""
    return write(f"{results['method']}-{results['shape']}", results | {"kind": COMPARISON})


def write(name: str, results: dict[str, Any]) -> Path:
    """Writes one JSON file named after what was measured and the machine, whole or not at all."""
    return write_whole(path_of(name, results["hardware"]), results)


def write_whole(path: Path, results: dict[str, Any]) -> Path:
    """Writes a JSON file, whole or not at all."""
    path.parent.mkdir(exist_ok=True)
    scratch = path.with_suffix(".part")
    scratch.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return scratch.replace(path)


def path_of(name: str, hardware: dict[str, Any]) -> Path:
    machine = hardware.get("gpu") or f"{hardware['threads']}x {hardware['cpu']}"
    return FOLDER / (re.sub(r"[^a-z0-9.]+", "-", f"{name} {machine}".lower()).strip("-") + ".json")


def over_earlier(name: str, hardware: dict[str, Any], part: str, found: dict[str, Any]) -> dict[str, Any]:
    """Returns what was found by its names, over what a file of this machine has of them in one of its parts."""
    path = path_of(name, hardware)
    return (json.loads(path.read_text(encoding="utf-8"))[part] if path.exists() else {}) | found


def merged(
    name: str, hardware: dict[str, Any], run: dict[str, Any], key: tuple[str, ...], runs: str = "runs"
) -> list[dict[str, Any]]:
    """Returns the runs recorded under a name on this machine, with one more in place of that with the same key."""
    path = path_of(name, hardware)
    known = json.loads(path.read_text(encoding="utf-8")).get(runs, []) if path.exists() else []
    return [*(each for each in known if any(each[part] != run[part] for part in key)), run]


def recorded() -> list[dict[str, Any]]:
    """Returns all recorded results, in the order of their file names."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.json"))]


def described(hardware: dict[str, Any]) -> str:
    """Returns the hardware of a result in a line."""
    gpu = f"{hardware['gpu']} ({hardware['gpu_memory_gb']} GB), " if "gpu" in hardware else ""
    return f"{gpu}{hardware['cpu']}, {hardware['threads']} threads, {hardware['memory_gb']} GB, {hardware['system']}"


def dated(versions: dict[str, str]) -> str:
    """Returns when a result was measured, and of what."""
    libraries = ", ".join(f"{name} {versions[name]}" for name in ("torch", "transformers", "trl"))
    return f"{versions['date']}, lowtide {versions['lowtide']} at {versions['lowtide_commit']}, {libraries}"


def git(*arguments: str) -> str:
    """What git answers about this checkout, or "unknown"."""
    answer = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return answer.stdout.strip() if answer.returncode == 0 else "unknown"
