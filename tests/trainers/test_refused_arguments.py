"""Arguments and options that transformers or PEFT pass over, or fail on late: refused by name as a trainer is made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from peft import AdaLoraConfig, LoraConfig, PrefixTuningConfig

import lowtide
from lowtide.demo.model import make_model, make_tokenizer
from lowtide.step.rank_sync import OutOfMemory

ROWS = Dataset.from_list([{"text": f"{n} + {n} = {2 * n}"} for n in range(4)])


def config(folder: Path, **options: Any) -> lowtide.SFTConfig:
    always = {"use_cpu": True, "max_steps": 1, "report_to": "none", "disable_tqdm": True}
    return lowtide.SFTConfig(**{"output_dir": str(folder / "out"), **always, **options})


def trainer(folder: Path, options: dict[str, Any] | None = None, **given: Any) -> lowtide.SFTTrainer:
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, seed=0)
    return lowtide.SFTTrainer(
        model, config(folder, **(options or {})), train_dataset=ROWS, processing_class=tokenizer, **given
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"peft_config": LoraConfig(modules_to_save=["lm_haed"])}, "modules_to_save names 'lm_haed'"),
        (
            {"peft_config": LoraConfig(target_modules=["q_proj"], trainable_token_indices=[5, 9, 5])},
            r"trainable_token_indices lists 5 more than once",
        ),
        ({"peft_config": LoraConfig(target_modules="(")}, r"target_modules: '\(' is no regular expression"),
        (
            {"peft_config": LoraConfig(target_modules=["q_proj"], exclude_modules="(")},
            r"exclude_modules: '\(' is no reg",
        ),
        (
            {"peft_config": LoraConfig(target_modules=["q_proj"], rank_pattern={"(": 3})},
            r"rank_pattern: '\(' is no reg",
        ),
        ({"peft_config": LoraConfig(target_modules=[])}, "target_modules names no modules"),
        ({"peft_config": LoraConfig(target_modules="")}, "target_modules names no modules"),
        ({"peft_config": LoraConfig(modules_to_save="lm_head")}, "modules_to_save='lm_head' must be a list"),
        ({"eval_dataset": {}}, "eval_dataset is a mapping without a dataset"),
        ({"compute_loss_func": "x"}, "compute_loss_func must be a function"),
        ({"preprocess_logits_for_metrics": 3}, "preprocess_logits_for_metrics must be a function"),
    ],
    ids=lambda each: next(iter(each)) if isinstance(each, dict) else "",
)
def test_an_argument_that_means_nothing_is_refused(given, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path, **given)


def test_rows_with_a_transform_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"has a transform \(Dataset.with_transform\(\) .*skip_prepare_dataset"):
        lowtide.SFTTrainer(
            make_model(make_tokenizer(), seed=0),
            config(tmp_path),
            train_dataset=ROWS.with_transform(lambda batch: batch),
            processing_class=make_tokenizer(),
        )


def test_a_rank_of_more_numbers_than_can_be_counted_is_said_to_be_too_large(tmp_path):
    with pytest.raises(OutOfMemory, match=r"out of memory while making the adapters: .* Lower their rank `r`"):
        trainer(tmp_path, peft_config=LoraConfig(target_modules=["q_proj"], r=2**62))


@pytest.mark.parametrize(
    ("targets", "missing"),
    [
        (["q_proj", "all-linear"], "'all-linear'"),
        (["q_porj", "v_proj", "proj"], "'proj', 'q_porj'"),
        (["q_proj", "self_attn.v_proj"], ""),
    ],
)
def test_modules_to_adapt_that_are_not_there_are_named_where_others_are(targets, missing, tmp_path, caplog):
    trainer(tmp_path, peft_config=LoraConfig(target_modules=targets))
    said = [each.getMessage() for each in caplog.records if "target_modules names" in each.getMessage()]
    assert [text.split(" names ")[1].split(", and ")[0] for text in said] == [missing] * bool(missing)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (LoraConfig(target_modules=["q_proj"], target_parameters=["nowhere"]), "target_parameters names 'nowhere'"),
        (LoraConfig(target_modules=["q_proj"], layers_to_transform=[0, 99]), "layers_to_transform names 99"),
        (LoraConfig(target_modules=["q_proj"], lora_dropout=1.0), "lora_dropout=1 leaves adapters nothing"),
        (LoraConfig(target_modules=["q_proj"], init_lora_weights="eva"), "init_lora_weights='eva' needs"),
        (LoraConfig(target_modules=["q_proj"], init_lora_weights="lora_ga"), "init_lora_weights='lora_ga' needs"),
        (AdaLoraConfig(target_modules=["q_proj"], total_step=9), "ranks are not moved between layers"),
        (PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=0), "num_virtual_tokens=0 puts nothing"),
        (LoraConfig(target_modules=["q_proj"], layers_to_transform=[0], lora_dropout=0.5), ""),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_values_that_peft_takes_without_a_word_are_warned_of(config, words, tmp_path, caplog):
    trainer(tmp_path, peft_config=config)
    said = [each.getMessage() for each in caplog.records if each.name == "lowtide.engine.weights.loading"]
    assert [words in text for text in said] == [True] * bool(words)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eval_on_start": True}, r"eval_on_start=True requires rows to evaluate on"),
        ({"output_dir": "/dev/null", "save_strategy": "no"}, r"output_dir='/dev/null' is a file"),
        ({"output_dir": "a\0b", "save_strategy": "no"}, r"output_dir='a.x00b' has a zero byte"),
    ],
)
def test_a_trainer_that_could_not_start_is_refused(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path, options)


@pytest.mark.parametrize(("task", "warned"), [("SEQ_CLS", True), ("CAUSAL_LM", False), (None, False)])
def test_a_task_of_another_model_is_warned_of(task, warned, tmp_path, caplog):
    trainer(tmp_path, peft_config=LoraConfig(target_modules=["q_proj"], task_type=task))
    assert ("task_type='SEQ_CLS' is saved with the adapters" in caplog.text) == warned


def test_modules_that_peft_trains_whole_by_itself_are_no_fault(tmp_path):
    made = trainer(tmp_path, peft_config=LoraConfig(target_modules=["q_proj"], modules_to_save=["score", "lm_head"]))
    assert any("lm_head.modules_to_save" in name for name, _ in made.model.named_parameters())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_length": 10**30}, "max_length=1000000.* must be at most 9223372036854775807"),
        (
            {"torch_compile_backend": "inductr"},
            r"backend='inductr' is not one of .*did you mean 'inductor'",
        ),
        ({"memory_report": "."}, r"memory_report='.' is a folder: name a file"),
        ({"memory_report": f"{__file__}/report.json"}, r"report.json' is below the file '.*arguments.py': name a file"),
    ],
    ids=lambda each: next(iter(each)) if isinstance(each, dict) else "",
)
def test_an_option_that_would_fail_later_is_refused(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        config(tmp_path, **options)


def test_a_metric_that_no_evaluation_has_is_named(tmp_path):
    options = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "best", "metric_for_best_model": "bleu"}
    with pytest.raises(ValueError, match=r"`metric_for_best_model` .* 'eval_bleu', which is not found"):
        trainer(tmp_path, options, eval_dataset=ROWS).train()


def metrics_of_no_mapping(prediction: Any) -> Any:
    return "good"


def test_metrics_that_are_no_mapping_are_refused(tmp_path):
    made = trainer(tmp_path, {"eval_strategy": "steps"}, eval_dataset=ROWS, compute_metrics=metrics_of_no_mapping)
    with pytest.raises(ValueError, match="compute_metrics returned str: it must return a mapping"):
        made.evaluate()


@pytest.mark.parametrize("argument", ["compute_metrics", "compute_loss_func", "preprocess_logits_for_metrics"])
def test_what_a_function_that_was_passed_raises_says_whose_it_is(argument, tmp_path):
    def mine(*args: Any, **named: Any) -> Any:
        raise KeyError("nowhere")

    given: dict[str, Any] = {"compute_metrics": lambda prediction: {}} | {argument: mine}
    made = trainer(tmp_path, {"eval_strategy": "steps"}, eval_dataset=ROWS, **given)
    with pytest.raises(KeyError, match="nowhere") as raised:
        made.evaluate()
    [note] = raised.value.__notes__
    assert note.startswith(f"This was raised by {argument}, a function that was passed (")
    assert ".mine)" in note


@pytest.mark.parametrize(
    ("optim", "given", "message"),
    [
        ("adamw_torch", "momentum=0.5", "optim='adamw_torch' does not look at momentum"),
        ("adamw_torch_fused", "amsgrad=true,foreach=false", "does not look at amsgrad, foreach"),
        ("sgd", "momentum=0.5,nowhere=1", "optim='sgd' does not look at nowhere"),
        ("adafactor", "scale_parameter=true", "optim='adafactor' does not look at scale_parameter"),
        ("sgd", "momentum=0.5,nesterov=true", ""),
        ("rmsprop", "alpha=0.9", ""),
        ("galore_adamw", "rank=4,update_proj_gap=50,scale=0.25", ""),
        ("apollo_adamw", "rank=4,nowhere=1", "optim='apollo_adamw' does not look at nowhere"),
    ],
)
def test_arguments_that_an_optimizer_does_not_look_at_are_warned_of(optim, given, message, tmp_path, caplog):
    adapted = {"optim_target_modules": ["q_proj"]} if "_adamw" in optim else {}
    trainer(tmp_path, {"optim": optim, "optim_args": given, **adapted})
    said = [each.getMessage() for each in caplog.records if "optim_args" in each.getMessage()]
    assert (len(said) == 1 and message in said[0]) if message else not said


def test_a_value_that_an_optimizer_cannot_take_names_its_option(tmp_path):
    with pytest.raises(ValueError, match="optim_args='alpha=x' does not go with optim='rmsprop': could not convert"):
        trainer(tmp_path, {"optim": "rmsprop", "optim_args": "alpha=x"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"torch_compile_mode": "quick"}, "torch_compile_mode='quick' is not one of default, "),
        ({"learning_rate": 1e300}, "learning_rate=1e\\+300 must be finite and at least 0, and is inf in float32"),
        ({"weight_decay": 1e39}, "weight_decay=1e\\+39 must be .*, and is inf in float32"),
        ({"num_train_epochs": 1e10}, "num_train_epochs=10000000000.0 must be above 0 and at most 1000000000"),
        (
            {"num_train_epochs": 1e-300},
            "num_train_epochs=1e-300 must be above 0 and .*, and is 0 in",
        ),
        ({"optim_args": "a=b=c"}, "optim_args='a=b=c' must be of the form"),
        ({"dataloader_persistent_workers": True}, "dataloader_persistent_workers=True requires dataloader_num_workers"),
        (
            {"dataloader_multiprocessing_context": "fork"},
            "dataloader_multiprocessing_context='fork' requires dataloader_num_workers above 0",
        ),
        (
            {"num_train_epochs": 1e300},
            "num_train_epochs=1e\\+300 must be finite and above 0 and at most 10*, and is",
        ),
    ],
)
def test_an_option_that_means_nothing_is_refused(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        config(tmp_path, **options)
