"""What the trainers over prompts and completions share: their data, and the reference where the method has one."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from datasets import Dataset, IterableDataset
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback, TrainingArguments

from lowtide.data.collate import CompletionCollator
from lowtide.data.preference import PreferenceOptions, prepare_pairs, prepare_unpaired
from lowtide.engine.forward import causal_model, embedding_weight
from lowtide.engine.loading import load_model
from lowtide.engine.reference import AdapterOff, FrozenModel
from lowtide.engine.reference_storage import STORAGES
from lowtide.methods.method import Scorer, option
from lowtide.trainers.config import TrainingConfig
from lowtide.trainers.inputs import model_name
from lowtide.trainers.method import MethodTrainer, Prepared, disable_dropout
from lowtide.trainers.precompute import Precomputed, precompute
from lowtide.trainers.report import bytes_text
from lowtide.trainers.setup import Engine, check_prefixes

logger = logging.getLogger(__name__)


@dataclass
class CompletionConfig(TrainingConfig):
    """What the configs of these trainers have in common beyond `TrainingConfig`."""

    refused: ClassVar[dict[str, str]] = {
        **TrainingConfig.refused,
        "label_smoothing_factor": "it smooths the targets of supervised fine-tuning; preferences have label_smoothing",
        "neftune_noise_alpha": "its noise would differ between the policy and its reference; it is of sft",
    }

    learning_rate: float = option(1e-6, "The initial learning rate.")

    def __post_init__(self) -> None:
        self.check()
        super().__post_init__()

    def check(self) -> None:
        """The method's own checks; its options class has them."""
        raise NotImplementedError


class CompletionTrainer(MethodTrainer):
    """A trainer over rows of a prompt and one or two completions."""

    columns: ClassVar[tuple[str, ...]] = ("chosen_ids", "rejected_ids")
    """The completions of a prepared row."""
    values: ClassVar[tuple[str, ...]] = ()
    """The columns that become row values."""
    scores_prompt: ClassVar[bool] = False

    def prepare(self, dataset: Dataset | IterableDataset, name: str) -> Prepared:
        assert self.tokenizer is not None
        batch_size = self.args.per_device_train_batch_size
        return prepare_pairs(dataset, self.tokenizer, self.data_options(), batch_size=batch_size, name=name)

    def data_options(self) -> PreferenceOptions:
        """The options of data, as preparation takes them."""
        args: Any = self.args
        names = ("max_length", "truncation_mode", "max_prompt_length", "max_completion_length", "eos_token")
        return PreferenceOptions(
            **{name: getattr(args, name) for name in names if hasattr(args, name)},
            num_proc=args.dataset_num_proc,
            vocab_size=self.vocabulary,
        )

    def check_model(self, model: nn.Module) -> None:
        self.vocabulary = embedding_weight(model).shape[0]

    def collator(self, args: Any, engine: Engine) -> Callable:
        return CompletionCollator(
            self.columns,
            sharing=check_prefixes(engine, args.prefix_sharing),
            scores_prompt=self.scores_prompt,
            reads_last=self.rewards,
            values=(*self.values, "number"),
        )

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        assert self._signature_columns is not None
        self._signature_columns += ["prompt_ids", *self.columns, *self.values, "ref_logprobs", "number"]


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
    ):
        self._ref_model = ref_model
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
        )
        options: Any = self.args
        if options.precompute_ref_log_probs:
            precompute(self)
            self.reference, self._ref_model = Precomputed(), None
        if options.sync_ref_model:
            assert isinstance(self.reference, FrozenModel)
            self.add_callback(
                _FollowPolicy(self.reference, options.ref_model_mixup_alpha, options.ref_model_sync_steps)
            )

    def make_reference(self, model: nn.Module, engine: Engine) -> Scorer:
        args: Any = self.args
        given, self._ref_model = self._ref_model, None
        adapters = hasattr(model, "disable_adapter")
        if adapters and given is None:
            self._check_adapters(model)
            self._reference_text = "the policy with its adapters off; it costs nothing"
            return AdapterOff(model, padding_free=engine.padding_free)
        if given is None and args.precompute_ref_log_probs:
            self._reference_text = "log-probabilities computed before training; no reference is resident"
            return FrozenModel(model, padding_free=engine.padding_free)
        frozen = copy.deepcopy(model) if given is None else self._given(given, model)
        if args.disable_dropout:
            disable_dropout(frozen)
        reference = FrozenModel.of(frozen, padding_free=engine.padding_free)
        STORAGES[args.ref_model_storage](reference.model, args.device)
        whose = "a frozen copy of the model" if given is None else "the ref_model that was passed"
        exact = "" if args.ref_model_storage in ("same", "cpu") else ", not exact"
        self._reference_text = f"{whose}, {_size(reference.model)}{exact}"
        if given is None:
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
        came_trained = [name for name, p in model.named_parameters() if "lora_B" in name and p.detach().any()]
        if came_trained:
            logger.warning(
                f"the adapters that came with the model are trained already ({came_trained[0]}): the reference is the "
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
            weight = embedding_weight(policy)
            reference = load_model(reference, trust_remote_code=self.args.trust_remote_code, dtype=weight.dtype)
        ours, theirs = embedding_weight(policy).shape[0], embedding_weight(reference).shape[0]
        if ours != theirs:
            raise ValueError(
                f"ref_model ({model_name(reference) or type(causal_model(reference)).__name__}) has a vocabulary of "
                f"{theirs} tokens and the model one of {ours}: their log-probabilities are not of the same tokens. "
                "Pass the model that the policy started from"
            )
        return reference

    def report_lines(self) -> list[tuple[str, str]]:
        return [("reference", self._reference_text)]


class UnpairedTrainer(ReferenceTrainer):
    """A trainer over rows of one completion that is desirable or not."""

    columns, values = ("completion_ids",), ("label",)

    def prepare(self, dataset: Dataset | IterableDataset, name: str) -> Prepared:
        assert self.tokenizer is not None
        args = self.args
        rows = args.per_device_train_batch_size if name == "train" else args.per_device_eval_batch_size
        return prepare_unpaired(
            dataset,
            self.tokenizer,
            self.data_options(),
            batch_size=rows,
            name=name,
            kl_block=rows if "kl_completion_ids" in self.columns else None,
        )

    def metrics_of(self, sums: dict[str, float]) -> dict[str, float]:
        metrics = super().metrics_of(sums)
        if "rewards/chosen" in metrics and "rewards/rejected" in metrics:
            metrics["rewards/margins"] = metrics["rewards/chosen"] - metrics["rewards/rejected"]
        return metrics


class _FollowPolicy(TrainerCallback):
    """Moves the reference towards the policy every so many steps (TR-DPO, arXiv 2404.09656)."""

    def __init__(self, reference: FrozenModel, share: float, steps: int) -> None:
        self.reference, self.share, self.steps = reference, share, steps

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step % self.steps == 0:
            self.reference.follow(causal_model(model), self.share)


def _size(model: nn.Module) -> str:
    parameters = list(model.parameters())
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in parameters})
    count = sum(p.numel() * p.element_size() for p in parameters)
    return f"{bytes_text(count)} in {'/'.join(dtypes)} on {parameters[0].device.type}"
