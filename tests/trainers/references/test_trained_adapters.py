"""The reference of a policy whose adapters were trained before, as after SFT, is the policy as it arrived: frozen
copies of its trained weights stand in for them while the reference computes."""

from __future__ import annotations

import copy
from typing import Any, cast

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import lowtide
from lowtide import DPOConfig
from lowtide.engine.adapters import leaves_base
from lowtide.engine.reference import AdapterOff, ArrivedPolicy, FrozenModel
from lowtide.ragged import RaggedBatch
from lowtide.trainers.predictions import predicted
from tests.support.marks import slow_but
from tests.support.references.parity_world import build_model, tokenizer
from tests.support.runs.online_runs import online
from tests.support.runs.preference_runs import build, trainer

Q = {"r": 4, "target_modules": ["q_proj", "down_proj"]}
KINDS: dict[str, Any] = {
    "lora": LoraConfig(**Q),
    "rank-stabilized": LoraConfig(**Q, use_rslora=True, lora_alpha=3),
    "dora": LoraConfig(**Q, use_dora=True),
    "head saved": LoraConfig(**Q, modules_to_save=["lm_head"]),
    "embedding": LoraConfig(r=4, target_modules=["embed_tokens", "q_proj"]),
    "ia3": IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "virtual tokens": PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
}


def adapted(kind: str = "lora", seed: int = 3, model: Any = None) -> PeftModel:
    """A model whose adapters are far from new."""
    made = get_peft_model(build() if model is None else model, copy.deepcopy(KINDS[kind]))
    torch.manual_seed(seed)
    for p in made.parameters():
        if p.requires_grad:
            p.data.add_(torch.randn(p.shape, dtype=p.dtype), alpha=0.1)
    return made


def losses(of: Any) -> list[float]:
    return [entry["loss"] for entry in of.state.log_history if "loss" in entry]


@pytest.mark.parametrize("kind", slow_but(["lora", "head saved", "virtual tokens"], KINDS))
def test_it_is_the_policy_as_it_arrived(kind, tmp_path):
    model = adapted(kind)
    expected = FrozenModel.of(copy.deepcopy(model), padding_free=kind != "virtual tokens")
    made = trainer("dpo", tmp_path, model=model)
    assert "the policy as it arrived" in dict(made.report_lines())["reference"]
    before = {name: p.detach().clone() for name, p in made.model.named_parameters()}
    made.train()
    assert losses(made)[0] == pytest.approx(0.6931472, abs=1e-5)
    assert any(not torch.equal(p, before[name]) for name, p in made.model.named_parameters())
    after = {name: p.detach().clone() for name, p in made.model.named_parameters()}
    batch = next(iter(made.get_train_dataloader()))
    torch.testing.assert_close(made.reference(batch), expected(batch), rtol=1e-5, atol=1e-5)
    assert all(torch.equal(p, after[name]) for name, p in made.model.named_parameters()), "the policy is put back"


@pytest.mark.parametrize("method", ["dpo", "kto", "bco"])
def test_losses_are_those_with_a_merged_reference(method, tmp_path):
    model = adapted()
    merged = copy.deepcopy(model).merge_and_unload()
    dense = trainer(method, tmp_path, model=copy.deepcopy(model), arguments={"ref_model": merged})
    own = trainer(method, tmp_path, model=model)
    dense.train()
    own.train()
    assert losses(own) == pytest.approx(losses(dense), rel=1e-5)


ONLINE = {
    "GRPO": {"beta": 0.1},
    "RLOO": {"beta": 0.1},
    "OnlineDPO": {"num_generations": 2},
    "PPO": {"num_generations": 1, "kl_coef": 0.2},
}


@pytest.mark.parametrize("method", slow_but(["GRPO", "PPO"], ONLINE))
def test_online_methods_compare_with_it_too(method, tmp_path):
    model = adapted(model=build_model("llama").double())
    arrived = copy.deepcopy(model)
    made = online(tmp_path, method, model=model, **ONLINE[method])
    expected = FrozenModel.of(arrived, padding_free=True, temperature=made.reference.temperature)
    made.train()
    assert any(abs(loss) > 0 for loss in losses(made))
    batch = RaggedBatch.from_segments([[5, 6, 7, 8, 9], [8, 7, 6]])
    ours = made.reference(batch)
    torch.testing.assert_close(ours, expected(batch).to(ours), rtol=1e-5, atol=1e-5)


def test_a_value_head_is_saved_with_adapters_that_came(tmp_path):
    made = online(tmp_path, "PPO", model=adapted(model=build_model("llama").double()), **ONLINE["PPO"])
    made.train()
    made.save_model(str(tmp_path / "saved"))
    saved = load_file(tmp_path / "saved" / "adapter_model.safetensors")
    (trained,) = [p for name, p in made.model.named_parameters() if p.requires_grad and "value_head" in name][:1]
    (found,) = [p for name, p in saved.items() if name.endswith("value_head.weight")]
    assert torch.equal(found, trained.detach())
    assert trained.any()


def test_precomputed_log_probs_are_its_own_and_no_copy_is_kept(tmp_path):
    found = []
    for precompute in (False, True):
        made = trainer("dpo", tmp_path, model=adapted(), precompute_ref_log_probs=precompute)
        made.train()
        found.append(losses(made))
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    assert not isinstance(made.reference, ArrivedPolicy)


def test_precomputed_log_probs_of_another_scale_are_computed_anew(tmp_path):
    """The scale of an adapter is in its configuration alone, and the weights are the same."""
    columns = []
    for alpha in (1, 64):
        model = adapted()
        config: Any = model.peft_config["default"]
        config.lora_alpha = alpha
        for each in model.modules():
            if isinstance(each, LoraLayer):
                each.scaling["default"] = alpha / Q["r"]
        made = trainer("dpo", tmp_path, model=model, precompute_ref_log_probs=True)
        columns.append(cast(Any, made.train_dataset)[0]["ref_logprobs"])
    assert columns[0] != columns[1]


@pytest.mark.parametrize("came", [False, True])
def test_the_reference_of_new_adapters_is_the_base_at_no_cost(came, tmp_path):
    lora = LoraConfig(**Q, modules_to_save=["lm_head"])
    if came:
        torch.manual_seed(0)
        made = trainer("dpo", tmp_path, model=get_peft_model(build(), lora))
    else:
        made = trainer("dpo", tmp_path, arguments={"peft_config": lora})
    assert isinstance(made.reference, AdapterOff)
    assert made.reference.beside(made.model) == []


def test_a_bias_of_the_base_that_is_trained_is_kept(tmp_path):
    """It stays in effect while adapters are off, so that the reference would move with it."""
    lora = LoraConfig(r=4, target_modules=["q_proj"], bias="all")
    model = build_model("tied")  # Qwen2 has biases
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(p)
    expected = FrozenModel.of(copy.deepcopy(model), padding_free=True)
    arguments = {"peft_config": lora, "processing_class": tokenizer()}
    made = trainer("dpo", tmp_path, model=model, arguments=arguments)
    made.train()
    batch = next(iter(made.get_train_dataloader()))
    torch.testing.assert_close(made.reference(batch), expected(batch), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("init", slow_but(["pissa"], ["pissa", "olora"]))
def test_adapters_whose_making_changes_the_base_are_kept(init, tmp_path):
    lora = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=init)
    assert not leaves_base(lora)
    expected = FrozenModel.of(build(), padding_free=True)
    made = trainer("dpo", tmp_path, arguments={"peft_config": lora})
    made.train()
    assert losses(made)[0] == pytest.approx(0.6931472, abs=1e-5)
    batch = next(iter(made.get_train_dataloader()))
    torch.testing.assert_close(made.reference(batch), expected(batch), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("came", [False, True])
def test_it_follows_the_policy(came, tmp_path):
    options: dict[str, Any] = {"sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.25}
    if came:
        options["model"] = adapted()
    else:
        options["arguments"] = {"peft_config": LoraConfig(**Q)}
    made = trainer("dpo", tmp_path, max_steps=2, **options)
    reference = made.reference
    assert isinstance(reference, ArrivedPolicy)
    before = {name: p.clone() for name, p in reference.copies.items()}
    made.train()
    for name, p in reference.weights.items():
        torch.testing.assert_close(reference.copies[name], before[name].lerp(p.detach(), 0.25))
    assert losses(made)[0] == pytest.approx(0.6931472, abs=1e-5)


def test_a_resumed_run_has_the_reference_that_first_arrived(tmp_path):
    """Also where the policy that is passed is the checkpoint's, which was trained since."""
    saving = {"save_strategy": "steps", "save_steps": 2}
    through = trainer("dpo", tmp_path / "through", model=adapted(), **saving)
    through.train()
    checkpoint = tmp_path / "through" / "checkpoint-2"
    later = PeftModel.from_pretrained(build(), checkpoint, is_trainable=True)
    again = trainer("dpo", tmp_path / "again", model=later, **saving)
    again.train(resume_from_checkpoint=str(checkpoint))
    ours, theirs = (dict(each.model.named_parameters()) for each in (again, through))
    assert all(torch.equal(p, theirs[name]) for name, p in ours.items())


def test_a_checkpoint_without_it_is_said_to_have_none(tmp_path, caplog, monkeypatch):
    """As earlier versions wrote them."""
    made = trainer("dpo", tmp_path, model=adapted(), save_strategy="steps", save_steps=2)
    with monkeypatch.context() as earlier:
        earlier.setattr("lowtide.trainers.references.kept.save_file", lambda *_: None)
        made.train()
    again = trainer("dpo", tmp_path / "again", model=adapted())
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert "has no reference.safetensors" in caplog.text


def test_what_is_saved_and_merged_is_the_policy_alone(tmp_path):
    made = trainer("dpo", tmp_path, model=adapted())
    made.train()
    made.save_model(str(tmp_path / "saved"))
    saved = load_file(tmp_path / "saved" / "adapter_model.safetensors")
    policy = {name.replace(".default", ""): p for name, p in made.model.named_parameters() if p.requires_grad}
    assert saved.keys() == policy.keys()
    assert all(torch.equal(saved[name], p) for name, p in policy.items())
    assert [*made.model.peft_config] == ["default"]
    merged = copy.deepcopy(made.model).merge_and_unload()
    again = PeftModel.from_pretrained(build(), tmp_path / "saved").merge_and_unload()
    for p, q in zip(merged.parameters(), again.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.slow
def test_the_copies_are_planned(tmp_path):
    """By a trainer that tells what its run would take: the same trainer with new adapters holds no copies."""
    held = {}
    for came in (False, True):
        options: dict[str, Any] = {"model": adapted()} if came else {"arguments": {"peft_config": KINDS["lora"]}}
        made = trainer("dpo", tmp_path, **options)
        (found,) = predicted(cast(Any, made), [{}])
        assert not isinstance(found, ValueError), found
        held[came] = max(phase.get("reference", 0) for phase in found.phases.values())
    trained = sum(p.nbytes for p in made.model.parameters() if p.requires_grad)
    assert held == {False: 0, True: trained}


def test_a_reference_that_shares_the_base_is_not_stored_otherwise(tmp_path):
    with pytest.raises(ValueError, match=r"ref_model_storage='8bit' requires a reference of its own"):
        trainer("dpo", tmp_path, model=adapted(), ref_model_storage="8bit")


def test_a_folder_of_adapters_goes_on_being_trained_and_is_planned(tmp_path):
    """By name, as on the command line: SFT leaves adapters in a folder, which is DPO's model."""
    build().save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model = adapted(model=base)
    model.save_pretrained(tmp_path / "adapters")
    made = trainer("dpo", tmp_path / "run", model=str(tmp_path / "adapters"))
    assert isinstance(made.reference, ArrivedPolicy)
    arrived = {name: p.detach() for name, p in model.named_parameters()}
    assert all(torch.equal(p, arrived[name]) for name, p in made.model.named_parameters())
    made.train()
    assert losses(made)[0] == pytest.approx(0.6931472, abs=1e-5)
    trained = sum(p.nbytes for p in made.model.parameters() if p.requires_grad)
    config = DPOConfig(output_dir=str(tmp_path / "plan"), use_cpu=True, report_to="none")
    found = lowtide.estimate(config, str(tmp_path / "adapters"), lengths=[(20, 10, 10)] * 8)
    assert max(phase.get("reference", 0) for phase in found.phases.values()) == trained
