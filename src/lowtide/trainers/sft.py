"""Supervised fine-tuning: `SFTConfig` and `SFTTrainer`, with TRL's names."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from datasets import Dataset, IterableDataset
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments, set_seed

from lowtide.data.chat import adopt_chat_template
from lowtide.data.collate import RaggedCollator
from lowtide.data.ledger import Ledger
from lowtide.data.prepare import PrepareOptions, prepare
from lowtide.engine.forward import causal_model, embedding_weight
from lowtide.engine.loading import adapt, check_tokenizer, load_model, load_tokenizer
from lowtide.methods.method import option
from lowtide.methods.sft import SFT, SFTOptions
from lowtide.trainers.base import LowtideTrainer
from lowtide.trainers.config import TrainingConfig
from lowtide.trainers.report import StartReport
from lowtide.trainers.setup import install_engine, router_coefficient

logger = logging.getLogger(__name__)


@dataclass
class SFTConfig(SFTOptions, TrainingConfig):
    """Options of supervised fine-tuning: those of `SFTOptions`, `TrainingConfig` and `TrainingArguments`."""

    max_seq_length: int | None = option(None, "The older name of `max_length`.")

    def __post_init__(self) -> None:
        if self.max_seq_length is not None:
            if self.max_length not in (1024, self.max_seq_length):
                raise ValueError(
                    f"SFTConfig: max_length={self.max_length} and its older name max_seq_length="
                    f"{self.max_seq_length} contradict each other: keep max_length"
                )
            self.max_length, self.max_seq_length = self.max_seq_length, None
        if self.loss_type == "chunked_nll":  # TRL's older name of the same
            self.loss_type = "nll"
        self.check()
        super().__post_init__()


class SFTTrainer(LowtideTrainer):
    """Fine-tunes a causal language model on texts, conversations, or prompts with completions.

    Args:
        model: a name, a path, a `PreTrainedModel` or a `PeftModel`.
        args: the options; a plain `TrainingArguments` gets the others' defaults.
        data_collator: of another library, where it returns `input_ids` and `labels`; by default rows are laid end
            to end.
        train_dataset: rows in any format of `docs/sft.md`; a stream needs `max_steps`.
        eval_dataset: one, or several by name.
        processing_class: the tokenizer; by default the model's own.
        compute_metrics: gets `EvalPrediction(predictions=log-probs [scores], label_ids=tokens [scores])`.
        quantization_config: for a model given by name.
        peft_config: adapters to put on the model.
        formatting_func: called with a row, returns its text or its messages.

    Raises:
        ValueError: anything that cannot work, before the first step, with what to do.
    """

    def __init__(
        self,
        model: str | PreTrainedModel | nn.Module,
        args: SFTConfig | TrainingArguments | None = None,
        data_collator: Callable | None = None,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: Dataset | IterableDataset | Mapping[str, Dataset] | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        compute_loss_func: None = None,
        compute_metrics: Callable | None = None,
        callbacks: list | None = None,
        optimizers: tuple = (None, None),
        optimizer_cls_and_kwargs: tuple | None = None,
        preprocess_logits_for_metrics: None = None,
        quantization_config: Any = None,
        peft_config: Any = None,
        formatting_func: Callable | None = None,
    ):
        args = _config(args, model)
        if compute_loss_func is not None or preprocess_logits_for_metrics is not None:
            raise ValueError(
                "compute_loss_func and preprocess_logits_for_metrics work on logits, which are never built: choose a "
                "`loss_type`, add a loss to lowtide.objectives, or use compute_metrics on log-probs"
            )
        set_seed(args.seed)
        model, tokenizer = _load(model, args, processing_class, quantization_config, peft_config)
        if peft_config is not None:
            model = adapt(model, peft_config, gradient_checkpointing=args.gradient_checkpointing)
        inner = causal_model(model)
        options = _prepare_options(args, formatting_func, inner)
        self._prepare = Preparation(args, options, tokenizer, skip=args.skips_preparation)
        if train_dataset is None and args.do_train:
            raise ValueError("SFTTrainer needs a `train_dataset`")
        if train_dataset is not None:
            train_dataset, self.ledger = self._prepare(train_dataset, "train", args.packing)
            _check_budget(args, self.ledger)
        else:
            self.ledger = None
        if eval_dataset is not None:
            eval_dataset = self._prepare.evaluation(eval_dataset)
        aux = router_coefficient(inner, args.router_aux_loss_coef)
        engine = install_engine(model, args)
        super().__init__(
            objective=SFT.objective(args, aux_coefficient=aux),
            padding_free=engine.padding_free,
            model=model,
            args=args,
            data_collator=data_collator or RaggedCollator(),
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=tokenizer,
            compute_metrics=compute_metrics,
            callbacks=callbacks,
            optimizers=optimizers,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
        )
        self.add_callback(StartReport(self, engine))

    def evaluate(self, eval_dataset: Any = None, *args: Any, **kwargs: Any) -> dict[str, float]:
        """As the Trainer's; a dataset handed in here may be unprepared."""
        if eval_dataset is not None and not isinstance(eval_dataset, str):
            eval_dataset = self._prepare.evaluation(eval_dataset)
        return super().evaluate(cast(Any, eval_dataset), *args, **kwargs)


@dataclass(frozen=True)
class Preparation:
    """How the datasets of a trainer become token rows."""

    args: SFTConfig
    options: PrepareOptions
    tokenizer: PreTrainedTokenizerBase | None
    skip: bool

    def __call__(self, dataset: Any, name: str, packing: bool) -> tuple[Any, Ledger | None]:
        if self.skip:
            return dataset, None
        if not isinstance(dataset, Dataset | IterableDataset):
            raise ValueError(f"the {name} dataset is a {type(dataset).__name__}; give a datasets.Dataset or a stream")
        if isinstance(dataset, IterableDataset) and name == "train" and self.args.max_steps < 1:
            raise ValueError("a streamed train_dataset has no length: set `max_steps`")
        assert self.tokenizer is not None
        options = self.options if name == "train" else dataclasses.replace(self.options, shuffle=False)
        with self.args.main_process_first(desc=f"preparing the {name} dataset"):
            return prepare(
                dataset,
                self.tokenizer,
                options,
                batch_size=self.args.per_device_train_batch_size,
                packing=packing,
                name=name,
            )

    def evaluation(self, dataset: Any) -> Any:
        """One dataset, or several by name, prepared for evaluation."""
        packing = self.args.packing if self.args.eval_packing is None else self.args.eval_packing
        if isinstance(dataset, Mapping):
            return {name: self(each, name, packing)[0] for name, each in dataset.items()}
        return self(dataset, "eval", packing)[0]


def _config(args: TrainingArguments | None, model: Any) -> SFTConfig:
    if isinstance(args, SFTConfig):
        return args
    if args is None:
        name = model if isinstance(model, str) else getattr(causal_model(model).config, "_name_or_path", "") or "model"
        return SFTConfig(output_dir=f"{name.split('/')[-1]}-SFT")
    plain = {f.name: getattr(args, f.name) for f in dataclasses.fields(TrainingArguments) if f.init}
    return SFTConfig(**plain)


def _check_budget(args: SFTConfig, ledger: Ledger | None) -> None:
    """One row goes through the model whole, so the token budget must hold the longest."""
    if args.tokens_per_microbatch is None or ledger is None:
        return
    longest = args.max_length if args.packing and args.max_length else ledger.longest_row
    if longest > args.tokens_per_microbatch:
        raise ValueError(
            f"tokens_per_microbatch={args.tokens_per_microbatch} is below the longest row, {longest} tokens, which "
            f"goes through the model whole: raise it to at least {longest}, or lower max_length"
        )


def _load(
    model: Any,
    args: SFTConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    quantization_config: Any,
    peft_config: Any,
) -> tuple[nn.Module, PreTrainedTokenizerBase | None]:
    init = dict(cast(dict, args.model_init_kwargs) or {})
    name = model if isinstance(model, str) else getattr(causal_model(model).config, "_name_or_path", "")
    if not isinstance(model, str):
        for given, what in ((init, "model_init_kwargs"), (quantization_config, "quantization_config")):
            if given:
                raise ValueError(f"{what} came with a model that is loaded already: pass the model's name, or drop it")
    if tokenizer is None and not args.skips_preparation:
        if not name:
            raise ValueError("a model without a name needs its tokenizer: pass it as `processing_class`")
        tokenizer = load_tokenizer(name, trust_remote_code=args.trust_remote_code, revision=init.get("revision"))
    if isinstance(model, str):
        if quantization_config is not None:
            init["quantization_config"] = quantization_config
        model = load_model(model, trust_remote_code=args.trust_remote_code, **init)
    if tokenizer is not None:
        tokenizer = cast(PreTrainedTokenizerBase, getattr(tokenizer, "tokenizer", tokenizer))  # a processor's
        if args.chat_template_path is not None:
            _adopt_template(args.chat_template_path, tokenizer, model, has_adapters=peft_config is not None)
        check_tokenizer(tokenizer, embedding_weight(model).shape[0])
    return model, tokenizer


def _adopt_template(path: str, tokenizer: PreTrainedTokenizerBase, model: nn.Module, *, has_adapters: bool) -> None:
    """The chat template of another tokenizer, with the tokens that it writes: they get embeddings of their own."""
    added = adopt_chat_template(tokenizer, path)
    inner = causal_model(model)
    if added and has_adapters:
        raise ValueError(
            f"chat_template_path={path!r} brings {len(added)} new tokens ({added[0]!r}, ...), whose embeddings "
            "adapters would leave untrained: use a .jinja file that writes known tokens, or train all weights"
        )
    if added and len(tokenizer) > embedding_weight(model).shape[0]:
        inner.resize_token_embeddings(len(tokenizer))
    inner.config.get_text_config().eos_token_id = tokenizer.eos_token_id


def _prepare_options(args: SFTConfig, formatting_func: Callable | None, model: PreTrainedModel) -> PrepareOptions:
    return PrepareOptions(
        dataset_text_field=args.dataset_text_field,
        formatting_func=formatting_func,
        assistant_only_loss=args.assistant_only_loss,
        completion_only_loss=args.completion_only_loss,
        eos_token=args.eos_token,
        max_length=args.max_length,
        truncation_mode=args.truncation_mode,  # type: ignore[arg-type]
        max_prompt_length=args.max_prompt_length,
        max_completion_length=args.max_completion_length,
        packing_strategy=args.packing_strategy,  # type: ignore[arg-type]
        shuffle=args.shuffle_dataset,
        seed=args.seed,
        vocab_size=embedding_weight(model).shape[0],
        num_proc=args.dataset_num_proc,
    )
