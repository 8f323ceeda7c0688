"""The keys and values that are held while completions are written.

Those of a prompt are held once for all its completions, in a block with other prompts of nearly its length; those of a
completion are a line of one tensor for all completions. A layer that carries a state has one for each completion, which
is its prompt's at first. Who owns which line is kept on the host, once for all layers.

Shapes: a block's keys are [prompts, kv_heads, longest, dim], the completions' own [lines, kv_heads, capacity, dim], and
states [lines, ...].
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from lowtide.ops.attention.cached_kernels import Kept
from lowtide.ragged import SegmentImage

T = TypeVar("T")
PADDING = 1.25
"""Prompts share a block while its padded tokens are at most so many times the real ones."""
FEWEST = 16
"""Tokens that a completion's own keys have places for at first."""


@dataclass(eq=False)
class Group:
    """The completions that are being written of one prompt."""

    prompt: tuple[int, ...]
    lines: list[Line] = field(default_factory=list)
    images: tuple[SegmentImage, ...] = ()
    """Those among the tokens of the prompt."""
    shift: int = 0
    """From the place of what follows in its row to its position, of a model that counts positions by images."""


@dataclass(eq=False)
class Line:
    """One completion whose keys are held; its place among `KeyStore.lines` is its place in the tensors."""

    group: Group
    held: int = 0
    """Tokens of its own whose keys are held."""
    place: int = 0

    @property
    def position(self) -> int:
        """Of its next token in its row."""
        return len(self.group.prompt) + self.held


@dataclass(eq=False)
class Held:
    """Keys and values of one layer [.., kv_heads, places, dim], and how steps see them."""

    keys: Tensor
    values: Tensor

    @functools.cached_property
    def rows(self) -> Kept:
        """Places one after the other."""
        return Kept(*(x.view(-1, x.shape[-1]) for x in (self.keys, self.values)))

    @functools.cached_property
    def stacks(self) -> tuple[Tensor, Tensor]:
        """[.. x kv_heads, 1, places, dim]."""
        keys, values = (x.flatten(0, 1)[:, None] for x in (self.keys, self.values))
        return keys, values

    def changed(self, change: Callable[[Tensor], Tensor]) -> Held:
        """Others in their place, made one after the other, so that only one is there twice; this is used up."""
        keys, values = self.keys, self.values
        vars(self).clear()
        keys = change(keys)
        return Held(keys, change(values))


@dataclass
class LayerKeys:
    """Keys and values of one layer."""

    blocks: list[Held] = field(default_factory=list)
    own: Held | None = None

    def own_for(self, key: Tensor, value: Tensor, lines: int, capacity: int) -> Held:
        """The completions' own, made when they are first asked for. `key`, `value` [tokens, kv_heads, dim]."""
        if self.own is None:
            # Zeros: what is not seen is multiplied by a weight of 0, which leaves nothing of finite numbers alone.
            self.own = Held(*(x.new_zeros(lines, x.shape[1], capacity, x.shape[2]) for x in (key, value)))
        return self.own


def blocks_of(lengths: Sequence[int]) -> list[list[int]]:
    """Which prompts share a block: places among `lengths` (tokens), by falling length."""
    blocks: list[list[int]] = []
    real = 0
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        if blocks:
            padded = lengths[blocks[-1][0]] * (len(blocks[-1]) + 1)
            if padded <= PADDING * (real + lengths[place]):
                blocks[-1].append(place)
                real += lengths[place]
                continue
        blocks.append([place])
        real = lengths[place]
    return blocks


def padded_tokens(lengths: Sequence[int]) -> int:
    """Tokens that the keys of prompts of these lengths take, padding included."""
    return sum(lengths[block[0]] * len(block) for block in blocks_of(lengths))


class KeyStore:
    """All keys and values that are held, and whose they are.

    Args:
        most: tokens of a completion whose keys may be held.
        device: where the model is.
        fewest: tokens that a completion's own keys have places for at first, where it may have so many.
    """

    def __init__(self, most: int, device: torch.device, fewest: int = FEWEST):
        self.most, self.device, self.fewest = most, device, fewest
        self.layers: dict[Hashable, LayerKeys] = {}
        self.states: dict[Hashable, Tensor] = {}
        """Of layers that carry one: the state of each completion."""
        self.shared: dict[Hashable, Hashable] = {}
        """Layers that use another one's keys, and which one's."""
        self.blocks: list[list[Group]] = []
        self.lines: list[Line] = []
        self.allotted = 0
        """Lines that the tensors have places for."""
        self.capacity = 0
        """Tokens that each of them has places for."""
        self.width = 0
        """Tokens of its own that each completion attends to in the steps that come, those that it does not have yet
        among them."""
        self.longest = 0
        """Tokens that no row exceeds in these steps."""
        self.changes = 0
        """How often completions or prompts have come or gone, or tensors have moved."""
        self._worked_out: dict[Hashable, object] = {}

    # -- sizes --------------------------------------------------------------------------------------------------

    @property
    def held_tokens(self) -> int:
        """Tokens that keys and values have places for, in each layer."""
        prompts = sum(max(len(g.prompt) for g in block) * len(block) for block in self.blocks)
        return prompts + self.allotted * self.capacity

    def tensors(self) -> list[Tensor]:
        """All that is held."""
        held = [each for layer in self.layers.values() for each in (*layer.blocks, layer.own) if each is not None]
        return [*(tensor for each in held for tensor in (each.keys, each.values)), *self.states.values()]

    # -- who is there -------------------------------------------------------------------------------------------

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` returns, made again only when lines have come or gone."""
        if key not in self._worked_out:
            self._worked_out[key] = make()
        return self._worked_out[key]  # type: ignore[return-value]

    def admit(self, groups: Sequence[Group]) -> range:
        """Prepares for the keys of further prompts, and for their completions; gives the places of their blocks."""
        first = len(self.blocks)
        for block in blocks_of([len(group.prompt) for group in groups]):
            self.blocks.append([groups[place] for place in block])
        for group in itertools.chain.from_iterable(self.blocks[first:]):
            for line in group.lines:
                line.place = len(self.lines)
                self.lines.append(line)
        self._forget()
        self._allot(len(self.lines))
        return range(first, len(self.blocks))

    def remove(self, gone: Sequence[Line]) -> None:
        """Frees what belongs to completions that have ended, and to prompts that have none left."""
        if not gone:
            return
        left = len(self.lines) - len(gone)
        ended = {line.place for line in gone}
        holes = [place for place in sorted(ended) if place < left]
        movers = [line for line in self.lines[left:] if line.place not in ended]
        self._move([line.place for line in movers], holes)
        for line, hole in zip(movers, holes, strict=True):
            self.lines[hole], line.place = line, hole
        del self.lines[left:]
        for line in gone:
            line.group.lines.remove(line)
        self._drop_prompts()
        self._forget()
        if left <= self.allotted // 2:
            self._allot(left)

    def _forget(self) -> None:
        self._worked_out.clear()
        self.changes += 1

    def _drop_prompts(self) -> None:
        for number, block in reversed(list(enumerate(self.blocks))):
            kept = [place for place, group in enumerate(block) if group.lines]
            if len(kept) == len(block):
                continue
            self.blocks[number] = [block[place] for place in kept]
            if not kept:
                del self.blocks[number]
            index = torch.tensor(kept, device=self.device)
            longest = max((len(block[place].prompt) for place in kept), default=0)
            for layer in self.layers.values():
                block = layer.blocks.pop(number)
                if kept:
                    left = block.changed(lambda x, index=index, most=longest: x[:, :, :most].index_select(0, index))
                    layer.blocks.insert(number, left)

    def _move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies the own keys of some lines over those of others."""
        if not sources:
            return
        source, target = (torch.tensor(places, device=self.device) for places in (sources, targets))
        for layer in self.layers.values():
            for tensor in () if layer.own is None else (layer.own.keys, layer.own.values):
                tensor.index_copy_(0, target, tensor.index_select(0, source))
        for state in self.states.values():
            state.index_copy_(0, target, state.index_select(0, source))

    def put_states(self, layer: Hashable, lines: Sequence[int], states: Tensor) -> None:
        """Keeps states [lines, ...] of completions at some places."""
        if layer not in self.states:
            self.states[layer] = states.new_zeros(self.allotted, *states.shape[1:])
        self.states[layer].index_copy_(0, torch.tensor(lines, device=self.device), states)

    # -- how much there is --------------------------------------------------------------------------------------

    def extend(self, steps: int, *, as_reserved: bool = False) -> None:
        """Prepares for so many steps, in each of which each completion gets a token.

        Args:
            as_reserved: attend to all places that there are, so that shapes change only when tensors do.
        """
        held = max(line.held for line in self.lines)
        self.reserve(min(held + steps, max(self.most, held + 1)))
        if as_reserved:
            self.width = self.capacity
            self.longest = self.capacity + max(len(line.group.prompt) for line in self.lines)
        else:
            self.width = min(held + steps, self.capacity)
            self.longest = steps + max(line.position for line in self.lines)

    def reserve(self, tokens: int) -> None:
        """Makes places for so many tokens of each completion, twice as many as there were at least."""
        if tokens > self.capacity:
            self.capacity = min(max(tokens, 2 * self.capacity, self.fewest), max(self.most, tokens))
            self._change()

    def _allot(self, lines: int) -> None:
        """Makes places for so many completions, and no more of each than the longest may soon need."""
        longest = max((line.held for line in self.lines), default=0)
        self.allotted, self.capacity = lines, min(self.capacity, max(2 * longest, self.fewest))
        self._change()

    def _change(self) -> None:
        """Gives the tensors the lines and the capacity that they should have."""
        lines, capacity = self.allotted, self.capacity
        self.changes += 1
        if lines == 0:
            self.capacity = 0
            for layer in self.layers.values():
                layer.own = None

        def changed(tensor: Tensor) -> Tensor:
            if tensor.shape[0] == lines and tensor.shape[2] == capacity:
                return tensor
            new = tensor.new_zeros(lines, tensor.shape[1], capacity, tensor.shape[3])
            both = slice(min(lines, tensor.shape[0])), slice(None), slice(min(capacity, tensor.shape[2]))
            new[both] = tensor[both]
            return new

        for layer in self.layers.values():
            layer.own = None if layer.own is None else layer.own.changed(changed)
        for name, state in self.states.items():
            if state.shape[0] != lines:
                kept = state[:lines]
                self.states[name] = torch.cat([kept, kept.new_zeros(lines - kept.shape[0], *kept.shape[1:])])
