"""Weights in a file a rank, each with the rows that the rank holds: how they are written, and read row by row.

The files are safetensors, and their metadata says at which row each weight begins, as that of torch's
`HuggingFaceStorageWriter(save_distributed=True)` does: torch's reader and `consolidate_safetensors_files` read them
too. They are not written by torch's writer, which makes a second copy of all that a rank writes, plans in collectives
that a rank with a full disk leaves, and knows nothing of ZeRO-3's parameters.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from lowtide.own_files import share_file
from lowtide.parsing import parse_json

SHARD = re.compile(r"shard-(\d+)-of-(\d+)\.safetensors")
"""The name of a rank's file."""
OF_A_MODEL = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")
"""The names of files that hold the weights of a whole model, and of their index."""
PLACES, VERSION = "DCP_SHARDING_INFO", "DCP_VERSION"
"""Keys of the metadata, and of a weight's place in it, as torch names them."""
OFFSETS = "saved_offsets"
MOST_NAMED = 16
"""Missing files that are named: a file may say that it is one of billions."""


def shard_name(rank: int, ranks: int) -> str:
    """Of the file of a rank, which count from 0."""
    return f"shard-{rank + 1:05}-of-{ranks:05}.safetensors"


def shards_in(folder: Path) -> list[Path]:
    """The files that ranks wrote into a folder, in the order of ranks; none where it is no folder."""
    return sorted(path for path in folder.glob("shard-*.safetensors") if SHARD.fullmatch(path.name))


def missing_shards(folder: Path) -> list[str]:
    """The names of files that belong to those of a folder, and are not there; of many the first alone."""
    names = {path.name for path in shards_in(folder)}
    ranks = max((int(match[2]) for name in names if (match := SHARD.fullmatch(name))), default=0)
    gone = (name for rank in range(ranks) if (name := shard_name(rank, ranks)) not in names)
    return list(itertools.islice(gone, MOST_NAMED))


def write_shard(path: Path, rows: Mapping[str, tuple[Tensor, int]]) -> None:
    """Writes the rows that a rank holds; what lies on a CPU is not copied.

    Args:
        rows: by the weight's name, its rows, and the number of the first.

    Raises:
        OSError, SafetensorError: they cannot be written.
    """
    places = {name: {OFFSETS: [first, *[0] * (part.dim() - 1)][: part.dim()]} for name, (part, first) in rows.items()}
    told = {"format": "pt", VERSION: "1.0", PLACES: json.dumps(places)}
    save_file({name: part.detach().cpu().contiguous() for name, (part, _) in rows.items()}, path, metadata=told)
    share_file(path)


class WeightFiles:
    """The weights in safetensors files, whole ones and those of ranks; each row is read when it is asked for.

    Attributes:
        shapes: by name, of the whole weights.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        """Opens the files.

        Raises:
            ValueError: rows of a weight are missing.
        """
        self._open = contextlib.ExitStack()
        self._pieces: dict[str, list[tuple[int, int, Any]]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for path in paths:
            self._add(self._open.enter_context(safe_open(path, framework="pt")))
        for name, pieces in self._pieces.items():
            pieces.sort(key=lambda piece: piece[:2])
            starts, ends = [first for first, _, _ in pieces], [end for _, end, _ in pieces]
            if starts != [0, *ends[:-1]]:
                self._open.close()
                raise ValueError(f"{paths[0].parent} does not hold all rows of {name}: copy the whole folder again")
            self.shapes[name] = (ends[-1], *self.shapes[name][1:]) if self.shapes[name] else ()

    def __enter__(self) -> WeightFiles:
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.close()

    def _add(self, file: Any) -> None:
        places = parse_json((file.metadata() or {}).get(PLACES, "{}"))
        for name in file.keys():  # noqa: SIM118
            shape = tuple(file.get_slice(name).get_shape())
            first = places[name][OFFSETS][0] if name in places and shape else 0
            self._pieces.setdefault(name, []).append((first, first + (shape[0] if shape else 1), file))
            self.shapes[name] = shape

    def rows(self, name: str, first: int = 0, end: int | None = None) -> Tensor:
        """Some rows of a weight; by default all."""
        if not self.shapes[name]:
            return self._pieces[name][0][2].get_tensor(name)
        end = self.shapes[name][0] if end is None else end
        found = [
            file.get_slice(name)[max(first, start) - start : min(end, stop) - start]
            for start, stop, file in self._pieces[name]
            if max(first, start) < min(end, stop)
        ]
        if not found:
            return self._pieces[name][0][2].get_slice(name)[:0]
        return found[0] if len(found) == 1 else torch.cat(found)
