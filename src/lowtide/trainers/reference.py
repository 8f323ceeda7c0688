"""The trainers of methods that compare the policy with a reference: which one, and what it costs."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from datasets import Dataset, IterableDataset
from safetensors.torch import load_model as load_weights
from safetensors.torch import save_model as save_weights
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback, TrainingArguments

from lowtide.engine.forward import causal_model, compute_in, embedding_weight
from lowtide.engine.reference import AdapterOff, FrozenModel
from lowtide.engine.weights.loading import load_model, load_tokenizer
from lowtide.engine.weights.model_init import model_init
from lowtide.engine.weights.quantized import is_quantized
from lowtide.engine.weights.reference_storage import STORAGES
from lowtide.memory.allocators.measure import bytes_text
from lowtide.methods.completions import completion_segments, in_completion, segment_sums
from lowtide.methods.method import Scorer
from lowtide.run.edge import edge, out_of_memory_while
from lowtide.run.engine import Engine, computed_in
from lowtide.run.inputs.arguments import check_arguments, check_kind
from lowtide.run.inputs.loading import model_name
from lowtide.run.options.training import TrainingConfig
from lowtide.trainers.completions import CompletionTrainer
from lowtide.trainers.method import disable_dropout
from lowtide.trainers.optimizers import OPTIMIZERS
from lowtide.trainers.references.later import LaterReference
from lowtide.trainers.references.precompute import Precomputed, precompute

logger = logging.getLogger(__name__)

MOVED = "reference.safetensors"
"""The file of a checkpoint for the weights of a reference that follows the policy."""


class ReferenceTrainer(CompletionTrainer):
    """A trainer of a method that compares the policy with a reference.

    Args:
        ref_model: the reference, if it is not the model as it is before training; a model, a name or a path.

    The others are those of `MethodTrainer`.
    """

    def __init__(
        self,
        model: str | PreTrainedModel | nn.Module,
        ref_model: str | PreTrainedModel | nn.Module | None = None,
        args: TrainingArguments | None = None,
        data_collator: Callable | None = None,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: Dataset | IterableDataset | Mapping[str, Dataset] | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        compute_metrics: Callable | None = None,
        callbacks: list | None = None,
        optimizers: tuple = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        optimizer_cls_and_kwargs: tuple | None = None,
        **older: Any,
    ):
        check_arguments(self.config.__name__, ref_model=ref_model)
        self._ref_model = os.fspath(ref_model) if isinstance(ref_model, os.PathLike) else ref_model
        self._later: LaterReference | None = None
        self._adapters_came = peft_config is None
        super().__init__(
            model,
            args,
            data_collator,
            train_dataset,
            eval_dataset,
            processing_class,
            compute_metrics,
            callbacks,
            optimizers,
            optimizer_cls_and_kwargs,
            quantization_config,
            peft_config,
            **older,
        )
        options: Any = self.args
        if options.precompute_ref_log_probs:
            reference: Any = self.reference
            with edge("precomputing the reference"):
                self._later = LaterReference(reference, *precompute(self), computed_in=computed_in(self.args))
            self.reference, self._ref_model = Precomputed(), None
        if options.sync_ref_model:
            assert isinstance(self.reference, FrozenModel)
            self.reference.check_follows(self.site.model)
            self.add_callback(
                _FollowPolicy(self.reference, options.ref_model_mixup_alpha, options.ref_model_sync_steps)
            )

    def put_adapters(self, model: nn.Module, peft_config: Any, args: TrainingConfig) -> nn.Module:
        """As the others', if without them the policy is still the model that they were put on.

        Raises:
            ValueError: making them changed weights of the model, as PiSSA does, and no `ref_model` was passed.
        """
        before = {name: (p, _some_of(p)) for name, p in model.named_parameters() if not isinstance(p, FakeTensor)}
        adapted = super().put_adapters(model, peft_config, args)
        changed = [name for name, (p, some) in before.items() if not torch.equal(_some_of(p), some)]
        if changed and self._ref_model is None:
            made = getattr(peft_config, "init_lora_weights", None)
            raise ValueError(
                f"making these adapters (init_lora_weights={made!r}) changed "
                f"{len(changed)} weights of the model ({changed[0]}, ...), so that without them the policy is not the "
                "reference: pass the model as `ref_model`, or leave init_lora_weights out"
            )
        return adapted

    @out_of_memory_while("making the reference")
    def make_reference(self, model: nn.Module, engine: Engine) -> Scorer:
        args: Any = self.args
        given, self._ref_model = self._ref_model, None
        adapters = hasattr(model, "disable_adapter")
        if adapters and given is None:
            self._check_adapters(model)
            self._reference_text = "the policy with its adapters off; it costs nothing"
            return AdapterOff(model, padding_free=engine.padding_free)
        narrowed = args.optim in OPTIMIZERS
        if given is None and args.precompute_ref_log_probs and not narrowed:
            self._reference_text = "log-probabilities computed before training; no reference is resident"
            return FrozenModel(model, padding_free=engine.padding_free)
        frozen = copy.deepcopy(model) if given is None else self._given(given, model)
        if args.disable_dropout:
            disable_dropout(frozen)
        if narrowed:
            for parameter in frozen.parameters():  # as the policy's will be; buffers stay
                parameter.data = parameter.data.to(torch.bfloat16)
        reference = FrozenModel.of(frozen, padding_free=engine.padding_free)
        compute_in(frozen, engine.computed_in)
        STORAGES[args.ref_model_storage](reference.model, args.device)
        whose = "a frozen copy of the model" if given is None else "the ref_model that was passed"
        exact = "" if args.ref_model_storage in ("same", "cpu") else ", not exact"
        self._reference_text = f"{whose}, {_size(reference.model)}{exact}"
        if args.precompute_ref_log_probs:
            self._reference_text += "; let go once its log-probabilities are computed, before training"
        elif given is None:
            self._reference_text += "; precompute_ref_log_probs=True does without"
        return reference

    def _check_adapters(self, model: nn.Module) -> None:
        """A reference that is the policy without its adapters can be neither moved nor stored otherwise."""
        args: Any = self.args
        for name, off in (("sync_ref_model", False), ("ref_model_storage", "same")):
            if getattr(args, name) != off:
                raise ValueError(
                    f"{name}={getattr(args, name)!r} is of a reference of its own, and with adapters the reference "
                    f"is the policy with its adapters off: pass a `ref_model`, or leave it at {off!r}"
                )
        known = [(name, p) for name, p in model.named_parameters() if not isinstance(p, FakeTensor)]
        trained = [name for name, p in known if "lora_B" in name and p.detach().any()]
        if trained and self._adapters_came:
            logger.warning(
                f"the adapters that came with the model are trained already ({trained[0]}): the reference is the "
                "model without them. To compare with the model as it came, merge them first (merge_and_unload), or "
                "pass it as `ref_model`"
            )

    def _given(self, reference: Any, policy: nn.Module) -> nn.Module:
        """The reference that was passed, loaded if it is a name; of the policy's vocabulary."""
        if reference is policy:
            raise ValueError(
                "ref_model is the model that is trained, which would be compared with itself: leave it out, and a "
                "frozen copy is made where one is needed"
            )
        if isinstance(reference, str):
            self._check_its_tokenizer(reference)
            weight = embedding_weight(policy)
            reference = load_model(reference, trust_remote_code=self._trusts_code, dtype=weight.dtype)
        check_kind(reference, head=self.head, name="ref_model")
        ours, theirs = embedding_weight(policy).shape[0], embedding_weight(reference).shape[0]
        if ours != theirs:
            raise ValueError(
                f"ref_model ({model_name(reference) or type(causal_model(reference)).__name__}) has a vocabulary of "
                f"{theirs} tokens and the model one of {ours}: their log-probabilities are not of the same tokens. "
                "Pass the model that the policy started from"
            )
        return reference

    @property
    def _trusts_code(self) -> bool:
        args: Any = self.args
        return model_init(args.model_init_kwargs, trust_remote_code=args.trust_remote_code)["trust_remote_code"]

    def _check_its_tokenizer(self, name: str) -> None:
        """Refuses a reference that was trained on other tokens of the same number."""
        try:
            theirs = load_tokenizer(name, trust_remote_code=self._trusts_code)
        except ValueError:  # a folder of weights alone
            return
        if self.tokenizer is not None and theirs.get_vocab() != self.tokenizer.get_vocab():
            raise ValueError(
                f"the tokenizer of ref_model {name!r} gives other ids than the policy's: their log-probabilities are "
                "not of the same tokens. Pass the model that the policy started from"
            )

    @property
    def ref_model(self) -> nn.Module | None:
        """The reference that is resident; None where it is the policy without adapters, or was computed before."""
        return self.reference.model if isinstance(self.reference, FrozenModel) else None

    @property
    def precompute_ref_logps(self) -> bool:
        """Whether the reference's log-probabilities are computed before training."""
        return cast(Any, self.args).precompute_ref_log_probs

    def compute_ref_log_probs(self, model: nn.Module, inputs: Mapping[str, Any]) -> tuple[Tensor, ...]:
        """[pairs] for the chosen and the rejected completions: the reference's log-probabilities, for a `compute_loss`
        of a subclass that asks for those of its inputs."""
        batch = self._micro_of(inputs).batch
        referred = self.runner.models(model).referred(batch, self.inner_objective)
        assert referred is not None
        counted = in_completion(batch, referred)
        sums = segment_sums(referred * counted, batch)
        return tuple(sums[segments] for segments in completion_segments(batch, len(self.columns)))

    def _handed_in(self, dataset: Any) -> Any:
        """As the others', with the reference's log-probabilities where those of training were computed before it."""
        dataset = super()._handed_in(dataset)
        return dataset if self._later is None else self._later.with_columns(self, dataset)

    def report_lines(self) -> list[tuple[str, str]]:
        return [("reference", self._reference_text)]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if cast(Any, self.args).sync_ref_model and self.args.should_save:
            save_weights(cast(FrozenModel, self.reference).model, str(Path(output_dir, MOVED)))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None or not cast(Any, self.args).sync_ref_model:
            return
        moved = Path(checkpoint, MOVED)
        if not moved.exists():
            raise ValueError(
                f"{checkpoint} has no {MOVED}: with sync_ref_model=True the reference has moved since the run began, "
                "and where to is not known. Resume from a checkpoint that was saved with sync_ref_model=True and "
                "save_only_model=False, or start a new run from this model"
            )
        load_weights(cast(FrozenModel, self.reference).model, moved)


class _FollowPolicy(TrainerCallback):
    """Moves the reference towards the policy every so many steps (TR-DPO, arXiv 2404.09656)."""

    def __init__(self, reference: FrozenModel, share: float, steps: int) -> None:
        self.reference, self.share, self.steps = reference, share, steps

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step % self.steps == 0:
            self.reference.follow(causal_model(model), self.share)


def _some_of(weight: Tensor) -> Tensor:
    """A few of a weight's numbers, from all over it; none of one that is quantized."""
    if is_quantized(weight):
        return torch.empty(0)
    numbers = weight.detach().reshape(-1)
    return numbers[:: max(numbers.numel() // 64, 1)].clone()


def _size(model: nn.Module) -> str:
    parameters = list(model.parameters())
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in parameters})
    count = sum(p.numel() * p.element_size() for p in parameters)
    return f"{bytes_text(count)} in {'/'.join(dtypes)} on {parameters[0].device.type}"
