"""Which weights a copy lacks, and how they travel: merged, under the names of checkpoints, in buckets of bounded size.

Adapters are merged one weight at a time, in float32, as `lowtide merge` does it, so that what vLLM computes is the
policy to rounding, whatever kind of adapter it has. After the first copy only those blocks (the attention or the
feed-forward part of a layer, an embedding) are sent again in which something can have changed: with adapters on
attention alone, these.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from lowtide.compat.deepspeed import is_partitioned
from lowtide.compat.torch import version_of
from lowtide.engine.forward import causal_model
from lowtide.engine.weights.merging import checkpoint_weights
from lowtide.parsing import parse_json
from lowtide.ranks.shards import local_of

MAX_BUCKET_BYTES = 256 << 20
MAX_BODY_BYTES = 4 * MAX_BUCKET_BYTES
"""Of what a server takes at a time: a row of a weight may be above a bucket."""
WHOLE = -1


class Copies:
    """Knows what a copy of the weights of a model has.

    Args:
        adapted: they are merged with their adapters; otherwise the base's alone.
    """

    def __init__(self, *, adapted: bool = True) -> None:
        self.adapted = adapted
        self._marks: dict[str, Mark] | None = None
        self._renamed = False

    def forget(self) -> None:
        """The copy is lost, or of somebody else."""
        self._marks = None

    def current(self, model: nn.Module) -> bool:
        """Whether nothing was written to the model's weights since they were copied."""
        if any(is_partitioned(p) for p in model.parameters()):
            return False  # what is written to its parts leaves no mark
        return self._marks is not None and self._marks == self._found(model)

    def took_all(self, model: nn.Module) -> None:
        """The copy has the weights of the model; another rank saw to that."""
        self._marks = self._found(model)

    def _found(self, model: nn.Module) -> dict[str, Mark]:
        return marks_of(model, lambda name: self.adapted or not is_adapter(name))

    def lacking(self, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """The weights that a copy lacks, as checkpoints name them; it has them when all are taken, which ranks do
        together where weights are sharded.

        Raises:
            ValueError: as `checkpoint_weights`.
        """
        marks, before = self._found(model), self._marks
        self._marks = None
        merged = functools.partial(checkpoint_weights, model, adapted=self.adapted)
        if before is None:
            self._renamed = False
            known = {name for name, _ in causal_model(model).named_parameters()}
            for name, weight in merged():
                self._renamed |= name not in known and not _adapted(name, known)
                yield name, weight
        else:
            blocks = {block for block, found in marks.items() if found.trained or found != before.get(block)}
            if self._renamed:
                layers = {_layer(block) for block in blocks}
                yield from merged(lambda module: _layer(_block(module)) in layers)
            else:
                yield from merged(lambda module: _block(module) in blocks)
        self._marks = marks


class Mark(NamedTuple):
    """What tells whether a block was written to."""

    trained: bool
    written: tuple[tuple[int, int], ...]
    """Of each parameter, which tensor it is, and how often it was written to."""


def is_adapter(name: str) -> bool:
    """Whether a parameter is of a LoRA adapter."""
    return ".lora_A." in name or ".lora_B." in name


def marks_of(model: nn.Module, wanted: Callable[[str], bool]) -> dict[str, Mark]:
    """The mark of each block, of its parameters whose names are wanted."""
    found: dict[str, list[Tensor]] = {}
    for name, parameter in causal_model(model).named_parameters():
        if wanted(name):
            found.setdefault(_block(name), []).append(parameter)
    return {
        block: Mark(any(p.requires_grad for p in own), tuple((id(p), version_of(local_of(p))) for p in own))
        for block, own in found.items()
    }


ADAPTER_WORDS = ("base_layer", "modules_to_save", "original_module", "token_adapter", "lora_", "weight", "bias")


def _block(name: str) -> str:
    """The block of a module or parameter: of layers the part right below the layer, otherwise the module."""
    words = name.split(".")
    number = next((n for n, word in enumerate(words) if word.isdigit()), None)
    if number is not None:
        return ".".join(words[: number + 2])
    end = next((n for n, word in enumerate(words) if word.startswith(ADAPTER_WORDS)), len(words))
    return ".".join(words[:end])


def _layer(block: str) -> str:
    words = block.split(".")
    return ".".join(words[:-1]) if len(words) > 1 and words[-2].isdigit() else block


def _adapted(name: str, known: Iterable[str]) -> bool:
    """Whether a weight stands below its name, since adapters are put around it."""
    module, _, own = name.rpartition(".")
    return any(
        f"{module}.{inner}.{own}" in known
        for inner in ("base_layer", "modules_to_save.default", "original_module", "token_adapter.base_layer")
    )


# -- buckets -----------------------------------------------------------------------------------------------------


class Piece(NamedTuple):
    """A weight, or some of its rows."""

    name: str
    rows: Tensor
    first: int = 0
    """The place of these rows in the weight."""
    total: int = WHOLE
    """The rows of the weight; `WHOLE` if this is all of it."""


def buckets(
    weights: Iterable[tuple[str, Tensor]], most: int = MAX_BUCKET_BYTES, *, cut: bool = True
) -> Iterator[list[Piece]]:
    """Weights, in buckets of at most so many bytes.

    Args:
        cut: a weight above that is cut between rows; otherwise it is a bucket of its own.
    """
    held: list[Piece] = []
    size = 0
    for name, weight in weights:
        for piece in _pieces(name, weight.detach(), most if cut else math.inf):
            bytes_of_piece = piece.rows.numel() * piece.rows.element_size()
            if held and size + bytes_of_piece > most:
                yield held
                held, size = [], 0
            held.append(piece)
            size += bytes_of_piece
    if held:
        yield held


def _pieces(name: str, weight: Tensor, most: float) -> Iterator[Piece]:
    size = weight.numel() * weight.element_size()
    if size <= most or len(weight) == 1:
        yield Piece(name, weight)
        return
    total = len(weight)
    count = max(int(most * total // size), 1)
    for first in range(0, total, count):
        yield Piece(name, weight[first : first + count], first, total)


def to_bytes(bucket: Iterable[Piece]) -> bytes:
    """A bucket as safetensors."""
    bucket = list(bucket)
    tensors = {piece.name: piece.rows.detach().cpu().clone(memory_format=torch.contiguous_format) for piece in bucket}
    places = {piece.name: [piece.first, piece.total] for piece in bucket}
    return save(tensors, {"places": json.dumps(places)})


def from_bytes(data: bytes) -> list[Piece]:
    """The bucket again.

    Raises:
        ValueError: it is none.
    """
    try:
        tensors = load(data)
        header = parse_json(data[8 : 8 + int.from_bytes(data[:8], "little")])
        places = parse_json(header["__metadata__"]["places"])
        return [_placed(Piece(name, rows, *places[name])) for name, rows in tensors.items()]
    except Exception as error:
        raise ValueError(f"these {len(data):,} bytes are no bucket of weights: {error}") from error


def _placed(piece: Piece) -> Piece:
    """A piece whose place is one.

    Raises:
        ValueError: it is none.
    """
    numbers = type(piece.first) is int and type(piece.total) is int
    if numbers and piece.total == WHOLE and piece.first == 0:
        return piece
    if not numbers or not piece.rows.dim() or not 0 <= piece.first < piece.first + len(piece.rows) <= piece.total:
        raise ValueError(f"{piece.name} has no rows from {piece.first!r} on of {piece.total!r}")
    return piece


class Assembly:
    """Puts weights together that come in pieces, in their order. Memory is taken for what has come alone."""

    def __init__(self) -> None:
        self._open: dict[str, list[Piece]] = {}

    def take(self, bucket: Iterable[Piece]) -> dict[str, Tensor]:
        """The weights that are whole now.

        Raises:
            ValueError: rows are missing, come twice, or are of another shape or type than those before.
        """
        whole = {}
        for piece in bucket:
            if piece.total == WHOLE:
                whole[piece.name] = piece.rows
                continue
            there = self._open.pop(piece.name, [])
            _check_follows(piece, there)
            there.append(piece)
            if piece.first + len(piece.rows) == piece.total:
                whole[piece.name] = torch.cat([each.rows for each in there])
            else:
                self._open[piece.name] = there
        return whole


def _check_follows(piece: Piece, there: list[Piece]) -> None:
    count = sum(len(each.rows) for each in there)
    if piece.first != count or piece.first + len(piece.rows) > piece.total:
        raise ValueError(f"rows {piece.first} and on of {piece.name} came, where {count} of {piece.total} are there")
    kinds = {(each.total, each.rows.shape[1:], each.rows.dtype) for each in (*there[:1], piece)}
    if len(kinds) > 1:
        raise ValueError(f"rows of {piece.name} came that are of another shape or type than those before")
