"""Options under which no weight moves are warned of, and only they."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig

import lowtide
from lowtide.run.unwise import unwise
from tests.support.runs.preference_runs import assert_same, build, trainer, weights

SAYS = "nothing is learned with "
IDLE = [
    ("dpo", {"learning_rate": 0}, "learning_rate=0.0"),
    ("dpo", {"learning_rate": 1e-300}, "learning_rate=1e-300"),
    ("dpo", {"max_grad_norm": 1e-300}, "max_grad_norm=1e-300"),
    ("dpo", {"beta": 0}, "beta=0.0"),
    ("dpo", {"beta": 0, "loss_type": ["hinge", "apo_zero"]}, "beta=0.0"),
    ("dpo", {"loss_type": ["sigmoid", "sft"], "loss_weights": [0, 0]}, "loss_weights=[0.0, 0.0]"),
    ("dpo", {"beta": 0, "loss_type": ["sigmoid", "sft"], "loss_weights": [1, 0]}, "beta=0.0, loss_weights=[1.0, 0.0]"),
    ("kto", {"beta": 0}, "beta=0.0"),
    ("kto", {"desirable_weight": 0, "undesirable_weight": 0}, "desirable_weight=0.0, undesirable_weight=0.0"),
    ("bco", {"beta": 0}, "beta=0.0"),
    ("cpo", {"beta": 0, "cpo_alpha": 0}, "beta=0.0, cpo_alpha=0.0"),
]
LEARNING = [
    ("dpo", {"max_grad_norm": 0}),
    ("dpo", {"beta": 0, "loss_type": ["sigmoid", "sft"]}),
    ("dpo", {"loss_type": ["sigmoid", "sft"], "loss_weights": [0, 1]}),
    ("kto", {"undesirable_weight": 0}),
    ("cpo", {"beta": 0}),
    ("cpo", {"cpo_alpha": 0}),
    ("orpo", {"beta": 0}),
    ("tpo", {"beta": 0}),
]


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if SAYS in record.getMessage()]


@pytest.mark.parametrize(("method", "options", "names"), IDLE)
def test_what_moves_no_weight_is_warned_of_once(method, options, names, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        made = trainer(method, tmp_path, max_steps=1, **options)
        before = weights(made)
        made.train()
    assert_same(weights(made), before)
    (warning,) = said(caplog)
    assert f"{SAYS}{names}:" in warning


@pytest.mark.parametrize(("method", "options"), LEARNING)
def test_what_moves_weights_is_not(method, options, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        made = trainer(method, tmp_path, max_steps=1, **options)
        before = weights(made)
        made.train()
    assert not said(caplog)
    after = weights(made)
    assert any(not torch.equal(after[name], before[name]) for name in before)


def test_an_optimizer_that_came_has_rates_of_its_own(tmp_path, caplog):
    model = build()
    optimizers = (torch.optim.SGD(model.parameters(), lr=0.1), None)
    with caplog.at_level(logging.WARNING):
        trainer("dpo", tmp_path, model=model, learning_rate=0, arguments={"optimizers": optimizers})
    assert not said(caplog)


@pytest.mark.parametrize(("more", "idle"), [({}, True), ({"modules_to_save": ["lm_head"]}, False)])
def test_adapters_of_scale_0_are_warned_of(more, idle, tmp_path, caplog):
    adapter = LoraConfig(target_modules=["q_proj"], lora_alpha=0, **more)
    with caplog.at_level(logging.WARNING):
        trainer("dpo", tmp_path, arguments={"peft_config": adapter})
    assert [f"{SAYS}lora_alpha=0:" in each for each in said(caplog)] == [True] * idle


@pytest.mark.parametrize("dead", [True, False])
def test_a_first_gradient_of_0_is_warned_of(dead, tmp_path, caplog):
    model = build()
    for weight in model.parameters() if dead else ():
        weight.data.zero_()
    with caplog.at_level(logging.WARNING):
        trainer("cpo", tmp_path, model=model, max_steps=2, logging_steps=1).train()
    said = [each.getMessage() for each in caplog.records if "is exactly 0" in each.getMessage()]
    assert [text.startswith("the gradient of step 1") for text in said] == [True] * dead


@pytest.mark.parametrize("checkpointing", [True, False])
def test_weights_without_a_gradient_are_named(checkpointing, tmp_path, caplog):
    model = build()
    for layer in model.model.layers:
        layer.mlp.unused = torch.nn.Linear(3, 3)
    options = {"max_steps": 2, "logging_steps": 1, "gradient_checkpointing": checkpointing}
    with caplog.at_level(logging.WARNING):
        trainer("cpo", tmp_path, model=model, **options).train()
    (text,) = [each.getMessage() for each in caplog.records if "had no gradient" in each.getMessage()]
    names = "model.layers.*.mlp.unused.weight, model.layers.*.mlp.unused.bias. "
    assert f"{2 * len(model.model.layers)} trained weights had no gradient in the first step" in text
    assert names in text


def test_the_loss_of_a_router_is_a_term_beside():
    module, off = torch.nn.Linear(1, 1), {"gradient_checkpointing": False}
    args = SimpleNamespace(learning_rate=1.0, weight_decay=0.0, without_gradient=lambda: [{"beta=0"}], **off)
    assert unwise(args, module, given=True)
    assert not unwise(args, module, aux_coefficient=0.1, given=True)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"learning_rate": 1000}, "learning_rate=1000 moves each weight by up to 1000"),
        ({"learning_rate": 1000, "optim": "sgd"}, ""),
        ({"learning_rate": 1}, ""),
        ({"adam_epsilon": 1e9}, "adam_epsilon=1e+09 divides nearly all of each step away"),
        ({"max_grad_norm": 1e-30}, "max_grad_norm=1e-30 scales gradients below adam_epsilon=1e-08"),
        ({"max_grad_norm": 1e-30, "optim": "sgd"}, ""),
    ],
)
def test_steps_of_an_odd_length_are_unwise(options, said, tmp_path):
    args = lowtide.SFTConfig(
        output_dir=str(tmp_path), use_cpu=True, report_to="none", **{"weight_decay": 0.0, **options}
    )
    found = unwise(args, torch.nn.Linear(1, 1))
    assert len(found) == bool(said)
    assert all(each.startswith(said) for each in found)
    assert not unwise(args, torch.nn.Linear(1, 1), given=True)


@pytest.mark.parametrize(("rows", "said"), [(None, 0), (range(9), 0), (range(8), 0), (range(7), 1)])
def test_a_step_of_more_rows_than_there_are_is_said(rows, said, tmp_path):
    args = lowtide.SFTConfig(
        output_dir=str(tmp_path),
        use_cpu=True,
        report_to="none",
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
    )
    found = unwise(args, torch.nn.Linear(1, 1), rows=rows)
    assert ["a step is to take 8 rows" in each for each in found] == [True] * said


@pytest.mark.parametrize("method", ["dpo", "cpo"])
@pytest.mark.parametrize(("smoothing", "said"), [(0.2, ""), (0.5, "either completion"), (0.9, "rejected completion")])
def test_smoothing_that_leaves_no_preference_is_unwise(method, smoothing, said):
    loss = {"dpo": ["aot"], "cpo": "sigmoid"}[method]
    kind = getattr(lowtide, f"{method.upper()}Config")
    made = kind("run", use_cpu=True, loss_type=loss, label_smoothing=smoothing)
    assert len(made.advice) == bool(said)
    assert all(said in each for each in made.advice)


@pytest.mark.parametrize("name", ["GRPO", "RLOO", "OnlineDPO", "PPO"])
def test_rewards_of_weight_0_are_unwise(name):
    kind = getattr(lowtide, f"{name}Config")
    made = kind("run", use_cpu=True, reward_weights=[0, 0])
    assert "rewarded for nothing" in made.advice[0]
    assert not kind("run", use_cpu=True, reward_weights=[0, 1]).advice


CONFIGS = [name for name in lowtide.__all__ if hasattr(getattr(lowtide, name), "without_gradient")]


@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_on_by_default_is_not_unwise(name, tmp_path):
    args = getattr(lowtide, name)(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    assert unwise(args, torch.nn.Linear(1, 1)) == []


@pytest.mark.parametrize(("coefficient", "same"), [(0, "forward_kl"), (1, "reverse_kl"), (0.5, None)])
def test_an_alpha_at_its_ends_is_another_divergence(coefficient, same):
    given = {"use_cpu": True, "f_alpha_divergence_coef": coefficient}
    made = lowtide.DPOConfig("run", f_divergence_type="alpha_divergence", **given)
    said = [f"f_alpha_divergence_coef={float(coefficient)} makes the divergence that of f_divergence_type={same!r}"]
    assert made.advice == (said if same else [])
    assert lowtide.DPOConfig("run", **given).advice == []
