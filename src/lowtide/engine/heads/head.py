"""What a head is: how numbers are read off hidden states, and all that the layers above need to know of it.

Each kind of head is a class of its own, in a file of its own, and one entry of `lowtide.engine.heads.HEADS`. Its
methods are class methods: a head has no state, the weights are the model's.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils.generic import ModelOutput

from lowtide.engine.heads.head_parts import HeadParts
from lowtide.ops.logits.across_vocabularies import Across, Spans
from lowtide.ops.logits.linear_logprobs import NOTHING_MORE, ScoreLoss
from lowtide.ops.logits.logit_rows import Named, Projection, Support, Want
from lowtide.score_rules import NEXT_TOKEN, ScoreRule


@dataclass(frozen=True)
class TeacherStates:
    """What a teacher makes of a batch: hidden states in the place of its logits, and what would make these; where ranks
    split the tokens, those of a rank's own, or with places for all (`Scores.placed`)."""

    states: Float[Tensor, "scores hidden"]
    parts: Sequence[HeadParts]
    """Of the teacher; of several, each reads columns of its own, one after the other."""
    projection: Projection


@dataclass(frozen=True)
class Replacements:
    """What a generator makes of a batch with masked tokens; a position is one of the flattened batch."""

    logprobs: Float[Tensor, " scores"]
    """Of the tokens that are masked, with gradient."""
    replaced: Bool[Tensor, " positions"]
    """Where another token stands than in the text."""
    present: Bool[Tensor, " positions"]
    """Where a token stands, and no padding."""


@dataclass(frozen=True)
class Scores:
    """What to ask of a model's forward: which hidden states to read, by which head, and how."""

    index: Tensor
    """[scores]: place of the hidden state in the flattened batch."""
    target: Tensor
    """[scores]: what is predicted there; not read by a head without targets."""
    want: Want = NOTHING_MORE
    temperature: float = 1.0
    """Divisor of the logits, of a head that has them."""
    loss: ScoreLoss | None = None
    """A loss that is known score by score: its gradients are formed in forward, and `ScoreOutput.loss` is set."""
    factor: float = 1.0
    """Factor of that loss."""
    weights: Float[Tensor, " scores"] | None = None
    """The weights of the scores in that loss; None where each is 1."""
    old: Float[Tensor, " scores"] | None = None
    """What that loss finds as `TokenStats.old`."""
    grad_scale: float = 1.0
    """What `backward` multiplies the loss by (see `ops.logits.linear_logprobs.linear_loss`)."""
    accumulate: bool = False
    """The head's weight takes its gradient straight into `.grad` (see `ops.logits.linear_logprobs`)."""
    aux_loss: bool = False
    """Also the load-balancing loss of a mixture of experts."""
    lengths: Tensor | None = None
    """[scores]: tokens of the segment that begins at `index`, for a head that reads the mean of its hidden states."""
    read: Callable[[Tensor, slice], Tensor] | None = None
    """What the head of next tokens reads off the logits (see `ops.logits.linear_logprobs.read_logits`)."""
    draws: Float[Tensor, " scores"] | None = None
    """Uniform numbers with which a generator draws a token in each score's place (`engine.heads.replaced_tokens`)."""
    replacements: Replacements | None = None
    """What it drew."""
    placed: bool = False
    """Whether what ranks keep that split the tokens (`ScoreOutput.stays`) has a place for each score, 0 at others'."""
    teacher: TeacherStates | None = None
    """Whom the `divergences` of `want` are from; their loss is formed in forward."""
    beta: float = 0.5
    """Of these: 0 is KL(teacher || student), 1 is KL(student || teacher) (see `ops.logits.compared_rows`)."""
    support: Support | None = None
    """The tokens that these compare; None for all."""
    named: Named | None = None
    """Those that a teacher named at each score, where that is all that is known of it: in place of `teacher`."""
    across: Across | None = None
    """How these compare two vocabularies, where the teacher has another one."""
    spans: Spans | None = None
    """Then: the spans of the scores; None where each is one."""
    head: type[Head] | None = None
    """The head that is asked; None for the one that `install_head` found on the model."""

    @property
    def counted_spans(self) -> Spans | None:
        """The spans, in which the likelihood counts times `factor`."""
        if self.spans is None or self.spans.likelihood is None:
            return self.spans
        return self.spans._replace(likelihood=self.spans.likelihood * self.factor)


Stats = dict[str, Tensor]
"""What a head gives, by name, the one number of each score first: [scores] each, or [scores, ..]. What was not asked
for is left out."""
STATES = "states"
"""Of these, [scores, hidden]: the hidden states before the head."""
HIDDEN = "hidden"
"""In their place on a rank of a pipeline without the head, [1, tokens, hidden]: what the next rank goes on with."""
Held = Callable[[Scores], tuple[Int[Tensor, " held"], Scores]]
"""Gives the numbers of the scores whose hidden states a rank has, and these with places among its own tokens."""


@dataclass
class ScoreOutput(ModelOutput):
    """What the forward of a model returns when it is given scores, whatever its head."""

    loss: Tensor | None = None
    """[]: `factor` times the sum of the losses, where `Scores.loss` is known score by score."""
    stats: Stats = None  # type: ignore[assignment]  # a model's outputs have one field without a default at most
    """What was read, by name; a dictionary, in which wrappers such as FSDP find tensors."""
    aux_loss: Tensor | None = None
    """[]"""

    @property
    def scored(self) -> Tensor:
        """[scores]: the one number of each score, with its gradient: a log-probability, or a value; of the logits of
        labels the largest."""
        found = next(iter(self.stats.values()))
        return found if found.dim() == 1 else found.amax(-1)

    @property
    def nothing(self) -> Tensor:
        """[]: 0, of all that was read: what goes backward where nothing is scored, so that the same modules take part
        in it as on other ranks."""
        return torch.stack([each.sum() for each in self.stats.values() if each.requires_grad]).sum() * 0.0

    @property
    def stays(self) -> bool:
        """Whether ranks keep what each of them read, in place of putting it together or telling it to the others: of
        hidden states."""
        return STATES in self.stats

    def map(self, change: Callable[[Tensor], Tensor]) -> ScoreOutput:
        """The same with each of its tensors changed."""
        loss, aux_loss = (None if each is None else change(each) for each in (self.loss, self.aux_loss))
        return ScoreOutput(loss, {name: change(value) for name, value in self.stats.items()}, aux_loss)


class Head(ABC):
    """A kind of head."""

    numbers: ClassVar[str]
    """What it gives, in words."""
    statistic: ClassVar[str]
    """What they are called among `Stats`."""
    of_lines: ClassVar[bool] = False
    """Whether a model's own forward gives them for each line of a padded batch, and not for each token."""
    single: ClassVar[bool] = False
    """Whether it gives one number in a dimension of its own."""
    number: ClassVar[str]
    """One of them, in words, with its unit."""
    unit: ClassVar[str] = ""
    """Of these numbers, in words, with a space before it."""
    models: ClassVar[str]
    """What models with this head are called, in words."""
    auto_class: ClassVar[Any]
    """The class of transformers that loads such a model by name."""
    config_values: ClassVar[Mapping[str, Any]] = {}
    """What the model's config says beyond what is saved."""
    new_module: ClassVar[str | None] = None
    """The module that starts from random weights where the saved model has none; None if it has to be saved."""
    added_module: ClassVar[str | None] = None
    """The module that `attach` adds to a model, which PEFT trains whole; None if none."""
    adapter: ClassVar[str | None] = None
    """The adapter that it is read through, on a model that has one of this name; None for the policy's."""
    task_type: ClassVar[str]
    """What PEFT calls the task."""
    pipeline: ClassVar[str]
    """What transformers calls the pipeline that uses such a model."""
    used: ClassVar[tuple[str, ...]] = ("pipeline",)
    """What `usage` takes from transformers."""
    virtual_tokens: ClassVar[bool] = True
    """Whether adapters may put virtual tokens before each row."""
    hides_tokens: ClassVar[bool] = False
    """Whether tokens of its rows are hidden, for which a tokenizer needs a mask token."""
    of_tokens: ClassVar[frozenset[str]] = frozenset()
    """Statistics with a number for each token in place of each score; where tokens are split, for those of a rank."""
    of_all_scores: ClassVar[frozenset[str]] = frozenset()
    """Those that each rank has for all scores where tokens are split."""
    trains_beside: ClassVar[str | None] = None
    """What the other model is called that is trained with a model (see `beside`); None if there is none."""
    rule: ClassVar[ScoreRule] = NEXT_TOKEN
    """The `score_rule`, where it is one for all models."""

    @classmethod
    def loader(cls, config: PretrainedConfig | None) -> Any:
        """The class of transformers that makes a model of a config, as far as it is known."""
        return cls.auto_class

    @classmethod
    def is_saved(cls, config: PretrainedConfig) -> bool:
        """Whether a config says that the model was saved with this head, where another has the same `task_type`."""
        return False

    @classmethod
    @abstractmethod
    def why_not(cls, model: nn.Module) -> str | None:
        """What keeps a model from having this head, as a part of a sentence ("has no ..."); None if it has it."""

    @classmethod
    def check(cls, model: PreTrainedModel) -> None:
        """Refuses a model whose head, though of this kind, cannot be run; by default none, as it is called as it is.

        Raises:
            ValueError: names the head, and what to do.
        """
        return

    @classmethod
    def attach(cls, model: PreTrainedModel, options: Any = None) -> None:
        """Adds to a model that was loaded what this head needs beyond it; by default nothing.

        Args:
            options: the method's; None for their defaults.
        """
        return

    @classmethod
    def beside(cls, model: nn.Module) -> PreTrainedModel | None:
        """Another model that is a module of a model, and trained with it; None if there is none."""
        return None

    @classmethod
    def run_first(
        cls, model: PreTrainedModel, scores: Scores, inputs: dict[str, Any], held: Held | None = None
    ) -> tuple[Scores, dict[str, Any]]:
        """What runs before the model's body, and may change its inputs; by default nothing.

        Args:
            inputs: of the model's forward, by name; where ranks split the tokens, of a rank's own.
            held: finds, where ranks do, the scores among a rank's own tokens.
        """
        return scores, inputs

    @classmethod
    @abstractmethod
    def outputs(cls, model: PreTrainedModel, hidden: Float[Tensor, "tokens hidden"], scores: Scores) -> ScoreOutput:
        """Reads the scores off the hidden states, within the head module's own call."""

    @classmethod
    def dense_stats(
        cls,
        logits: Float[Tensor, "lines *longest labels"],
        index: Int[Tensor, " scores"],
        target: Int[Tensor, " scores"],
        longest: int,
        want: Want = NOTHING_MORE,
    ) -> Stats:
        """The `ScoreOutput.stats` of the scores, from what the model's own forward gives for a padded batch.

        Args:
            logits: of the model's own forward; with virtual tokens before each line, or without.
            index: of each score, its place among `lines` x `longest`.
            longest: tokens of a line, virtual ones left out.
        """
        found = logits[index // longest] if cls.of_lines else logits.flatten(0, 1)[index]
        return {cls.statistic: (found.squeeze(-1) if cls.single else found).float()}

    @classmethod
    def predictions(cls, output: ScoreOutput) -> Tensor:
        """[scores, ..]: what `compute_metrics` gets."""
        return output.scored.float()

    @classmethod
    def distances(cls, found: Float[Tensor, " scores"], expected: Float[Tensor, " scores"]) -> Tensor:
        """[scores]: how far two passes over the same rows are apart, in the unit of their numbers."""
        return (at_least_float32(found) - expected).abs()

    @classmethod
    def means(cls, model: nn.Module) -> bool:
        """Whether it reads the mean of a segment's hidden states in place of one of them."""
        return False

    @classmethod
    def pad_id(cls, model: PreTrainedModel) -> int | None:
        """The token that the model's own forward passes over at the end of a row before it reads; None if none."""
        return None

    @classmethod
    def score_rule(cls, model: PreTrainedModel) -> ScoreRule:
        """Where the model's own forward is read: the scores under which both give the same numbers."""
        return cls.rule

    @classmethod
    def chunk_rows(cls, config: PretrainedConfig, dtype: torch.dtype, device: str) -> int | None:
        """Scores that the head works on at a time, on which its peak depends; None for all."""
        return None

    @classmethod
    def packed_elements(cls, config: PretrainedConfig) -> int:
        """Elements of the weight that a CPU's library packs for the head's products."""
        return 0

    @classmethod
    @abstractmethod
    def usage(cls, where: str) -> list[str]:
        """Lines of Python that use a saved model by transformers' `pipeline`, for a model card."""


def at_least_float32(values: Tensor) -> Tensor:
    """The same in float32, where they are in less."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def body(model: PreTrainedModel) -> nn.Module:
    """All of the model but its head; Llama 4 names a prefix that it has no attribute for."""
    return model.base_model if model.base_model is not model else getattr(model, "model", model)


def language_model_within(model: PreTrainedModel) -> PreTrainedModel | None:
    """The language model that a model without a body of its own runs, head included, behind its vision tower (Llama 4);
    None of any other. BLIP-2's is called by a forward that wants pixels, and is none."""
    inner: Any = getattr(model, "language_model", None)
    if body(model) is not model or not isinstance(inner, PreTrainedModel) or body(inner) is inner:
        return None
    return None if _wants_pixels(type(model)) else inner


@functools.cache
def _wants_pixels(kind: type[PreTrainedModel]) -> bool:
    pixels = inspect.signature(kind.forward).parameters.get("pixel_values")
    return pixels is not None and pixels.default is pixels.empty


def is_one_of(model: nn.Module, names: Collection[str]) -> bool:
    """Whether a model's class, or one that it inherits from as a sharded model's does, has one of some names."""
    return any(each.__name__ in names for each in type(model).__mro__)


def own_call(module: nn.Module, function: Callable[..., Any], *args: Any) -> Any:
    """Runs a function of `args` as a module's own call, in place of its forward.

    All that is hung on the call of a module happens around it, such as hooks that gather a sharded weight.
    """
    with acting_as(module, function):
        return module(*args)


@contextlib.contextmanager
def acting_as(module: nn.Module, function: Callable[..., Any]) -> Iterator[None]:
    """While it lasts, a function stands in place of a module's forward, called without the module."""
    before = vars(module).get("forward")
    module.forward = function
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before
