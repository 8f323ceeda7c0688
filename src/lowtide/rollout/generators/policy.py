"""What every generator checks of what is asked, and says of logits that nothing can be drawn from."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence

from torch import nn

from lowtide.engine.forward import causal_model, vocabulary
from lowtide.engine.positions import position_table
from lowtide.rollout.generators.generator import Request, Sampling

logger = logging.getLogger(__name__)


def check_requests(model: nn.Module, requests: Sequence[Request], sampling: Sampling) -> None:
    """Refuses what cannot be written.

    Raises:
        ValueError: names the request, and what is wrong with it.
    """
    known = getattr(causal_model(model).config.get_text_config(), "max_position_embeddings", None)
    vocab = vocabulary(model)
    for number, request in enumerate(requests):
        prompt, where = request.prompt_ids, f"request {number}"
        if len(prompt) == 0:
            raise ValueError(f"{where} has an empty prompt: give it one token at least, such as the beginning of text")
        if request.count < 1:
            raise ValueError(f"{where} asks for {request.count} completions: ask for 1 at least")
        if not 0 <= min(prompt) <= max(prompt) < vocab:
            raise ValueError(f"{where} has a token outside of the model's vocabulary of {vocab:,}")
        total = len(prompt) + request.room(sampling)
        if known is None or total <= known:
            continue
        if position_table(model) is None:
            warn_of_positions(known)
        else:
            raise ValueError(
                f"{where} has a prompt of {len(prompt):,} tokens, which with `max_new_tokens` of "
                f"{request.room(sampling):,} makes {total:,}, above the {known:,} positions of the model "
                "(`max_position_embeddings`): shorten the prompt, or lower `max_new_tokens`"
            )


@functools.cache
def warn_of_positions(known: int) -> None:
    """Says once that more is written than the model was made for."""
    logger.warning(
        f"completions go past the {known:,} positions that the model was made for (max_position_embeddings): what it "
        "writes there is seldom good. Shorten prompts (max_prompt_length) or completions"
    )


def not_finite(request: int, number: int, place: int) -> FloatingPointError:
    """The error of a completion whose next token cannot be drawn."""
    return FloatingPointError(
        f"the logits of request {request}, completion {number}, are not finite at its token {place}, so that nothing "
        "can be drawn: the model's weights or activations have overflowed (look at the loss and the learning rate of "
        "the steps before, or compute in bfloat16 or float32 in place of float16)"
    )
