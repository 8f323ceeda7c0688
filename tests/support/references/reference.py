"""The plain computation that everything is compared with: padded, eager, dense logits, `torch.log_softmax`.

Nothing of lowtide is used here, so that an error cannot be on both sides of a comparison. Rows are padded on the
right: positions then start at 0 in every row, as they do in a ragged batch, and no real token is ever computed
from padding (attention is causal, and state models have not met it yet).
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

PAD = 0


def reference_logprobs(model: PreTrainedModel, rows: Sequence[Sequence[int]]) -> list[Float[Tensor, " tokens-1"]]:
    """The log-probability of each token but the first, given those before it in its row.

    A row of `n` token ids gives `n - 1` values. The result carries gradients.
    """
    longest = max(map(len, rows))
    input_ids = torch.tensor([[*row, *[PAD] * (longest - len(row))] for row in rows])
    attention_mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    logits = model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits
    logprobs = torch.log_softmax(logits[:, :-1].to(torch.promote_types(logits.dtype, torch.float32)), dim=-1)
    logprobs = logprobs.gather(-1, input_ids[:, 1:, None])[..., 0]
    return [logprobs[i, : len(row) - 1] for i, row in enumerate(rows)]


def gradients(model: PreTrainedModel, loss: Float[Tensor, ""]) -> dict[str, Tensor]:
    """The gradient of `loss` by parameter name; zeros where a parameter took no part."""
    model.zero_grad(set_to_none=True)
    loss.backward()
    result = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        for name, parameter in model.named_parameters()
    }
    model.zero_grad(set_to_none=True)
    return result


def gradient_errors(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, float]:
    """By parameter: the norm of the difference over the norm of the wanted gradient.

    Gradients below a hundredth of the largest are measured against that: they are sums that cancel (that of a key's
    bias to zero, if no rotation follows), and float32 rounds their terms, not their result.
    """
    assert got.keys() == wanted.keys()
    norms = {name: float(gradient.norm()) for name, gradient in wanted.items()}
    floor = max(norms.values()) / 100
    return {name: float((got[name] - wanted[name]).norm()) / max(norm, floor) for name, norm in norms.items()}
