"""What decoder layers of transformers are made of, by where their parts are: norms, what mixes tokens, an MLP.

A layer has two halves, each a norm, something, and a sum with the residual. What mixes tokens is known where it is
attention of Llama's form, and an MLP where it is a gate, up and down; a half that is not known runs as it is.
"""

from __future__ import annotations

import functools
import inspect
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lowtide.compat.bitsandbytes import dense_of
from lowtide.compat.peft import PlainLora, has_adapters, linear_of, marks_of_linear, plain_lora
from lowtide.compat.torch import children_of, has_module_hooks, parameters_in
from lowtide.compat.transformers import CACHES
from lowtide.memory.kernels.float8_products import in_8_bits
from lowtide.ops.layers import float8
from lowtide.ops.layers.decoder_layer import DecoderLayer
from lowtide.ops.layers.layer_kernels import Activation, Norm
from lowtide.ops.layers.lora_linear import Adapter, Projection, Together
from lowtide.ops.target import autocast_dtype

WINDOW = {"sliding_window": "sliding_window"}
FAMILIES: dict[str, dict[str, str]] = {
    "BambaDecoderLayer": {},
    "FalconH1DecoderLayer": {},
    "Gemma2DecoderLayer": {**WINDOW, "softcap": "attn_logit_softcapping"},
    "Gemma3DecoderLayer": WINDOW,
    "GemmaDecoderLayer": {},
    "GraniteDecoderLayer": {},
    "GraniteMoeHybridDecoderLayer": {},
    "JambaAttentionDecoderLayer": {},
    "JambaMambaDecoderLayer": {},
    "KimiLinearDecoderLayer": {},
    "Lfm2DecoderLayer": {},
    "Lfm2MoeDecoderLayer": {},
    "LlamaDecoderLayer": {},
    "GptOssDecoderLayer": {**WINDOW, "s_aux": "sinks"},
    "MinistralDecoderLayer": WINDOW,
    "MistralDecoderLayer": {"sliding_window": "config.sliding_window"},
    "MixtralDecoderLayer": {"sliding_window": "config.sliding_window"},
    "NemotronHBlock": {},
    "Olmo2DecoderLayer": {},
    "Olmo3DecoderLayer": WINDOW,
    "OlmoHybridAttentionDecoderLayer": {},
    "OlmoHybridLinearAttentionDecoderLayer": {},
    "OlmoeDecoderLayer": {},
    "Qwen2DecoderLayer": WINDOW,
    "Qwen2MoeDecoderLayer": {},
    "Qwen3DecoderLayer": WINDOW,
    "Qwen3MoeDecoderLayer": WINDOW,
    "Qwen3NextDecoderLayer": {},
    "Qwen3_5DecoderLayer": {},
    "Qwen3_5MoeDecoderLayer": {},
    "SmolLM3DecoderLayer": WINDOW,
}
"""By the class of a layer, what its attention passes on beside what all do, and in which of its attributes it is."""
ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
"""By their names in configs."""
CENTRED = {
    "GemmaRMSNorm",
    "Gemma2RMSNorm",
    "Gemma3RMSNorm",
    *(f"Qwen3{each}RMSNorm" for each in ("Next", "_5", "_5Moe")),
}
"""Norms that multiply by 1 + weight."""
MIXERS = ("self_attn", "linear_attn", "mamba", "conv")
MLPS = ("mlp", "feed_forward", "shared_mlp")
ALONE = "mixer"
"""What a layer of one half has: its first, where that mixes tokens, else its second."""
HEADS = ("q_proj", "k_proj", "v_proj")
OUTPUTS = ("o_proj", "out_proj")
HEAD_NORMS = (("q_norm", "k_norm"), ("q_layernorm", "k_layernorm"))
GATED = (
    (("gate_proj", "up_proj"), "down_proj"), (("w1", "w3"), "w2"), (("input_linear",), "output_linear")
)  # fmt: skip
"""The linear layers of a gated MLP: what reads its input (two, or one that has both), and what gives its output."""
UP_FIRST = {"FalconH1DecoderLayer"}
"""Layers whose MLP computes up before the gate."""
LINEARS = {*HEADS, *OUTPUTS, *(name for gates, down in GATED for name in (*gates, down))}
EXPERTS = ("block_sparse_moe",)
"""What a layer may have beside its MLP, in the same half."""
NORMS = {
    "pre_feedforward_layernorm": (
        ("input_layernorm", "pre_feedforward_layernorm"), ("post_attention_layernorm", "post_feedforward_layernorm")
    ),
    "post_feedforward_layernorm": ((None, None), ("post_attention_layernorm", "post_feedforward_layernorm")),
    "post_attention_layernorm": (("input_layernorm", "post_attention_layernorm"), (None, None)),
    "pre_ff_layernorm": (("input_layernorm", "pre_ff_layernorm"), (None, None)),
    "ffn_norm": (("operator_norm", "ffn_norm"), (None, None)),
}  # fmt: skip
"""By the first of these norms that a layer has: which are before its halves, and which after them."""
PASSED = ("attention_mask", *CACHES, "position_embeddings")
"""What attention is given under names of its own; the rest it passes on."""


class Mixer(NamedTuple):
    """What mixes tokens in a layer."""

    module: Any
    before: float = 1.0
    """By which its input is multiplied."""
    after: float = 1.0
    """By which its output is."""


class Glu(NamedTuple):
    """The linear layers of a gated MLP."""

    gates: tuple[Any, ...]
    """In the order in which they are called."""
    down: Any


class Attention(NamedTuple):
    """The parts of attention of Llama's form."""

    module: Any
    heads: tuple[Any, Any, Any]
    output: Any
    head_norms: tuple[Any, Any] | None
    gated: bool
    """Whether the matrix of the queries has a gate on what it gathers, too."""


def family(layer: Any) -> str:
    """The name of a layer's class, sharded or not."""
    return type(layer).__name__.removeprefix("FSDP")


def mixers(layer: Any) -> tuple[Mixer, ...]:
    """What mixes tokens in a layer; where it is several, their sum does. None in a layer that is an MLP alone."""
    found = [child for name in MIXERS if (child := children_of(layer).get(name)) is not None]
    if (alone := children_of(layer).get(ALONE)) is not None and _mixes_tokens(type(alone)):
        found.append(alone)
    if len(found) < 2:
        return tuple(map(Mixer, found))
    attention, state_space = found  # Falcon-H1
    return (
        Mixer(state_space, 1.0, layer.ssm_out_multiplier),
        Mixer(attention, layer.attention_in_multiplier, layer.attn_out_multiplier),
    )


def second_halves(layer: Any) -> dict[str, Any]:
    """By its name in a layer, its MLP, and what is added to that; the MLP first. None in a layer that mixes tokens
    alone."""
    children = children_of(layer)
    names = (*MLPS, *EXPERTS, *(() if mixers(layer) else (ALONE,)))
    return {name: children[name] for name in names if children.get(name) is not None}


def glu(layer: Any) -> Glu | None:
    """The linear layers of a layer's MLP, where it is a gate, up and down; None where it runs as it is."""
    found = [*second_halves(layer).values()]
    children = children_of(found[0]) if len(found) == 1 else {}
    for gates, down in GATED:
        if all(name in children for name in (*gates, down)):
            ordered = reversed(gates) if family(layer) in UP_FIRST else gates
            return Glu(tuple(children[name] for name in ordered), children[down])
    return None


def attention(layer: Any) -> Attention | None:
    """The attention of a layer, where nothing else mixes its tokens and it is of Llama's form."""
    found = mixers(layer)
    children = children_of(found[0].module) if len(found) == 1 else {}
    output = next((name for name in OUTPUTS if name in children), None)
    norms = next((names for names in HEAD_NORMS if set(names) <= children.keys()), ())
    if output is None or children.keys() != {*HEADS, output, *norms}:
        return None
    query, key, value, out = (children[name] for name in (*HEADS, output))
    wide, gathered = linear_of(query), linear_of(out)
    gated = wide is not None and gathered is not None and wide.out_features == 2 * gathered.in_features
    pair = (children[norms[0]], children[norms[1]]) if norms else None
    return Attention(found[0].module, (query, key, value), out, pair, gated)


def norm_names(layer: Any) -> tuple[tuple[str | None, str | None], tuple[str | None, str | None]]:
    """The names of the norms before a layer's halves, and after them."""
    if ALONE in children_of(layer):
        return (("norm", None) if mixers(layer) else (None, "norm")), (None, None)
    return next(names for name, names in NORMS.items() if hasattr(layer, name))


def a_norm(layer: Any) -> Any:
    """One of a layer's norms, as wide as its hidden states."""
    before, after = norm_names(layer)
    return getattr(layer, next(name for name in (*before, *after) if name is not None))


def config_of(layer: Any) -> Any:
    """The config of a layer's parts."""
    modules = [*second_halves(layer).values(), *(each.module for each in mixers(layer))]
    return next((each.config for each in modules if hasattr(each, "config")), None)


def activation(layer: Any) -> str | None:
    """The name of the activation of a layer's MLP."""
    config = config_of(layer)
    named = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)
    return named or "silu"  # LFM2 names none


def linears(layer: Any) -> list[Any]:
    """The linear layers of the halves that are known."""
    found, mlp = attention(layer), glu(layer)
    of_attention = () if found is None else (*found.heads, found.output)
    return [*of_attention, *(() if mlp is None else (*mlp.gates, mlp.down))]


def halves_alone(layer: Any) -> list[Any]:
    """What mixes a layer's tokens; the MLP of a layer that is one alone."""
    return [each.module for each in mixers(layer)] or [*second_halves(layer).values()]


def adapted_inside(layer: Any) -> list[Any]:
    """The linear layers with adapters in what mixes a layer's tokens, or is all it has, where that runs as it is."""
    if attention(layer) is not None:
        return []
    parts = [part for module in halves_alone(layer) for part in module.modules()]
    return [part for part in parts if has_adapters(part) and linear_of(part) is not None and not _is_watched(part)]


def _is_watched(module: Any) -> bool:
    """Whether a part of a module has hooks."""
    return any(part is not module and has_module_hooks(part) for part in module.modules())


def passed_on(layer: Any) -> dict[str, Any]:
    """What a layer's attention passes on beside what all do."""
    return {name: attrgetter(path)(mixers(layer)[0].module) for name, path in FAMILIES[family(layer)].items()}


@functools.cache
def takes_rotary(kind: type[nn.Module]) -> bool:
    """Whether attention of a class takes rotary embeddings."""
    return "position_embeddings" in inspect.signature(kind.forward).parameters


def given_to(module: Any, given: dict[str, Any], plan: str) -> dict[str, Any]:
    """What a layer gives to what mixes its tokens, of what it is given itself; a mask is none of it.

    Args:
        plan: the name of the plan; what takes no such argument gets it as its attention mask.
    """
    names, takes_any = _parameters(type(module))
    found = {name: each for name, each in given.items() if name in names or (takes_any and name not in PASSED)}
    return {**found, "attention_mask": None if takes_any else given[plan]}


def _mixes_tokens(kind: type[nn.Module]) -> bool:
    """Whether a class of modules is given what tells tokens apart."""
    return "attention_mask" in _parameters(kind)[0]


@functools.cache
def _parameters(kind: type[nn.Module]) -> tuple[frozenset[str], bool]:
    """Those of a class's forward, and whether it takes any others."""
    parameters = inspect.signature(kind.forward).parameters
    return frozenset(parameters), any(each.kind is each.VAR_KEYWORD for each in parameters.values())


# -- reading ------------------------------------------------------------------------------------------------------


def marks(layer: Any) -> list[Any]:
    """Of which one is another where a layer is to be read anew: modules, parameters, how adapters are switched."""
    found: list[Any] = []
    for part in children_of(layer).values():
        found += (part, *parameters_in(part))
        for name, module in {} if part is None else children_of(part).items():
            found += (module, *(marks_of_linear(module) if name in LINEARS else parameters_in(module)))
    return found


def read(layer: Any, dtype: torch.dtype) -> DecoderLayer | str:
    """A layer as it is now, for products in a dtype; or why it is to run as it was, as a clause."""
    found, mlp, parts = attention(layer), glu(layer), []
    for module in linears(layer):
        part = projection(module, dtype)
        if isinstance(part, str):
            return part
        parts.append(part)
    before, after = norm_names(layer)
    of_attention, of_mlp = (parts[:4], parts[4:]) if found is not None else ([], parts)
    whole = next(iter(second_halves(layer).values()), None)
    gate_factor, down_factor = (getattr(whole, f"{each}_multiplier", 1.0) for each in ("gate", "down"))
    factor = float(getattr(layer, "residual_multiplier", 1.0))
    given = [] if found is not None else [part for each in mixers(layer) for part in each.module.modules()]
    return DecoderLayer(
        norms=(_norm(layer, before[0]), _norm(layer, before[1])),
        attention=Together(of_attention[:3]),
        output=Together(of_attention[3:]),
        gates=Together(of_mlp[: len(mlp.gates)] if mlp is not None else ()),
        down=Together(of_mlp[-1:]),
        dim=0 if found is None else found.module.head_dim,
        gated=found is not None and found.gated,
        after=(_norm(layer, after[0]), _norm(layer, after[1])),
        head_norms=None
        if found is None or found.head_norms is None
        else (_as_norm(found.head_norms[0]), _as_norm(found.head_norms[1])),
        activation=ACTIVATIONS.get(activation(layer) or "", "silu"),
        up_first=family(layer) in UP_FIRST,
        gate_factor=float(gate_factor),
        factors=(factor, factor * float(down_factor)),
        random=any(part.adapter is not None and part.adapter.drop is not None for part in parts)
        or any(getattr(part, "p", 0.0) > 0 for part in given),
    )


def projection(module: Any, dtype: torch.dtype) -> Projection | str:
    """A linear layer as it is now, for products in a dtype; or why it is to run as it was, as a clause."""
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
    return None if module is None else _as_norm(module)


def _as_norm(module: Any) -> Norm:
    eps = module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps
    return Norm(module.weight, eps, 1.0 if type(module).__name__ in CENTRED else 0.0)
