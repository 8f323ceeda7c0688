"""LoRA-FA: steps are those of peft's optimizer, and a LoRA layer keeps rank numbers a token in place of its input."""

from typing import Any

import peft.optimizers.lorafa
import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.optimizers import create_lorafa_optimizer
from torch import nn

from lowtide.memory.optimizers.lora_fa import LoraFA, freeze_down_projections, projections_of
from tests.support.matrix.matrix import make
from tests.support.models.tiny_llama import same_bits, tiny_llama, token_ids

RANK, ALPHA = 4, 6
ADAPTER: dict[str, Any] = {"task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA, "target_modules": "all-linear"}
STEP = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-12, "weight_decay": 0.0}


def adapted(**options: Any) -> Any:
    base = tiny_llama()
    torch.manual_seed(1)
    return get_peft_model(base, LoraConfig(**ADAPTER, **options))


def backward(model: nn.Module, step: int) -> None:
    model.zero_grad()
    ids = token_ids(step)
    model(input_ids=ids, labels=ids).loss.backward()


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def optimizer_of(model: nn.Module) -> LoraFA:
    freeze_down_projections(model)
    return LoraFA(trained(model), projections_of(model), **STEP, fused=True)


@pytest.mark.parametrize("rslora", [False, True], ids=["lora", "rslora"])
def test_steps_are_those_of_peft_in_float32(rslora, monkeypatch):
    monkeypatch.setattr(peft.optimizers.lorafa, "is_bf16_available", lambda: False)
    theirs, ours = adapted(use_rslora=rslora), adapted(use_rslora=rslora)
    reference = create_lorafa_optimizer(theirs, r=RANK, lora_alpha=ALPHA, lr=STEP["lr"])
    for group in reference.param_groups:
        group["eps"] = STEP["eps"]
    optimizer = optimizer_of(ours)
    before = {name: p.detach().clone() for name, p in ours.named_parameters()}
    for step in range(5):
        for model, stepping in ((theirs, reference), (ours, optimizer)):
            backward(model, step)
            stepping.step()
    moved = 0
    for (name, left), right in zip(theirs.named_parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(right, left, rtol=2e-3, atol=2e-5)
        changed = not torch.equal(right, before[name])
        assert changed == ("lora_B" in name)
        moved += changed
    assert moved == 14


def test_the_gradient_is_left_as_it_is_and_a_changed_projection_is_made_anew():
    model = adapted()
    optimizer = optimizer_of(model)
    backward(model, 0)
    grads = [p.grad for p in trained(model)]
    copies = [grad.clone() for grad in grads if grad is not None]
    optimizer.step()
    for parameter, grad, copy in zip(trained(model), grads, copies, strict=True):
        assert parameter.grad is grad
        assert same_bits(copy, grad)
    up, projection = next(iter(projections_of(model).items()))
    first = projection(torch.ones_like(up))
    with torch.no_grad():
        projection.down.mul_(2.0)
    torch.testing.assert_close(projection(torch.ones_like(up)), first / 4, rtol=1e-3, atol=1e-5)


def test_the_projected_gradient_moves_the_product_nearest_to_full_fine_tuning():
    """The least squares that the paper solves: of all changes D of B, the one whose `s D A` is nearest to G."""
    model = adapted()
    up, projection = next(iter(projections_of(model).items()))
    down, scaling = projection.down.detach().double(), projection.scaling
    whole = torch.randn(up.shape[0], down.shape[1], dtype=torch.float64)
    of_up = scaling * whole @ down.T  # what backward gives
    found = projection(of_up.float()).double()
    wanted = torch.linalg.lstsq(scaling * down.T, whole.T).solution.T
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)


# -- in a run --------------------------------------------------------------------------------------------------------


def lora(**options: Any) -> LoraConfig:
    return LoraConfig(**{**ADAPTER, **options})


def test_a_run_trains_up_projections_alone_and_goes_on_from_its_states():
    run = make("SFT", optim="adamw_lora_fa", peft_config=lora(), max_steps=2, learning_rate=1e-2)
    names = {name.split(".")[-3] for name, p in run.model.named_parameters() if p.requires_grad}
    assert names == {"lora_B"}
    run.train()
    assert isinstance(run.optimizer.optimizer, LoraFA)
    assert run.state.log_history[-1]["train_loss"] > 0
    assert all(p.abs().sum() > 0 for p in trained(run.model))


def kept(model: nn.Module) -> int:
    """Bytes that a forward keeps for backward, beside parameters."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    sizes: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids = token_ids(0, length=200)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(input_ids=ids, labels=ids).loss
    assert loss.requires_grad
    return sum(sizes.values())


@pytest.mark.parametrize("base", [torch.float32, torch.bfloat16], ids=str)
def test_no_layer_keeps_its_input(base):
    sizes = {}
    for frozen in (False, True):
        model = get_peft_model(tiny_llama(dtype=base), lora())
        if frozen:
            freeze_down_projections(model)
        sizes[frozen] = kept(model)
    tokens, hidden, inner = 2 * 200, 32, 64
    # query, key and value share a norm's output, as gate and up do; behind them the down projection's input. Over a
    # base in bfloat16, each of them keeps a copy in the adapter's float32.
    inputs = 2 * hidden + inner if base == torch.float32 else 6 * hidden + inner
    assert sizes[False] - sizes[True] >= 2 * tokens * inputs * 4


def test_what_it_is_not_for_is_refused():
    with pytest.raises(ValueError, match=r"LoRA-FA .*this model has none that are trained: set use_peft=True"):
        make("SFT", optim="adamw_lora_fa")
    with pytest.raises(ValueError, match=r"more than a product \(Dora.*\): take plain LoRA"):
        make("SFT", optim="adamw_lora_fa", peft_config=lora(use_dora=True))
    with pytest.raises(ValueError, match=r"optim_args='x=1': adamw_lora_fa takes none"):
        make("SFT", optim="adamw_lora_fa", optim_args="x=1", peft_config=lora())
