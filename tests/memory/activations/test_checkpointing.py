"""Checkpointing policies: the same gradients to the last bit, the right operations computed again, the right memory."""

from collections import Counter

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide.compat.transformers import checkpointed_layers
from lowtide.engine.forward import install
from lowtide.memory.activations.checkpointing import OUTSIDE_RECURRENCES, POLICIES, set_checkpointing
from lowtide.memory.activations.offloading import ActivationOffload
from lowtide.memory.activations.tiled_mlp import install_tiled_mlp
from lowtide.ops.attention.attention_plan import AttentionPlan
from lowtide.ops.recurrence.chunked import CHUNK
from lowtide.ops.recurrence.linear_recurrence import LinearRecurrence
from lowtide.ops.recurrence.recurrence import ComputedAgain
from lowtide.ragged import RaggedBatch
from tests.support.marks import slow_but
from tests.support.memory.storages import Storages
from tests.support.models.architectures import build as recurrent
from tests.support.models.fused_families import family
from tests.support.models.tiny_models import (
    assert_same,
    build,
    checkpointed,
    gradients,
    loss_of,
    prepared,
    separate,
    shared,
    with_adapters,
)

LAYERS = 3
MODELS = {
    "llama": lambda: prepared(build(num_hidden_layers=LAYERS)),
    "soft_caps": lambda: prepared(build("gemma2", num_hidden_layers=LAYERS, attn_logit_softcapping=2.0)),
    "windows": lambda: prepared(build("mistral", num_hidden_layers=LAYERS, sliding_window=4)),
    "gpt_neox": lambda: prepared(build("gpt_neox", num_hidden_layers=LAYERS)),
    "adapters": lambda: with_adapters(prepared(build(num_hidden_layers=LAYERS)), lora_dropout=0.2),
}


WRITES_OVER = {"products written over": lambda: prepared(family("gpt_oss", num_hidden_layers=LAYERS))}


def run(model, batch):
    torch.manual_seed(4)
    loss_of(model, batch).backward()
    return gradients(model)


@pytest.mark.parametrize(
    ("every", "those"),
    [(1, "xxxxxxxx"), (1.33, "x.xxx.xx"), (1.5, "x.xx.xx."), (2, "x.x.x.x."), (4, "x...x..."), (99.5, "x.......")],
)
def test_layers_are_spread_evenly(every, those):
    layers = checkpointed_layers(checkpointed(prepared(build(num_hidden_layers=len(those))), every=every))
    assert "".join(".x"[layer.gradient_checkpointing] for layer in layers) == those


@pytest.mark.parametrize("batch", slow_but([shared], [separate, shared]))
@pytest.mark.parametrize("every", slow_but([2], [1, 2]))
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("make", [*MODELS.values(), *WRITES_OVER.values()], ids=[*MODELS, *WRITES_OVER])
def test_gradients_are_the_same_bits(make, policy, every, batch):
    wanted = run(make(), batch())
    assert_same(run(checkpointed(make(), policy, every), batch()), wanted)


class Operations(TorchDispatchMode):
    """How often each operation runs."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.name()] += 1
        return func(*args, **(kwargs or {}))


def recomputed(model, batch):
    """Of each operation how many a backward adds to those of a model that is not checkpointed."""

    def backward(model):
        loss = loss_of(model, batch)
        with Operations() as operations:
            loss.backward()
        return operations.counts

    return backward(model) - backward(MODELS["llama"]())


@pytest.mark.parametrize("batch", [separate, shared])
@pytest.mark.parametrize(
    ("policy", "every", "products", "attentions"),
    # Of the seven products of a layer the last is not computed again: what follows it keeps nothing of it.
    [("full", 1, 6 * 3, 3), ("attention", 1, 6 * 3, 0), ("matmul", 1, 0, 0), ("full", 2, 6 * 2, 2), ("full", 9, 6, 1)],
)
def test_what_is_computed_again(policy, every, products, attentions, batch):
    found = recomputed(checkpointed(MODELS["llama"](), policy, every), batch())
    calls = 2 if batch is shared else 1  # prompts, and what follows them
    assert found["aten::mm"] == products
    assert found["aten::_scaled_dot_product_flash_attention_for_cpu"] == attentions * calls
    assert found["aten::rsqrt"] == 2 * len(range(0, LAYERS, every))  # the norms, always


def held(model, batch):
    """Bytes that forward leaves for backward."""
    with Storages() as storages:
        loss = loss_of(model, batch)
    live = storages.live
    loss.backward()
    return live


@pytest.mark.parametrize("batch", [separate, shared])
def test_policies_keep_more_from_one_to_the_next(batch):
    models = [checkpointed(MODELS["llama"](), policy) for policy in POLICIES]
    kept = [held(model, batch()) for model in (*models, MODELS["llama"]())]
    assert kept == sorted(set(kept))
    every_second = held(checkpointed(MODELS["llama"](), every=2), batch())
    assert kept[0] < every_second < kept[-1]
    hidden = batch().tokens * 32 * 4
    # attention keeps its result [tokens, hidden] and a number a head and token; padding of segments adds a little
    assert LAYERS * hidden < kept[1] - kept[0] < 2 * LAYERS * hidden


def test_full_with_offloading_keeps_the_inputs_of_layers_elsewhere():
    batch = shared()
    plain, model = MODELS["llama"](), checkpointed(MODELS["llama"]())
    hidden = batch.tokens * 32 * 4
    offload = ActivationOffload(model, torch.device("cpu"), min_bytes=hidden)
    inputs = []
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda _, args: inputs.append(StorageWeakRef(args[0].untyped_storage())))
    away, put = [], offload.store.put
    offload.store.put = lambda tensor: away.append(tensor.untyped_storage().nbytes()) or put(tensor)
    with offload.around():
        loss = loss_of(model, batch)
    assert len(inputs) == LAYERS
    assert all(ref.expired() for ref in inputs)
    assert sum(away) == offload.offloaded_bytes
    assert away.count(hidden) >= LAYERS
    # besides: what the last norm and the head keep
    assert len(away) <= LAYERS + 4
    loss.backward()
    assert_same(gradients(model), run(plain, batch))


@pytest.mark.slow
@pytest.mark.parametrize("batch", [separate, shared])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())
def test_what_a_policy_keeps_is_offloaded_too(make, batch):
    wanted, away, left = run(make(), batch()), [], []
    for policy in POLICIES:
        model = checkpointed(make(), policy)
        offload = ActivationOffload(model, torch.device("cpu"), min_bytes=1)
        torch.manual_seed(4)
        with offload.around(), Storages() as storages:
            loss = loss_of(model, batch())
        away.append(offload.offloaded_bytes)
        left.append(storages.live)
        loss.backward()
        assert_same(gradients(model), wanted)
        assert offload.offloaded_bytes == 0
    hidden = batch().tokens * 32 * 4
    open_attention = make is MODELS["soft_caps"]  # and nothing else is kept of it
    assert away[1] - away[0] >= (0 if open_attention else LAYERS * hidden)
    # of a layer: queries, keys and values, what follows attention, gates, what they gate, and their product
    assert away[2] - away[1] >= LAYERS * (3 * hidden + 2 * hidden * 48 // 32)
    assert max(left) - min(left) < hidden  # nothing more is left on the device


@pytest.mark.parametrize("policy", POLICIES)
def test_tiled_mlps_keep_none_of_their_products(policy):
    def tiled():
        model = MODELS["llama"]()
        install_tiled_mlp(model, 5)
        return model

    model = checkpointed(tiled(), policy)
    assert_same(run(model, shared()), run(tiled(), shared()))
    if policy == "matmul":
        assert held(model, shared()) < held(checkpointed(MODELS["llama"](), policy), shared())


@pytest.mark.parametrize("policy", POLICIES)
def test_two_forwards_under_one_autocast(policy):
    """The second finds the first one's casts of the weights in autocast's cache; backward does not.

    Gradients that meet at a cached cast are summed in bfloat16, others in float32: what keeps results has no cache.
    """

    def twice(model, cache=True):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
            loss = loss_of(model, separate()) + loss_of(model, shared())
        loss.backward()
        return gradients(model)

    assert_same(twice(checkpointed(MODELS["llama"](), policy)), twice(MODELS["llama"](), cache=policy == "full"))


def test_a_model_can_be_set_again():
    model = checkpointed(MODELS["llama"](), "matmul", 2)
    assert set_checkpointing(model, "full") == LAYERS
    assert set_checkpointing(model, "attention", every=2) == 2
    assert [layer.gradient_checkpointing for layer in model.model.layers] == [True, False, True]
    assert_same(run(model, separate()), run(MODELS["llama"](), separate()))


def test_reentrant_is_for_the_full_policy_alone():
    kwargs = {"use_reentrant": True}
    wanted = run(MODELS["llama"](), shared())
    assert_same(run(checkpointed(MODELS["llama"](), "full", 1, kwargs), shared()), wanted)
    for policy in ("attention", "matmul"):
        with pytest.raises(ValueError, match="use_reentrant"):
            set_checkpointing(MODELS["llama"](), policy, kwargs=kwargs)


def test_what_cannot_be_done_is_said():
    with pytest.raises(ValueError, match=r"'some'.*full, attention, matmul"):
        set_checkpointing(build(), "some")
    with pytest.raises(ValueError, match="one layer in 0 cannot"):
        set_checkpointing(build(), every=0)
    with pytest.raises(ValueError, match="Linear"):
        set_checkpointing(torch.nn.Linear(2, 2))


RECURRENT = {
    "delta rule": lambda: prepared(recurrent("qwen3_5")),
    "Mamba-2": lambda: prepared(recurrent("bamba")),
    "Mamba": lambda: prepared(recurrent("mamba")),
}


@pytest.mark.parametrize("make", RECURRENT.values(), ids=RECURRENT)
def test_recurrences_alone_are_computed_again(make):
    wanted = run(make(), shared())
    assert_same(run(checkpointed(make(), OUTSIDE_RECURRENCES), shared()), wanted)
    assert_same(run(checkpointed(checkpointed(make(), OUTSIDE_RECURRENCES)), shared()), wanted)  # and no longer
    kept = [held(model, separate()) for model in (checkpointed(make(), OUTSIDE_RECURRENCES), checkpointed(make()))]
    assert kept[1] < kept[0] < held(make(), separate())


@pytest.mark.parametrize("kind", ["delta", "plain", "channels"])
def test_of_a_recurrence_that_is_computed_again_its_inputs_are_kept(kind):
    plan = AttentionPlan.build(RaggedBatch.from_segments([[1] * length for length in (130, 64, 20)]))
    heads, width, draws = (1 if kind == "plain" else 4), 16, torch.Generator().manual_seed(0)
    query, key = (torch.randn(plan.tokens, heads, width, generator=draws) / 4 for _ in range(2))
    value = torch.randn(plan.tokens, 4, width, generator=draws)
    decay = -torch.rand(plan.tokens, 4, *([width] if kind == "channels" else []), generator=draws)
    given = [query, key, value, decay, None if kind == "plain" else torch.rand(plan.tokens, 4, generator=draws)]
    inputs = [each.requires_grad_() for each in given if each is not None]
    found, live = [], []
    for way in (LinearRecurrence, lambda *given: ComputedAgain(LinearRecurrence(*given))):
        with Storages() as storages:
            out, _ = way(*given).over(plan, CHUNK)
            live.append(storages.live - out.untyped_storage().nbytes())
            found.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    assert all(torch.equal(*each) for each in zip(*found, strict=True))
    assert live[1] < 1024 < sum(each.nbytes for each in inputs) < live[0] / 2  # beside the inputs, which others hold


def test_a_model_without_recurrences_has_none_to_compute_again():
    with pytest.raises(ValueError, match="'outside_recurrences' computes recurrences again, and the layers"):
        checkpointed(MODELS["llama"](), OUTSIDE_RECURRENCES)
    padded = recurrent("bamba")
    install(padded)
    install(padded, padding_free=False)
    with pytest.raises(ValueError, match="none that lowtide computes: take the policy 'full'"):
        checkpointed(padded, OUTSIDE_RECURRENCES)
