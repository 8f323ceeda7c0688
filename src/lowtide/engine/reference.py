"""The reference that a policy is compared with: its log-probabilities, at the lowest price that the run allows.

It is the policy as it arrived, unless another model is given. In order of preference: the policy with its adapters
switched off, which costs nothing, where they were new; log-probabilities computed before training, after which no
reference is resident; the policy with frozen copies of its trained weights, where these are few; a frozen copy.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn

from lowtide.engine.adapters import adapter_of, adapters_off
from lowtide.engine.forward import causal_model, embedding_weight, inference, install, score_shared
from lowtide.engine.heads.head import HIDDEN, STATES, Head, Scores, TeacherStates
from lowtide.engine.heads.head_parts import head_parts, projection_of
from lowtide.engine.heads.hidden_states import HiddenStates, StatesAndLogprobs
from lowtide.engine.heads.language_model import LanguageModel
from lowtide.engine.heads.next_token import READ, NextToken
from lowtide.engine.over_ranks.stage import stage_of
from lowtide.engine.weights.merging import Weights, effective_weights
from lowtide.engine.weights.quantized import is_quantized
from lowtide.ragged import RaggedBatch
from lowtide.ranks.shards import copied, local_of, part_of, standing_in, whole_of


class ReferenceModel:
    """A model whose log-probabilities a policy is compared with; the policy itself in another state, or another model.

    Args:
        model: what runs.
        padding_free: whether it runs without padding.
        temperature: divisor of its logits.
    """

    def __init__(self, model: nn.Module, *, padding_free: bool, temperature: float = 1.0) -> None:
        self.model, self.padding_free, self.temperature = model, padding_free, temperature

    def active(self) -> AbstractContextManager[None]:
        """While it is entered, the model is this reference."""
        return nullcontext()

    def __call__(self, batch: RaggedBatch) -> Tensor:
        """[scores]"""
        with self.active():
            return logprobs(self.model, batch, padding_free=self.padding_free, temperature=self.temperature)

    def states(self, batch: RaggedBatch, *, placed: bool = False) -> Tensor:
        """[scores, hidden]: as `teacher_states`."""
        with self.active():
            return teacher_states(self.model, batch, padding_free=self.padding_free, placed=placed)

    def states_and_logprobs(self, batch: RaggedBatch, temperature: float) -> tuple[Tensor, Tensor]:
        """([scores, hidden], [scores]): its hidden states, and the log-probabilities of the targets, in one forward."""
        with self.active(), inference(self.model):
            head = StatesAndLogprobs
            scores = Scores(batch.score_index, batch.score_target, temperature=temperature, head=head)
            found = score_shared(self.model, batch, scores, padding_free=self.padding_free)
        return found.stats[STATES], found.scored

    def likeliest(self, batch: RaggedBatch, count: int, temperature: float) -> Tensor:
        """[scores, 1 + 2 count]: the log-probability of each target, those of the likeliest tokens by falling
        probability, and the numbers of these tokens; at least in float32, which tells them apart."""

        def read(logits: Tensor, span: slice) -> Tensor:
            logprobs = torch.log_softmax(logits.div_(temperature), -1)
            top = logprobs.topk(count, dim=-1)
            own = logprobs.gather(-1, batch.score_target[span, None])
            return torch.cat([own, top.values, top.indices.to(logprobs.dtype)], -1).T

        with self.active(), inference(self.model):
            scores = Scores(batch.score_index, batch.score_target, head=NextToken, read=read)
            return score_shared(self.model, batch, scores, padding_free=self.padding_free).stats[READ].T

    @property
    def models(self) -> list[nn.Module]:
        """What runs, each by itself."""
        return [self.model]

    @property
    def width(self) -> int:
        """Of its hidden states."""
        return embedding_weight(self.model).shape[1]

    def teaching(self, states: Tensor) -> TeacherStates | None:
        """What a student's head is to know of it, of which `states` are: those, and what would make logits of them,
        adapters off the head where they are; None on ranks that have layers of their own, and not the head."""
        inner = causal_model(self.model)
        if (stage := stage_of(inner)) is not None and not stage.pipeline.is_last:
            return None
        with self.active():
            return TeacherStates(states, [head_parts(inner)], projection_of(inner.config))

    def beside(self, policy: nn.Module) -> list[Tensor]:
        """The tensors that it holds beside the policy's."""
        shared = {*policy.parameters(), *policy.buffers()}
        return [each for each in (*self.model.parameters(), *self.model.buffers()) if each not in shared]


class AdapterOff(ReferenceModel):
    """The policy without its adapters: the model that they were put on."""

    def active(self) -> AbstractContextManager[None]:
        return adapters_off(self.model)


class ArrivedPolicy(ReferenceModel):
    """The policy as it arrived: frozen copies of its trained weights stand in for them while it computes.

    So it serves adapters of every kind, modules that are trained whole beside them, and biases of the base; none of the
    copies is a part of the model, which is saved, merged and sent elsewhere without them.

    Args:
        names: of the weights that will be trained, which are as they arrived now. A rank of a pipeline keeps those of
            its own layers.
        device: where the policy will run.
    """

    def __init__(self, model: nn.Module, names: Collection[str], device: torch.device, **how: Any) -> None:
        super().__init__(model, **how)
        self.weights = {name: p for name, p in model.named_parameters() if name in names and p.requires_grad}
        self.copies = {name: copied(p, device) for name, p in self.weights.items()}

    def active(self) -> AbstractContextManager[None]:
        return standing_in(self.model, [(p, self.copies[name]) for name, p in self.weights.items()])

    def beside(self, policy: nn.Module) -> list[Tensor]:
        return [*self.copies.values()]

    @torch.no_grad()
    def follow(self, policy: nn.Module, share: float) -> None:
        """Moves the copies towards the policy's weights: `share` of the policy's and the rest of their own. The two
        matrices of an adapter move each by itself."""
        for name, p in self.weights.items():
            ours = local_of(self.copies[name])
            ours.lerp_(local_of(p).to(ours), share)

    def state(self) -> dict[str, Tensor]:
        """The whole copies by the names of their weights, on the host; all ranks that hold parts of the model ask
        together."""
        own = {name: whole_of(each).cpu() for name, each in self.copies.items()}
        stage = stage_of(causal_model(self.model))
        everyones = [own] if stage is None else stage.pipeline.all_objects(own)
        return {name: each for part in everyones for name, each in part.items()}

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Takes the copies from what `state` gave.

        Raises:
            ValueError: a weight is missing, or has another shape; names it.
        """
        for name, ours in self.copies.items():
            found = state.get(name)
            if found is None or found.shape != ours.shape:
                raise ValueError(f"the saved reference has no {name} of shape {tuple(ours.shape)}")
            local_of(ours).copy_(part_of(found.to(ours.device), ours))


class FrozenModel(ReferenceModel):
    """Another model, or a copy of the policy as it was; or the policy itself, for as long as it is not trained."""

    @classmethod
    def of(cls, model: nn.Module, *, padding_free: bool, temperature: float = 1.0) -> FrozenModel:
        """Another model, which is frozen and made ready here."""
        install(model, padding_free=padding_free)
        return cls(model.eval().requires_grad_(False), padding_free=padding_free, temperature=temperature)

    @classmethod
    def copy_of(cls, model: nn.Module, *, padding_free: bool = True) -> FrozenModel:
        """A copy of a model as it is, in the dtype that it is stored in."""
        return cls.of(copy.deepcopy(model), padding_free=padding_free)

    def check_follows(self, policy: nn.Module) -> None:
        """Refuses a policy whose weights, with its adapters in them, are not one for one those of this model.

        Raises:
            ValueError: naming a weight, and what to pass instead.
        """
        theirs = {name: what for part in self._weights_of(policy) for name, what in part.names.items()}
        seen: dict[int, object] = {}
        for name, ours in causal_model(self.model).named_parameters(remove_duplicate=False):
            other = theirs.get(name)
            dense = isinstance(other, Tensor) and not is_quantized(other)
            if other is None or is_quantized(ours) or (dense and cast(Tensor, other).shape != ours.shape):
                raise ValueError(
                    f"a reference that follows the policy needs its weights, as plain numbers, and {name} is not one "
                    "that both have: pass the model that the policy started from, without adapters and not quantized"
                )
            if seen.setdefault(id(ours), other) is not other:
                raise ValueError(
                    f"{name} is tied in the reference and adapted by itself in the policy, which no reference with "
                    "tied weights can follow: leave embedding and head out of `target_modules`"
                )

    @torch.no_grad()
    def follow(self, policy: nn.Module, share: float) -> None:
        """Moves the weights towards the policy's: `share` of the policy's and the rest of its own.

        Adapters are merged into them, and quantized ones dequantized, one module at a time; the policy stays as it is.
        """
        ours = dict(causal_model(self.model).named_parameters())
        for part in self._weights_of(policy):
            if not ours.keys().isdisjoint(part.names):
                for name, theirs in part.make().items():
                    if name in ours:  # tied weights once, buffers never
                        ours[name].lerp_(theirs.detach().to(ours[name]), share)

    def _weights_of(self, policy: nn.Module) -> Iterator[Weights]:
        dtype = embedding_weight(self.model).dtype
        return effective_weights(causal_model(policy), "", dtype, dtype)


def logprobs(
    model: nn.Module,
    batch: RaggedBatch,
    *,
    padding_free: bool,
    temperature: float = 1.0,
    head: type[Head] = LanguageModel,
) -> Tensor:
    """[scores]: a model's log-probabilities of a micro-batch, without gradient and without dropout.

    Args:
        temperature: divisor of the logits.
        head: another one gives other numbers in their place, through its own adapter where the model has one.
    """
    with inference(model), adapter_of(model, head):
        scores = Scores(batch.score_index, batch.score_target, temperature=temperature, head=head)
        return score_shared(model, batch, scores, padding_free=padding_free).scored


def teacher_states(model: nn.Module, batch: RaggedBatch, *, padding_free: bool, placed: bool = False) -> Tensor:
    """[scores, hidden]: a model's hidden states at the scores of a micro-batch, without gradient and without dropout;
    of no width on ranks that have layers of their own, and not the head.

    Args:
        placed: where ranks split the tokens, a rank has its own states in their places, and 0 in those of others. By
            default it has its own alone.
    """
    with inference(model):
        scores = Scores(batch.score_index, batch.score_target, head=HiddenStates, placed=placed)
        found = score_shared(model, batch, scores, padding_free=padding_free).stats
    return found[STATES] if STATES in found else found[HIDDEN].new_empty(batch.scores, 0)
