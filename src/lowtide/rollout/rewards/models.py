"""Reward models: sequence classifiers with one label, whose value at the end of a text is its reward.

They run as the policy does, without padding, on the ragged engine: what the completions of one prompt begin with is
computed once. A model that the engine does not know, or that lets segments see each other, runs its own padded forward;
the rewards are the same to rounding.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, ClassVar, Literal, NamedTuple, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lowtide.compat.templates.jinja import limit_templates
from lowtide.compat.transformers import attention_implementation
from lowtide.data.encode.chat import ChatEncoder
from lowtide.data.encode.message_form import MessageForm
from lowtide.data.formats.conversation import as_said
from lowtide.data.formats.reading import ChatSample, RowPlace
from lowtide.engine.forward import causal_model, compute_in, embedding_weight, install, score_shared
from lowtide.engine.heads.head import Head, Scores
from lowtide.engine.heads.value import TURNS_READ, Value
from lowtide.engine.layers.rotary import kinds_by_length
from lowtide.engine.probe import Probe, probe
from lowtide.engine.virtual_tokens import prompt_config
from lowtide.engine.weights.complete_weights import load_complete
from lowtide.engine.weights.loading import check_tokenizer, load_tokenizer, saved_config
from lowtide.engine.weights.model_init import config_init, model_init
from lowtide.memory.allocators.out_of_memory import drop_frames, free_caches, is_out_of_memory
from lowtide.ragged import RaggedBatch
from lowtide.ranks.world import worst_of_ranks
from lowtide.rollout.rewards.completed import Completed
from lowtide.rollout.rewards.steps import Column
from lowtide.score_rules import IGNORE, OWN_TOKEN, LastToken
from lowtide.step_plan import Limits, cut_rows

limit_templates()
logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RewardModelOptions:
    """How reward models are loaded, and run."""

    tokens_per_microbatch: int = 8192
    """Most tokens of one forward, but for a prompt with one completion that alone has more."""
    padding_free: bool = True
    """False runs the model's own padded forward."""
    prefix_sharing: bool = True
    """Compute what the completions of a prompt begin with once."""
    computed_in: torch.dtype | None = None
    """What autocast takes matrix products in (bfloat16 where the policy trains with bf16=True, as in TRL); None for the
    dtype of the weights."""
    inputs: Literal["text", "ids"] = "text"
    """What a model reads. "text": prompt and completion as text, by its own tokenizer and chat template, without the
    policy's special tokens, which is what TRL's models read. "ids": the very tokens of the rollout, its end token with
    them, where the model has the policy's tokenizer; else as "text"."""
    policy_tokenizer: PreTrainedTokenizerBase | None = None
    """The policy's; for `inputs="ids"`."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Further keywords of chat templates."""
    init: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `from_pretrained` for models that are given by name; their dtype is the files' unless it says so."""

    def __post_init__(self) -> None:
        if self.inputs not in ("text", "ids"):
            raise ValueError(f"reward models read inputs 'text' or 'ids', not {self.inputs!r}")
        if self.inputs == "ids" and self.policy_tokenizer is None:
            raise ValueError("inputs='ids' needs `policy_tokenizer`, to compare the reward model's with")
        if self.tokens_per_microbatch < 1:
            raise ValueError(f"tokens_per_microbatch={self.tokens_per_microbatch} must be at least 1")


Messages = Sequence[Mapping[str, Any]]
Part = tuple[list[int], Callable[[], Tensor]]
"""The numbers of some completions, and what gives their rewards."""


class Group(NamedTuple):
    """Completions that begin alike: a row of the batch."""

    prefix: Sequence[int]
    """Tokens that all begin with; may be empty."""
    rests: Sequence[Sequence[int]]
    """The tokens of each after that; none is empty."""
    numbers: list[int]
    """The place of each among all completions."""
    ends: Sequence[Sequence[int]] | None = None
    """The tokens of each rest at which it is read; None for its last one."""

    @property
    def tokens(self) -> int:
        return len(self.prefix) + sum(map(len, self.rests))


class ModelReward:
    """A reward model as a column of rewards: one number at the end of a text.

    Args:
        model: loaded; moved to no device, put into evaluation mode.
        tokenizer: its own; None for the one saved beside it.
        name: for messages and logs.

    Raises:
        ValueError: it has not one label, or no tokenizer is known that goes with it.
    """

    head: ClassVar[type[Head]] = Value
    """What is read off its hidden states."""

    def __init__(
        self, model: nn.Module, tokenizer: PreTrainedTokenizerBase | None, name: str, options: RewardModelOptions
    ) -> None:
        self.model, self.name, self.options = model.eval(), name, options
        try:
            self._inner: PreTrainedModel | None = causal_model(model)
        except ValueError:  # no transformers model, or one that is compiled
            self._inner = None
        config: Any = getattr(self._inner or model, "config", None)
        self._check_labels(getattr(config, "num_labels", None))
        own: Any = tokenizer
        if own is None:
            own = load_tokenizer(getattr(config, "name_or_path", "") or name)
        self.tokenizer: Any = _with_padding(own, name)
        if config is not None:  # the model reads at the last token that is not this one
            config.get_text_config().pad_token_id = self.tokenizer.pad_token_id
        if self._inner is not None:
            check_tokenizer(self.tokenizer, embedding_weight(self._inner).shape[0])
            compute_in(self._inner, options.computed_in)
        self._reads_ids = options.inputs == "ids" and _same_tokens(self.tokenizer, options.policy_tokenizer)
        self._cap = options.tokens_per_microbatch
        self._proved: Probe | None = None
        self._asked = False
        self._together = False

    def _check_labels(self, labels: int | None) -> None:
        if labels not in (None, 1):
            raise ValueError(
                f"reward model {self.name!r} gives {labels} numbers, and a reward is one: load it with num_labels=1, "
                "or wrap it into a reward function that chooses"
            )

    @property
    def padding_free(self) -> bool:
        """Whether it runs on the ragged engine; found out at the first use, on the device where it then is."""
        if not self._asked:
            self._proved, self._asked = self._prove(), True
        return self._proved is not None

    def cut(self, cutter: Callable[[nn.Module], None]) -> None:
        """Leaves on each rank its part of the weights, so that forwards are of all ranks together. A model that the
        engine does not know, or that is quantized or placed, stays whole.

        Args:
            cutter: cuts a model.
        """
        placed = getattr(self._inner, "hf_device_map", None) is not None or getattr(self._inner, "is_quantized", False)
        if self._inner is None or placed or self.head.why_not(self._inner) is not None:
            logger.info("reward model %r stays whole on each rank", self.name)
            return
        cutter(self.model)
        self._together = True

    def column(self, completed: Completed) -> Column:
        """The rewards, as those of a function."""
        return Column(self(completed).double())

    @torch.no_grad()
    def __call__(self, completed: Completed) -> Float[Tensor, " completions"]:
        """The rewards, on the CPU.

        Raises:
            ValueError: a completion has no tokens, or its reward is not finite; names the completion's row.
        """
        token_ids = self._encode(completed)
        for number, ids in enumerate(token_ids):
            if len(ids) == 0:
                raise ValueError(f"reward model {self.name!r} has no token to read for {completed.where(number)}")
        whole = group_by_prompt(completed.prompts, token_ids, self._shares)
        rewards = self._forward(
            len(token_ids), max(map(len, token_ids), default=0), lambda: self._parts(whole, token_ids)
        )
        if not rewards.isfinite().all():
            number = int((~rewards.isfinite()).nonzero()[0])
            raise ValueError(f"reward model {self.name!r} gives {rewards[number]:g} for {completed.where(number)}")
        return rewards

    # -- texts -------------------------------------------------------------------------------------------------

    def _encode(self, completed: Completed) -> Sequence[Sequence[int]]:
        """The tokens that the model reads for each completion."""
        prompt_ids, completion_ids = completed.prompt_ids, completed.completion_ids
        if self._reads_ids and prompt_ids is not None and completion_ids is not None:
            return [[*prompt, *own] for prompt, own in zip(prompt_ids, completion_ids, strict=True)]
        pairs = zip(completed.prompts, completed.completions, strict=True)
        if not completed.is_chat:
            texts = [prompt + completion for prompt, completion in pairs]
        elif self._by_turns is not None:
            return [
                self._as_trained(self._by_turns, prompt, completion, completed.where(number))
                for number, (prompt, completion) in enumerate(pairs)
            ]
        else:
            texts = [
                self._render([*prompt, *completion], completed.where(number))
                for number, (prompt, completion) in enumerate(pairs)
            ]
        return self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []

    @functools.cached_property
    def _by_turns(self) -> ChatEncoder | None:
        """What takes answers as the model's training took them, up to their stop token; None where its config does not
        say so."""
        noted = getattr(getattr(self._inner, "config", None), TURNS_READ, None)
        if not isinstance(noted, Mapping) or noted.get("turns") != "as_generated":
            return None
        stop_ids, thought_end = noted.get("stop_ids"), noted.get("thought_end")
        return ChatEncoder(
            self.tokenizer,
            self.options.chat_template_kwargs.get("chat_template"),
            stop_ids=[each for each in stop_ids if isinstance(each, int)] if isinstance(stop_ids, list) else (),
            thought_end=thought_end if isinstance(thought_end, str) else None,
            by_turns=True,
            heeds_marks=False,
            learns_to_stop=False,
        )

    def _as_trained(self, encoder: ChatEncoder, prompt: Messages, completion: Messages, where: str) -> list[int]:
        given = {name: each for name, each in self.options.chat_template_kwargs.items() if name != "chat_template"}
        messages = [as_said(each) for each in (*prompt, *completion)]
        chat = ChatSample(messages, len(prompt), template_kwargs=given)
        with self._naming(where):
            [answer] = encoder.encode_answers([chat], RowPlace(where, [0]), [messages[-1]["role"] == "assistant"])
        return answer.token_ids

    def _render(self, messages: Messages, where: str) -> str:
        options = self.options.chat_template_kwargs
        with self._naming(where):
            said = self._form([as_said(each) for each in messages])
            return str(self.tokenizer.apply_chat_template(said, tokenize=False, **options))

    @contextmanager
    def _naming(self, where: str) -> Iterator[None]:
        """Says of what fails in the chat template which completion it was."""
        try:
            yield
        except Exception as error:
            raise ValueError(
                f"the chat template of reward model {self.name!r} cannot render {where}: {error}"
            ) from error

    @functools.cached_property
    def _form(self) -> MessageForm:
        """How its template takes messages."""
        return MessageForm.of(self.tokenizer, self.options.chat_template_kwargs.get("chat_template"))

    # -- forwards ----------------------------------------------------------------------------------------------

    def _prove(self) -> Probe | None:
        """Puts the engine into the model; None where it runs its own forward."""
        if self._inner is None or not self.options.padding_free or self.head.why_not(self._inner) is not None:
            return None
        if prompt_config(self.model) is not None:  # virtual tokens stand before each padded row
            return None
        before = attention_implementation(self._inner.config) or "eager"
        reason = "segments see each other when they are laid end to end"
        try:
            found = probe(self.model)
            if found.isolated:
                return found
            if is_out_of_memory(found.error):
                raise cast(Exception, found.error)  # it says nothing of the model
        except ValueError as error:
            reason = str(error)
        install(self.model, padding_free=False)
        self._inner.set_attn_implementation(before)
        logger.warning("reward model %r runs padded: %s", self.name, reason)
        return None

    def _forward(self, count: int, longest: int, parts: Callable[[], Iterable[Part]]) -> Float[Tensor, " numbers"]:
        """So many numbers, with half the tokens a micro-batch each time that memory runs out.

        Args:
            longest: tokens of the longest row.
            parts: the micro-batches, of as many tokens as they may have.
        """
        self.model.eval()
        numbers = torch.zeros(count)
        while True:
            try:
                for places, forward in self._as_often_as_others(parts()):
                    numbers[places] = forward().float().cpu()
                return numbers
            except Exception as error:
                if self._together or not is_out_of_memory(error) or self._cap < longest:
                    raise
                drop_frames(error)
            self._cap //= 2
            free_caches()
            logger.warning("reward model %r: out of memory, now %s tokens a micro-batch", self.name, self._cap)

    def _as_often_as_others(self, parts: Iterable[Part]) -> Iterable[Part]:
        """Micro-batches and, where forwards are of all ranks together, as many more of no completion as another rank
        has more of them."""
        if not self._together:
            return parts
        parts, device = list(parts), embedding_weight(self.model).device
        idle = lay_groups([Group([], [[0]], [])], None).to(device)
        own = functools.partial(values_at_ends, self.model, idle, self.head, padding_free=self.padding_free)
        return [*parts, *[([], lambda: own()[:0])] * (worst_of_ranks(len(parts), device) - len(parts))]

    @property
    def _shares(self) -> bool:
        """Whether what rows begin with is computed once."""
        if self._inner is None or not self.padding_free:
            return False
        shares = self.options.prefix_sharing and cast(Probe, self._proved).shares_prefixes
        return shares and not kinds_by_length(self._inner)  # prompts of rows that need different tables

    def _parts(self, whole: Sequence[Group], token_ids: Sequence[Sequence[int]]) -> Iterator[Part]:
        """The completions, micro-batch by micro-batch."""
        if not self.padding_free:
            yield from self._padded(token_ids)
            return
        for groups, part in self._laid(whole):
            numbers = [number for group in groups for number in group.numbers]
            yield numbers, functools.partial(values_at_ends, self.model, part)

    def _laid(self, whole: Sequence[Group]) -> Iterator[tuple[list[Group], RaggedBatch]]:
        """Micro-batches, where the model is."""
        assert self._inner is not None
        device = embedding_weight(self.model).device
        for groups, part in microbatches(whole, self._cap, self.head.pad_id(self._inner)) if whole else ():
            yield groups, part.to(device)

    def _padded(self, token_ids: Sequence[Sequence[int]]) -> Iterator[Part]:
        """The same by the model's own forward."""
        for numbers in self._alike(token_ids):
            rows = [token_ids[number] for number in numbers]
            yield numbers, functools.partial(lambda rows: self._own_logits(rows)[:, 0], rows)

    def _alike(self, token_ids: Sequence[Sequence[int]]) -> Iterator[list[int]]:
        """The numbers of rows of like length together."""
        order = sorted(range(len(token_ids)), key=lambda number: -len(token_ids[number]))
        while order:
            count = max(self._cap // len(token_ids[order[0]]), 1)
            numbers, order = order[:count], order[count:]
            yield numbers

    def _own_logits(self, token_ids: Sequence[Sequence[int]]) -> Tensor:
        """What the model's own forward says of one padded batch."""
        device, dtype = next(self.model.parameters()).device, self.options.computed_in
        inputs = self.tokenizer.pad({"input_ids": token_ids}, padding_side="right", return_tensors="pt").to(device)
        with nullcontext() if dtype is None else torch.autocast(device.type, dtype, cache_enabled=False):
            return self.model(**inputs).logits


def values_at_ends(
    model: nn.Module, batch: RaggedBatch, head: type[Head] = Value, *, padding_free: bool = True
) -> Float[Tensor, "scores ..."]:
    """What a reward model that the engine is in says of a micro-batch of `microbatches`."""
    scores = Scores(batch.score_index, batch.score_target, head=head)
    return score_shared(model, batch, scores, padding_free=padding_free).stats[head.statistic]


def load_reward_model(
    name: str, options: RewardModelOptions, head: type[Head] = Value
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A reward model by hub name or path, and its tokenizer.

    Args:
        head: what is read off it.

    Raises:
        ValueError: there is none, or its files hold no trained value head.
    """
    init = model_init(options.init)
    try:
        arguments = {"dtype": "auto", **head.config_values, **init}
        model = load_complete(head.loader(saved_config(name, init)), name, **arguments)
    except OSError as error:
        line = str(error).strip().split("\n")[0]
        raise ValueError(f"reward model {name!r} cannot be loaded: {line}") from error
    return model, load_tokenizer(name, **config_init(init))


def group_by_prompt(prompts: Sequence[Any], token_ids: Sequence[Sequence[int]], shares: bool = True) -> list[Group]:
    """Completions of one prompt that stand together, with the tokens that they all begin with apart.

    Args:
        prompts: of each completion.
        token_ids: of each, prompt and completion.
        shares: False makes each completion a group of its own.
    """
    groups = []
    places = range(len(token_ids))
    runs = (list(run) for _, run in groupby(places, key=lambda n: prompts[n])) if shares else ([n] for n in places)
    for numbers in runs:
        whole = [list(token_ids[number]) for number in numbers]
        common = _common(whole) if len(whole) > 1 else 0
        groups.append(Group(whole[0][:common], [ids[common:] for ids in whole], numbers))
    return groups


def microbatches(groups: Sequence[Group], cap: int, pad_id: int | None) -> Iterator[tuple[list[Group], RaggedBatch]]:
    """Groups in micro-batches of at most `cap` tokens where that can be, each with the groups that it holds."""
    parts = [part for group in groups for part in _cut(group, cap)]
    batch = lay_groups(parts, pad_id)
    limits = Limits(tokens=max(cap, *(group.tokens for group in parts)))
    for each in cut_rows(batch.segments, limits, why_whole_rows=""):
        yield [parts[row] for row in each.rows], batch.select_rows(each.rows)


def lay_groups(groups: Sequence[Group], pad_id: int | None) -> RaggedBatch:
    """The ragged batch of some groups, each a row, with one score at the end of each completion, or at its `ends`."""
    segments: list[Sequence[int]] = []
    labels: list[list[int]] = []
    prefix: list[int] = []
    row: list[int] = []
    for number, group in enumerate(groups):
        before = -1
        if group.prefix:
            before = len(segments)
            segments, prefix, row = [*segments, group.prefix], [*prefix, -1], [*row, number]
            labels.append([IGNORE] * len(group.prefix))
        for rest, ends in zip(group.rests, group.ends or [()] * len(group.rests), strict=True):
            labels.append([0 if place in ends else IGNORE for place in range(len(rest))])
        segments += group.rests
        prefix += [before] * len(group.rests)
        row += [number] * len(group.rests)
    rule = LastToken(pad_id) if groups[0].ends is None else OWN_TOKEN
    return RaggedBatch.from_segments(segments, labels, prefix=prefix, row=row, score_rule=rule)


def _common(token_ids: list[list[int]]) -> int:
    """How many tokens all begin with; each keeps one of its own at least."""
    low, high = min(token_ids), max(token_ids)  # what these two share, all between them share
    count = next((n for n, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), len(low))
    return min(count, min(map(len, token_ids)) - 1)


def _cut(group: Group, cap: int) -> Iterator[Group]:
    """A group in parts of at most `cap` tokens each where that can be, each with the prefix."""
    first, tokens = 0, len(group.prefix)
    for place, rest in enumerate(group.rests):
        if place > first and tokens + len(rest) > cap:
            yield _part(group, first, place)
            first, tokens = place, len(group.prefix)
        tokens += len(rest)
    yield _part(group, first, len(group.rests))


def _part(group: Group, first: int, stop: int) -> Group:
    ends = None if group.ends is None else group.ends[first:stop]
    return Group(group.prefix, group.rests[first:stop], group.numbers[first:stop], ends)


def _with_padding(tokenizer: Any, name: str) -> Any:
    """The tokenizer with a padding token: the end token where it has none, as in TRL."""
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.pad_token_id is None:
        raise ValueError(
            f"the tokenizer of reward model {name!r} has neither a padding nor an end token: set its pad_token"
        )
    return tokenizer


def _same_tokens(tokenizer: Any, other: Any) -> bool:
    """Whether two tokenizers give the same ids for the same conversation."""
    if tokenizer is other:
        return True
    same = type(tokenizer) is type(other) and tokenizer.chat_template == other.chat_template
    return same and tokenizer.get_vocab() == other.get_vocab()
