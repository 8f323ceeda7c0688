"""`python -m bench.rollouts_ahead`: GRPO whose completions a server writes while the policy learns, and in turns.

The model is that of `lowtide demo` (0.2M parameters), asked for sums of two numbers and rewarded where the answer is
right. A server in this process stands in for vLLM; it writes with lowtide's own generator. Compared are

- time: 30 steps of 32 completions, where writing and learning from a window are each made a second longer: the wall
  time one window ahead (`max_staleness=1`) with that in turns (`max_staleness=0`). Some 2 minutes;
- rewards: the demo's lesson as it is (supervised fine-tuning, then 240 steps of 256 completions) from 5 seeds: the mean
  reward of the last 10 steps, one window ahead and in turns. One standard error is that of the 5 runs in turns. Three
  quarters of an hour.

Prints each beside its target, records them, and exits with 1 where one is missed. The times want a machine that does
nothing else.
"""

import os
import statistics
import sys
import tempfile
import time as clock
from pathlib import Path
from typing import Any

from bench.measuring.figures import Figure, measure
from bench.measuring.results import AHEAD

NAME = "rollouts-ahead-demo"
STEPS, SECONDS, TIME_TARGET = 30, 1.0, 0.65
SEEDS, LAST = range(5), 10
SETTINGS: dict[str, Any] = {
    "use_vllm": True,
    "vllm_mode": "server",
    "vllm_importance_sampling_mode": "token_truncate",  # AsyncGRPOConfig's
    "vllm_weight_check_interval": 0,  # which would write, too
}
PLAIN: dict[str, Any] = {
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "use_cpu": True,
    "gradient_checkpointing": False,
    "log_level": "error",
}


def main(argv: list[str] | None = None) -> int:
    """Measures, prints and records; returns 1 where a figure misses its target or a run fails."""
    import datasets
    import transformers

    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    return measure(__doc__, argv, MEASURES, NAME, AHEAD)


def run(
    base: Path, ahead: int, *, reward: str = "exact_answer", seconds: float = 0.0, **options: Any
) -> dict[str, Any]:
    """Trains the model of a folder by GRPO.

    Args:
        ahead: windows.
        reward: by its short name.
        seconds: by which writing a window, and learning from it, each take longer.

    Returns:
        `seconds` of the training, those of each window's `writing`, those of `waiting` for windows, and the `rewards`
        of its steps.
    """
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback

    from bench.rollouts_ahead.stand_in import StandIn, standing_in
    from lowtide import GRPOConfig, GRPOTrainer
    from lowtide.demo.data import make_questions
    from lowtide.demo.lessons import COMMON, LESSONS

    class Slower(TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            clock.sleep(seconds)

    tokenizer = AutoTokenizer.from_pretrained(base)
    models = [AutoModelForCausalLM.from_pretrained(base) for _ in range(2)]
    questions, _ = make_questions(200, 0)
    rows = [
        {"prompt": each.messages[:1], "answer": str(each.left + each.right)}
        for each in questions[: LESSONS["grpo"].questions]
    ]
    engine = StandIn(models[1], tokenizer, seconds)
    with standing_in(engine) as url, tempfile.TemporaryDirectory() as folder:
        taught = {name: value for name, value in LESSONS["grpo"].settings.items() if name != "reward_funcs"}
        settings = COMMON | taught | PLAIN | SETTINGS | {"vllm_server_base_url": url, "max_staleness": ahead} | options
        trainer = GRPOTrainer(
            model=models[0],
            reward_funcs=reward,
            args=GRPOConfig(output_dir=folder, **settings),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            callbacks=[Slower()],
        )
        trainer.remove_callback(PrinterCallback)
        began = clock.perf_counter()
        trainer.train()
        taken = clock.perf_counter() - began
    logs = [each for each in trainer.state.log_history if "reward" in each]
    return {
        "seconds": taken,
        "writing": engine.busy,
        "waiting": [each["perf/rollout_wait_s"] for each in logs if "perf/rollout_wait_s" in each],
        "rewards": [each["reward"] for each in logs],
    }


def time() -> dict[str, Any]:
    """Of 30 steps."""
    from lowtide.demo.model import save

    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder), 0)
        settings = {"max_steps": STEPS, "per_device_train_batch_size": 32, "reward": "length", "seconds": SECONDS}
        load = os.getloadavg()[0]
        turns, ahead = (run(Path(folder), number, **settings) for number in (0, 1))
    ratio = ahead["seconds"] / turns["seconds"]
    writing = statistics.median(turns["writing"])
    learning = turns["seconds"] / STEPS - writing
    text = (
        f"{STEPS} steps in turns {turns['seconds']:.1f} s ({writing:.2f} s to write a window, {learning:.2f} s to learn"
        f"); one window ahead {ahead['seconds']:.1f} s (waited {sum(ahead['waiting']):.1f} s): {ratio:.2f}x "
        f"(target {TIME_TARGET}x)"
    )
    found = {"in_turns": turns, "ahead": ahead, "load_before": load, "ratio": ratio}
    return {**found, "text": text, "met": ratio <= TIME_TARGET}


def rewards() -> dict[str, Any]:
    """Of 5 seeds."""
    from lowtide.demo.lessons import LESSONS

    with tempfile.TemporaryDirectory() as folder:
        taught = teach(Path(folder))
        found: dict[str, list[float]] = {"in turns": [], "ahead": []}
        for seed in SEEDS:
            for ahead, name in enumerate(found):
                made = run(taught, ahead, seed=seed, max_steps=LESSONS["grpo"].steps)
                found[name].append(statistics.mean(made["rewards"][-LAST:]))
    means = [statistics.mean(each) for each in found.values()]
    error = statistics.stdev(found["in turns"]) / len(SEEDS) ** 0.5
    text = (
        f"of the last {LAST} of {LESSONS['grpo'].steps} steps, {len(SEEDS)} seeds: in turns {means[0]:.3f}, "
        f"one window ahead {means[1]:.3f}: {abs(means[1] - means[0]) / error:.2f} standard errors of {error:.4f} apart "
        "(target 1)"
    )
    return {**found, "standard_error": error, "text": text, "met": abs(means[1] - means[0]) <= error}


def teach(folder: Path) -> Path:
    """Returns the folder of a model that answers some questions, since it was fine-tuned on others' answers."""
    from datasets import Dataset
    from transformers import PrinterCallback

    from lowtide import SFTConfig, SFTTrainer
    from lowtide.demo.data import dialogue_rows, make_questions
    from lowtide.demo.lessons import COMMON, LESSONS
    from lowtide.demo.model import make_model, make_tokenizer

    questions, _ = make_questions(200, 0)
    tokenizer = make_tokenizer()
    trainer = SFTTrainer(
        model=make_model(tokenizer, 0),
        args=SFTConfig(
            output_dir=str(folder / "run"),
            max_steps=LESSONS["grpo"].taught,
            **(COMMON | LESSONS["sft"].settings | PLAIN),
        ),
        train_dataset=Dataset.from_list([row for each in questions for row in dialogue_rows(each)]),
        processing_class=tokenizer,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    trainer.save_model(str(folder / "taught"))
    tokenizer.save_pretrained(folder / "taught")
    return folder / "taught"


MEASURES: dict[str, Figure] = {"time": time, "rewards": rewards}


if __name__ == "__main__":
    sys.exit(main())
