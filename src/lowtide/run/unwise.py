"""What is unwise in a run, known once its model is there: it is trained as asked, and said aloud before."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

from torch import nn

from lowtide.compat.transformers import checkpointed_layers
from lowtide.memory.optimizers.states import optimizer_name
from lowtide.methods.shared.options import zeros

AS_LARGE_AS_THE_GRADIENT = ("sgd", "adafactor")
"""How the names of optimizers begin whose learning rate may be above 1: SGD multiplies the gradient itself, Adafactor
has rates relative to the weights."""
COLD = 0.01
"""Temperatures below this one, but for 0, are warned of."""


def unwise(
    args: Any, model: nn.Module, *, aux_coefficient: float = 0.0, given: bool = False, rows: object = None
) -> list[str]:
    """What to warn of, a sentence each.

    Args:
        args: a method's config.
        aux_coefficient: weight of the load-balancing loss of a mixture of experts, a term beside the method's.
        given: whether an optimizer came, which has learning rates of its own.
        rows: those that are trained on; None where a policy writes them.
    """
    adapters = getattr(model, "peft_config", None) or {}
    found = [
        *getattr(args, "advice", ()),
        _nothing_is_learned(args, aux_coefficient, adapters, given=given),
        _one_layer_recomputed(args, model),
        *([] if given else [_decay_beyond_zero(args), _leaps(args), _steps_of_no_length(args)]),
        _cold(args),
        _without_labels(args),
        _more_rows_than_there_are(args, len(rows)) if isinstance(rows, Sized) else "",
    ]
    return [each for each in found if each]


def _nothing_is_learned(args: Any, aux_coefficient: float, adapters: Any, *, given: bool) -> str:
    """Names the options that leave the whole loss without gradient, or its steps without length."""
    everywhere = set() if given else zeros(args, "learning_rate")
    if getattr(args, "max_grad_norm", 0):
        everywhere |= zeros(args, "max_grad_norm")  # 0 itself leaves gradients as they are
    scales = [getattr(each, "lora_alpha", None) for each in adapters.values() if not _trains_more(each)]
    if scales and all(scale == 0 for scale in scales):
        everywhere.add("lora_alpha=0")
    terms = [everywhere | term for term in args.without_gradient()]
    if aux_coefficient:
        terms.append(everywhere)
    if not all(terms):
        return ""
    names = sorted(set().union(*terms))
    return (
        f"nothing is learned with {', '.join(names)}: no term of the loss moves a weight. Change "
        f"{'it' if len(names) == 1 else 'one of them'}, unless this is a test run"
    )


def _more_rows_than_there_are(args: Any, rows: int) -> str:
    asked = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.data_ranks
    if asked <= rows:
        return ""
    return (
        f"a step is to take {asked:,} rows (per_device_train_batch_size={args.per_device_train_batch_size}, "
        f"gradient_accumulation_steps={args.gradient_accumulation_steps}), and there are {rows:,}: each step takes all "
        "of them. Lower these for more than one step in an epoch"
    )


def _decay_beyond_zero(args: Any) -> str:
    """Decay takes `learning_rate * weight_decay` of each weight away in a step."""
    rate, decay = args.learning_rate, args.weight_decay
    if rate * decay <= 1:
        return ""
    return (
        f"learning_rate={rate:g} times weight_decay={decay:g} is {rate * decay:g}, above 1: each step turns the sign "
        "of the weights that decay, and makes them larger where it is above 2. Lower weight_decay"
    )


def _leaps(args: Any) -> str:
    """An optimizer that divides by the gradient's size moves each weight by up to the learning rate in a step."""
    if args.learning_rate <= 1 or optimizer_name(args).startswith(AS_LARGE_AS_THE_GRADIENT):
        return ""
    return (
        f"learning_rate={args.learning_rate:g} moves each weight by up to {args.learning_rate:g} in a step, far beyond "
        "the weights of a model. Lower it"
    )


def _steps_of_no_length(args: Any) -> str:
    """Adam divides by the gradient's size plus `adam_epsilon`: far below it a gradient moves nothing."""
    if not optimizer_name(args).startswith("adamw"):
        return ""
    epsilon, norm = args.adam_epsilon, args.max_grad_norm
    if epsilon > 1:
        return f"adam_epsilon={epsilon:g} divides nearly all of each step away. Take one near 1e-8"
    if norm and norm < epsilon:
        return (
            f"max_grad_norm={norm:g} scales gradients below adam_epsilon={epsilon:g}, by which AdamW divides: nearly "
            "nothing is left of a step. Raise it, or set it to 0 to leave gradients as they are"
        )
    return ""


def _cold(args: Any) -> str:
    """At a temperature near 0 the likeliest token has nearly all of the probability."""
    temperature = getattr(args, "temperature", 1.0)
    if temperature == 0 or temperature >= COLD:
        return ""
    return (
        f"temperature={temperature:g} multiplies logits by {1 / temperature:g}: the likeliest token is written nearly "
        "always, so that completions of a prompt are alike, and gradients of what is scored at that temperature are as "
        f"much larger. Take {COLD} or more"
    )


def _without_labels(args: Any) -> str:
    if getattr(args, "label_smoothing_factor", 0) != 1:
        return ""
    return (
        "label_smoothing_factor=1 leaves nothing of the labels: the model learns that all are equally likely. Lower it"
    )


def _trains_more(adapter: Any) -> bool:
    """Whether weights are trained beside an adapter's matrices."""
    return bool(getattr(adapter, "modules_to_save", None)) or getattr(adapter, "bias", "none") != "none"


def _one_layer_recomputed(args: Any, model: nn.Module) -> str:
    if not args.gradient_checkpointing or args.checkpointing_every == 1:
        return ""
    layers = len(checkpointed_layers(model))
    if args.checkpointing_every <= layers:
        return ""
    return (
        f"checkpointing_every={args.checkpointing_every:g} is beyond the model's {layers} layers: only the first is "
        "recomputed, and the others keep their activations. Lower it, or set gradient_checkpointing=False"
    )
