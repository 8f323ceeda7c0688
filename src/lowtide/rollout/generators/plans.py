"""How the tokens of each forward of a generation attend: whole prompts, one token a completion, or several of one.

Each plan keeps the keys and values of its tokens in a `KeyStore`, and the states of layers that carry one. What
does not depend on the layer (masks, places) is worked out once a forward.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from lowtide.ops.attention.attention_plan import AttentionPlan, Rules, Sight
from lowtide.ops.attention.cached_attention import CachedPlan, Part, Rotary, as_bias, gather_from, merged, seen
from lowtide.ops.attention.cached_flash import Starts, gather_used, serves, starts_of
from lowtide.ops.attention.cached_kernels import Grouping, merge_rows, turn_and_keep
from lowtide.ops.attention.varlen_attention import AttentionRules, in_autocast, rules_of, varlen_attention
from lowtide.ops.layers.layer_kernels import rotate_
from lowtide.ops.recurrence.convolution import causal_convolution
from lowtide.ops.recurrence.recurrence import Recurrence
from lowtide.ragged import PositionRule, RaggedBatch, Segment, Shown, sent
from lowtide.rollout.generators.cache import Group, Held, KeyStore, LayerKeys, Line
from lowtide.score_rules import IGNORE

T = TypeVar("T")
Shape = tuple[int, int, int]
"""Lines, heads of keys, and query heads that read one of them."""


class PromptPlan(CachedPlan):
    """Whole prompts laid end to end, each a segment of its own, in the order of their blocks.

    Args:
        position_rule: how positions are counted on several axes; None where prompts show no images.
    """

    def __init__(self, store: KeyStore, blocks: range, position_rule: PositionRule | None = None):
        self.store, self.blocks = store, [store.blocks[number] for number in blocks]
        prompts, shown = [group.prompt for group in self.groups], [group.images for group in self.groups]
        self.batch = RaggedBatch.from_segments(
            prompts, [[IGNORE] * len(prompt) for prompt in prompts], shown=Shown(shown, position_rule)
        ).to(store.device)
        self.ragged = AttentionPlan.build(self.batch)
        self.positions, self.axes = self.batch.position_ids, self.batch.axis_positions
        self._index = [self._places(start, block) for start, block in self._starts()]
        self._given: list[tuple[weakref.ref[Tensor], Hashable]] = []

    @property
    def groups(self) -> list[Group]:
        """In the order of the segments."""
        return [group for block in self.blocks for group in block]

    def stands_for(self, layer: Hashable, key: Tensor) -> Hashable:
        first = next((first for given, first in self._given if given() is key), None)
        if first is None:
            self._given.append((weakref.ref(key), layer))
            return layer
        self.store.shared[layer] = first
        return first

    def attend(
        self,
        layer: Hashable,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        asked: AttentionRules,
        rotary: Rotary | None = None,
    ) -> Tensor:
        query, key, value = _turned(query, key, value, rotary)
        held = self.store.layers.setdefault(layer, LayerKeys())
        if len(held.blocks) < len(self.store.blocks):  # layers that share keys keep them once
            for index in self._index:
                held.blocks.append(Held(_heads_first(key, index), _heads_first(value, index)))
        return varlen_attention(query, key, value, self.ragged, **asked)

    def recur(self, layer: Hashable, recurrence: Recurrence, chunk: int) -> Tensor:
        out, states = recurrence.over(self.ragged, chunk, final=True)
        assert states is not None
        self._hand_on(layer, states)
        return out

    def convolve(self, layer: Hashable, x: Tensor, weight: Tensor) -> Tensor:
        reach = weight.shape[1] - 1
        ends = [x[max(part.stop - reach, part.start) : part.stop] for part in self.ragged.segments]
        self._hand_on(layer, torch.stack([_after_zeros(each, reach) for each in ends]))
        return causal_convolution(x, weight, self.ragged)

    def _hand_on(self, layer: Hashable, states: Tensor) -> None:
        """Each completion starts from the state [prompts, ...] of its prompt."""
        places = [line.place for group in self.groups for line in group.lines]
        owners = [number for number, group in enumerate(self.groups) for _ in group.lines]
        self.store.put_states(layer, places, states.index_select(0, torch.tensor(owners, device=states.device)))

    def _starts(self) -> list[tuple[int, list[Group]]]:
        starts, start = [], 0
        for block in self.blocks:
            starts.append((start, block))
            start += sum(len(group.prompt) for group in block)
        return starts

    def _places(self, start: int, block: Sequence[Group]) -> Tensor:
        """[prompts, longest]: the token that goes to each place; padding repeats the last one."""
        longest, rows = max(len(group.prompt) for group in block), []
        for group in block:
            length = len(group.prompt)
            rows.append(torch.arange(longest).clamp_(max=length - 1) + start)
            start += length
        return torch.stack(rows).to(self.store.device)


def _heads_first(x: Tensor, index: Tensor) -> Tensor:
    """[tokens, kv_heads, dim] to [prompts, kv_heads, longest, dim], a copy that holds on to nothing."""
    return x.index_select(0, index.flatten()).unflatten(0, index.shape).transpose(1, 2).contiguous()


def _after_zeros(x: Tensor, length: int) -> Tensor:
    """[tokens, channels] to [length, channels]."""
    return torch.cat([x.new_zeros(length - x.shape[0], x.shape[1]), x])


class _LaterPlan(CachedPlan):
    """Tokens of completions whose earlier keys are held."""

    def __init__(self, store: KeyStore):
        self.store = store
        self._worked_out: dict[Hashable, object] = {}

    def stands_for(self, layer: Hashable, key: Tensor) -> Hashable:
        return self.store.shared.get(layer, layer)

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` returns, made only once for a key: all layers ask for the same."""
        if key not in self._worked_out:
            self._worked_out[key] = make()
        return self._worked_out[key]  # type: ignore[return-value]


class NextPlan(_LaterPlan):
    """One token of each completion, in the order of `KeyStore.lines`. `KeyStore.extend` comes before.

    Between two changes of the store its shapes depend on nothing that Python counts, so that a step may be replayed.

    Args:
        positions: [lines], of the tokens in their rows.
        held: [lines], tokens of each completion whose keys are held.
        axes: [axes, lines], see `CachedPlan`.
    """

    def __init__(self, store: KeyStore, positions: Tensor, held: Tensor, axes: Tensor | None = None):
        super().__init__(store)
        self.positions, self.held, self.axes = positions, held, axes
        self._appended: set[Hashable] = set()

    def attend(
        self,
        layer: Hashable,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        asked: AttentionRules,
        rotary: Rotary | None = None,
    ) -> Tensor:
        heads = query, key, value = in_autocast(query, key, value)
        rules = rules_of(asked, query.shape[-1], self.store.longest)
        held = self.store.layers[layer]
        own = held.own_for(key, value, self.store.allotted, self.store.capacity)
        shape = len(query), key.shape[1], query.shape[1] // key.shape[1]  # lines, kv_heads, share
        grouping = self.store.once(("grouping", *shape), lambda: self._grouping(*shape[1:]))
        if layer not in self._appended:  # layers that share keys append them once
            self._appended.add(layer)
            query, grouped = turn_and_keep(heads, rotary, own.rows, self._place(key.shape[1]), grouping)
        else:
            assert rotary is None, "layers that share keys take them turned"
            grouped = query.reshape(-1, query.shape[-1]).index_select(0, grouping.source)
        flash = self.once(("flash", rules[:3], query.dtype, shape), lambda: serves(query, value, rules))
        out, lse = self._from_own(query.reshape(-1, 1, shape[2], query.shape[-1]), own, rules, shape, flash)
        others = self._from_prompts(grouped, held.blocks, rules, shape, flash)
        if rules.sinks is None:
            return merge_rows(out, lse, others, grouping).view(*query.shape[:2], -1)
        parts = (Part(out, lse), Part(*(each.index_select(0, grouping.place) for each in others)))
        of_heads = [Part(part.out.view(*shape, -1), part.lse.view(shape)) for part in parts]
        return merged(of_heads, rules.sinks.view(shape[1:])).reshape(*query.shape[:2], -1)

    def recur(self, layer: Hashable, recurrence: Recurrence, chunk: int) -> Tensor:
        held = self.store.states[layer][: len(self.store.lines)]
        out, state = recurrence.step(held)
        held.copy_(state)
        return out

    def convolve(self, layer: Hashable, x: Tensor, weight: Tensor) -> Tensor:
        held = self.store.states[layer][: len(self.store.lines)]
        inputs = torch.cat([held, x[:, None]], 1)  # [lines, taps, channels]
        held.copy_(inputs[:, 1:])
        wide = torch.promote_types(x.dtype, torch.float32)
        return (inputs.to(wide) * weight.T.to(wide)).sum(1).to(torch.promote_types(x.dtype, weight.dtype))

    def _place(self, kv_heads: int) -> Tensor:
        """[lines * kv_heads]: where each head of a new key goes in the tensors, seen as lines of `dim` numbers."""

        def make() -> Tensor:
            lines = torch.arange(len(self.store.lines), device=self.store.device)[:, None] * kv_heads
            heads = torch.arange(kv_heads, device=self.store.device)
            return ((lines + heads) * self.store.capacity + self.held[:, None]).flatten()

        return self.once(("place", kv_heads), make)

    def _from_own(self, query: Tensor, own: Held, rules: Rules, shape: Shape, flash: bool) -> tuple[Tensor, Tensor]:
        """What heads of tokens gather of the completions' own keys, [rows, value_dim] and [rows].

        Args:
            query: [stacks, 1, share, dim].
            flash: whether flash attention serves, which is told how many keys are used; else a bias hides the others.
        """
        (_, kv_heads, share), stacks = shape, len(query)
        keys, values = own.stacks
        if keys.shape[0] > stacks:
            keys, values = keys[:stacks], values[:stacks]

        def used() -> Tensor:
            return (self.held + 1).to(torch.int32).repeat_interleave(kv_heads)

        def bias() -> Tensor:
            places = torch.arange(self.store.width, device=self.store.device)[None, :]
            prompts = self.positions - self.held
            mask = seen(self.positions[:, None, None], (places + prompts[:, None])[:, None], rules.sight)
            return as_bias(mask, kv_heads, share, query.dtype)

        if flash:
            starts = self._starts(stacks, share, self.store.capacity)
            counts = self.once(("used", kv_heads), used)
            found = gather_used(query, keys, values, starts, counts, rules.scale)
        else:
            keys, values = (x.narrow(2, 0, self.store.width) for x in (keys, values))
            hides = self.once(("own", rules.sight, query.dtype, kv_heads), bias)
            found = gather_from(query, keys, values, hides, rules)
        return found[0].flatten(0, 2), found[1].flatten()

    def _from_prompts(
        self, query: Tensor, blocks: Sequence[Held], rules: Rules, shape: Shape, flash: bool
    ) -> tuple[Tensor, Tensor]:
        """As `_from_own`, of prompts' keys, by grouped queries [grouped, dim], and grouped."""
        (_, kv_heads, share), found, start = shape, [], 0
        for number, (block, most) in enumerate(zip(blocks, self.store.once("most", self._most), strict=True)):
            keys, values = block.stacks
            count = keys.shape[0] * most * share
            own = query if len(blocks) == 1 else query.narrow(0, start, count)
            stacked, start = own.view(keys.shape[0], 1, most * share, -1), start + count
            if flash:
                starts = self._starts(keys.shape[0], most * share, keys.shape[2])
                used = self.store.once(
                    ("used", number, kv_heads), lambda number=number: self._lengths(number, kv_heads)
                )
                part = gather_used(stacked, keys, values, starts, used, rules.scale)
            else:
                bias = self.once(
                    ("prompts", number, rules.sight, query.dtype, kv_heads),
                    lambda number=number: self._prompt_bias(number, rules.sight, shape, query.dtype),
                )
                part = gather_from(stacked, keys, values, bias, rules)
            found.append((part[0].flatten(0, 2), part[1].flatten()))
        if len(found) == 1:
            return found[0]
        out, lse = (torch.cat(each) for each in zip(*found, strict=True))
        return out, lse

    def _starts(self, stacks: int, queries: int, keys: int) -> Starts:
        """Where stacks begin, made again when lines have come or gone."""
        shape = (stacks, queries, keys)
        return self.store.once(("starts", *shape), lambda: starts_of(*shape, self.store.device))

    def _lengths(self, number: int, kv_heads: int) -> Tensor:
        """[prompts * kv_heads]: tokens of each prompt of a block, for each head of its keys."""
        lengths = [len(group.prompt) for group in self.store.blocks[number] for _ in range(kv_heads)]
        return torch.tensor(lengths, dtype=torch.int32, device=self.store.device)

    def _most(self) -> list[int]:
        """The most completions of a prompt of each block."""
        return [max(len(group.lines) for group in block) for block in self.store.blocks]

    def _grids(self) -> list[Tensor]:
        """For each block [prompts, most completions of a prompt] the line at each place; one that has fewer repeats its
        first."""
        grids = []
        for block, most in zip(self.store.blocks, self._most(), strict=True):
            rows = [[line.place for line in group.lines] for group in block]
            grid = torch.tensor([row + row[:1] * (most - len(row)) for row in rows])
            grids.append(sent(grid, self.store.device))
        return grids

    def _grouping(self, kv_heads: int, share: int) -> Grouping:
        """Where the heads of each line stand among the queries of prompts: block by block those of a prompt that read
        the same head of keys, a line's one after the other."""
        first, between, start = [0] * len(self.store.lines), [0] * len(self.store.lines), 0
        for block, most in zip(self.store.blocks, self._most(), strict=True):
            for prompt, group in enumerate(block):
                for number, line in enumerate(group.lines):
                    first[line.place] = start + (prompt * kv_heads * most + number) * share
                    between[line.place] = most * share
            start += len(block) * kv_heads * most * share
        of_line, apart = (torch.tensor(each)[:, None, None] for each in (first, between))
        place = (of_line + apart * torch.arange(kv_heads)[:, None] + torch.arange(share)).flatten()
        source = torch.zeros(start, dtype=torch.long)
        source[place] = torch.arange(len(place))
        return Grouping(*(sent(each, self.store.device) for each in (source, place)))

    def _prompt_bias(self, number: int, sight: Sight, shape: Shape, dtype: torch.dtype) -> Tensor | None:
        """What hides keys of the prompts of a block."""
        block, device = self.store.blocks[number], self.store.device
        lengths, heads = [len(group.prompt) for group in block], (*shape[1:], dtype)
        if sight == Sight():
            if min(lengths) == max(lengths):
                return None
            return self.store.once(("lengths", number, heads), lambda: _length_bias(lengths, heads, device))
        grid = self.store.once("grids", self._grids)[number]
        real = self.store.once(("real", number), lambda: _real_tokens(lengths, device))
        places = torch.arange(max(lengths), device=device)
        mask = seen(self.positions[grid][:, :, None], places[None, None], sight)
        return as_bias(mask & real, *heads)


def _turned(query: Tensor, key: Tensor, value: Tensor, rotary: Rotary | None) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values in autocast's dtype, the first two turned by their positions, if they are yet to be."""
    query, key, value = in_autocast(query, key, value)
    if rotary is not None:
        rotate_(query, key, *rotary)
    return query, key, value


def _length_bias(lengths: Sequence[int], heads: tuple[int, int, torch.dtype], device: torch.device) -> Tensor:
    """Hides the padding of prompts."""
    return as_bias(_real_tokens(lengths, device), *heads)


def _real_tokens(lengths: Sequence[int], device: torch.device) -> Tensor:
    """[prompts, 1, longest]: which tokens are no padding."""
    return (torch.arange(max(lengths), device=device) < torch.tensor(lengths, device=device)[:, None])[:, None]


class RepliesPlan(_LaterPlan):
    """Several tokens of some completions, one completion after the other.

    Args:
        lines: the completions, and how many tokens of each come.
        axes: of positions, where they are counted on several.
    """

    def __init__(self, store: KeyStore, lines: Sequence[tuple[Line, int]], axes: int = 0):
        super().__init__(store)
        self.lines = lines
        spans = [torch.arange(line.position, line.position + count) for line, count in lines]
        self.positions = torch.cat(spans).to(store.device)
        if axes:
            moved = [span + line.group.shift for span, (line, _) in zip(spans, lines, strict=True)]
            self.axes = torch.cat(moved).to(store.device).expand(axes, -1)
        self.longest = max(line.position + count for line, count in lines)
        store.reserve(max(line.held + count for line, count in lines))
        self._appended: set[Hashable] = set()

    def attend(
        self,
        layer: Hashable,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        asked: AttentionRules,
        rotary: Rotary | None = None,
    ) -> Tensor:
        query, key, value = _turned(query, key, value, rotary)
        rules = rules_of(asked, query.shape[-1], self.longest)
        held = self.store.layers[layer]
        own = held.own_for(key, value, self.store.allotted, self.store.capacity)
        fresh = layer not in self._appended
        self._appended.add(layer)
        heads = query.unflatten(1, (key.shape[1], -1))
        outs, start = [], 0
        for line, count in self.lines:
            span, stop = slice(start, start + count), line.held + count
            if fresh:
                for into, new in zip((own.keys, own.values), (key, value), strict=True):
                    into[line.place, :, line.held : stop] = new[span].transpose(0, 1)
            mine = own.keys[line.place, :, None, :stop], own.values[line.place, :, None, :stop]
            of_line = heads[span].transpose(0, 1)[None]  # [1, kv_heads, tokens, share, dim]
            prompt = self._prompt_of(line, held)
            parts = [self._part(of_line, mine, line, rules, own=True), self._part(of_line, prompt, line, rules)]
            outs.append(merged(parts, rules.sinks))
            start += count
        return torch.cat(outs)

    def recur(self, layer: Hashable, recurrence: Recurrence, chunk: int) -> Tensor:
        places = [line.place for line, _ in self.lines]
        held = self.store.states[layer].index_select(0, torch.tensor(places, device=self.store.device))
        out, states = recurrence.over(self.once("segments", self._segments), chunk, held, final=True)
        assert states is not None
        self.store.put_states(layer, places, states)
        return out

    def convolve(self, layer: Hashable, x: Tensor, weight: Tensor) -> Tensor:
        outs, (channels, taps) = [], weight.shape
        for part, (line, _) in zip(self.once("segments", self._segments).segments, self.lines, strict=True):
            inputs = torch.cat([self.store.states[layer][line.place], x[part.start : part.stop]])
            outs.append(torch.nn.functional.conv1d(inputs.T.to(weight.dtype), weight[:, None], groups=channels).T)
            self.store.put_states(layer, [line.place], inputs[None, inputs.shape[0] - taps + 1 :])
        return torch.cat(outs)

    def _segments(self) -> AttentionPlan:
        """The new tokens of each completion, apart."""
        stops = list(itertools.accumulate(count for _, count in self.lines))
        spans = itertools.pairwise([0, *stops])
        parts = tuple(Segment(start, stop, -1, number, 0, 0) for number, (start, stop) in enumerate(spans))
        return AttentionPlan(parts, self.positions)

    def _prompt_of(self, line: Line, held: LayerKeys) -> tuple[Tensor, Tensor]:
        """Keys and values [kv_heads, 1, tokens, dim]."""
        for block, of_block in zip(self.store.blocks, held.blocks, strict=True):
            if line.group in block:
                place, length = block.index(line.group), len(line.group.prompt)
                return of_block.keys[place, :, None, :length], of_block.values[place, :, None, :length]
        raise AssertionError("a completion is written of a prompt whose keys are held")

    def _part(self, query: Tensor, keys: tuple[Tensor, Tensor], line: Line, rules: Rules, own: bool = False) -> Part:
        first = len(line.group.prompt) if own else 0

        def make() -> Tensor:
            device = self.store.device
            position = torch.arange(line.position, line.position + query.shape[2], device=device)[None, :, None]
            key_position = torch.arange(first, first + keys[0].shape[2], device=device)[None, None]
            mask = seen(position, key_position, rules.sight)
            return as_bias(mask, query.shape[1], query.shape[3], query.dtype)

        bias = self.once((line, own, rules.sight, query.dtype, query.shape[1]), make)
        found = gather_from(query[0].flatten(1, 2)[:, None], *keys, bias, rules)
        return Part(*(x[:, 0].unflatten(1, query.shape[2:4]).transpose(0, 1).flatten(1, 2) for x in found))
