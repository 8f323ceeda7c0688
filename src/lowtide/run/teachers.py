"""The teacher that a student is distilled from: a reference that may be another model, with the same tokens."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from typing import Any, cast

from torch import nn
from transformers import PreTrainedTokenizerBase

from lowtide.compat.torch import FakeTensor
from lowtide.compat.transformers import attention_implementation
from lowtide.data.two_tokenizers import TwoTokenizers, WithoutEnds
from lowtide.engine.adapters import leaves_base
from lowtide.engine.forward import causal_model, embedding_weight, install, vocabulary
from lowtide.engine.heads.language_model import LanguageModel
from lowtide.engine.image_proof import ImageProof
from lowtide.engine.probe import probe
from lowtide.engine.reference import FrozenModel
from lowtide.engine.vision import encodes_images
from lowtide.engine.weights.loading import load_model, load_tokenizer
from lowtide.engine.weights.model_init import config_init, model_init
from lowtide.process.ways_out import in_python
from lowtide.run.engine import Engine, prompts_unlike
from lowtide.run.inputs.arguments import check_kind
from lowtide.run.inputs.images import image_reader, is_processor, rows_to_prove
from lowtide.run.inputs.loading import model_name, stop_ids
from lowtide.run.references import (
    Reference,
    ReferenceMaker,
    check_its_tokenizer,
    size_text,
    trained_beyond_adapters,
)
from lowtide.run.streamed_weights import check_before_loading, loaded_on_host
from lowtide.run.teachers_by_row import TeachersByRow

OTHER_TOKENS = ", or take GOLD, which compares other tokens by the text that they stand for (use_uld_loss=True)"
"""A way out, where a teacher has another vocabulary."""


def teacher_init(options: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `from_pretrained` for the teacher, from a run's options by name.

    Raises:
        ValueError: two revisions of it are named.
    """
    trusts = bool(options.get("trust_remote_code"))
    init, revision = model_init(options.get("teacher_model_init_kwargs"), trust_remote_code=trusts), "revision"
    named = options.get("teacher_model_revision")
    if named is None:
        return init
    if init.get(revision, named) != named:
        raise ValueError(
            f"teacher_model_revision={named!r} and teacher_model_init_kwargs (revision={init[revision]!r}) name two "
            "revisions of the teacher: keep one of them"
        )
    return {**init, revision: named}


class TeacherMaker(ReferenceMaker):
    """Makes the teacher of a run; the arguments are `ReferenceMaker`'s."""

    what = "teacher_model"

    def __init__(self, args: Any, requested: Any, *, adapters_came: bool) -> None:
        if requested is None:
            requested = args.teacher_model_names_or_paths or args.teacher_model_name_or_path
        if args.teacher_names and not isinstance(requested, Mapping):
            raise ValueError(
                f"a teacher_model was passed, and teacher_model_names_or_paths has {', '.join(args.teacher_names)}: "
                "leave one of them out"
            )
        init, revision = args.teacher_model_init_kwargs, args.teacher_model_revision
        given = [f"teacher_model_init_kwargs ({', '.join(init)})"] if init else []
        given += [] if revision is None else [f"teacher_model_revision={revision!r}"]
        if given and not isinstance(requested, str | Mapping) and not _is_fake(requested):
            found = (
                "there is no name to load one by" if requested is None else "the teacher_model that was passed is one"
            )
            raise ValueError(
                f"{' and '.join(given)} {'are' if init else 'is'} for a teacher that is loaded by its name, and "
                f"{found}: leave {'them' if init else 'it'} out, or pass the teacher's name"
            )
        self._other: tuple[TwoTokenizers, Any] | None = None
        """Of a teacher with tokens of its own: both tokenizers, and what its own came in, which may read images too."""
        self.in_dtype_of_policy = not teacher_init(vars(args)).keys() & {"dtype", "quantization_config"}
        super().__init__(args, requested, adapters_came=adapters_came)

    def make(self, model: nn.Module, tokenizer: PreTrainedTokenizerBase | None, engine: Engine) -> Reference:
        """As of any reference.

        Raises:
            ValueError: there is none, its tokens are others than the student's, or options do not go with it.
        """
        if isinstance(self.requested, Mapping):
            return self._several(self.requested, model, tokenizer, engine)
        if self._is_copied(model):
            raise ValueError(
                "there is no teacher: set teacher_model_name_or_path"
                f"{in_python(', or pass a model as `teacher_model`')}. With adapters (use_peft=True"
                f"{in_python(', or `peft_config`')}) the model without them can be the teacher"
            )
        return super().make(model, tokenizer, engine)

    def _several(
        self, requested: Mapping[str, Any], model: nn.Module, tokenizer: PreTrainedTokenizerBase | None, engine: Engine
    ) -> Reference:
        """Several teachers, each made as one is."""
        made = {}
        for name, each in requested.items():
            alone = copy.copy(self)
            alone.requested = each
            made[name] = alone.make(model, tokenizer, engine)
        self.requested = None
        scorer = TeachersByRow({name: cast(FrozenModel, each.scorer) for name, each in made.items()})
        return Reference(scorer, ", ".join(f"{name}: {each.text}" for name, each in made.items()))

    def arrived(self, model: nn.Module, peft_config: Any) -> None:
        """Looks whether a student without its adapters can be the teacher, where there is no other.

        Raises:
            ValueError: it would not be a model that stays as it arrived.
        """
        if self.requested is not None or not hasattr(model, "disable_adapter"):
            return
        beyond = trained_beyond_adapters(model)
        if beyond is not None:
            raise ValueError(
                f"{beyond} is trained and no part of the adapters, so that the student without them is no fixed "
                f"teacher: set teacher_model_name_or_path{in_python(' (or pass a `teacher_model`)')}, or train "
                "adapters alone (bias='none')"
            )
        if peft_config is not None and not leaves_base(peft_config):
            raise ValueError(
                f"making these adapters (init_lora_weights={peft_config.init_lora_weights!r}) changes the model's own "
                "weights, so that the student without them is not the model that was to teach it: name that by "
                f"teacher_model_name_or_path{in_python(' (or pass it as `teacher_model`)')}, or leave "
                "init_lora_weights out"
            )

    def tokenizers(self, student: PreTrainedTokenizerBase | None, model: nn.Module) -> TwoTokenizers | None:
        """The student's tokenizer and the teacher's, where that has its own; None for one that both have, and in plans,
        which have no teacher here or one without memory.

        Args:
            model: the student.

        Raises:
            ValueError: there is no teacher's tokenizer, or none whose tokens can be aligned; says what to do.
        """
        args = self.args
        if not args.own_tokens or self.requested is None or _is_fake(self.requested):
            return None
        name = args.teacher_tokenizer_name_or_path
        init: dict[str, Any] = {"trust_remote_code": args.trust_remote_code}
        if name is None:
            name, init = model_name(self.requested), config_init(teacher_init(vars(args)))
        if not name:
            raise ValueError(
                "use_uld_loss=True reads texts by the teacher's own tokenizer, and the teacher_model that was passed "
                "has no name to find it by: set teacher_tokenizer_name_or_path"
            )
        theirs = load_tokenizer(name, **init)
        assert student is not None, "a student that reads texts has a tokenizer"
        ends_apart = WithoutEnds(args.uld_skip_student_eos, args.uld_skip_teacher_eos)
        made = TwoTokenizers(
            student,
            getattr(theirs, "tokenizer", theirs),
            ends=stop_ids(model, student),
            by_text=args.use_extended_uld,
            without_ends=ends_apart,
        )
        self._other = made, theirs
        return made

    def _check_images(self, model: nn.Module, reference: nn.Module) -> None:
        """Of a teacher with tokens of its own: has images made ready for it by its own processor.

        Raises:
            ValueError: it, or what came as its tokenizer, reads text alone.
        """
        if not self.args.own_tokens:
            super()._check_images(model, reference)
        if self._other is None:
            return
        tokenizers, theirs = self._other
        tokenizers.reader = image_reader(reference, theirs)
        if tokenizers.reader is None:
            reads = type(causal_model(reference) if is_processor(theirs) else theirs).__name__
            raise ValueError(
                f"rows show images, and teacher_model ({_title(reference)}) reads text alone ({reads}): take a "
                "vision-language model as teacher, with its processor beside it (or in teacher_tokenizer_name_or_path)"
            )

    def _runs(self, frozen: nn.Module, engine: Engine) -> dict[str, Any]:
        """Without padding where the teacher itself is proved to keep segments apart."""
        if not engine.padding_free or _is_fake(frozen):
            return {}
        inner = causal_model(frozen)
        whole = self.args.ref_model_storage == "same" and not self.args.sharding.cuts_weights
        if whole and not getattr(inner, "is_quantized", False):
            frozen.to(self.args.device)
        implementation = attention_implementation(inner.config) or "eager"
        reader = None if self._other is None else self._other[0].reader
        rows = engine.images if reader is None else rows_to_prove(reader)
        shown = ImageProof(frozen, rows) if rows and encodes_images(frozen) else None
        found = probe(frozen)
        isolated = found.isolated and (shown is None or shown.why_not_ragged(frozen) is None)
        if self.sees_prefixes:
            isolated &= found.shares_prefixes and not prompts_unlike(frozen, self.args)
        if not isolated:
            install(frozen, padding_free=False)
            inner.set_attn_implementation(implementation)
            if shown is not None:
                shown.check_padded(frozen)
        return {"padding_free": isolated}

    def _text(self, reference: nn.Module, *, own_model: bool) -> str:
        exact = "" if self.args.ref_model_storage in ("same", "cpu") else ", not exact"
        return f"the teacher {_title(reference)}, {size_text(reference)}{exact}"

    def _loaded(self, reference: Any, policy: nn.Module, tokenizer: PreTrainedTokenizerBase | None) -> nn.Module:
        """The teacher, loaded if it is a name; of the student's tokens, with rows that pad them or without."""
        if reference is policy:
            raise ValueError("teacher_model is the model that is trained, which would be its own teacher: pass another")
        init, other = teacher_init(vars(self.args)), self.args.own_tokens
        name = model_name(reference)
        if not other and (isinstance(reference, str) or os.path.isdir(name)):
            check_its_tokenizer("teacher_model", name, tokenizer, otherwise=OTHER_TOKENS, **config_init(init))
        if isinstance(reference, str):
            init = {"dtype": embedding_weight(policy).dtype, **init}
            check_before_loading(name, self.args, init, frozen=True, what=self.what)
            reference = load_model(name, **loaded_on_host(init, self.args))
        check_kind(reference, head=LanguageModel, name="teacher_model")
        if other:
            return reference
        ours, theirs = vocabulary(policy), vocabulary(reference)
        tokens = min(ours, theirs) if tokenizer is None else len(tokenizer)
        if tokens > theirs:
            raise ValueError(
                f"teacher_model ({_title(reference)}) has a vocabulary of {theirs} tokens, and the student's tokenizer "
                f"one of {tokens}: it predicts other tokens. Pass a teacher with the student's tokenizer{OTHER_TOKENS}"
            )
        rows = self.args.fsdp_split_vocabulary
        ranks = self.args.world_size if rows else self.args.sharding.tensor_parallel
        if theirs <= -(-ours // ranks) * (ranks - 1):
            remedy = "leave fsdp_split_vocabulary out" if rows else "take a smaller tp_size, or fsdp=True"
            raise ValueError(
                f"teacher_model ({_title(reference)}) has a vocabulary of {theirs} tokens and the student one of "
                f"{ours}, of which the last of {ranks} ranks would have none in common: {remedy}"
            )
        return reference


def _is_fake(model: Any) -> bool:
    """Whether its tensors have no memory, as in a plan."""
    return isinstance(model, nn.Module) and isinstance(next(model.parameters()), FakeTensor)


def _title(model: nn.Module) -> str:
    return model_name(model) or type(causal_model(model)).__name__
