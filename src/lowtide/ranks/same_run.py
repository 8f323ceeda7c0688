"""Ranks run the same versions with the same options; where one has others, all are refused with both values.

With another learning rate a rank's weights would drift from those of the others, and with another number of steps it
would leave the others waiting.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from lowtide.process.versions import version_of
from lowtide.ranks.world import distributed, objects_of_all_ranks

LIBRARIES = ("lowtide", "torch", "transformers", "accelerate", "peft")
OF_A_RANK = re.compile(
    r"local_rank|output_dir|run_name|report_to|project|disable_tqdm|memory_report|log_.*|logging_.*|dataloader_.*|"
    r"hub_.*|push_to_hub.*|trackio_.*|.*_(dir|kwargs|host|url)|cache_.*|vllm_.*|_.*"
)
"""Options that may differ: where a rank reads and writes, and what it prints."""


def check_same_run(options: Mapping[str, Any]) -> None:
    """Refuses versions and options that are others on another rank; all ranks ask together.

    Args:
        options: of the run, by name.

    Raises:
        ValueError: names the first that differs, with the values of two ranks.
    """
    if not distributed():
        return
    mine = {f"the version of {name}": version_of(name, "not installed") for name in LIBRARIES}
    mine |= {name: _text(value) for name, value in options.items() if not OF_A_RANK.fullmatch(name)}
    digest = hashlib.blake2b(json.dumps(mine, sort_keys=True).encode(), digest_size=16).hexdigest()
    if len(set(objects_of_all_ranks(digest))) == 1:
        return
    everyones = objects_of_all_ranks(mine)
    for name in sorted({*mine}.union(*everyones)):
        values = [each.get(name, "not there") for each in everyones]
        other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            raise ValueError(
                f"ranks differ: {name} is {values[0]} on rank 0, and {values[other]} on rank {other}. Start all ranks "
                "with the same versions and options"
            )


def _text(value: Any) -> str:
    """A value as text, without what is the process's own."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))[:500]
