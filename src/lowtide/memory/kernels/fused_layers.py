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
import functools
import logging
import operator
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from lowtide.compat.peft import PlainLora, marks_of_linear, plain_lora
from lowtide.compat.torch import FakeTensor, gathered, has_module_hooks
from lowtide.compat.transformers import (
    attention_implementation,
    checkpointed_layers,
    holds_cache,
    plain_forward,
    run_checkpointed,
)
from lowtide.memory.activations.checkpointing import checkpointing_policy
from lowtide.memory.allocators.out_of_memory import first_line
from lowtide.memory.kernels.layer_parts import (
    ACTIVATIONS,
    ALONE,
    FAMILIES,
    MIXERS,
    Mixer,
    a_norm,
    activation,
    adapted_inside,
    attention,
    family,
    given_to,
    glu,
    linears,
    marks,
    mixers,
    passed_on,
    projection,
    read,
    second_halves,
    takes_rotary,
)
from lowtide.ops.attention.attention_plan import NAME, PLAN, AttentionPlan
from lowtide.ops.attention.cached_attention import CachedPlan
from lowtide.ops.attention.layer_attention import asked_by, layer_attention
from lowtide.ops.attention.varlen_attention import AttentionRules
from lowtide.ops.layers.adapted_linear import adapted_linear
from lowtide.ops.layers.attention_half import attention_half, normed
from lowtide.ops.layers.decoder_layer import DecoderLayer, Keeps, Rotary, decoder_layer
from lowtide.ops.layers.lora_linear import Together
from lowtide.ops.layers.mixed_layer import mixed_layer
from lowtide.ops.target import autocast_dtype
from lowtide.ragged import RaggedBatch

PAIRS = {"GptOssDecoderLayer"}
"""Layers whose experts give how they were chosen, too."""
HALF_TABLES = {"GptOssDecoderLayer"}
"""Layers that get cosines and sines of half a head, which are the other half's too."""
WRAPPED: dict[str, Callable[[Tensor], Any]] = {
    "BambaDecoderLayer": lambda out: (out, None),
    "FalconH1DecoderLayer": lambda out: (out,),
}
"""What the forward of a class returns that returns more than hidden states."""
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
IN_THE_OPEN = ("softcap", "sinks")
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
        _attach(layer)

    def undo() -> None:
        for layer in fused:
            _detach(layer)
            _known.pop(layer, None)

    return undo


BEFORE = "_lowtide_forward_before"
"""The attribute of a module whose forward was not its class's before: what hands a plan on (`engine.layers.mixers`)."""


def _attach(layer: Any) -> None:
    """Has a layer run as it is known, and adapted linear layers in what mixes its tokens."""
    for module, forward in ((layer, _forward), *((each, _linear) for each in adapted_inside(layer))):
        if "forward" in vars(module):
            vars(module)[BEFORE] = module.forward
        module.forward = types.MethodType(forward, module)


def _detach(layer: Any) -> None:
    """Has a layer run as it was."""
    for module in (layer, *adapted_inside(layer)):
        before = vars(module).pop(BEFORE, None)
        vars(module).pop("forward", None)
        if before is not None:
            module.forward = before


def _before(module: Any) -> Callable[..., Any]:
    """The forward of a layer, or of a linear layer in it, as it was."""
    return vars(module).get(BEFORE) or types.MethodType(type(module).forward, module)


@contextlib.contextmanager
def unfused(model: nn.Module) -> Iterator[None]:
    """While it lasts, fused layers run module by module, for who watches their modules."""
    fused = [each for each in checkpointed_layers(model) if getattr(each.forward, "__func__", None) is _forward]
    for layer in fused:
        _detach(layer)
    try:
        yield
    finally:
        for layer in fused:
            _attach(layer)


def why_not_fused(model: nn.Module, computed_in: torch.dtype | None = None) -> str | None:
    """Why none of a model's layers can be fused; None if some may be. Arguments as `fuse_layers` takes them."""
    layers: list[Any] = list(checkpointed_layers(model))
    if not any(family(layer) in FAMILIES for layer in layers):
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


def _why_not(layer: Any, computed_in: torch.dtype | None) -> str | None:
    """What keeps a layer from running as one function; None if nothing does."""
    if family(layer) not in FAMILIES:
        return f"a {family(layer)} is of another form"
    if not all(_knows_segments(each.module) for each in mixers(layer)):
        return "rows are padded: fused layers need padding_free=True"
    if glu(layer) is not None and activation(layer) not in ACTIVATIONS:
        return f"its MLP has the activation {activation(layer)!r}, not {' or '.join(ACTIVATIONS)}"
    if reason := _why_not_attention(layer):
        return reason
    if layer.gradient_checkpointing and plain_forward(layer) is type(layer).forward:
        return "this version of transformers checkpoints around a layer: upgrade it, or leave checkpointing off"
    runs_as_it_is = _as_it_is(layer)
    for path, part in layer.named_modules():
        if path and path.split(".")[0] not in runs_as_it_is and (reason := _why_not_part(path, part)):
            return reason
    found = a_norm(layer).weight
    with _products_in(computed_in, found.device):
        known = read(layer, computed_in or found.dtype)
    return known if isinstance(known, str) else None


def _knows_segments(mixer: Any) -> bool:
    """Whether what mixes tokens keeps to segments: a recurrence, or attention that looks its function up."""
    own = vars(mixer).get("forward")
    recurs = own is not None and getattr(own, "__module__", "").startswith(OWN)
    return recurs or attention_implementation(getattr(mixer, "config", None)) == NAME


def _why_not_attention(layer: Any) -> str | None:
    known = attention(layer)
    if known is None:
        return None
    if dropout := getattr(known.module, "attention_dropout", 0.0):
        return f"its attention drops weights at random (attention_dropout={dropout:g})"
    if (clip := getattr(known.module.config, "clip_qkv", None)) is not None:
        return f"its attention clips queries, keys and values (clip_qkv={clip:g})"
    return None


def _as_it_is(layer: Any) -> set[str]:
    """The names of a layer's parts that run as they are."""
    given = set() if attention(layer) is not None else {*MIXERS, ALONE}
    return given | (set() if glu(layer) is not None else {*second_halves(layer)})


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
    rotates = [getattr(each.module, "use_rope", True) for each in mixers(layer)]
    adapted = tuple(isinstance(plain_lora(part), PlainLora) for part in linears(layer))
    dtypes = tuple(sorted({str(each.dtype) for each in layer.parameters()}))
    of_halves = [type(each.module) for each in mixers(layer)], [type(each) for each in second_halves(layer).values()]
    return type(layer), str(of_halves), str(passed_on(layer)), str(rotates), adapted, dtypes


# -- the layer's forward ------------------------------------------------------------------------------------------


@dataclass
class _Call:
    """A layer's attention in one forward."""

    module: Any
    asked: AttentionRules
    plan: AttentionPlan | CachedPlan
    rotary: Rotary | None
    """By which it turns queries and keys; None: they are turned."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, gate: Tensor | None = None) -> Tensor:
        found = layer_attention(
            self.module, query, key, value, self.plan, self.asked, whose=key, rotary=self.rotary
        ).reshape(len(query), -1)
        return found if gate is None else found * torch.sigmoid(gate.view(len(query), -1))


class _Known(NamedTuple):
    """A layer as it was read, and by what one sees that it is as it was."""

    marks: tuple[Any, ...]
    layer: DecoderLayer
    asked: AttentionRules
    """Of its attention, if that is known."""


_known: WeakKeyDictionary[Any, _Known] = WeakKeyDictionary()
_known_linears: WeakKeyDictionary[Any, tuple[tuple[Any, ...], Together]] = WeakKeyDictionary()


def _forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    dtype = None if args else _dtype_here(hidden_states, kwargs)
    known = None if dtype is None else _known_layer(self, dtype)
    if dtype is None or known is None:
        return _before(self)(hidden_states, *args, **kwargs)
    checkpointed = self.gradient_checkpointing and self.training
    keeps = _keeps(self, known, hidden_states.device) if checkpointed else "products"
    out = _through(self, known, hidden_states, kwargs, dtype, keeps, checkpointed)
    return WRAPPED.get(family(self), lambda out: out)(out)


def _through(
    self: Any,
    known: _Known,
    hidden_states: Tensor,
    kwargs: dict[str, Any],
    dtype: torch.dtype,
    keeps: Keeps,
    checkpointed: bool,
) -> Tensor:
    """What a layer makes of hidden states, each half by its function where there is one."""
    layer = known.layer
    if layer.attention.parts:
        rotary, plan = _rotary(self, kwargs), kwargs[PLAN]
        keeps_turned = isinstance(plan, CachedPlan)  # it turns what it keeps
        attend = _Call(mixers(self)[0].module, known.asked, plan, rotary if keeps_turned else None)
        rotary = None if keeps_turned else rotary
        if layer.gates.parts:
            return decoder_layer(layer, hidden_states, rotary, attend, dtype, keeps=keeps)
        half = partial(_attended, layer, rotary, attend, dtype)
    else:
        half = partial(_mixed, self, layer, kwargs)
    rest = partial(_mlp_half, self, layer)
    if layer.gates.parts:
        mix = partial(run_checkpointed, self, half) if checkpointed and keeps != "input" else half
        mixed_by = [each for part in mixers(self) for each in part.module.parameters() if each.requires_grad]
        norms = (layer.norms[0], layer.after[0])
        mixed_by += [norm.weight for norm in norms if norm is not None and norm.weight.requires_grad]
        return mixed_layer(layer, hidden_states, mix, mixed_by, dtype, keeps=keeps)
    if not checkpointed:
        return rest(half(hidden_states))
    if keeps == "products" and layer.attention.parts:  # it writes over its own, and keeps what they come to
        return run_checkpointed(self, rest, half(hidden_states))
    return run_checkpointed(self, lambda hidden: rest(half(hidden)), hidden_states)


def _keeps(layer: Any, known: _Known, device: torch.device) -> Keeps:
    """What a layer that is checkpointed keeps. A CPU writes out the scores of attention with soft-caps or sinks."""
    in_the_open = device.type == "cpu" and any(known.asked.get(name) is not None for name in IN_THE_OPEN)
    return "input" if in_the_open else KEEPS[checkpointing_policy(layer)]


def _attended(layer: DecoderLayer, rotary: Rotary | None, attend: _Call, dtype: torch.dtype, hidden: Tensor) -> Tensor:
    """The residual after a layer's attention."""
    return attention_half(layer, hidden, rotary, attend, dtype)


def _mixed(self: Any, layer: DecoderLayer, kwargs: dict[str, Any], hidden: Tensor) -> Tensor:
    """The residual after a layer's first half, where what mixes its tokens runs as it is."""
    return _half(layer, 0, [partial(_by_mixer, each, kwargs) for each in mixers(self)], hidden)


def _by_mixer(mixer: Mixer, kwargs: dict[str, Any], x: Tensor) -> Tensor:
    out = mixer.module(x if mixer.before == 1 else x * mixer.before, **given_to(mixer.module, kwargs, PLAN))
    out = _hidden_states(out)
    return out if mixer.after == 1 else out * mixer.after


def _mlp_half(self: Any, layer: DecoderLayer, mid: Tensor) -> Tensor:
    """What a layer makes of the residual after its first half, where its MLP runs as it is."""
    return _half(layer, 1, [*second_halves(self).values()], mid)


def _half(layer: DecoderLayer, number: int, parts: Sequence[Callable[[Tensor], Any]], residual: Tensor) -> Tensor:
    """The residual after a half of a layer, whose parts run as they are and are added; as it was without any."""
    if not parts:
        return residual
    before, after = layer.norms[number], layer.after[number]
    x = residual if before is None else normed(residual, before, residual.dtype)
    out = functools.reduce(operator.add, (_hidden_states(part(x)) for part in parts))
    return torch.add(residual, out if after is None else normed(out, after, out.dtype), alpha=layer.factors[number])


def _hidden_states(out: Any) -> Tensor:
    """What a module gives, without what it tells beside: experts say how they were chosen."""
    return out[0] if isinstance(out, tuple) else out


def _dtype_here(hidden: Tensor, kwargs: dict[str, Any]) -> torch.dtype | None:
    """In which dtype a layer's products are computed; None where it is to run as it was."""
    if not isinstance(kwargs.get(PLAN), AttentionPlan | CachedPlan):
        return None  # a user's own call, or ranks that split a batch
    if kwargs.get("attention_mask") is not None or holds_cache(kwargs):
        return None
    return autocast_dtype(hidden.device) or hidden.dtype


def _linear(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """What the forward of a linear layer with adapters computes."""
    dtype = autocast_dtype(x.device) or x.dtype
    known = None if args or kwargs else _known_linear(self, dtype)
    return _before(self)(x, *args, **kwargs) if known is None else adapted_linear(known, x, dtype)


def _known_linear(module: Any, dtype: torch.dtype) -> Together | None:
    """As `_known_layer`, of a linear layer with adapters; None too where none of them is on."""
    found = (dtype, autocast_dtype(module.weight.device), *marks_of_linear(module))
    known = _known_linears.get(module)
    if known is None or not _same(known[0], found):
        part = projection(module, dtype)
        if isinstance(part, str) or part.adapter is None:
            return None
        known = _known_linears[module] = found, Together([part])
    return known[1]


def _same(known: tuple[Any, ...], found: tuple[Any, ...]) -> bool:
    return len(known) == len(found) and all(map(operator.is_, known, found))


def _rotary(layer: Any, kwargs: dict[str, Any]) -> Rotary | None:
    given = kwargs.get("position_embeddings")
    if given is None or not getattr(mixers(layer)[0].module, "use_rope", True):
        return None
    cos, sin = (each.reshape(-1, each.shape[-1]) for each in given)
    return (cos.repeat(1, 2), sin.repeat(1, 2)) if family(layer) in HALF_TABLES else (cos, sin)


def _known_layer(layer: Any, dtype: torch.dtype) -> _Known | None:
    """A layer for products in a dtype, read anew where something of it has changed; None where it is to run as it
    was."""
    found = (dtype, autocast_dtype(a_norm(layer).weight.device), *marks(layer))
    known = _known.get(layer)
    if known is None or not _same(known.marks, found):
        as_read = read(layer, dtype)
        if isinstance(as_read, str):
            return None
        known = _known[layer] = _Known(found, as_read, _asked(layer))
    return known


def _asked(layer: Any) -> AttentionRules:
    """What a layer asks of its attention; nothing where that runs as it is."""
    if attention(layer) is None:
        return {}
    module = mixers(layer)[0].module
    return asked_by(module, passed_on(layer), module.scaling)


# -- the proof ----------------------------------------------------------------------------------------------------


def _why_unlike(layer: Any, computed_in: torch.dtype | None) -> str | None:
    """Runs a layer both ways on random tokens; the reason if their numbers differ, None if they do not."""
    if any(isinstance(each, FakeTensor) or each.is_meta for each in layer.parameters()):
        return None  # nothing to compute with
    with _plainly(layer), _without_unknown_mlp(layer):
        parameters = [each for each in layer.parameters() if each.requires_grad]
        expected = _numbers(layer, parameters, computed_in)
        _attach(layer)
        try:
            found = _numbers(layer, parameters, computed_in)
        except Exception as failure:  # Triton's compiler has errors of its own, by card and version
            return f"its kernels fail here with {type(failure).__name__}: {first_line(failure)}"
        finally:
            _detach(layer)
    tolerance = TOLERANCE.get(computed_in or a_norm(layer).weight.dtype, IN_16_BITS)
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
    own = {} if glu(layer) is not None else second_halves(layer)
    for name in own:
        setattr(layer, name, _AsItIs(family(layer) in PAIRS))
    try:
        yield
    finally:
        for name, module in own.items():
            setattr(layer, name, module)


def _numbers(layer: Any, parameters: list[nn.Parameter], computed_in: torch.dtype | None) -> list[Tensor]:
    """The output, and the gradients at the input and of all trained parameters."""
    weight, generator = a_norm(layer).weight, torch.Generator().manual_seed(1)
    batch = RaggedBatch.from_segments([[*range(length)] for length in LENGTHS]).to(weight.device)
    tokens, width = batch.tokens, weight.shape[0]

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(weight)

    rotary = _random_rotary(layer, tokens, generator)
    x, grad = random(1, tokens, width).requires_grad_(), random(1, tokens, width)
    with _products_in(computed_in, weight.device):
        out = layer.forward(
            x,
            position_embeddings=rotary and tuple(each.to(weight) for each in rotary),
            position_ids=batch.position_ids[None],
            **{PLAN: AttentionPlan.build(batch)},
        )
    out = out[0] if isinstance(out, tuple) else out
    return [out.detach(), *torch.autograd.grad(out, [x, *parameters], grad, materialize_grads=True)]


def _random_rotary(layer: Any, tokens: int, generator: torch.Generator) -> Rotary | None:
    """Cosines and sines as a layer's attention takes them; None where it takes none."""
    module = next((each.module for each in mixers(layer) if takes_rotary(type(each.module))), None)
    if module is None:
        return None
    parameters = getattr(module.config, "rope_parameters", None) or {}
    width = int(module.head_dim * parameters.get("partial_rotary_factor", 1.0))
    angles = torch.rand(1, tokens, width // 2, generator=generator).mul_(6)
    angles = angles if family(layer) in HALF_TABLES else angles.repeat(1, 1, 2)
    return angles.cos(), angles.sin()


def in_16_bits(model: nn.Module) -> bool:
    """Whether a model's weights are in 16 bits."""
    return any(each.dtype in (torch.bfloat16, torch.float16) for each in model.parameters())
