"""`metrics.jsonl`: each log of a run as a line of JSON in its output folder, whatever trackers there are."""

from __future__ import annotations

import contextlib
import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from lowtide.own_files import writing

METRICS = "metrics.jsonl"

logger = logging.getLogger(__name__)


class MetricsFile(TrainerCallback):
    """Writes what a training logs. A resumed run has its earlier logs too, up to the step that it resumes from."""

    def __init__(self) -> None:
        self._path: Path | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        self._path = path = Path(str(args.output_dir)) / METRICS
        with self._unless_it_cannot_be_written():
            path.parent.mkdir(parents=True, exist_ok=True)
            with writing(path) as beside:
                beside.write_text(_lines(state.log_history), encoding="utf-8")

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._path is not None:
            with self._unless_it_cannot_be_written(), self._path.open("a", encoding="utf-8") as file:
                file.write(_lines(state.log_history[-1:]))

    @contextlib.contextmanager
    def _unless_it_cannot_be_written(self) -> Iterator[None]:
        """A run does not end for want of this file."""
        try:
            yield
        except OSError as error:
            logger.warning(f"{self._path} is not written: {error.strerror or error}")
            self._path = None


def _lines(logs: Iterable[Mapping[str, Any]]) -> str:
    """A line for each log; a number that JSON has not (infinity, or none at all) is null."""
    return "".join(json.dumps({name: _plain(value) for name, value in each.items()}) + "\n" for each in logs)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | bool | None) else str(value)
