"""One rank of one run of `bench.sharded` or `bench.exchange`: trains a few steps and prints what they took.

A `gigabits` in what it is given slows the exchange of gradients down to a link of so many a second; without `overlap`
it follows backward, and without `by_rows` all rows of the embedding's are exchanged. `counts_tensors` has the
bytes of living tensors counted, `options` are further ones of lowtide's config, and `zero` of DeepSpeed's stage.
With `first_rows` the dataset has no more than so many.
"""

import contextlib
import gc
import importlib
import json
import os
import time
from collections.abc import Callable
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.compare.child import clock
from bench.compare.methods import METHODS
from bench.inputs.rows import CASES
from bench.inputs.shapes import KNOWN_SHAPES, build_model
from bench.inputs.tokenizer import load_tokenizer
from bench.measuring.arguments import specification
from bench.measuring.living_bytes import LivingBytes
from bench.measuring.measure import PeakMeter
from bench.measuring.processes import MARK

APART = "apart"
"""In place of an engine: ranks that exchange nothing."""
BY_DEEPSPEED = ("zero2", "zero3")
"""Engines whose number is ZeRO's stage."""
ZERO: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
}


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    """Seconds of each timed step, and the peak of the steps above what was held before the model was."""
    from datasets import Dataset

    rank = int(os.environ["RANK"])
    meet = _meet(spec)
    if "gigabits" in spec:
        _slow_down(spec["gigabits"], spec["overlap"], spec["by_rows"])
    package = importlib.import_module(spec["contestant"])
    method, folder = METHODS[spec["method"]], Path(spec["folder"])
    config_class, trainer_class = getattr(package, method.config), getattr(package, method.trainer)
    alone = spec["engine"] == APART
    if rank == 0 or alone:
        folder = folder / str(rank) if alone else folder
        build_model(KNOWN_SHAPES[spec["shape"]]).save_pretrained(folder / "model")
    meet()
    gc.collect()
    rows = CASES[spec["method"]]["gsm8k"].rows()[: spec.get("first_rows")]
    dataset = Dataset.from_list(rows[rank :: spec["ranks"]] if alone else rows)
    steps, timer = spec["warmup"] + spec["timed"], clock("cpu")
    loading, training = PeakMeter("cpu"), PeakMeter("cpu")
    args = config_class(**_options(spec, steps))
    loading.start()
    trainer = trainer_class(
        model=_model(spec, folder / "model"),
        args=args,
        train_dataset=dataset,
        processing_class=load_tokenizer(Path(spec["tokenizer"])),
        callbacks=[timer],
        **_reference(spec, folder / "model"),
    )
    loaded = loading.stop()["above_start_bytes"]
    training.start()
    with LivingBytes() if spec.get("counts_tensors") else contextlib.nullcontext() as living:
        trainer.train()
    peak = training.stop()["peak_bytes"] - loading.start_bytes
    seconds = [after - before for before, after in pairwise(timer.ends)][-spec["timed"] :]
    tensors = {} if living is None else {"tensor_bytes": living.peak}
    return {"step_seconds": seconds, "peak_above_start_bytes": peak, "loading_bytes": loaded, **tensors}


def _meet(spec: dict[str, Any]) -> Callable[[], object]:
    """The ranks find each other, in the way of the engine; returns what waits for all of them."""
    if spec["engine"] == APART:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name)
        return lambda: None
    import torch.distributed as dist

    if find_spec("deepspeed") is not None:  # accelerate imports it under every engine
        importlib.import_module("torch._dynamo")  # deepspeed patches tensors, after which it cannot be imported
        importlib.import_module("deepspeed")
    if spec["engine"] in BY_DEEPSPEED and spec["contestant"] == "trl":  # lowtide starts it by itself
        importlib.import_module("deepspeed").init_distributed("gloo")
    else:
        dist.init_process_group("gloo")
    return dist.barrier


class SlowWork:
    """A collective that is over no sooner than a link of that speed lets it."""

    free = 0.0
    """When the link is free again, by `time.monotonic`."""

    def __init__(self, work: Any, seconds: float) -> None:
        self.work = work
        self.until = SlowWork.free = max(SlowWork.free, time.monotonic()) + seconds

    def wait(self) -> None:
        self.work.wait()
        time.sleep(max(self.until - time.monotonic(), 0.0))


def _slow_down(gigabits: float, overlap: bool, by_rows: bool) -> None:
    import torch.distributed as dist

    from lowtide.ranks import replicas

    exchange, ranks = dist.all_reduce, dist.get_world_size()

    def slow(tensor: Any, *args: Any, async_op: bool = False, **more: Any) -> Any:
        work = exchange(tensor, *args, async_op=async_op, **more)
        sent = 2 * (ranks - 1) / ranks * tensor.nbytes  # of each rank, around a ring
        return SlowWork(work, sent * 8 / (gigabits * 1e9)) if async_op else work

    dist.all_reduce = slow
    if not overlap:
        replicas.Averaging.overlap = lambda self: contextlib.nullcontext()
    if not by_rows:
        replicas.MOST_ROWS = -1.0  # any are too many


def _options(spec: dict[str, Any], steps: int) -> dict[str, Any]:
    """What both libraries get, and what turns the engine on in each."""
    common = {
        "output_dir": spec["folder"],
        "per_device_train_batch_size": spec["rows"] // spec["ranks"],
        "train_sampling_strategy": "sequential",
        "max_steps": steps,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
    }
    if spec["engine"] in BY_DEEPSPEED:
        stage = {"stage": int(spec["engine"][-1]), "stage3_gather_16bit_weights_on_model_save": True}
        common["deepspeed"] = {**ZERO, "zero_optimization": stage | spec.get("zero", {})}
        if spec["contestant"] == "trl":
            _tell_accelerate()
            del common["use_cpu"]
            common["accelerator_config"] = {"use_configured_state": True}
    elif spec["engine"] == "fsdp2" and spec["contestant"] == "lowtide":
        common["fsdp"] = True
    if spec["contestant"] == "lowtide":
        common |= spec.get("options", {})
        common["rehearsal"] = False  # the heaviest rows of the whole dataset are no part of the steps
    return common


def _tell_accelerate() -> None:
    """That the ranks are DeepSpeed's: by itself it turns DeepSpeed off where it is told of a CPU, and sees one rank
    where it is not."""
    from accelerate import DistributedType, PartialState

    PartialState(cpu=True).distributed_type = DistributedType.DEEPSPEED
    os.environ.pop("ACCELERATE_USE_CPU")


def _model(spec: dict[str, Any], path: Path) -> Any:
    """By name; TRL's is sharded by transformers as it is loaded, where the engine is FSDP2."""
    if spec["contestant"] == "lowtide" or spec["engine"] != "fsdp2":
        return str(path)
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    return AutoModelForCausalLM.from_pretrained(path, distributed_config=DistributedConfig(fsdp_size=spec["ranks"]))


def _reference(spec: dict[str, Any], path: Path) -> dict[str, Any]:
    """TRL is given a reference that is sharded too; lowtide and TRL under DeepSpeed make their own."""
    if spec["method"] == "dpo" and spec["contestant"] == "trl" and spec["engine"] == "fsdp2":
        return {"ref_model": _model(spec, path)}
    return {}


if __name__ == "__main__":
    print(MARK + json.dumps(measure(specification(__doc__))), flush=True)
