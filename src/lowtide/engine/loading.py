"""Models and tokenizers from a name or path, with adapters on them; and what their weights take."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "auto": "auto"}


def load_model(name: str, *, trust_remote_code: bool = False, rewards: bool = False, **init: Any) -> PreTrainedModel:
    """A causal language model by hub name or path, in float32 unless `dtype` says otherwise.

    Args:
        rewards: a model of one value a row in its place, whose head is new where the weights have none.

    Raises:
        ValueError: the dtype is unknown, or there is no such model; names what was asked for.
    """
    dtype = init.pop("dtype", init.pop("torch_dtype", "float32"))
    if isinstance(dtype, str):
        if dtype not in DTYPES:
            raise ValueError(f"model_init_kwargs: dtype {dtype!r} is not one of {', '.join(DTYPES)}")
        dtype = DTYPES[dtype]
    try:
        kind: Any = AutoModelForSequenceClassification if rewards else AutoModelForCausalLM
        init = {"num_labels": 1, **init} if rewards else init
        return kind.from_pretrained(name, dtype=dtype, trust_remote_code=trust_remote_code, **init)
    except OSError as error:
        raise ValueError(f"model {name!r} cannot be loaded: {_first_line(error)}") from error


def load_tokenizer(name: str, *, trust_remote_code: bool = False, revision: str | None = None):
    """The tokenizer of a model, by hub name or path.

    Raises:
        ValueError: there is none; says how to pass one.
    """
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code, revision=revision or "main")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"no tokenizer at {name!r}: pass one as `processing_class`, or save it beside the model "
            f"({_first_line(error)})"
        ) from error


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0]


def adapt(model: nn.Module, peft_config: Any, *, gradient_checkpointing: bool) -> nn.Module:
    """The model with the adapters of a PEFT configuration, the rest of it frozen.

    What a quantized model has left in 16 bits stays so, as in TRL; PEFT's `prepare_model_for_kbit_training` would make
    float32 of it, which for a small model's embedding is more than all its layers in 4 bits.
    """
    from peft import PeftModel, get_peft_model

    if isinstance(model, PeftModel):
        raise ValueError(
            "the model is a PeftModel already and a `peft_config` came with it: merge the adapters first "
            "(model.merge_and_unload()), or leave `peft_config` out to train those that are there"
        )
    quantized = getattr(model, "is_loaded_in_4bit", False) or getattr(model, "is_loaded_in_8bit", False)
    if quantized and gradient_checkpointing:
        cast(Any, model).enable_input_require_grads()  # reentrant checkpoints need it
    return get_peft_model(cast(PreTrainedModel, model), peft_config)


def settle_quantized(model: nn.Module) -> None:
    """Lets the weights that bitsandbytes has quantized on a CPU be trained through, and the file they came from go.

    On a CPU with bfloat16 instructions it packs 4-bit weights for inference, for good, in the first forward in eval
    mode. There is no backward through packed weights, and a probe or an evaluation before a step is such a forward. And
    what is not quantized, the embedding above all, still maps the file, which keeps all of that resident.
    """
    on_cpu = getattr(model, "device", torch.device("cpu")).type == "cpu"
    if not on_cpu or not (getattr(model, "is_loaded_in_4bit", False) or getattr(model, "is_loaded_in_8bit", False)):
        return
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]
    for weight in model.parameters():
        if weight.is_floating_point():
            weight.data = weight.data.clone()


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, vocab: int) -> None:
    """Refuses a tokenizer whose ids the model has no embedding for.

    Raises:
        ValueError: naming both sizes and the way out.
    """
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if largest >= vocab:
        raise ValueError(
            f"the tokenizer knows ids up to {largest}, the model only {vocab} embeddings: they do not belong "
            f"together, or call model.resize_token_embeddings({largest + 1}) first"
        )
