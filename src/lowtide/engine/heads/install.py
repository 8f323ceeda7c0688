"""A model's own forward, which returns what its head reads when it is given scores.

Wrappers such as DDP see one ordinary forward call; nothing outside has to reach into the model.
"""

from __future__ import annotations

import functools
import types
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from lowtide.compat.transformers import load_balancing_loss
from lowtide.engine.heads import head_of
from lowtide.engine.heads.head import HIDDEN, Head, ScoreOutput, Scores, acting_as, body, language_model_within
from lowtide.engine.images import IMAGES, encoded_images
from lowtide.engine.over_ranks.split_plan import SplitPlan
from lowtide.engine.over_ranks.stage import stage_of
from lowtide.ops.attention.attention_plan import PLAN


def install_head(model: PreTrainedModel) -> None:
    """Lets `model(..., scores=Scores(...))` return a `ScoreOutput`; without scores nothing changes.

    Args:
        model: of one of `engine.heads.HEADS`, not wrapped by PEFT or others (adapters inside are fine).

    Raises:
        ValueError: the model has no head to speak of, or one that cannot be fused; names the model type.
    """
    head = head_of(model)
    head.check(model)
    if "scores" not in getattr(model.forward, "__lowtide__", ()):
        inner = model.forward
        # Unbound, so that a copy of the model calls its own.
        plain = inner.__func__ if getattr(inner, "__self__", None) is model else lambda _, *a, **k: inner(*a, **k)

        @functools.wraps(inner)
        def forward(self: PreTrainedModel, *args: Any, scores: Scores | None = None, **kwargs: Any) -> Any:
            return plain(self, *args, **kwargs) if scores is None else _forward_scores(self, head, scores, args, kwargs)

        forward.__lowtide__ = ("scores",)  # type: ignore[attr-defined]
        model.forward = types.MethodType(forward, model)


def _forward_scores(
    model: PreTrainedModel, own: type[Head], scores: Scores, args: tuple, kwargs: dict[str, Any]
) -> ScoreOutput:
    head = scores.head or own
    if head is not own and (reason := head.why_not(model)):
        raise ValueError(f"{head.numbers} were asked of a {type(model).__name__}, which {reason}")
    if scores.aux_loss:
        kwargs["output_router_logits"] = True
    kwargs = {name: value for name, value in kwargs.items() if value is not None}  # PEFT passes all that it knows
    if (images := kwargs.pop(IMAGES, None)) is not None:
        kwargs["mm_encoder_outputs"] = encoded_images(body(model), images)
    plan = kwargs.get(PLAN)
    split = plan if isinstance(plan, SplitPlan) else None
    scores, kwargs = head.run_first(model, scores, kwargs, None if split is None else split.held)
    outputs = _run_body(model, args, kwargs)
    if (stage := stage_of(model)) is not None and not stage.pipeline.is_last:
        return ScoreOutput(stats={HIDDEN: outputs[0]})
    read = functools.partial(head.outputs, model, outputs[0].flatten(0, -2))
    found = read(scores) if split is None else split.scored(scores, read, head)
    if scores.aux_loss:
        routed = outputs.router_logits if split is None else split.of_all_tokens(outputs.router_logits)
        found.aux_loss = _load_balancing_loss(model, routed, kwargs.get("attention_mask"))
    return found


def _run_body(model: PreTrainedModel, args: tuple, kwargs: dict[str, Any]) -> Any:
    """What the model gives but for its head, hidden states first. Llama 4 runs a language model with its head; T5 has
    its two stacks side by side, without a module around them."""
    if (inner := body(model)) is not model:
        return inner(*args, **kwargs, use_cache=False)
    both: Any = model
    if (within := language_model_within(model)) is not None:
        with acting_as(within, functools.partial(body(within))):
            return type(both).forward(both, *args, **kwargs, use_cache=False)
    tokens, targets = kwargs.pop("input_ids"), kwargs.pop("decoder_input_ids")
    mask = kwargs.pop("attention_mask", None)
    encoded = both.get_encoder()(input_ids=tokens, attention_mask=mask, **kwargs)[0]
    read = {"encoder_hidden_states": encoded, "encoder_attention_mask": mask}
    return both.get_decoder()(input_ids=targets, **read, **kwargs, use_cache=False)


def _load_balancing_loss(model: PreTrainedModel, routed: Any, attention_mask: Tensor | None) -> Tensor:
    """The model family's own auxiliary loss, over the real tokens of this forward; `routed` [tokens, experts] each."""
    config = model.config.get_text_config()
    experts = getattr(model, "num_experts", None) or getattr(config, "num_experts", None) or config.num_local_experts
    chosen = getattr(model, "num_experts_per_tok", None) or config.num_experts_per_tok
    return load_balancing_loss(model, routed, experts, chosen, attention_mask)
