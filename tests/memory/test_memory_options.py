"""Options that transformers has other words for, and folders that are in memory, as trainers see them."""

import pytest
import torch

from tests.support.matrix.matrix import classes, make, watched


@pytest.mark.parametrize("policy", ["full", "attention", "matmul"])
def test_every_n_layers_goes_with_a_policy(policy):
    kwargs = {"use_reentrant": False, "every_n_layers": 2}
    run = watched(
        make(
            "SFT",
            gradient_checkpointing=True,
            gradient_checkpointing_kwargs=kwargs,
            checkpointing_policy=policy,
            max_steps=1,
        )
    )
    assert run.layers == [len(run.forwards) + run.graphs, len(run.forwards)]
    assert run.trainer.args.checkpointing_every == 2
    assert kwargs["every_n_layers"] == 2  # the user's own is left as it was


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"gradient_checkpointing_kwargs": {"every_n_layers": 3}, "checkpointing_every": 2}, "two words for one thing"),
        ({"gradient_checkpointing_kwargs": {"offload": True}}, "activation_offloading=True"),
        ({"gradient_checkpointing_kwargs": {"selective": True}}, "checkpointing_policy='matmul'"),
        ({"gradient_checkpointing_kwargs": {"use_reentrent": False}}, "'use_reentrent' .* is none of use_reentrant, "),
    ],
)
def test_two_words_that_disagree_are_refused(options, why, tmp_path):
    with pytest.raises(ValueError, match=why):
        classes("SFT")[1](str(tmp_path), use_cpu=True, **options)


def test_an_activation_budget_needs_a_compiler_that_chooses(tmp_path):
    config = classes("SFT")[1]
    with pytest.raises(
        ValueError, match=r"activation_memory_budget=0.5 .* torch_compile is off: set torch_compile=True"
    ):
        config(str(tmp_path), use_cpu=True, activation_memory_budget=0.5)
    for share in (0, 1.5):
        with pytest.raises(ValueError, match="activation_memory_budget"):
            config(str(tmp_path), use_cpu=True, torch_compile=True, activation_memory_budget=share)
    with pytest.raises(ValueError, match=r"torch_compile_backend='eager' does not choose what is kept"):
        make("SFT", torch_compile=True, torch_compile_backend="eager", activation_memory_budget=0.5)
    kept = {"torch_compile": True, "gradient_checkpointing": True, "checkpointing_policy": "matmul"}
    with pytest.raises(ValueError, match="both say what a compiled layer keeps: leave one"):
        config(str(tmp_path), use_cpu=True, activation_memory_budget=0.5, **kept)


def test_a_runs_seed_is_that_of_stochastic_rounding():
    weights = []
    for seed, drawn in ((3, 0), (3, 1), (4, 0)):
        trainer = make("SFT", optim="adamw_stochastic", seed=seed, data_seed=0, max_steps=1)
        torch.manual_seed(drawn)  # another rank's generator
        weights.append(watched(trainer).weights)
    same, other = ([torch.equal(weights[0][name], each[name]) for name in weights[0]] for each in weights[1:])
    assert all(same)
    assert not all(other)
