"""The reference that a method compares with: which one it is, and what it costs."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from lowtide.compat.peft import adapters_are_new, parameters_of_adapters
from lowtide.compat.torch import FakeTensor
from lowtide.engine.adapters import leaves_base
from lowtide.engine.forward import causal_model, compute_in, embedding_weight, sequence_of, vocabulary
from lowtide.engine.heads.language_model import LanguageModel
from lowtide.engine.over_ranks.splitting import split_over
from lowtide.engine.over_ranks.stage import stage_of
from lowtide.engine.reference import AdapterOff, ArrivedPolicy, FrozenModel, ReferenceModel
from lowtide.engine.weights.loading import load_model, load_tokenizer
from lowtide.engine.weights.model_init import model_init
from lowtide.engine.weights.reference_storage import STORAGES
from lowtide.engine.weights.sharded.fully_shard import sharing_weights
from lowtide.engine.weights.sharded.split_vocabulary import splits_head
from lowtide.engine.weights.sharded.stages import cut_into_stages
from lowtide.memory.allocators.measure import bytes_text
from lowtide.memory.weights.streaming import stream_of
from lowtide.methods.shared.options import ReferenceOptions
from lowtide.ops.mapped import declare_in_files, let_go
from lowtide.ranks.shards import is_sharded, whole_shape
from lowtide.run.edge import out_of_memory_while
from lowtide.run.engine import Engine, cut, disable_dropout
from lowtide.run.inputs.arguments import check_kind
from lowtide.run.inputs.images import check_reads_alike
from lowtide.run.inputs.loading import model_name
from lowtide.run.optimizers import OPTIMIZERS
from lowtide.run.streamed_weights import check_before_loading, stream_frozen, text_of, wants_stream


@dataclass(frozen=True)
class Reference:
    """A reference, and what the start-up report says of it."""

    scorer: ReferenceModel
    text: str


class ReferenceMaker:
    """Makes the reference of a run.

    Args:
        requested: the reference, if it is not the model as it is before training; a model, a name or a path.
        adapters_came: whether adapters came with the model, rather than being put on it here.
    """

    def __init__(self, args: Any, requested: Any, *, adapters_came: bool) -> None:
        self.args, self.requested, self.adapters_came = args, requested, adapters_came
        self._aside: nn.Module | None = None
        self._kept: frozenset[str] | None = None
        """The trained weights of a policy with adapters, where switching these off does not give it as it arrived."""
        self.source: str | None = None
        """The name that the policy was loaded by, where a streamed copy of it is loaded once more."""
        self.sees_images = False
        """Whether it is given rows with images."""
        self.sees_prefixes = False
        """Whether it is given segments that go on from others."""
        self.temperature = float(getattr(args, "scored_at", 1.0))
        """At which an online method compares."""

    what = "ref_model"
    """The argument that it comes in."""
    in_dtype_of_policy = True
    """Whether the reference's weights are in the dtype that the policy's will be in."""

    def _runs(self, frozen: nn.Module, engine: Engine) -> dict[str, Any]:
        """How a reference runs, where that is not as the policy does."""
        return {}

    def arrived(self, model: nn.Module, peft_config: Any) -> None:
        """Looks at a policy as it arrived, before it is sharded and before another head is put on it.

        Args:
            peft_config: of the adapters that were made here; None where they came with the model.
        """
        if self.requested is not None or not hasattr(model, "disable_adapter"):
            return
        new_here = peft_config is not None and not self.adapters_came and leaves_base(peft_config)
        is_base = trained_beyond_adapters(model) is None and (new_here or _are_new(model))
        if not is_base or getattr(self.args, "follows", False):
            self._kept = frozenset(name for name, p in model.named_parameters() if p.requires_grad)

    def set_aside(self, model: nn.Module) -> None:
        """Keeps the model as it is before it is sharded, where the reference is a copy of it: the two share their
        weights until each has cut its shards from them."""
        if self._is_copied(model):
            self._aside = sharing_weights(model)

    def _is_copied(self, model: nn.Module) -> bool:
        return (
            not self.args.is_live
            and self.requested is None
            and not hasattr(model, "disable_adapter")
            and not self._is_policy
        )

    @property
    def _is_policy(self) -> bool:
        """Whether the policy itself is the reference, whose log-probabilities are computed before it is trained."""
        return getattr(self.args, "precompute_ref_log_probs", False) and self.args.optim not in OPTIMIZERS

    def make(self, model: nn.Module, tokenizer: PreTrainedTokenizerBase | None, engine: Engine) -> Reference:
        """The reference of a model on which the engine is installed; the model that was passed is let go.

        Raises:
            OutOfMemory: it does not fit.
            ValueError: it cannot be the reference, or options do not go with it; says what to do.
        """
        precomputes = hasattr(self.args, "precompute_ref_log_probs")
        or_else = ", or set precompute_ref_log_probs=True" if precomputes else ""
        with out_of_memory_while("making the reference", or_else=or_else):
            return self._made(model, tokenizer, engine)

    def _made(self, model: nn.Module, tokenizer: PreTrainedTokenizerBase | None, engine: Engine) -> Reference:
        args, requested = self.args, self.requested
        how: dict[str, Any] = {"padding_free": engine.padding_free, "temperature": self.temperature}
        if args.is_live:
            self._check_storage()
            return Reference(ReferenceModel(model, **how), "the policy as it is in each step; it costs nothing")
        if hasattr(model, "disable_adapter") and requested is None:
            self._check_storage()
            if self._kept is None:
                return Reference(AdapterOff(model, **how), "the policy with its adapters off; it costs nothing")
            return self._as_it_is(model, **how) if self._is_policy else self._as_it_arrived(model, **how)
        copied, sharded = self._is_copied(model), is_sharded(model)
        requested = self._streamed(requested, model, copied=copied)
        self.requested = None
        if requested is None and not copied:
            return self._as_it_is(model, **how)
        if sharded and args.ref_model_storage != "same":
            raise ValueError(
                f"ref_model_storage={args.ref_model_storage!r} stores a whole reference, and this one is sharded with "
                "the model: leave it at 'same'"
            )
        frozen, self._aside = self._aside, None
        narrow = args.optim in OPTIMIZERS and self.in_dtype_of_policy
        if requested is not None:
            frozen = self._loaded(requested, model, tokenizer)
            if self.sees_images:
                self._check_images(model, frozen)
        elif frozen is None and sharded:
            raise ValueError(
                "the model came sharded, so that no copy of it can be the reference: "
                f"{self._instead('pass a `ref_model` that is sharded alike, ')}take adapters (`peft_config`), or give "
                "the model by name with fsdp=True"
            )
        elif frozen is None:
            frozen = _copied(model, torch.bfloat16 if narrow else None)
        if args.disable_dropout:
            disable_dropout(frozen)
        if narrow:
            _narrow(frozen)
        stream_frozen(frozen.requires_grad_(False), args, what=self.what)
        reference = FrozenModel.of(frozen, **how | self._runs(frozen, engine))
        compute_in(frozen, engine.computed_in)
        stage = stage_of(causal_model(model))
        if stage is not None and requested is not None:
            cut_into_stages(frozen, stage.pipeline, args.device)
        if args.sharding.cuts_weights:
            cut(reference.model, args, split_vocabulary=splits_head(causal_model(model)))
        elif not sharded and not wants_stream(args):
            STORAGES[args.ref_model_storage](reference.model, args.device)
        split_over(reference.model, sequence_of(model))
        return Reference(reference, self._text(reference.model, own_model=copied))

    def _check_images(self, model: nn.Module, reference: nn.Module) -> None:
        """Refuses a reference that does not take the images of rows as the model does."""
        check_reads_alike(model, reference, self.what)

    def _streamed(self, requested: Any, model: nn.Module, *, copied: bool) -> Any:
        """What is loaded so that it can be streamed, if it is to be: a copy of the policy lies in no file, and its
        files are loaded again in its place. Else what was requested.

        Raises:
            ValueError: the policy did not come from files, or a reference's weights are to change or lie elsewhere.
        """
        args = self.args
        if not wants_stream(args):
            if copied and stream_of(model) is not None:
                precomputes = hasattr(args, "precompute_ref_log_probs")
                raise ValueError(
                    "streamed trained weights (trained_weights='stream') cannot work here: the reference would be a "
                    "resident copy: set base_weights='stream' too"
                    + (", or precompute_ref_log_probs=True" if precomputes else "")
                )
            return requested
        stored = None if args.ref_model_storage == "same" else f"ref_model_storage={args.ref_model_storage!r}"
        if other := stored or (args.following and args.following.option):
            raise ValueError(
                f"{other} and base_weights='stream' both say where a reference's weights are: streamed ones stay as "
                "their files have them. Leave one of them out"
            )
        if args.optim in OPTIMIZERS and self.in_dtype_of_policy:
            raise ValueError(
                f"optim={args.optim!r} makes a reference bfloat16 in memory, and base_weights='stream' takes it from "
                "its files: leave base_weights out, or take optim='adamw_torch_fused'"
            )
        if requested is None and not copied:
            raise ValueError(
                "base_weights='stream' has nothing to stream: all weights are trained, and "
                "precompute_ref_log_probs=True keeps no reference. Leave base_weights out"
            )
        if copied and isinstance(embedding_weight(model), FakeTensor):
            return None
        if copied and self.source is None:
            raise ValueError(
                "base_weights='stream' takes the reference from the files that the model came from, and the model was "
                f"passed loaded: {self._instead('pass a `ref_model`, or ')}pass its name or folder"
            )
        return self.source if copied else requested

    def _text(self, reference: nn.Module, *, own_model: bool) -> str:
        whose = "a frozen copy of the model" if own_model else "the ref_model that was passed"
        exact = "" if self.args.ref_model_storage in ("same", "cpu") else ", not exact"
        text = f"{whose}, {size_text(reference)}{exact}"
        if wants_stream(self.args):
            text = f"{text}, streamed: {text_of(stream_of(reference))}"
        if not hasattr(self.args, "precompute_ref_log_probs"):
            return text
        if self.args.precompute_ref_log_probs:
            return f"{text}; let go once its log-probabilities are computed, before training"
        return f"{text}; precompute_ref_log_probs=True does without" if own_model else text

    def _check_storage(self) -> None:
        """A reference that shares the policy's base cannot be stored otherwise."""
        if self.args.ref_model_storage != "same":
            raise ValueError(
                f"ref_model_storage={self.args.ref_model_storage!r} requires a reference of its own, and with adapters "
                f"the reference shares the policy's base: {self._instead('pass a `ref_model`, or ')}leave it at 'same'"
            )

    def _instead(self, way_out: str) -> str:
        """A way out by the argument `ref_model`, which not every trainer takes."""
        takes = isinstance(self.args, ReferenceOptions) or "ref_model" in self.args.method.arguments
        return way_out if takes else ""

    def _as_it_is(self, model: nn.Module, **how: Any) -> Reference:
        return Reference(
            FrozenModel(model, **how), "log-probabilities computed before training; no reference is resident"
        )

    def _as_it_arrived(self, model: nn.Module, **how: Any) -> Reference:
        assert self._kept is not None
        made = ArrivedPolicy(model, self._kept, self.args.device, **how)
        size = bytes_text(sum(whole_shape(each).numel() * each.element_size() for each in made.copies.values()))
        moves = ", which follows it" if getattr(self.args, "follows", False) else ""
        return Reference(made, f"the policy as it arrived: a frozen copy of its adapters{moves}, {size}")

    def _loaded(self, reference: Any, policy: nn.Module, tokenizer: PreTrainedTokenizerBase | None) -> nn.Module:
        """The reference that was passed, loaded if it is a name; of the policy's vocabulary."""
        if reference is policy:
            raise ValueError(
                "ref_model is the model that is trained, which would be compared with itself: leave it out, and a "
                "frozen copy is made where one is needed"
            )
        if isinstance(reference, str):
            init = model_init(self.args.model_init_kwargs, trust_remote_code=self.args.trust_remote_code)
            trusts = init["trust_remote_code"]
            dtype = embedding_weight(policy).dtype
            check_before_loading(reference, self.args, {**init, "dtype": dtype}, frozen=True, what=self.what)
            check_its_tokenizer("ref_model", reference, tokenizer, trust_remote_code=trusts)
            reference = load_model(reference, trust_remote_code=trusts, dtype=dtype)
        check_kind(reference, head=LanguageModel, name="ref_model")
        ours, theirs = vocabulary(policy), vocabulary(reference)
        if ours != theirs:
            raise ValueError(
                f"ref_model ({model_name(reference) or type(causal_model(reference)).__name__}) has a vocabulary of "
                f"{theirs} tokens and the model one of {ours}: their log-probabilities are not of the same tokens. "
                "Pass the model that the policy started from"
            )
        return reference


def check_its_tokenizer(
    what: str, name: str, tokenizer: PreTrainedTokenizerBase | None, *, otherwise: str = "", **how: Any
) -> None:
    """Refuses a model to compare with that was trained on other tokens of the same numbers.

    Args:
        what: the trainer's argument.
        name: of the model.
        tokenizer: the policy's.
        otherwise: another way out, as the end of a sentence.
        how: further arguments of `load_tokenizer`.
    """
    try:
        theirs = load_tokenizer(name, **how)
    except ValueError:  # a folder of weights alone
        return
    if tokenizer is not None and theirs.get_vocab() != tokenizer.get_vocab():
        raise ValueError(
            f"the tokenizer of {what} {name!r} gives other ids than the policy's: their log-probabilities are "
            f"not of the same tokens. Pass a {what} with the policy's tokenizer{otherwise}"
        )


def trained_beyond_adapters(model: nn.Module) -> str | None:
    """A weight that is trained and has its effect with adapters off too, such as a bias of the base; None if none."""
    of_adapters = parameters_of_adapters(model)
    return next((name for name, p in model.named_parameters() if p.requires_grad and p not in of_adapters), None)


def check_head_taught(reference: ReferenceModel) -> None:
    """Refuses a teacher that is the policy as it arrived where the head is trained: the copies of its weights stand in
    for a forward alone, and the teacher's hidden states meet the head later.

    Raises:
        ValueError: names a weight of the head, and what to do.
    """
    if not isinstance(reference, ArrivedPolicy):
        return
    head: Any = causal_model(reference.model).get_output_embeddings()
    own = {id(p) for p in head.parameters()}
    for name, p in reference.weights.items():
        if id(p) in own:
            raise ValueError(
                f"{name} of the head is trained, and the teacher is the policy as it was before: its distributions "
                "would be read off the student's head. Leave the head (and an embedding that is tied to it) out of "
                "target_modules and modules_to_save, or compare written tokens alone "
                "(distillation_mode='sampled_token')"
            )


def _copied(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """A copy of a model, whose weights are in a dtype of their own from the start, each cast by itself.

    None is shared with the model, which is trained, in whatever dtype it was.
    """
    cast = {} if dtype is None else {id(p): p.data.to(dtype, copy=True) for p in model.parameters()}
    return copy.deepcopy(model, {key: nn.Parameter(each, requires_grad=False) for key, each in cast.items()})


def _narrow(model: nn.Module) -> None:
    """Makes weights bfloat16, as the policy's will be; buffers stay. Pages of a file go with the weight that was read
    from them."""
    wide = [parameter for parameter in model.parameters() if parameter.dtype != torch.bfloat16]
    declare_in_files(parameter.data for parameter in wide)
    for parameter in wide:
        stored = parameter.data
        parameter.data = stored.to(torch.bfloat16)
        let_go(stored)


def _are_new(model: nn.Module) -> bool:
    """As `adapters_are_new`; False where a plan knows no numbers."""
    return not isinstance(next(model.parameters()), FakeTensor) and adapters_are_new(model)


def size_text(model: nn.Module) -> str:
    """The bytes of a model's weights, their dtypes, and where they lie."""
    parameters = list(model.parameters())
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in parameters})
    count = sum(whole_shape(p).numel() * p.element_size() for p in parameters)
    return f"{bytes_text(count)} in {'/'.join(dtypes)} on {parameters[0].device.type}"
