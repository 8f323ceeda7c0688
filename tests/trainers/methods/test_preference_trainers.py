"""The trainers over prompts and completions: references, precomputed ones, resuming, and bad input."""

from __future__ import annotations

import copy
import json
import logging

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DefaultDataCollator,
    GPT2Config,
    LlamaConfig,
)

import lowtide
from lowtide import (
    DPOConfig,
    KTOConfig,
    RewardConfig,
)
from lowtide.data.batches.collate import CompletionCollator
from lowtide.methods import METHODS
from lowtide.step.runner import StepRunner
from tests.support.marks import slow_but
from tests.support.runs.preference_runs import (
    ALL,
    SINGLE,
    assert_same,
    build,
    data,
    make_tokenizer,
    rows,
    trainer,
    weights,
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))


@pytest.mark.slow
@pytest.mark.parametrize("method", slow_but(["dpo"], ["dpo", "kto", "bco"]))
@pytest.mark.parametrize("accumulated", slow_but([2], [1, 2]))
def test_a_precomputed_reference_gives_the_same_run_bit_by_bit(method, accumulated, tmp_path):
    found = []
    for precompute in (False, True):
        options = {"gradient_accumulation_steps": accumulated, "max_steps": 4 // accumulated}
        made = trainer(method, tmp_path, precompute_ref_log_probs=precompute, **options)
        made.train()
        found.append(weights(made))
    assert_same(*found)


@pytest.fixture
def rows_computed(monkeypatch):
    """Makes a trainer with a precomputed reference, and tells for how many rows that was not found but computed."""
    counts, compute = [], StepRunner.reference_logprobs

    def counted(runner, batch, limits):
        counts.append(len(batch.row_segments))
        return compute(runner, batch, limits)

    monkeypatch.setattr(StepRunner, "reference_logprobs", counted)

    def made(folder, **options):
        counts.clear()
        return trainer("dpo", folder, precompute_ref_log_probs=True, **options), sum(counts)

    return made


@pytest.mark.slow
def test_a_precomputed_reference_is_found_again_and_never_when_it_is_stale(tmp_path, rows_computed):
    made, rows = rows_computed(tmp_path)
    assert rows == len(made.train_dataset) == 16
    column = made.train_dataset["ref_logprobs"]
    found, rows = rows_computed(tmp_path)
    assert rows == 0
    assert found.train_dataset["ref_logprobs"][:] == column[:]
    model = build()
    with torch.no_grad():
        model.model.norm.weight.mul_(1.01)
    other, rows = rows_computed(tmp_path, model=model)
    assert rows == 16, "other weights"
    assert other.train_dataset["ref_logprobs"][:] != column[:]
    assert rows_computed(tmp_path, max_completion_length=14)[1] == 16, "other tokens"
    assert rows_computed(tmp_path, dataset=data("dpo", 12))[1] == 12, "other rows"
    model = build()
    model.config.rms_norm_eps *= 2
    assert rows_computed(tmp_path, model=model)[1] == 16, "the same weights in another model"


class Collator:
    """A user's own, whose text is its address."""

    def __init__(self, sharing: bool) -> None:
        self.sharing = sharing

    def __call__(self, made: list[dict]):
        return CompletionCollator(("chosen_ids", "rejected_ids"), sharing=self.sharing, values=("number",))(made)


def test_a_precomputed_reference_is_found_again_with_a_collator_of_ones_own(tmp_path, rows_computed):
    rows = [
        rows_computed(tmp_path, arguments={"data_collator": Collator(sharing)})[1] for sharing in (True, True, False)
    ]
    assert rows == [16, 0, 16], "the same collator is found again, one that differs is not"


def test_precomputed_log_probs_are_the_references_own(tmp_path):
    from lowtide.data.batches.collate import CompletionCollator
    from lowtide.engine.reference import FrozenModel

    made = trainer("dpo", tmp_path, precompute_ref_log_probs=True)
    plain = made.train_dataset.remove_columns("ref_logprobs")
    batch = CompletionCollator(("chosen_ids", "rejected_ids"))([plain[n] for n in range(len(plain))])
    expected = FrozenModel.of(build(), padding_free=True)(batch)
    found = torch.tensor([value for row in made.train_dataset["ref_logprobs"] for value in row])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_evaluation_uses_the_precomputed_reference_too(tmp_path):
    arguments = {"eval_dataset": data("dpo", 8)}
    found = []
    for precompute in (False, True):
        made = trainer("dpo", tmp_path, precompute_ref_log_probs=precompute, arguments=arguments)
        made.train()
        found.append(made.evaluate())
    assert found[0]["eval_loss"] == pytest.approx(found[1]["eval_loss"], rel=1e-6)
    assert 0 <= found[0]["eval_rewards/accuracies"] <= 1
    again = made.evaluate(made.eval_dataset)
    assert again["eval_loss"] == found[1]["eval_loss"]


@pytest.mark.slow
@pytest.mark.parametrize("source", slow_but(["name"], ["name", "adapters", "untrained"]))
@pytest.mark.parametrize("method", ["dpo", "kto"])
def test_rows_that_come_after_training_get_their_reference(method, source, tmp_path):
    """Loaded once more by the model's name, the policy without its adapters, or the policy that is still as it was."""
    build().save_pretrained(tmp_path / "model")
    arguments = {"peft_config": LoraConfig(r=4, target_modules=["q_proj"])} if source == "adapters" else {}
    model = str(tmp_path / "model") if source == "name" else None
    found = []
    for precompute in (False, True):
        made = trainer(method, tmp_path, model=model, precompute_ref_log_probs=precompute, arguments=arguments)
        if source != "untrained":
            made.train()
        evaluated = made.evaluate(data(method, 8))
        assert made.predict(data(method, 8)).metrics["test_loss"] == pytest.approx(evaluated["eval_loss"])
        found.append(evaluated["eval_loss"])
    assert found[0] == pytest.approx(found[1], rel=1e-5)


@pytest.mark.slow
def test_a_reference_that_is_gone_is_said_to_be(tmp_path):
    made = trainer("dpo", tmp_path, precompute_ref_log_probs=True)
    made.train()
    with pytest.raises(ValueError, match="the model came without a name to load it from again: pass this dataset as"):
        made.evaluate(data("dpo", 4))
    build().save_pretrained(tmp_path / "model")
    made = trainer("dpo", tmp_path, model=str(tmp_path / "model"), precompute_ref_log_probs=True)
    made.train()
    made.model.save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match="are not those that it had: pass this dataset as `eval_dataset`"):
        made.evaluate(data("dpo", 6))


@pytest.mark.slow
@pytest.mark.parametrize("trained", [False, True])
def test_the_reference_of_a_policy_with_adapters_is_the_policy_without(trained, tmp_path):
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    if trained:
        made = trainer("dpo", tmp_path, arguments={"peft_config": lora})
    else:
        torch.manual_seed(0)
        made = trainer("dpo", tmp_path, model=get_peft_model(build(), lora))
    assert dict(made.report_lines())["reference"] == "the policy with its adapters off; it costs nothing"
    made.train()
    assert made.state.log_history[0]["loss"] == pytest.approx(0.6931, abs=1e-4)
    assert abs(made.state.log_history[-2]["rewards/margins"]) > 1e-3
    from lowtide.engine.reference import FrozenModel

    batch = next(iter(made.get_train_dataloader()))
    expected = FrozenModel.of(build(), padding_free=True)(batch)
    torch.testing.assert_close(made.reference(batch), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("method", slow_but(["kto"], ["dpo", "kto", "bco", "reward", "orpo", "cpo", "tpo"]))
def test_a_resumed_run_is_bit_by_bit_the_run_that_never_stopped(method, tmp_path):
    through = trainer(method, tmp_path / "through", save_strategy="steps", save_steps=2)
    through.train()
    again = trainer(method, tmp_path / "again", save_strategy="steps", save_steps=2)
    again.train(resume_from_checkpoint=str(tmp_path / "through" / "checkpoint-2"))
    assert_same(weights(through), weights(again))


@pytest.mark.slow
def test_bcos_running_mean_is_in_the_checkpoint(tmp_path):
    made = trainer("bco", tmp_path, save_strategy="steps", save_steps=2)
    made.train()
    saved = json.loads((tmp_path / "checkpoint-2" / "run_state.json").read_text())
    assert saved["running"]["count"] == 8


@pytest.mark.parametrize("method", slow_but(["dpo", "reward"], ALL))
def test_each_trainer_learns_and_reports(method, tmp_path):
    arguments = {"eval_dataset": data(method, 8)}
    made = trainer(method, tmp_path, arguments=arguments, max_steps=12)
    made.train()
    losses = [entry["loss"] for entry in made.state.log_history if "loss" in entry]
    assert sum(losses[-4:]) < sum(losses[:4])
    names = {"accuracy", "margin", "min_reward", "mean_reward", "max_reward", "num_tokens"}
    if method != "reward":
        names = {"rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen", "entropy", "num_tokens"}
    assert names <= set(made.state.log_history[0])
    assert made.evaluate()["eval_loss"] > 0


def test_a_moving_reference_goes_to_the_policy(tmp_path):
    model = build()
    made = trainer(
        "dpo",
        tmp_path,
        model=model,
        sync_ref_model=True,
        ref_model_sync_steps=2,
        ref_model_mixup_alpha=1.0,
        max_steps=2,
    )
    made.train()
    theirs = dict(made.reference.model.named_parameters())
    assert all(torch.equal(p, theirs[name]) for name, p in model.named_parameters())


def test_a_moving_reference_goes_to_a_policy_with_its_adapters(tmp_path):
    config = LoraConfig(r=4, target_modules="all-linear")
    model = build()
    arguments = {"peft_config": config, "ref_model": build()}
    options = {"sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 1.0, "max_steps": 2}
    made = trainer("dpo", tmp_path, model=model, arguments=arguments, **options)
    made.train()
    ours = dict(made.reference.model.named_parameters())
    theirs = dict(made.model.merge_and_unload().named_parameters())
    assert any(not torch.equal(p, ours[name]) for name, p in build().named_parameters())
    for name, p in theirs.items():
        torch.testing.assert_close(ours[name], p)


def test_a_frozen_copy_stays_as_it_was(tmp_path):
    model = build()
    before = copy.deepcopy(model)
    made = trainer("dpo", tmp_path, model=model)
    made.train()
    for (name, p), q in zip(before.named_parameters(), made.reference.model.parameters(), strict=True):
        assert torch.equal(p, q), name
    assert "frozen copy" in dict(made.report_lines())["reference"]


BAD = {
    "another vocabulary": (
        "dpo",
        {"arguments": {"ref_model": build(vocab=77)}},
        r"ref_model .* vocabulary of 77 tokens and the model one of",
    ),
    "labels that are no booleans": (
        "kto",
        {"dataset": Dataset.from_list([{"prompt": "a b", "completion": " c d", "label": "yes"}] * 4)},
        r"row 0 .*label",
    ),
    "no common prefix": (
        "dpo",
        {"dataset": Dataset.from_list([{"chosen": "yes it is", "rejected": "no"}] * 4)},
        r"row 0 .*(common|begin)",
    ),
    "a margin that is no number": (
        "reward",
        {"dataset": Dataset.from_list([{**row, "margin": "big"} for row in rows(4)])},
        r"row 0 .*margin",
    ),
    "all sides equal": (
        "dpo",
        {"dataset": Dataset.from_list([{"prompt": "a", "chosen": " b", "rejected": " b"}] * 4)},
        r"nothing to train on.*chosen equals rejected",
    ),
    "a moving reference that is another model": (
        "dpo",
        {"sync_ref_model": True, "arguments": {"ref_model": build(hidden=16)}},
        "is not one that both have: pass the model that the policy started from",
    ),
    "a quantized reference that is not resident": (
        "dpo",
        {"ref_model_storage": "8bit", "precompute_ref_log_probs": True},
        r"ref_model_storage='8bit' .*precompute_ref_log_probs=True",
    ),
    "a reference on the CPU beside a policy on the CPU": (
        "dpo",
        {"ref_model_storage": "cpu"},
        "where the policy is too",
    ),
    "a moving and a precomputed reference": (
        "dpo",
        {"sync_ref_model": True, "precompute_ref_log_probs": True},
        r"sync_ref_model=True .*precompute_ref_log_probs=True",
    ),
    "an unknown loss": ("dpo", {"loss_type": "sigmoidal"}, r"loss_type='sigmoidal' is not one of .*sigmoid"),
    "smoothing that nothing reads": ("dpo", {"label_smoothing": 0.1}, r"label_smoothing=0.1 .* no effect.*robust"),
    "weights for other losses": ("dpo", {"loss_weights": [1.0, 2.0]}, r"loss_weights has 2 weights for the 1 losses"),
    "a divergence that nothing reads": (
        "dpo",
        {"loss_type": "nca_pair", "f_divergence_type": "forward_kl"},
        r"f_divergence_type='forward_kl' .*nca_pair",
    ),
    "weighting of a loss without pairs": (
        "dpo",
        {"loss_type": "aot", "use_weighting": True},
        r"use_weighting=True .*aot",
    ),
    "exo_pair without smoothing": ("dpo", {"loss_type": "exo_pair"}, r"label_smoothing=0.0 .*exo_pair"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_gets_one_message(name, tmp_path):
    method, options, message = BAD[name]
    with pytest.raises(ValueError, match=message) as caught:
        trainer(method, tmp_path, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(("storage", "package"), [("8bit", "torchao"), ("4bit", "bitsandbytes")])
def test_a_quantized_reference_is_smaller_and_close(storage, package, tmp_path):
    pytest.importorskip(package, reason=f"{package} is not installed")
    exact = trainer("dpo", tmp_path, model=build(hidden=64))  # bitsandbytes packs blocks of 64
    made = trainer("dpo", tmp_path, model=build(hidden=64), ref_model_storage=storage)
    assert "not exact" in dict(made.report_lines())["reference"]
    batch = next(iter(made.get_train_dataloader()))
    expected, found = exact.reference(batch), made.reference(batch)
    assert not torch.equal(expected, found)
    assert (expected - found).abs().mean() < {"8bit": 0.02, "4bit": 0.3}[storage]
    made.train()


def test_the_model_itself_is_no_reference(tmp_path):
    model = build()
    with pytest.raises(ValueError, match="ref_model is the model that is trained"):
        trainer("dpo", tmp_path, model=model, arguments={"ref_model": model})


@pytest.mark.parametrize("which", ["train_dataset", "eval_dataset"])
@pytest.mark.parametrize("method", ["dpo", "kto"])
def test_a_stream_has_no_precomputed_reference(method, which, tmp_path):
    stream = data(method).to_iterable_dataset()
    given = {"dataset": stream} if which == "train_dataset" else {"arguments": {which: stream}}
    with pytest.raises(ValueError, match=r"precompute_ref_log_probs=True is not supported with IterableDataset"):
        trainer(method, tmp_path, precompute_ref_log_probs=True, max_steps=1, **given)


def test_a_reward_model_has_one_label(tmp_path):
    config = LlamaConfig(vocab_size=300, hidden_size=32, intermediate_size=16, num_hidden_layers=1, num_labels=3)
    with pytest.raises(
        ValueError, match=r"3 labels; a reward model gives one value, and reward models require `num_labels=1`"
    ):
        trainer("reward", tmp_path, model=AutoModelForSequenceClassification.from_config(config))
    with pytest.raises(ValueError, match=r"no `score` head; a reward model gives one value"):
        trainer("reward", tmp_path, model=build())


@pytest.mark.parametrize("padding", slow_but(["<eos>"], [None, "<eos>", "!"]))
@pytest.mark.parametrize("options", [{}, {"prefix_sharing": False}, {"padding_free": False}])
def test_rewards_are_those_that_the_saved_model_gives_to_padded_batches(padding, options, tmp_path):
    # One side adds nothing to what both begin with but padding.
    pairs = [
        *rows(3),
        {"prompt": "a", "chosen": "", "rejected": " b!!"},
        {"prompt": "c", "chosen": "!d", "rejected": "!"},
    ]
    tokenizer = make_tokenizer()
    tokenizer.pad_token = padding
    made = trainer(
        "reward", tmp_path, dataset=Dataset.from_list(pairs), arguments={"processing_class": tokenizer}, **options
    )
    made.train()
    found = made.evaluate(Dataset.from_list(pairs))
    made.save_model(str(tmp_path / "saved"))
    saved = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert saved.config.pad_token_id == tokenizer.convert_tokens_to_ids(padding or "<eos>")
    values = []
    for side in ("chosen", "rejected"):
        texts = [row["prompt"] + row[side] + "<eos>" for row in pairs]
        with torch.no_grad():
            values.append(saved(**tokenizer(texts, padding=True, return_tensors="pt")).logits[:, 0])
    assert found["eval_margin"] == pytest.approx((values[0] - values[1]).mean().item(), abs=1e-5)
    assert found["eval_mean_reward"] == pytest.approx(torch.cat(values).mean().item(), abs=1e-5)


def test_the_padding_token_of_a_reward_model_may_be_given(tmp_path):
    made = trainer("reward", tmp_path, pad_token="~")
    assert made.tokenizer.pad_token == "~"
    assert made.model.config.pad_token_id == made.tokenizer.convert_tokens_to_ids("~")
    with pytest.raises(ValueError, match="pad_token '<pad>' is not in the tokenizer's vocabulary"):
        trainer("reward", tmp_path, pad_token="<pad>")


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (DPOConfig, {"assistant_only_loss": True}, "DPOConfig has no option 'assistant_only_loss': it is of sft"),
        (RewardConfig, {"beta": 0.1}, "RewardConfig has no option 'beta': it is of dpo, kto"),
        (KTOConfig, {"desirable_weigth": 1}, "no option 'desirable_weigth'; did you mean 'desirable_weight'"),
    ],
)
def test_options_of_other_trainers_are_refused_with_whose_they_are(config, options, message, tmp_path):
    with pytest.raises(TypeError, match=message):
        config(output_dir=str(tmp_path), **options)


@pytest.mark.parametrize("task", [None, "CAUSAL_LM", "SEQ_CLS"])
def test_a_reward_models_new_head_is_trained_beside_adapters(task, tmp_path):
    lora = LoraConfig(r=2, target_modules=["q_proj"], task_type=task)
    made = trainer("reward", tmp_path, arguments={"peft_config": lora})
    head = {
        name: p.detach().clone() for name, p in made.model.named_parameters() if "score" in name and p.requires_grad
    }
    made.train()
    assert head
    assert all(not torch.equal(p, head[name]) for name, p in made.model.named_parameters() if name in head)
    assert lora.task_type == task


def test_labels_that_are_all_the_same_are_said(tmp_path, caplog):
    same = Dataset.from_list([{"prompt": "a b", "completion": f" c {n}", "label": True} for n in range(8)])
    with caplog.at_level(logging.WARNING):
        trainer("kto", tmp_path, dataset=same)
    assert "label" in caplog.text


@pytest.mark.parametrize(
    ("options", "is_said"),
    [
        ({"per_device_train_batch_size": 1}, True),
        ({"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}, False),
        ({"per_device_train_batch_size": 2}, False),
        ({"per_device_train_batch_size": 1, "loss_type": "apo_zero_unpaired"}, False),
    ],
)
def test_a_step_of_one_row_has_a_baseline_of_one_pair(options, is_said, tmp_path, caplog):
    KTOConfig(output_dir=str(tmp_path), use_cpu=True, report_to="none", **options)
    assert ("estimated from one mismatched pair" in caplog.text) == is_said


def test_every_public_trainer_is_covered_here():
    of_texts = {f"{row.public}Trainer" for name, row in METHODS.rows.items() if not METHODS[name].rows.completions}
    trainers = {name for name in lowtide.__all__ if name.endswith("Trainer")} - of_texts
    trainers -= {name for name in trainers if getattr(lowtide, name).method.writes}
    assert {each.__name__ for each, _ in ALL.values()} == trainers


@pytest.mark.parametrize("method", ["dpo", "kto", "reward"])
def test_a_collator_of_another_library_is_refused_at_construction(method, tmp_path):
    def flat(rows):
        ids = torch.tensor([row["prompt_ids"][:3] for row in rows])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    with pytest.raises(ValueError, match=r"data_collator flat returns no .*lengths.*: leave data_collator out"):
        trainer(method, tmp_path, arguments={"data_collator": flat})
    with pytest.raises(ValueError, match=r"data_collator DefaultDataCollator makes no batch of 2 rows of the train"):
        trainer(method, tmp_path, arguments={"data_collator": DefaultDataCollator()})


def test_our_own_collator_may_be_given(tmp_path):
    collator = CompletionCollator(("chosen_ids", "rejected_ids"), sharing=False)
    trainer("dpo", tmp_path, max_steps=1, arguments={"data_collator": collator}).train()


@pytest.mark.slow
@pytest.mark.parametrize("options", slow_but([{}], [{}, {"prefix_sharing": False}, {"padding_free": False}]), ids=str)
@pytest.mark.parametrize("method", slow_but(["dpo"], ALL))
def test_a_budget_that_a_trainer_takes_holds_every_row(method, options, tmp_path):
    single = [
        {"prompt": "1" * prompt, "completion": "2" * completion, "label": bool(number % 2)}
        for number, (prompt, completion) in enumerate([(40, 3), (3, 40)] * 4)
    ]
    dataset = Dataset.from_list(single) if method in SINGLE else data(method, 8)
    longest = int(trainer(method, tmp_path, dataset=dataset, **options).row_lengths().max())
    options = options | {"dataset": dataset, "max_steps": 2, "tokens_per_microbatch": longest}
    made = trainer(method, tmp_path, rehearsal=True, **options)
    assert longest >= made.ledger.longest_row
    made.train()
    options |= {"tokens_per_microbatch": longest - 1, "padding_free": False}
    with pytest.raises(ValueError, match=f"longest row of the train dataset, {longest} tokens.*at least {longest}"):
        trainer(method, tmp_path, **options)


def test_a_prompt_and_its_longest_completion_need_a_models_positions(tmp_path):
    config = GPT2Config(vocab_size=len(make_tokenizer()), n_embd=32, n_layer=1, n_head=4, n_positions=40)
    dataset = Dataset.from_list([{"prompt": "1" * 20, "chosen": "2" * 10, "rejected": "3" * 15}] * 8)
    trainer("dpo", tmp_path, model=AutoModelForCausalLM.from_config(config), dataset=dataset, max_steps=1).train()
    config.n_positions = 35
    with pytest.raises(ValueError, match=r"row 0 of the train dataset has 36 tokens and the model 35 positions"):
        trainer("dpo", tmp_path, model=AutoModelForCausalLM.from_config(config), dataset=dataset)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["group_by_length", "batch_rebalance"])
@pytest.mark.parametrize("method", ["dpo", "kto"])
def test_rows_are_grouped_by_what_they_have_of_tokens(method, strategy, tmp_path):
    made = trainer(method, tmp_path, train_sampling_strategy=strategy, max_steps=1)
    sampler = made._get_train_sampler()
    assert list(sampler.lengths) == made.row_lengths().tolist()
    made.train()


def test_a_reference_by_name_is_loaded_whole_or_refused(tmp_path):
    build().save_pretrained(tmp_path / "ref")
    trainer("dpo", tmp_path, arguments={"ref_model": str(tmp_path / "ref")}).train()
    weights = load_file(tmp_path / "ref" / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "ref" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"ref' is incomplete: its files hold no model.norm.weight"):
        trainer("dpo", tmp_path, arguments={"ref_model": str(tmp_path / "ref")})
