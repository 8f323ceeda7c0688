"""Decoder layers of Llama's, Gemma's and OLMo's forms, each run as one autograd function (`ops.layers.decoder_layer`).

A layer as transformers and PEFT have it gives a device some 270 operations forward, again and backward, a third of
whose time goes to casts, scales, sums and norms in pieces. The same arithmetic in one function is 90 operations at less
than half the bytes, and it knows what nothing needs: the last product of a layer is never computed again.

The layers' forward is replaced, and their modules stay: adapters, weights and what is saved are PEFT's and
transformers'. A layer runs as it was wherever it is not called for a batch of segments, or has adapters that are more
than two matrices. That a family's layer computes what the function does is proved on the first layer of each kind, as
training begins: outputs and gradients of a few random tokens, both ways.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from lowtide.compat.bitsandbytes import dense_of
from lowtide.compat.peft import PlainLora, linear_of, marks_of_linear, plain_lora
from lowtide.compat.torch import FakeTensor, children_of, gathered, has_module_hooks, parameters_in
from lowtide.compat.transformers import (
    attention_function,
    attention_implementation,
    checkpointed_layers,
    plain_forward,
    run_checkpointed,
)
from lowtide.memory.activations.checkpointing import checkpointing_policy
from lowtide.memory.allocators.out_of_memory import first_line
from lowtide.memory.kernels.float8_products import in_8_bits
from lowtide.ops.attention.attention_plan import NAME, PLAN, AttentionPlan
from lowtide.ops.attention.cached_attention import CachedPlan
from lowtide.ops.layers import float8
from lowtide.ops.layers.attention_half import attention_half, normed
from lowtide.ops.layers.decoder_layer import DecoderLayer, Keeps, Rotary, decoder_layer
from lowtide.ops.layers.layer_kernels import Activation, Norm
from lowtide.ops.layers.lora_linear import Adapter, Projection, Together
from lowtide.ops.target import autocast_dtype
from lowtide.ragged import RaggedBatch

WINDOW = {"sliding_window": "sliding_window"}
FAMILIES: dict[str, dict[str, str]] = {
    "Gemma2DecoderLayer": {**WINDOW, "softcap": "attn_logit_softcapping"},
    "Gemma3DecoderLayer": WINDOW,
    "GemmaDecoderLayer": {},
    "GraniteDecoderLayer": {},
    "LlamaDecoderLayer": {},
    "GptOssDecoderLayer": {**WINDOW, "s_aux": "sinks"},
    "MinistralDecoderLayer": WINDOW,
    "MistralDecoderLayer": {"sliding_window": "config.sliding_window"},
    "MixtralDecoderLayer": {"sliding_window": "config.sliding_window"},
    "Olmo2DecoderLayer": {},
    "Olmo3DecoderLayer": WINDOW,
    "OlmoeDecoderLayer": {},
    "Qwen2DecoderLayer": WINDOW,
    "Qwen2MoeDecoderLayer": {},
    "Qwen3DecoderLayer": WINDOW,
    "Qwen3MoeDecoderLayer": WINDOW,
    "SmolLM3DecoderLayer": WINDOW,
}
"""By the class of a layer, what its attention passes on beside what all do, and in which of its attributes it is."""
ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
"""By their names in configs."""
CENTRED = {"GemmaRMSNorm", "Gemma2RMSNorm", "Gemma3RMSNorm"}
"""Norms that multiply by 1 + weight."""
ATTENTION, OUTPUT, GATES, DOWN = ("q_proj", "k_proj", "v_proj"), "o_proj", ("gate_proj", "up_proj"), "down_proj"
LINEARS = {*ATTENTION, OUTPUT, *GATES, DOWN}
PAIRS = {"GptOssDecoderLayer"}
"""Layers whose experts give how they were chosen, too."""
HALF_TABLES = {"GptOssDecoderLayer"}
"""Layers that get cosines and sines of half a head, which are the other half's too."""
HEAD_NORMS = ("q_norm", "k_norm")
NORMS = {
    "pre_feedforward_layernorm": (
        ("input_layernorm", "pre_feedforward_layernorm"), ("post_attention_layernorm", "post_feedforward_layernorm")
    ),
    "post_feedforward_layernorm": ((None, None), ("post_attention_layernorm", "post_feedforward_layernorm")),
    "post_attention_layernorm": (("input_layernorm", "post_attention_layernorm"), (None, None)),
}  # fmt: skip
"""By the first of these norms that a layer has: which are before its halves, and which after them."""
OWN = ("lowtide.engine.layers.", "lowtide.engine.weights.quantized", "lowtide.memory.kernels.float8_products")
"""Whose functions may stand in place of the forward of a linear layer or a dropout: no number changes."""
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3}
"""Relative distance of outputs and gradients that rounding explains in the proof, by dtype; 16 bits have the next.
Norms of transformers are in float32 whatever the dtype."""
IN_16_BITS = 5e-2
LENGTHS = (4, 3)
"""Tokens of the segments of the proof."""

KEEPS: dict[str, Keeps] = {"full": "input", "attention": "attention", "matmul": "products"}
"""What a layer keeps by each checkpointing policy."""
IN_THE_OPEN = ("softcap", "s_aux")
"""What attention is computed with by no fused operation of a CPU."""

logger = logging.getLogger(__name__)


def fuse_layers(model: nn.Module, computed_in: torch.dtype | None = None) -> Callable[[], None]:
    """Has the layers of a model run as one function each, where they can, and says of which others why not.

    Args:
        model: of transformers, wrapped or not, after `engine.forward.install` and after adapters are on it;
            checkpointing is set.
        computed_in: what autocast takes products in; None: there is none.

    Returns:
        What undoes it.

    Raises:
        ValueError: none of its layers can.
    """
    if refused := why_not_fused(model, computed_in):
        raise ValueError(refused)
    layers: list[Any] = list(checkpointed_layers(model))
    proofs: dict[Any, str | None] = {}
    reasons: dict[int, str] = {}
    for number, layer in enumerate(layers):
        with gathered(model, layer):
            reason = _why_not(layer, computed_in)
            if reason is None:
                kind = _kind(layer)
                if kind not in proofs:
                    proofs[kind] = _why_unlike(layer, computed_in)
                reason = proofs[kind]
        if reason is not None:
            reasons[number] = reason
    fused = [layer for number, layer in enumerate(layers) if number not in reasons]
    if not fused:
        raise ValueError(f"{next(iter(reasons.values()))}: leave fused_layers off")
    for reason in dict.fromkeys(reasons.values()):
        those = [number for number, each in reasons.items() if each == reason]
        logger.warning(f"layers {those} run as they were, not fused: {reason}")
    for layer in fused:
        layer.forward = types.MethodType(_forward, layer)

    def undo() -> None:
        for layer in fused:
            vars(layer).pop("forward", None)
            _known.pop(layer, None)

    return undo


@contextlib.contextmanager
def unfused(model: nn.Module) -> Iterator[None]:
    """While it lasts, fused layers run module by module, for who watches their modules."""
    fused = [layer for layer in checkpointed_layers(model) if getattr(layer.forward, "__func__", None) is _forward]
    forwards = [vars(layer).pop("forward") for layer in fused]
    try:
        yield
    finally:
        for layer, forward in zip(fused, forwards, strict=True):
            layer.forward = forward  # type: ignore[method-assign]


def why_not_fused(model: nn.Module, computed_in: torch.dtype | None = None) -> str | None:
    """Why none of a model's layers can be fused; None if some may be. Arguments as `fuse_layers` takes them."""
    layers: list[Any] = list(checkpointed_layers(model))
    if not any(_family(layer) in FAMILIES for layer in layers):
        known = ", ".join(sorted(name.removesuffix("DecoderLayer") for name in FAMILIES))
        return f"it knows the decoder layers of {known}, and this model has none of them: leave fused_layers off"
    first: str | None = None
    for layer in layers:
        with gathered(model, layer):
            reason = _why_not(layer, computed_in)
        if reason is None:
            return None
        first = first or reason
    return f"{first}: leave fused_layers off"


# -- which layers -------------------------------------------------------------------------------------------------


def _family(layer: Any) -> str:
    return type(layer).__name__.removeprefix("FSDP")


def _why_not(layer: Any, computed_in: torch.dtype | None) -> str | None:
    """What keeps a layer from running as one function; None if nothing does."""
    if _family(layer) not in FAMILIES:
        return f"a {_family(layer)} is of another form"
    attention = layer.self_attn
    if attention_implementation(attention.config) != NAME:
        return "rows are padded: fused layers need padding_free=True"
    if _knows_mlp(layer) and _activation(attention.config) not in ACTIVATIONS:
        return f"its MLP has the activation {_activation(attention.config)!r}, not {' or '.join(ACTIVATIONS)}"
    if attention.attention_dropout:
        return f"its attention drops weights at random (attention_dropout={attention.attention_dropout:g})"
    if getattr(attention.config, "clip_qkv", None) is not None:
        return f"its attention clips queries, keys and values (clip_qkv={attention.config.clip_qkv:g})"
    if layer.gradient_checkpointing and plain_forward(layer) is type(layer).forward:
        return "this version of transformers checkpoints around a layer: upgrade it, or leave checkpointing off"
    for path, part in layer.named_modules():
        if path and (_knows_mlp(layer) or not path.startswith("mlp")) and (reason := _why_not_part(path, part)):
            return reason
    found = layer.post_attention_layernorm.weight
    with _products_in(computed_in, found.device):
        read = _read(layer, computed_in or found.dtype)
    return read if isinstance(read, str) else None


def _products_in(dtype: torch.dtype | None, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if dtype is None else torch.autocast(device.type, dtype)


def _why_not_part(path: str, part: Any) -> str | None:
    if has_module_hooks(part):
        return f"its {path} has hooks, which would not be called"
    own = vars(part).get("forward")
    if own is not None and not getattr(own, "__module__", "").startswith(OWN):
        return f"the forward of its {path} was replaced"
    return None


def _kind(layer: Any) -> tuple[Any, ...]:
    """Tells layers apart of which one's proof does not hold for another."""
    attention = layer.self_attn
    adapted = tuple(isinstance(plain_lora(part), PlainLora) for part in _linears(layer))
    dtypes = tuple(sorted({str(each.dtype) for each in layer.parameters()}))
    return type(layer), str(_passed_on(attention)), getattr(attention, "use_rope", True), adapted, dtypes


def _linears(layer: Any) -> list[Any]:
    of_mlp = (*GATES, DOWN) if _knows_mlp(layer) else ()
    names = [(layer.self_attn, each) for each in (*ATTENTION, OUTPUT)] + [(layer.mlp, each) for each in of_mlp]
    return [getattr(owner, name) for owner, name in names]


def _knows_mlp(layer: Any) -> bool:
    """Whether a layer's MLP is a gate, up and down; that of a mixture of experts runs as it is."""
    return all(name in children_of(layer.mlp) for name in (*GATES, DOWN))


def _passed_on(attention: Any) -> dict[str, Any]:
    """What a family's attention passes on beside what all do."""
    paths = FAMILIES[type(attention).__name__.removesuffix("Attention") + "DecoderLayer"]
    return {name: attrgetter(path)(attention) for name, path in paths.items()}


def _activation(config: Any) -> str | None:
    return getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)


# -- the layer's forward ------------------------------------------------------------------------------------------


@dataclass
class _Call:
    """What a layer's attention is called with."""

    attention: Any
    kwargs: dict[str, Any]

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        attention = self.attention
        heads = (each.transpose(0, 1)[None] for each in (query, key, value))
        function = attention_function(attention.config)
        out, _ = function(attention, *heads, None, dropout=0.0, scaling=attention.scaling, **self.kwargs)
        return out.reshape(len(query), -1)


class _Known(NamedTuple):
    """A layer as it was read, and by what one sees that it is as it was."""

    marks: tuple[Any, ...]
    layer: DecoderLayer
    passed_on: dict[str, Any]


_known: WeakKeyDictionary[Any, _Known] = WeakKeyDictionary()


def _forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    dtype = None if args else _dtype_here(hidden_states, kwargs)
    known = None if dtype is None else _known_layer(self, dtype)
    if dtype is None or known is None:
        return type(self).forward(self, hidden_states, *args, **kwargs)
    attention = self.self_attn
    beside = {name: each for name, each in kwargs.items() if name not in PASSED}
    attend = _Call(attention, {**beside, **known.passed_on})
    checkpointed, rotary = self.gradient_checkpointing and self.training, _rotary(self, kwargs)
    keeps = _keeps(self, known, hidden_states.device) if checkpointed else "products"
    if known.layer.gates.parts:
        return decoder_layer(known.layer, hidden_states, rotary, attend, dtype, keeps=keeps)

    def half(hidden: Tensor) -> Tensor:
        return attention_half(known.layer, hidden, rotary, attend, dtype)

    rest = partial(_mlp_half, self, known.layer)
    if not checkpointed:
        return rest(half(hidden_states))
    if keeps == "products":  # it writes over its own, and keeps what they come to
        return run_checkpointed(self, rest, half(hidden_states))
    return run_checkpointed(self, lambda hidden: rest(half(hidden)), hidden_states)


def _keeps(layer: Any, known: _Known, device: torch.device) -> Keeps:
    """What a layer that is checkpointed keeps. A CPU writes out the scores of attention with soft-caps or sinks."""
    in_the_open = device.type == "cpu" and any(known.passed_on.get(name) is not None for name in IN_THE_OPEN)
    return "input" if in_the_open else KEEPS[checkpointing_policy(layer)]


def _mlp_half(self: Any, layer: DecoderLayer, mid: Tensor) -> Tensor:
    """What a layer makes of the residual after its attention, where its MLP runs as it is."""
    before, after = layer.norms[1], layer.after[1]
    out = self.mlp(mid if before is None else normed(mid, before, mid.dtype))
    out = out[0] if isinstance(out, tuple) else out  # experts that tell how they were chosen
    return torch.add(mid, out if after is None else normed(out, after, out.dtype), alpha=layer.factor)


def _dtype_here(hidden: Tensor, kwargs: dict[str, Any]) -> torch.dtype | None:
    """In which dtype a layer's products are computed; None where it is to run as it was."""
    if not isinstance(kwargs.get(PLAN), AttentionPlan | CachedPlan):
        return None  # a user's own call, or ranks that split a batch
    if kwargs.get("attention_mask") is not None or kwargs.get("past_key_values") is not None:
        return None
    return autocast_dtype(hidden.device) or hidden.dtype


def _rotary(layer: Any, kwargs: dict[str, Any]) -> Rotary | None:
    if not getattr(layer.self_attn, "use_rope", True):
        return None
    cos, sin = (each.reshape(-1, each.shape[-1]) for each in kwargs["position_embeddings"])
    return (cos.repeat(1, 2), sin.repeat(1, 2)) if _family(layer) in HALF_TABLES else (cos, sin)


def _known_layer(layer: Any, dtype: torch.dtype) -> _Known | None:
    """A layer for products in a dtype, read anew where something of it has changed; None where it is to run as it
    was."""
    marks = (dtype, autocast_dtype(layer.post_attention_layernorm.weight.device), *_marks(layer))
    known = _known.get(layer)
    if known is None or len(known.marks) != len(marks) or not all(map(operator.is_, known.marks, marks)):
        read = _read(layer, dtype)
        if isinstance(read, str):
            return None
        known = _known[layer] = _Known(marks, read, _passed_on(layer.self_attn))
    return known


def _marks(layer: Any) -> list[Any]:
    """Of which one is another where a layer is to be read anew: modules, parameters, how adapters are switched."""
    found: list[Any] = []
    for part in children_of(layer).values():
        found += (part, *parameters_in(part))
        for name, module in {} if part is None else children_of(part).items():
            found += (module, *(marks_of_linear(module) if name in LINEARS else parameters_in(module)))
    return found


def _read(layer: Any, dtype: torch.dtype) -> DecoderLayer | str:
    """A layer as it is now, for products in a dtype; or why it is to run as it was, as a clause."""
    attention, parts = layer.self_attn, []
    for module in _linears(layer):
        part = _projection(module, dtype)
        if isinstance(part, str):
            return part
        parts.append(part)
    before, after = next(names for name, names in NORMS.items() if hasattr(layer, name))
    of_heads = tuple(_norm(attention, name) for name in HEAD_NORMS)
    query, key, value, output, *of_mlp = parts
    return DecoderLayer(
        norms=(_norm(layer, before[0]), _norm(layer, before[1])),
        attention=Together((query, key, value)),
        output=Together([output]),
        gates=Together(of_mlp[:2]),
        down=Together(of_mlp[2:]),
        dim=attention.head_dim,
        after=(_norm(layer, after[0]), _norm(layer, after[1])),
        head_norms=None if of_heads[0] is None or of_heads[1] is None else (of_heads[0], of_heads[1]),
        activation=ACTIVATIONS[_activation(attention.config) or ""],
        factor=float(getattr(layer, "residual_multiplier", 1.0)),
        random=any(part.adapter is not None and part.adapter.drop is not None for part in parts),
    )


PASSED = ("attention_mask", "past_key_values", "position_embeddings")
"""What a layer's attention is given under names of its own; the rest it passes on."""


def _projection(module: Any, dtype: torch.dtype) -> Projection | str:
    lora, linear = plain_lora(module), linear_of(module)
    if linear is None:
        kind = type(getattr(module, "base_layer", module)).__name__
        return f"one of its linear layers is a {kind}, whose weight is neither a plain matrix nor one in 4 bits"
    if isinstance(lora, str):
        return lora
    stored: Any = partial(float8.stored, linear)  # asked for anew each time: streamed weights come and go
    dense = dense_of(linear) if stored() is None else lambda wanted: stored().dense(wanted)
    given = [linear.bias, *(lora or ())[:2], *([linear.weight] if dense is None else [])]
    dtypes = {each.dtype for each in given if isinstance(each, Tensor)}
    computed_in = getattr(linear, "compute_dtype", None)
    if dense is not None and computed_in not in (None, dtype):
        return f"its 4-bit weights compute in {computed_in}, and other products in {dtype}"
    if autocast_dtype(linear.weight.device) is None and dtypes - {dtype}:
        return f"weights and adapters are of {dtype} and {min(map(str, dtypes - {dtype}))} without mixed precision"
    rows = stored if stored() is not None else partial(float8.in_rows, linear.weight) if in_8_bits(linear) else None
    if dtype != torch.bfloat16 or not float8.multiplies_on(linear.weight):
        rows = None
    return Projection(linear.weight, linear.bias, None if lora is None else _adapter(lora), dense, rows)


def _adapter(lora: PlainLora) -> Adapter:
    drops = lora.dropout.training and getattr(lora.dropout, "p", 0.0) > 0
    return Adapter(lora.first, lora.second, lora.scale, lora.dropout if drops else None)


def _norm(owner: Any, name: str | None) -> Norm | None:
    module = None if name is None else getattr(owner, name, None)
    if module is None:
        return None
    eps = module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps
    return Norm(module.weight, eps, 1.0 if type(module).__name__ in CENTRED else 0.0)


# -- the proof ----------------------------------------------------------------------------------------------------


def _why_unlike(layer: Any, computed_in: torch.dtype | None) -> str | None:
    """Runs a layer both ways on random tokens; the reason if their numbers differ, None if they do not."""
    if any(isinstance(each, FakeTensor) or each.is_meta for each in layer.parameters()):
        return None  # nothing to compute with
    with _plainly(layer), _without_unknown_mlp(layer):
        parameters = [each for each in layer.parameters() if each.requires_grad]
        expected = _numbers(layer, partial(type(layer).forward, layer), parameters, computed_in)
        try:
            found = _numbers(layer, partial(_forward, layer), parameters, computed_in)
        except Exception as failure:  # Triton's compiler has errors of its own, by card and version
            return f"its kernels fail here with {type(failure).__name__}: {first_line(failure)}"
    tolerance = TOLERANCE.get(computed_in or layer.post_attention_layernorm.weight.dtype, IN_16_BITS)
    far = max(_distance(*each) for each in zip(found, expected, strict=True))
    if far <= tolerance:
        return None
    return (
        f"a {type(layer).__name__} computes something else here: outputs or gradients are {far:.1g} apart, relatively, "
        f"where rounding explains {tolerance:.0e}"
    )


def _distance(one: Tensor, other: Tensor) -> float:
    size = other.double().norm()
    return float((one.double() - other.double()).norm() / size) if size > 0 else float(one.double().norm())


@contextlib.contextmanager
def _plainly(layer: Any) -> Iterator[None]:
    """Without dropout and checkpointing, and leaving random numbers alone."""
    training, checkpointing = [part for part in layer.modules() if part.training], layer.gradient_checkpointing
    devices = [each.device for each in list(layer.parameters())[:1] if each.is_cuda]
    layer.eval()
    layer.gradient_checkpointing = False
    try:
        with torch.random.fork_rng(devices), torch.enable_grad():
            torch.manual_seed(0)
            yield
    finally:
        layer.gradient_checkpointing = checkpointing
        for part in training:
            part.training = True


class _AsItIs(nn.Module):
    """In the place of an MLP."""

    def __init__(self, several: bool) -> None:
        super().__init__()
        self.several = several

    def forward(self, x: Tensor) -> Any:
        return (x, None) if self.several else x


@contextlib.contextmanager
def _without_unknown_mlp(layer: Any) -> Iterator[None]:
    """Has an MLP that runs as it is in both ways give its input, since rounding may choose other experts."""
    own = layer.mlp
    if not _knows_mlp(layer):
        layer.mlp = _AsItIs(_family(layer) in PAIRS)
    try:
        yield
    finally:
        layer.mlp = own


def _numbers(
    layer: Any, forward: Callable[..., Tensor], parameters: list[nn.Parameter], computed_in: torch.dtype | None
) -> list[Tensor]:
    """The output, and the gradients at the input and of all trained parameters."""
    weight, generator = layer.post_attention_layernorm.weight, torch.Generator().manual_seed(1)
    batch = RaggedBatch.from_segments([[*range(length)] for length in LENGTHS]).to(weight.device)
    tokens, width, dim = batch.tokens, layer.post_attention_layernorm.weight.shape[0], layer.self_attn.head_dim

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(weight)

    angles = torch.rand(1, tokens, dim // 2, generator=generator).mul_(6)
    angles = angles if _family(layer) in HALF_TABLES else angles.repeat(1, 1, 2)
    x, grad = random(1, tokens, width).requires_grad_(), random(1, tokens, width)
    with _products_in(computed_in, weight.device):
        out = forward(
            x,
            position_embeddings=(angles.cos().to(weight), angles.sin().to(weight)),
            position_ids=batch.position_ids[None],
            **{PLAN: AttentionPlan.build(batch)},
        )
    return [out.detach(), *torch.autograd.grad(out, [x, *parameters], grad, materialize_grads=True)]


def in_16_bits(model: nn.Module) -> bool:
    """Whether a model's weights are in 16 bits."""
    return any(each.dtype in (torch.bfloat16, torch.float16) for each in model.parameters())
