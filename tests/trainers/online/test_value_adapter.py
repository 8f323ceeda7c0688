"""PPO whose value function has an adapter of its own, against two PEFT models on padded rows: one with the policy's
adapter, one with the value function's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from lowtide.data.batches.values import OLD, REFERENCE, RETURN, TOKEN_ADVANTAGE, VALUE
from lowtide.engine.adapters import adapter_of
from lowtide.engine.heads.token_value import VALUE_ADAPTER, TokenValue, WithValues
from lowtide.engine.weights.merging import save_merged
from tests.support.marks import slow_but
from tests.support.references.parity_world import build_model, lora
from tests.support.runs.online_runs import assert_near, online, prompts, weights
from tests.support.runs.sabotage import out_of_memory

PLAIN: dict[str, Any] = {
    "value_adapter": True,
    "num_generations": 1,
    "per_device_train_batch_size": 4,
    "num_ppo_epochs": 2,
    "num_mini_batches": 2,
    "vf_coef": 0.5,
}
PATHS: dict[str, dict[str, Any]] = {
    "whole": {"gradient_checkpointing": False},
    "checkpointed": {"gradient_checkpointing": True},
    "reentrant": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    "padded": {"padding_free": False},
    "offloaded": {"activation_offloading": True},
    "row by row": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4},
}
CUTS: dict[str, dict[str, Any]] = {
    "accumulated": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4},
    "within a token budget": {"tokens_per_microbatch": 80},
    "stepped in backward": {"optimizer_in_backward": "two_pass"},
    "stepped in backward unclipped": {"optimizer_in_backward": True, "max_grad_norm": 0.0},
}


def trainer_of(folder: Path, *, arguments: dict[str, Any] | None = None, **options: Any) -> Any:
    arguments = {"peft_config": lora()} | (arguments or {})
    return online(folder, "PPO", arguments=arguments, **PLAIN | options)


def moved(trainer: Any) -> Any:
    """With both adapters away from where adapters begin."""
    torch.manual_seed(1)
    for name, parameter in trainer.model.named_parameters():
        if parameter.requires_grad:
            parameter.data += (0.3 if VALUE_ADAPTER in name else 0.1) * torch.randn_like(parameter)
    return trainer


def written(trainer: Any) -> Any:
    """A scored rollout of four prompts."""
    rows = [dict(trainer.train_dataset[row]) for row in range(4)]
    return trainer.maker.make(rows, (0, 0, 0), group=1, version=0).rollout


def batch_of(trainer: Any, rollout: Any) -> Any:
    return trainer.learning.batch(rollout, range(4), sharing=True)


# -- the plain computation --------------------------------------------------------------------------------------------


def model_with(trainer: Any, adapter: str) -> Any:
    """A PEFT model of its own, with the weights of one of a run's adapters."""
    base: Any = build_model("llama").double()
    WithValues.attach(base)
    saved = ["value_head"] if adapter == VALUE_ADAPTER else None
    made = get_peft_model(base, lora(modules_to_save=saved))
    theirs = dict(trainer.model.named_parameters())
    for name, parameter in made.named_parameters():
        if parameter.requires_grad:
            parameter.data = theirs[name.replace(".default", f".{adapter}")].data.clone()
    return made


def padded(prompt_ids: Any, completions: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Padded rows with their mask; and of each token of the completions the row, and the place before it."""
    rows = [torch.tensor([*p, *c]) for p, c in zip(prompt_ids, completions, strict=True)]
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    line = torch.tensor([n for n, ids in enumerate(completions) for _ in ids])
    place = torch.tensor([len(p) - 1 + n for p, c in zip(prompt_ids, completions, strict=True) for n in range(len(c))])
    return pad_sequence(rows, batch_first=True), mask, line, place


def dense_logprobs(model: Any, rollout: Any, temperature: float) -> Tensor:
    ids, mask, line, place = padded(rollout.prompts, [each.token_ids for each in rollout.completions])
    logits = model(input_ids=ids, attention_mask=mask).logits / temperature
    return logits.log_softmax(-1)[line, place, ids[line, place + 1]]


def dense_values(model: Any, rollout: Any) -> Tensor:
    ids, mask, line, place = padded(rollout.prompts, [each.token_ids for each in rollout.completions])
    inner = model.base_model.model
    return inner.value_head(inner.model(input_ids=ids, attention_mask=mask).last_hidden_state)[line, place, 0]


@pytest.mark.parametrize("path", slow_but(["whole", "checkpointed", "row by row"], PATHS))
def test_numbers_and_gradients_are_those_of_two_models(path, tmp_path):
    trainer = moved(trainer_of(tmp_path, **PATHS[path]))
    args, rollout = trainer.args, written(trainer)
    policy, value = model_with(trainer, "default"), model_with(trainer, VALUE_ADAPTER)
    logprobs, values = dense_logprobs(policy, rollout, args.temperature), dense_values(value, rollout)
    known = rollout.score_values
    torch.testing.assert_close(known[VALUE].double(), values.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(known[OLD].double(), logprobs.detach(), rtol=1e-5, atol=1e-5)
    with policy.disable_adapter():
        reference = dense_logprobs(policy, rollout, args.temperature).detach()
    torch.testing.assert_close(known[REFERENCE].double(), reference, rtol=1e-5, atol=1e-5)

    known[VALUE] += 0.05  # so that some values are clipped
    ratio = (logprobs - known[OLD]).exp()
    gain = known[TOKEN_ADVANTAGE].double()
    losses = -torch.minimum(gain * ratio, gain * ratio.clamp(1 - args.cliprange, 1 + args.cliprange))
    wanted, before = known[RETURN].double(), known[VALUE].double()
    near = before + (values - before).clamp(-args.cliprange_value, args.cliprange_value)
    errors = torch.maximum((values - wanted) ** 2, (near - wanted) ** 2) / 2
    expected = losses.mean() + args.vf_coef * errors.mean()
    expected.backward()
    found = trainer.runner.gradients(batch_of(trainer, rollout))
    torch.testing.assert_close(found.double(), expected.detach(), rtol=1e-5, atol=1e-7)
    theirs = {
        name.replace(".default", f".{adapter}"): p.grad
        for adapter, model in (("default", policy), (VALUE_ADAPTER, value))
        for name, p in model.named_parameters()
        if p.requires_grad
    }
    ours = {name: p.grad for name, p in trainer.model.named_parameters() if p.requires_grad}
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        assert gradient.abs().max() > 0, name
        torch.testing.assert_close(gradient.double(), theirs[name], rtol=2e-5, atol=1e-7, msg=name)


def test_neither_loss_reaches_the_others_adapter(tmp_path):
    trainer = moved(trainer_of(tmp_path))
    batch = batch_of(trainer, written(trainer))

    def gradients(**changed: Any) -> dict[str, Tensor]:
        for name, value in changed.items():
            setattr(trainer.args, name, value)
        trainer.model.zero_grad()
        trainer.runner.gradients(batch)
        return {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None}

    both, policy = gradients(), gradients(vf_coef=0.0)
    batch.score_values[TOKEN_ADVANTAGE].zero_()
    value = gradients(vf_coef=0.5)
    for name, gradient in both.items():
        mine, other = (value, policy) if VALUE_ADAPTER in name else (policy, value)
        assert torch.equal(gradient, mine[name]), name
        assert not other[name].any(), name


# -- whole runs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", slow_but(["stepped in backward"], CUTS))
def test_however_a_step_is_cut_it_learns_the_same(cut, tmp_path):
    runs = []
    plain = {"max_steps": 4, "max_grad_norm": CUTS[cut].get("max_grad_norm", 1.0)}
    for name, more in (("whole", {}), ("parts", CUTS[cut])):
        trainer = moved(trainer_of(tmp_path / name, **plain | more))
        before = weights(trainer)
        trainer.train()
        runs.append(weights(trainer))
    trained = {name for name, p in trainer.model.named_parameters() if p.requires_grad}
    assert trained == {name for name, value in runs[0].items() if not torch.equal(before[name], value)}
    assert_near(runs[1], runs[0], 1e-5)


def test_after_memory_ran_out_in_either_forward_the_numbers_are_those_of_smaller_micro_batches(tmp_path):
    """Each checkpointed forward of the model is a passage of `forward`: of the policy, then of the value function."""
    smaller = moved(trainer_of(tmp_path, tokens_per_microbatch=80))
    rollout = written(smaller)
    smaller.runner.gradients(batch_of(smaller, rollout))
    for number in (0, 1):
        failing = moved(trainer_of(tmp_path, tokens_per_microbatch=1000))
        with out_of_memory(failing.model, "forward", number) as fired:
            failing.runner.gradients(batch_of(failing, rollout))
        assert fired
        for (name, one), other in zip(smaller.model.named_parameters(), failing.model.parameters(), strict=True):
            if one.grad is not None:
                torch.testing.assert_close(other.grad, one.grad, rtol=1e-5, atol=1e-8, msg=name)
        layer = failing.model.base_model.model.model.layers[0].self_attn.q_proj
        assert layer.active_adapters == ["default"]


@pytest.mark.parametrize("step", slow_but([6], [2, 6]))
def test_a_run_that_resumes_in_the_middle_of_a_rollout_ends_with_the_same_bits(step, tmp_path):
    options = {"max_steps": 9, "save_strategy": "steps", "save_steps": step}
    whole = trainer_of(tmp_path / "whole", **options)
    whole.train()
    resumed = trainer_of(tmp_path / "resumed", **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{step}"))
    found = weights(resumed)
    assert all(torch.equal(found[name], value) for name, value in weights(whole).items())
    assert [p.requires_grad for p in resumed.model.parameters()] == [p.requires_grad for p in whole.model.parameters()]


def test_an_evaluation_adds_both_losses_up(tmp_path):
    trainer = moved(trainer_of(tmp_path, per_device_eval_batch_size=2))
    found = trainer.evaluate(trainer.train_dataset.select(range(5)).remove_columns("prompt_ids"))
    parts = found["eval_loss/policy_avg"] + trainer.args.vf_coef * found["eval_loss/value_avg"]
    assert found["eval_loss/value_avg"] > 0
    assert found["eval_loss"] == pytest.approx(parts, rel=1e-5)


def test_a_checkpoint_that_lacks_the_value_functions_adapter_is_refused(tmp_path):
    trainer_of(tmp_path, value_adapter=False, max_steps=1, save_strategy="steps", save_steps=1).train()
    with pytest.raises(ValueError, match=VALUE_ADAPTER):
        trainer_of(tmp_path, max_steps=2).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


def test_the_best_checkpoint_gives_both_adapters_back(tmp_path):
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "eval_strategy": "steps", "eval_steps": 1}
    saving = {"max_steps": 3, "save_strategy": "steps", "save_steps": 1}
    trainer = trainer_of(tmp_path, arguments={"eval_dataset": prompts(4)}, **best, **saving)
    trainer.train()
    folder = Path(trainer.state.best_model_checkpoint)
    for adapter, path in (("default", folder), (VALUE_ADAPTER, folder / VALUE_ADAPTER)):
        for name, value in load_file(path / "adapter_model.safetensors").items():
            own = name if f"{adapter}." in name else name.replace(".weight", f".{adapter}.weight", 1)
            if "value_head" not in name:
                assert torch.equal(trainer.model.get_parameter(own), value), name


def test_both_adapters_are_saved_and_loaded_by_peft_and_the_policys_is_merged(tmp_path):
    trainer = moved(trainer_of(tmp_path / "run"))
    rollout = written(trainer)
    trainer.save_model(str(tmp_path / "saved"))
    assert not any("value_head" in name for name in load_file(tmp_path / "saved" / "adapter_model.safetensors"))
    base: Any = build_model("llama").double()
    policy = PeftModel.from_pretrained(base, str(tmp_path / "saved"))
    logprobs = dense_logprobs(policy, rollout, trainer.args.temperature)
    torch.testing.assert_close(rollout.score_values[OLD].double(), logprobs.detach(), rtol=1e-5, atol=1e-5)
    save_merged(trainer.model, tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(str(tmp_path / "merged"), dtype=torch.float64)
    again = dense_logprobs(merged, rollout, trainer.args.temperature)
    torch.testing.assert_close(again.detach(), logprobs.detach(), rtol=1e-5, atol=1e-5)
    base = build_model("llama").double()
    WithValues.attach(base)
    value = PeftModel.from_pretrained(base, str(tmp_path / "saved" / VALUE_ADAPTER))
    torch.testing.assert_close(
        rollout.score_values[VALUE].double(), dense_values(value, rollout).detach(), rtol=1e-5, atol=1e-5
    )


def test_a_value_model_starts_the_head_of_the_value_functions_adapter(tmp_path):
    config = build_model("llama").config
    config.num_labels = 1
    classifier: Any = AutoModelForSequenceClassification.from_config(config)
    trainer = trainer_of(tmp_path, arguments={"value_model": classifier})
    with adapter_of(trainer.model, TokenValue):
        assert torch.equal(trainer.model.base_model.model.value_head.weight, classifier.score.weight.double())


@pytest.mark.parametrize("more", [{"modules_to_save": ["lm_head"]}, {"target_modules": ["q_proj", "lm_head"]}])
def test_of_the_language_models_head_the_value_function_has_no_copy(more, tmp_path):
    given = {"r": 4, "target_modules": ["q_proj"], **more}
    trainer = trainer_of(tmp_path, arguments={"peft_config": LoraConfig(**given)}, max_steps=1)
    names = [name for name, p in trainer.model.named_parameters() if p.requires_grad and "lm_head" in name]
    assert names
    assert not any(VALUE_ADAPTER in name for name in names)
    before = weights(trainer)
    trainer.train()
    after = weights(trainer)
    assert any(VALUE_ADAPTER in name and not torch.equal(before[name], value) for name, value in after.items())


@pytest.mark.parametrize("given", [{"target_modules": "all-linear"}, {"use_dora": True}, {"layers_to_transform": [1]}])
def test_adapters_of_other_kinds_of_lora(given, tmp_path):
    config = LoraConfig(**{"r": 4, "target_modules": ["v_proj"]} | given)
    trainer = trainer_of(tmp_path, arguments={"peft_config": config}, max_steps=2)
    before = weights(trainer)
    trainer.train()
    trained = {name for name, p in trainer.model.named_parameters() if p.requires_grad}
    assert trained == {name for name, value in weights(trainer).items() if not torch.equal(before[name], value)}


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (None, r"value_adapter=True .*set use_peft=True, or pass a LoraConfig as `peft_config` \(there is none"),
        (IA3Config(target_modules=["v_proj"], feedforward_modules=[]), r"pass a LoraConfig.*it is a IA3Config"),
        (lora(init_lora_weights="pissa"), r"init_lora_weights='pissa' is made for one"),
    ],
)
def test_without_plain_lora_it_is_refused(config, text, tmp_path):
    with pytest.raises(ValueError, match=text):
        online(tmp_path, "PPO", arguments={"peft_config": config}, **PLAIN)
