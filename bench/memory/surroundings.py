"""What a run needs around it: the environment of its process, the weights that it starts from, and its device."""

import tempfile
from pathlib import Path

from bench.inputs.tokenizer import cache_folder
from bench.measuring.processes import run_child
from lowtide.memory.allocators import settings as allocator

ENVIRONMENT = {**allocator.steady_malloc({}), allocator.NAME: allocator.SETTING}
"""Of a run: the heap, and the device's segments, of the `lowtide` command."""


def environment() -> dict[str, str]:
    """Variables of a child: the heap and segments of the `lowtide` command; threads wait without taking time."""
    return {**ENVIRONMENT, "OMP_WAIT_POLICY": "PASSIVE"}


def saved_weights(dtype: str = "bfloat16") -> str:
    """The folder of the model in a dtype, made on the first call by a process of its own."""
    folder = cache_folder() / f"qwen2.5-0.5b-{dtype}"
    if not folder.exists():
        cache_folder().mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=cache_folder()))
        run_child({"save": str(scratch), "dtype": dtype}, lambda step: None, 600, module="bench.memory.child")
        scratch.replace(folder)
    return str(folder)


def device_here() -> str:
    """ "cuda" where there is a GPU, else "cpu"."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
