"""What a training process holds on a CPU beside tensors: the interpreter, libraries, threads, the data's pipeline.

It differs from machine to machine and from version to version, and no trace sees it. So it is measured, once: a small
model is trained in a process of its own, and what its trace foretells is taken from its peak. The result is kept in the
user's cache folder, under the versions that it is of.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PACKAGES = ("lowtide", "torch", "transformers", "accelerate", "datasets", "peft", "numpy", "pyarrow")
SECONDS = 300
"""After which a measurement is given up."""
SIZES = {
    "vocab_size": 4_000,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
ROWS, TOKENS = 4, 256


def process_bytes(adapters: bool = False) -> int:
    """Resident bytes of a training process without its tensors; the first call for some versions takes ten seconds.

    Args:
        adapters: whether it trains adapters, for which it imports PEFT.

    Raises:
        RuntimeError: the small model could not be trained; says what its process printed last.
    """
    kept = _folder() / f"process-{_key(adapters)}.json"
    try:
        return int(json.loads(kept.read_text())["bytes"])
    except (OSError, ValueError, KeyError):
        pass
    found = _measured(adapters)
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        scratch = kept.with_suffix(f".{os.getpid()}")
        scratch.write_text(json.dumps({"bytes": found}))
        scratch.replace(kept)
    except OSError:
        pass  # it is measured again next time
    return found


def _measured(adapters: bool) -> int:
    command = [sys.executable, "-m", "lowtide.calibration", *(["adapters"] if adapters else [])]
    quiet = {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=os.environ | quiet, capture_output=True, text=True, timeout=SECONDS)
    if done.returncode:
        raise RuntimeError(f"the small run that shows what a process takes failed: {done.stderr.strip()[-300:]}")
    return int(done.stdout.split()[-1])


def _key(adapters: bool) -> str:
    versions = [f"{name} {importlib.metadata.version(name)}" for name in PACKAGES]
    facts = [sys.version, platform.machine(), os.environ.get("OMP_NUM_THREADS", ""), adapters, SIZES, *versions]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def _folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lowtide"


def small_run(folder: str, adapters: bool) -> dict[str, Any]:
    """Config, model description, rows and adapters of the run that is measured."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import LlamaConfig

    from lowtide.trainers.sft import SFTConfig

    config = SFTConfig(
        output_dir=folder,
        max_steps=2,
        per_device_train_batch_size=ROWS,
        max_length=TOKENS,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    rows = [{"input_ids": list(range(1, TOKENS + 1))} for _ in range(4 * ROWS)]
    peft_config = LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM") if adapters else None
    return {
        "config": config,
        "described": LlamaConfig(**SIZES),
        "dataset": Dataset.from_list(rows),
        "peft_config": peft_config,
    }


def main(adapters: bool) -> int:
    """Trains the small model in this process; returns what it held beside tensors, in bytes."""
    from transformers import AutoModelForCausalLM

    from lowtide.demo.model import make_tokenizer
    from lowtide.memory.measure import peak_resident_bytes
    from lowtide.planner.devices import device_named
    from lowtide.planner.estimate import estimate_run
    from lowtide.planner.fake_run import FakeRun
    from lowtide.trainers.sft import SFTTrainer

    with tempfile.TemporaryDirectory() as folder:
        run = small_run(folder, adapters)
        trainer = SFTTrainer(
            AutoModelForCausalLM.from_config(run["described"]),
            args=run["config"],
            train_dataset=run["dataset"],
            processing_class=make_tokenizer(),
            peft_config=run["peft_config"],
        )
        trainer.train()
        peak = peak_resident_bytes()
        traced = FakeRun(SFTTrainer, **run, processing_class=make_tokenizer())
        foretold = estimate_run(traced, device_named("cpu"))
    return peak - foretold.peak_bytes


if __name__ == "__main__":
    print(main("adapters" in sys.argv))
