"""The trainer as its users meet it: resuming, evaluating, saving, and what it refuses."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from datasets import Dataset
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    LlamaConfig,
    PreTrainedTokenizerFast,
    TrainerCallback,
    TrainingArguments,
)

from lowtide import DataCollatorForCompletionOnlyLM, DataCollatorWithFlattening, SFTConfig, SFTTrainer
from lowtide.memory import table
from tests.support.marks import slow_but, slow_or_sweep
from tests.support.matrix.matrix import dense_head
from tests.support.runs import small_sft

WORDS = [f"w{n}" for n in range(50)]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    vocab = {word: n for n, word in enumerate(["<eos>", "<unk>", *WORDS])}
    words = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", unk_token="<unk>")


def build(**changes) -> AutoModelForCausalLM:
    torch.manual_seed(0)
    config = {
        "vocab_size": 52,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "eos_token_id": 0,
    }
    return AutoModelForCausalLM.from_config(LlamaConfig(**{**config, **changes}))


@pytest.fixture(scope="module")
def rows() -> Dataset:
    generator = np.random.default_rng(0)
    texts = [" ".join(generator.choice(WORDS, generator.integers(2, 30))) for _ in range(40)]
    # The eos is spelled out so that it is not glued to the last word.
    return Dataset.from_dict({"text": [f"{text} <eos>" for text in texts]})


def config(folder: Path, **changes) -> SFTConfig:
    options = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "use_cpu": True,
        "report_to": "none",
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "max_steps": 6,
    }
    return SFTConfig(**{**options, **changes})


def weights(model) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "options", slow_but([{}], [{}, {"tokens_per_microbatch": 64}, {"optimizer_in_backward": "two_pass"}])
)
def test_hooks_on_embedding_and_head_choose_the_rows_that_are_trained(tied, options, tokenizer, rows, tmp_path):
    def trained(**more) -> tuple[list[float], dict[str, torch.Tensor]]:
        model = build(tie_word_embeddings=tied)
        for module in (model.get_input_embeddings(), model.get_output_embeddings()):
            if module is model.get_input_embeddings() or not tied:
                module.weight.register_hook(lambda grad: grad * mask)
        made = SFTTrainer(model, config(tmp_path, **more), train_dataset=rows, processing_class=tokenizer)
        made.train()
        return [each["loss"] for each in made.state.log_history if "loss" in each], weights(model)

    mask = torch.zeros(52, 1)
    mask[20:] = 1
    losses, found = trained(**options)
    with dense_head():
        expected, wanted = trained()
    assert losses == pytest.approx(expected, abs=1e-4)
    before = weights(build(tie_word_embeddings=tied))
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in found:
            assert torch.equal(found[name][:20], before[name][:20])
            assert not torch.equal(found[name][20:], before[name][20:])
            torch.testing.assert_close(found[name], wanted[name], rtol=1e-3, atol=1e-4)


class Kill(TrainerCallback):
    """Ends the process' training in the middle, as a kill would: by an exception after a step."""

    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise KeyboardInterrupt


@pytest.mark.slow
@pytest.mark.parametrize("packing", slow_but([True], [False, True]))
@pytest.mark.parametrize("accumulation", slow_but([2], [1, 2]))
def test_killed_and_resumed_is_bitwise_the_run_that_was_not(packing, accumulation, tmp_path, rows, tokenizer):
    # 40 rows in batches of 4 are 10 steps an epoch: the kill comes in mid-epoch, and the run goes on into the second.
    options = {
        "packing": packing,
        "max_length": 32,
        "gradient_accumulation_steps": accumulation,
        "per_device_train_batch_size": 2 if packing else 4,
        "save_strategy": "steps",
        "save_steps": 3,
        "max_steps": 12,
        "attention_dropout": None,
    }
    options.pop("attention_dropout")

    def trainer(folder: str, callbacks=()):
        args = config(tmp_path / folder, **options)
        return SFTTrainer(
            build(attention_dropout=0.1), args, train_dataset=rows, processing_class=tokenizer, callbacks=[*callbacks]
        )

    whole = trainer("whole")
    whole.train()
    with pytest.raises(KeyboardInterrupt):
        trainer("killed", [Kill(8)]).train()
    resumed = trainer("killed")
    resumed.train(resume_from_checkpoint=True)
    expected, found = weights(whole.model), weights(resumed.model)
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    losses = lambda t: [entry["loss"] for entry in t.state.log_history if "loss" in entry]  # noqa: E731
    assert losses(whole)[6:] == losses(resumed)[6:]


STREAM = {"train_sampling_strategy": "random"}


ORDERS: dict[str, dict[str, Any]] = {
    "stream": STREAM,
    "accumulated stream": STREAM | {"gradient_accumulation_steps": 2},
    "group by length": {"train_sampling_strategy": "group_by_length"},
    "rebalanced": {"train_sampling_strategy": "batch_rebalance"},
}
KILLED = {"stream": (5, 11), "accumulated stream": (8, 14), "group by length": (5, 14), "rebalanced": (8, 11)}
"""After which steps the slow tests kill a run; the sweep does at all four."""
RESUMED = slow_or_sweep(
    [(order, step) for order in ORDERS for step in (5, 8, 11, 14)],
    [(order, step) for order, steps in KILLED.items() for step in steps],
)


@pytest.mark.parametrize(("order", "killed"), RESUMED)
def test_a_run_resumed_in_a_later_pass_over_its_rows_goes_on_bitwise(order, killed, tmp_path, rows, tokenizer):
    # A pass is 5 steps; a checkpoint is made after each third.
    options = ORDERS[order]
    accumulated = options.get("gradient_accumulation_steps", 1)
    options = options | {"per_device_train_batch_size": 8 // accumulated, "max_steps": 17}
    options |= {"save_strategy": "steps", "save_steps": 3}
    data = rows.to_iterable_dataset().shuffle(seed=1, buffer_size=20) if options.items() >= STREAM.items() else rows

    def trainer(folder: str, callbacks=()):
        args = config(tmp_path / folder, **options)
        return SFTTrainer(build(), args, train_dataset=data, processing_class=tokenizer, callbacks=[*callbacks])

    whole = trainer("whole")
    whole.train()
    with pytest.raises(KeyboardInterrupt):
        trainer("killed", [Kill(killed)]).train()
    resumed = trainer("killed")
    resumed.train(resume_from_checkpoint=True)
    losses = [[entry["loss"] for entry in t.state.log_history if "loss" in entry] for t in (whole, resumed)]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 17
    expected, found = weights(whole.model), weights(resumed.model)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_a_checkpoint_that_does_not_say_how_far_a_stream_was_read_is_warned_of(tmp_path, rows, tokenizer, caplog):
    given = {"train_dataset": rows.to_iterable_dataset(), "processing_class": tokenizer}
    SFTTrainer(build(), config(tmp_path, save_strategy="steps", save_steps=2, max_steps=2), **given).train()
    state = tmp_path / "checkpoint-2" / "run_state.json"
    state.write_text(
        json.dumps({name: value for name, value in json.loads(state.read_text()).items() if name != "place"})
    )
    (tmp_path / "checkpoint-2" / "manifest.json").unlink()  # as a version wrote it that had neither
    SFTTrainer(build(), config(tmp_path, max_steps=3), **given).train(resume_from_checkpoint=True)
    assert "checkpoint-2 does not say how far the stream was read" in caplog.text


def test_training_learns_and_saves_what_it_trained(tmp_path, rows, tokenizer):
    few = rows.select(range(4))
    trainer = SFTTrainer(build(), config(tmp_path, max_steps=30), train_dataset=few, processing_class=tokenizer)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < 0.5 * losses[0]
    trainer.save_model(str(tmp_path / "final"))
    saved = load_file(tmp_path / "final" / "model.safetensors")
    assert torch.equal(saved["model.norm.weight"], trainer.model.model.norm.weight)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "final")
    ids = torch.tensor([[5, 6, 7, 8]])
    torch.testing.assert_close(again(ids).logits, trainer.model(ids).logits)


@pytest.mark.slow
def test_options_that_leave_the_numbers_alone(tmp_path, rows, tokenizer):
    """Padded, budgeted, accumulated otherwise, checkpointed or not: the same weights after six steps."""
    found = []
    for number, changes in enumerate(
        [
            {},
            {"padding_free": False},
            {"tokens_per_microbatch": 40},
            {"gradient_checkpointing": False},
            {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4},
        ]
    ):
        args = config(tmp_path / str(number), train_sampling_strategy="sequential", **changes)
        trainer = SFTTrainer(build(), args, train_dataset=rows, processing_class=tokenizer)
        trainer.train()
        found.append(weights(trainer.model))
    for other in found[1:]:
        for name, value in found[0].items():
            assert (other[name] - value).norm() <= 2e-4 * value.norm(), name


def test_a_metric_in_place_of_the_evaluations_own_is_warned_of_once(tmp_path, rows, tokenizer, caplog):
    found = [{"loss": 7.0}, {"eval_good": 1.0}]
    trainer = SFTTrainer(
        build(),
        config(tmp_path),
        train_dataset=rows,
        eval_dataset=rows,
        processing_class=tokenizer,
        compute_metrics=lambda prediction: {key: value for each in found for key, value in each.items()},
    )
    for _ in range(2):
        metrics = trainer.evaluate()
    assert metrics["eval_loss"] == 7
    assert metrics["eval_good"] == 1
    assert caplog.text.count("compute_metrics returned eval_loss, which take the place") == 1


def test_evaluation_is_the_mean_over_all_scored_tokens(tmp_path, rows, tokenizer):
    seen = {}

    def compute_metrics(prediction):
        seen["logprobs"], seen["targets"] = prediction.predictions, prediction.label_ids
        return {"perplexity": float(np.exp(-prediction.predictions.mean()))}

    trainer = SFTTrainer(
        build(),
        config(tmp_path, per_device_eval_batch_size=7),
        train_dataset=rows,
        eval_dataset=rows,
        processing_class=tokenizer,
        compute_metrics=compute_metrics,
    )
    metrics = trainer.evaluate()
    model, losses = build(), []
    for text in rows["text"]:
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        losses.append(torch.log_softmax(model(ids).logits[0, :-1], -1).gather(-1, ids[0, 1:, None])[:, 0])
    expected = torch.cat(losses)
    assert metrics["eval_loss"] == pytest.approx(-expected.mean().item(), rel=1e-5)
    assert metrics["eval_perplexity"] == pytest.approx(expected.mean().neg().exp().item(), rel=1e-5)
    assert seen["logprobs"].shape == seen["targets"].shape == expected.shape
    assert trainer.model.training is False or metrics["eval_mean_token_accuracy"] >= 0


@pytest.mark.slow
def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before_whole(tmp_path, rows, tokenizer, monkeypatch):
    trainer = SFTTrainer(
        build(),
        config(tmp_path, save_strategy="steps", save_steps=2),
        train_dataset=rows,
        processing_class=tokenizer,
    )
    write = trainer._save_optimizer_and_scheduler

    def full_disk(folder):
        if trainer.state.global_step == 4:
            Path(folder, "optimizer.pt").write_bytes(b"half")
            raise OSError(28, "No space left on device")
        write(folder)

    monkeypatch.setattr(trainer, "_save_optimizer_and_scheduler", full_disk)
    with pytest.raises(ValueError, match=r"step 4: the checkpoint could not be written .* the disk is full"):
        trainer.train()
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_dir()) == ["checkpoint-2"]
    resumed = SFTTrainer(build(), config(tmp_path), train_dataset=rows, processing_class=tokenizer)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 6


def test_a_loss_that_is_no_number_stops_the_run_and_says_where(tmp_path, rows, tokenizer):
    model = build()
    trainer = SFTTrainer(model, config(tmp_path), train_dataset=rows, processing_class=tokenizer)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 3] = float("nan")
    with pytest.raises(ValueError, match=r"step 1: the loss is nan.*first module .*layers\.1\.mlp\.down_proj"):
        trainer.train()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_length": 0}, "max_length"),
        ({"tokens_per_microbatch": 0}, "tokens_per_microbatch=0"),
        ({"loss_type": "nil"}, "loss_type='nil' is not one of nll, dft, chunked_nll, .*; did you mean 'nll'"),
        ({"loss_type": "dft", "label_smoothing_factor": 0.1}, "label_smoothing_factor"),
        ({"packing": True, "max_length": None}, "packing=True needs max_length"),
        ({"checkpointing_policy": "some"}, "checkpointing_policy='some' is not one of full, attention, matmul"),
        ({"checkpointing_every": 0}, "checkpointing_every=0"),
        ({"checkpointing_every": 2, "gradient_checkpointing": False}, "requires gradient_checkpointing=True"),
        ({"activation_offloading_dir": "/tmp"}, "activation_offloading_dir requires activation_offloading=True"),
        ({"mlp_tile_tokens": 0}, "mlp_tile_tokens=0"),
        ({"optimizer_in_backward": True}, "max_grad_norm=1.0"),
        ({"optimizer_in_backward": "two_pass", "max_grad_norm": 0.0}, "optimizer_in_backward=True"),
        ({"optimizer_in_backward": "often"}, "'often' must be"),
        ({"optim": "lomo"}, "'lomo' steps by itself.*optimizer_in_backward=True"),
        ({"optim": "galore_adamw_layerwise"}, "take 'galore_adamw' with optimizer_in_backward=True"),
        ({"optim": "adamw_anyprecision"}, "torchdistx"),
        ({"max_seq_length": 8, "max_length": 9}, "contradict"),
        ({"dataset_kwargs": {"no_such": 1}}, "no_such"),
        ({"fsdp": "full_share"}, "full_share"),
        ({"eval_do_concat_batches": False}, "eval_do_concat_batches"),
        ({"eos_token": "<end>"}, "'<end>' is not in the tokenizer's vocabulary"),
    ],
)
def test_what_cannot_work_is_refused_at_construction(changes, message, tmp_path, rows, tokenizer):
    with pytest.raises(ValueError, match=message):
        SFTTrainer(build(), config(tmp_path, **changes), train_dataset=rows, processing_class=tokenizer)


def test_another_end_token_is_that_of_what_is_saved(tmp_path, tokenizer):
    model, rows = build(), Dataset.from_dict({"text": ["w1 w2 ", "w3 "]})
    model.generation_config.eos_token_id = 0
    own = copy.deepcopy(tokenizer)
    trainer = SFTTrainer(model, config(tmp_path, eos_token="w9", max_steps=1), train_dataset=rows, processing_class=own)
    assert {row[-1] for row in trainer.train_dataset["input_ids"]} == {own.convert_tokens_to_ids("w9")}
    trainer.save_model(str(tmp_path / "saved"))
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").eos_token == "w9"
    assert saved.config.eos_token_id == own.eos_token_id
    assert saved.generation_config.eos_token_id == [own.eos_token_id, 0]


@pytest.mark.parametrize(
    ("optim", "command"),
    [
        ("adamw_8bit", r"pip install ('lowtide\[bnb\]'|-U bitsandbytes)"),
        ("galore_adamw", r"pip install (galore-torch|git\+https://\S+/GaLore)"),
    ],
)  # where they really are not installed, transformers says it first
def test_a_missing_package_is_named_at_construction(optim, command, tmp_path, rows, tokenizer, monkeypatch):
    monkeypatch.setattr(table, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=command):
        SFTTrainer(build(), config(tmp_path, optim=optim), train_dataset=rows, processing_class=tokenizer)


def test_an_optimizer_that_cannot_step_in_backward_is_refused_at_construction(tmp_path, rows, tokenizer):
    model, args = build(), config(tmp_path, optimizer_in_backward=True, max_grad_norm=0.0)
    given = torch.optim.LBFGS(model.parameters())
    with pytest.raises(ValueError, match="LBFGS cannot step one parameter at a time"):
        SFTTrainer(model, args, train_dataset=rows, processing_class=tokenizer, optimizers=(given, None))


def test_low_rank_optimizers_want_their_modules_at_construction(tmp_path, rows, tokenizer):
    pytest.importorskip("galore_torch")
    with pytest.raises(ValueError, match="optim_target_modules"):
        SFTTrainer(build(), config(tmp_path, optim="galore_adamw"), train_dataset=rows, processing_class=tokenizer)


def test_a_budget_below_the_longest_row_is_refused_before_training(tmp_path, rows, tokenizer):
    with pytest.raises(ValueError, match=r"tokens_per_microbatch=8 .*longest"):
        SFTTrainer(build(), config(tmp_path, tokens_per_microbatch=8), train_dataset=rows, processing_class=tokenizer)


def test_a_tokenizer_of_another_vocabulary_is_refused(tmp_path, rows, tokenizer):
    with pytest.raises(ValueError, match="embeddings"):
        SFTTrainer(build(vocab_size=20), config(tmp_path), train_dataset=rows, processing_class=tokenizer)


@pytest.mark.slow
def test_float16_weights_train_with_a_warning(tmp_path, rows, tokenizer, caplog):
    def losses(model, **more) -> list[float]:
        made = SFTTrainer(model, config(tmp_path, **more), train_dataset=rows, processing_class=tokenizer)
        made.train()
        return [each["loss"] for each in made.state.log_history if "loss" in each]

    options = {"optim": "sgd", "learning_rate": 0.1, "max_steps": 4}
    half = build().half()
    before = weights(half)
    found = losses(half, **options)
    assert "trained parameters are stored in float16" in caplog.text
    assert "dtype float32" in caplog.text
    assert {p.dtype for p in half.parameters()} == {torch.float16}
    assert any(not torch.equal(before[name], p) for name, p in half.named_parameters())
    assert found == pytest.approx(losses(build(), **options), rel=5e-3)


def test_float16_weights_whose_losses_are_scaled_are_refused(tmp_path, rows, tokenizer):
    args = config(tmp_path, optim="adamw_compressed")
    with pytest.raises(ValueError, match=r"'adamw_compressed' trains float32 or bfloat16, and .* stored in float16"):
        SFTTrainer(build().half(), args, train_dataset=rows, processing_class=tokenizer)


def test_older_names_and_plain_arguments(tmp_path, rows, tokenizer):
    assert SFTConfig(output_dir=str(tmp_path), max_seq_length=77, use_cpu=True).max_length == 77
    plain = TrainingArguments(output_dir=str(tmp_path), max_steps=1, use_cpu=True, report_to="none", disable_tqdm=True)
    trainer = SFTTrainer(build(), plain, train_dataset=rows, processing_class=tokenizer)
    assert isinstance(trainer.args, SFTConfig)
    assert trainer.args.max_steps == 1
    trainer.train()


def test_metrics_can_be_switched_off(tmp_path, rows, tokenizer):
    args = config(tmp_path, token_metrics=False, max_steps=1)
    trainer = SFTTrainer(build(), args, train_dataset=rows, processing_class=tokenizer)
    trainer.train()
    logged = trainer.state.log_history[0]
    assert "entropy" not in logged
    assert "mean_token_accuracy" not in logged
    assert logged["num_tokens"] > 0


def test_a_stream_trains(tmp_path, rows, tokenizer):
    args = config(tmp_path, max_steps=3)
    trainer = SFTTrainer(build(), args, train_dataset=rows.to_iterable_dataset(), processing_class=tokenizer)
    trainer.train()
    assert trainer.state.global_step == 3


@pytest.mark.slow
def test_lora_trains_only_adapters_and_equals_the_padded_run(tmp_path, rows, tokenizer):
    from peft import LoraConfig

    found = []
    for padding_free in (True, False):
        args = config(tmp_path, padding_free=padding_free, train_sampling_strategy="sequential")
        peft_config = LoraConfig(
            r=4, target_modules=["q_proj", "v_proj", "lm_head"], init_lora_weights=False, task_type="CAUSAL_LM"
        )
        trainer = SFTTrainer(build(), args, train_dataset=rows, processing_class=tokenizer, peft_config=peft_config)
        before = weights(trainer.model)
        trainer.train()
        after = weights(trainer.model)
        changed = {name for name in before if not torch.equal(before[name], after[name])}
        assert changed
        assert all("lora_" in name for name in changed)
        assert any("lm_head" in name for name in changed)
        found.append(after)
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-3, atol=1e-5)


def test_nothing_is_left_behind(tmp_path, rows, tokenizer):
    args = config(tmp_path / "run", save_strategy="steps", save_steps=2, save_total_limit=1)
    trainer = SFTTrainer(build(), args, train_dataset=rows, processing_class=tokenizer)
    trainer.train()
    assert sorted(os.listdir(tmp_path / "run")) == ["checkpoint-6", "metrics.jsonl", "report.html"]
    shutil.rmtree(tmp_path / "run")
    assert dataclasses.is_dataclass(args)


def test_a_chat_template_brings_its_tokens(tmp_path, tokenizer):
    other = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, eos_token="<|end|>", unk_token="<unk>"
    )
    other.chat_template = "{% for m in messages %}{{ m['content'] }} <|end|> {% endfor %}"
    other.save_pretrained(tmp_path / "other")
    ours = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(tokenizer.backend_tokenizer.to_str()), eos_token="<eos>", unk_token="<unk>"
    )
    chats = [[{"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": "w3"}]] * 8
    args = config(tmp_path / "run", max_steps=1, chat_template_path=str(tmp_path / "other"))
    data = Dataset.from_dict({"messages": chats})
    trainer = SFTTrainer(build(), args, train_dataset=data, processing_class=ours)
    assert trainer.model.get_input_embeddings().weight.shape[0] == 53
    assert trainer.train_dataset[0]["input_ids"][-1] == trainer.processing_class.eos_token_id == 52
    trainer.train()


def test_a_collator_that_joins_packed_segments_is_refused_at_construction(tmp_path, rows, tokenizer):
    padding = copy.deepcopy(tokenizer)
    padding.pad_token = "<eos>"
    padded = DataCollatorForCompletionOnlyLM([3], tokenizer=padding)
    for collator in (padded, transformers.DataCollatorWithFlattening()):
        message = rf"data_collator {type(collator).__name__} makes \d of the \d+ segments .*packing=False"
        for packed in ({"packing": True}, {"eval_packing": True}):
            with pytest.raises(ValueError, match=message):
                SFTTrainer(
                    build(),
                    config(tmp_path, max_length=64, **packed),
                    data_collator=collator,
                    train_dataset=rows,
                    eval_dataset=rows,
                    processing_class=tokenizer,
                )


def test_a_collator_that_cannot_pad_the_rows_is_refused_at_construction(tmp_path, rows, tokenizer):
    padding = copy.deepcopy(tokenizer)
    padding.pad_token = "<eos>"
    given = {"data_collator": transformers.DataCollatorForLanguageModeling(padding, mlm=False), "train_dataset": rows}
    with pytest.raises(
        ValueError, match=r"DataCollatorForLanguageModeling makes no batch of 2 rows .*input_ids, labels"
    ):
        SFTTrainer(build(), config(tmp_path), processing_class=tokenizer, **given)


@pytest.mark.slow
def test_a_collator_that_keeps_packed_segments_trains_as_our_own(tmp_path, rows, tokenizer):
    found = []
    for collator in (None, DataCollatorWithFlattening()):
        args = config(tmp_path, packing=True, max_length=64, max_steps=2)
        trainer = SFTTrainer(build(), args, collator, train_dataset=rows, processing_class=tokenizer)
        trainer.train()
        found.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert found[0] == pytest.approx(found[1], rel=1e-6)


@pytest.mark.parametrize("mask", ["completion_mask", "assistant_masks"])
def test_masks_that_nothing_reads_are_refused(mask, tmp_path, rows, tokenizer):
    masked = Dataset.from_list([{"input_ids": [5, 6, 7, 8], mask: [0, 0, 1, 1]}] * 8)
    labelled = masked.add_column("labels", [[-100, -100, 7, 8]] * 8)
    args = config(tmp_path, max_steps=1, dataset_kwargs={"skip_prepare_dataset": True})
    with pytest.raises(ValueError, match=rf"the train dataset has {mask} and no labels.*skip_prepare_dataset"):
        SFTTrainer(build(), args, train_dataset=masked, processing_class=tokenizer)
    with pytest.raises(ValueError, match="the held out dataset has"):
        SFTTrainer(build(), args, train_dataset=labelled, eval_dataset={"held out": masked}, processing_class=tokenizer)
    trainer = SFTTrainer(build(), args, train_dataset=labelled, processing_class=tokenizer)
    with pytest.raises(ValueError, match="the eval dataset has"):
        trainer.evaluate(masked.to_iterable_dataset())
    trainer.train()


def test_a_budget_below_the_longest_row_of_an_evaluation_set_is_refused_before_training(tmp_path, rows, tokenizer):
    """Where rows cannot be run in pieces."""
    long = Dataset.from_dict({"text": ["w1 " * 60]})
    args = config(tmp_path, tokens_per_microbatch=40, padding_free=False)

    def made(**held_out):
        return SFTTrainer(build(), args, train_dataset=rows, processing_class=tokenizer, **held_out)

    for name, held_out in (("eval", long), ("far", {"near": rows, "far": long})):
        message = rf"tokens_per_microbatch=40 is below the longest row of the {name} dataset, 6\d tokens"
        with pytest.raises(ValueError, match=message):
            made(eval_dataset=held_out)
        with pytest.raises(ValueError, match=message):
            made().evaluate(held_out)


def learned_positions(positions: int = 24):
    config = GPT2Config(vocab_size=52, n_embd=32, n_layer=1, n_head=4, n_positions=positions, eos_token_id=0)
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.slow
@pytest.mark.parametrize("packing", [False, True])
def test_rows_longer_than_a_table_of_positions_are_refused_before_training(packing, tmp_path, rows, tokenizer):
    short = Dataset.from_dict({"text": ["w1 w2 <eos>"] * 8})
    message = r"row \d+ of the {} dataset has \d\d tokens and the model 24 positions .* max_length=24"
    args = config(tmp_path, packing=packing, max_length=60, max_steps=1)
    given = {"processing_class": tokenizer}
    with pytest.raises(ValueError, match=message.format("train")):
        SFTTrainer(learned_positions(), args, train_dataset=rows, **given)
    with pytest.raises(ValueError, match=message.format("eval")):
        SFTTrainer(learned_positions(), args, train_dataset=short, eval_dataset=rows, **given)
    trainer = SFTTrainer(learned_positions(), args, train_dataset=short, eval_dataset=short, **given)
    trainer.train()
    with pytest.raises(ValueError, match=message.format("eval")):
        trainer.evaluate(rows)
    cut = config(tmp_path, packing=packing, max_length=24, max_steps=1)
    SFTTrainer(learned_positions(), cut, train_dataset=rows, **given).train()


def test_rows_may_be_longer_than_positions_that_are_computed(tmp_path, rows, tokenizer):
    model, args = build(max_position_embeddings=24), config(tmp_path, max_steps=1)
    SFTTrainer(model, args, train_dataset=rows, processing_class=tokenizer).train()


@pytest.mark.parametrize(
    ("column", "values", "what"),
    [
        ("attention_mask", [1, 1, 1, 0], "an attention_mask with zeros"),
        ("position_ids", [0, 1, 0, 1], "position_ids that do not count on from 0"),
    ],
)
def test_padding_and_positions_that_nothing_reads_are_refused(column, values, what, tmp_path, tokenizer):
    rows = [{"input_ids": [5, 6, 7, 8], "labels": [5, 6, 7, 8], column: kept} for kept in ([1, 1, 1, 1], values)]
    if column == "position_ids":
        rows[0][column] = [0, 1, 2, 3]
    args = config(tmp_path, max_steps=1, dataset_kwargs={"skip_prepare_dataset": True})
    with pytest.raises(ValueError, match=rf"the train dataset, row 1 \(the first is 0\), has {what}"):
        SFTTrainer(build(), args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    whole = Dataset.from_list(rows[:1] * 8)
    for dataset in (whole, whole.with_format("torch"), whole.map(lambda row: {column: None})):
        SFTTrainer(build(), args, train_dataset=dataset, processing_class=tokenizer)
    SFTTrainer(build(), args, train_dataset=whole, processing_class=tokenizer).train()


def test_unused_columns_and_the_format_of_rows_are_said_without_progress_bars(tmp_path, tokenizer, caplog):
    caplog.set_level("INFO", logger="lowtide")
    rows = [{"instruction": "one", "output": "two", "topic": n} for n in range(8)]
    SFTTrainer(
        build(), config(tmp_path, max_steps=1), train_dataset=Dataset.from_list(rows), processing_class=tokenizer
    ).train()
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "rows are read from the columns 'instruction', 'output'; not used: 'topic'." in warned
    assert "read as Alpaca, as texts (instruction, output)" in caplog.text


def test_predictions_are_in_the_order_of_the_rows_however_a_batch_is_cut(tmp_path):
    given = small_sft.rows(11)
    options = {"per_device_eval_batch_size": 8}
    whole = small_sft.trainer(tmp_path / "whole", **options).predict(given)
    cut = small_sft.trainer(tmp_path / "cut", **options, tokens_per_microbatch=40).predict(given)
    assert whole.label_ids.tolist() == [label for row in given["labels"] for label in row[1:]]
    assert cut.label_ids.tolist() == whole.label_ids.tolist()
    np.testing.assert_allclose(cut.predictions, whole.predictions, rtol=1e-5)
