"""Callbacks under TRL's names: the numbers of TRL's own, and a training that they leave as it is."""

import copy
import warnings
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from transformers import GenerationConfig

import lowtide
from lowtide import LogCompletionsCallback
from lowtide.demo.model import make_model, make_tokenizer
from lowtide.trainers.callbacks.log_completions import prompts_of
from lowtide.trainers.reports.progress import RichProgress
from tests.support.runs.talking import TALK, trainer

OPENING = "<|im_start|>user\n1 + 1<|im_end|>\n<|im_start|>assistant\n"


def moved(model, step):
    """The model with other weights, as after a step."""
    generator = torch.Generator().manual_seed(step)
    for weight in model.parameters():
        weight.data += 0.1 * torch.randn(weight.shape, generator=generator)


@pytest.mark.parametrize(
    "options",
    [{"update_freq": 1}, {"update_freq": 2, "update_after": 1}, {"update_freq": 1, "min_ema_multiplier": 0.9}],
)
def test_averaged_weights_are_trls(options, tmp_path):
    trl = pytest.importorskip("trl", reason="the comparison needs the bench extra (trl)")
    model = make_model(make_tokenizer(), seed=0)
    args, made = SimpleNamespace(output_dir=str(tmp_path)), []
    for library in (lowtide, trl):
        policy, callback = copy.deepcopy(model), library.BEMACallback(**options)
        callback.on_train_begin(args, None, None, model=policy)
        for step in (1, 2, 3, 4):
            moved(policy, step)
            callback.on_step_end(args, SimpleNamespace(global_step=step), None, model=policy)
        made.append(callback)
    ours, theirs = (dict(each.running_model.named_parameters()) for each in made)
    for name, weight in ours.items():
        torch.testing.assert_close(weight, theirs[name])
    made[0].on_train_end(args, SimpleNamespace(is_world_process_zero=True), None)
    assert (tmp_path / "bema" / "model.safetensors").is_file()


def test_with_frozen_weights_the_others_are_averaged():
    policy = make_model(make_tokenizer(), seed=0)
    policy.model.embed_tokens.weight.requires_grad_(False)  # TRL stops at a model with some
    start, callback = copy.deepcopy(policy), lowtide.BEMACallback(update_freq=1)
    callback.on_train_begin(None, None, None, model=policy)
    moved(policy, 1)
    callback.on_step_end(None, SimpleNamespace(global_step=1), None, model=policy)
    name = "model.layers.0.mlp.up_proj.weight"
    assert callback.running_model.get_parameter("model.embed_tokens.weight").equal(start.model.embed_tokens.weight)
    assert not callback.running_model.get_parameter(name).equal(start.get_parameter(name))


def test_a_reference_follows_as_trls_does():
    trl = pytest.importorskip("trl", reason="the comparison needs the bench extra (trl)")
    policy, reference = (make_model(make_tokenizer(), seed) for seed in (0, 1))
    args = SimpleNamespace(ref_model_sync_steps=2, ref_model_mixup_alpha=0.6)
    found = []
    for library in (lowtide, trl):
        following = copy.deepcopy(reference)
        callback = library.SyncRefModelCallback(following, accelerator=None)
        callback.on_step_end(args, SimpleNamespace(global_step=1), None, model=policy)
        assert all(map(torch.equal, following.parameters(), reference.parameters()))
        following = callback.ref_model
        if library is trl:
            callback._sync_target_model(policy, following, args.ref_model_mixup_alpha)
        else:
            callback.on_step_end(args, SimpleNamespace(global_step=2), None, model=policy)
        found.append(following)
    for ours, theirs in zip(found[0].parameters(), found[1].parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_completions_are_logged_and_training_goes_on_as_without_them(tmp_path, capsys):
    plain = trainer(tmp_path, disable_tqdm=True, learning_rate=1e-2)
    plain.train()
    capsys.readouterr()
    watched = trainer(tmp_path, disable_tqdm=True, learning_rate=1e-2)
    config = GenerationConfig(max_new_tokens=3, do_sample=False)
    callback = LogCompletionsCallback(watched, config, num_prompts=2, freq=2)
    watched.add_callback(callback)
    watched.train()
    assert [(step, prompt) for step, prompt, _ in callback.table] == [("2", OPENING)] * 2
    tokenizer, prompt = watched.processing_class, callback.table[0][1]
    inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    inputs.pop("token_type_ids", None)
    written = plain.model.eval().generate(**inputs, generation_config=config)
    expected = tokenizer.decode(written[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert callback.table[0][2] == expected
    assert "Completions" in capsys.readouterr().err  # no tracker is reported to
    assert all(map(torch.equal, watched.model.parameters(), plain.model.parameters()))


def test_prompts_come_from_rows_of_any_kind():
    tokenizer = make_tokenizer()
    ids = tokenizer(OPENING, add_special_tokens=False)["input_ids"]
    rows = [
        {"prompt": TALK["prompt"]},
        {"prompt": OPENING},
        {"prompt_ids": ids},
        {"input_ids": [*ids, 7], "labels": [-100] * len(ids) + [7]},
    ]
    assert [prompts_of(Dataset.from_list([row]), tokenizer) for row in rows] == [[OPENING]] * 4


def test_what_has_no_prompts_is_refused(tmp_path):
    for rows, message in ((None, "pass one to it"), (Dataset.from_dict({"text": ["a"]}), "reads the column `prompt`")):
        with pytest.raises(ValueError, match=message):
            LogCompletionsCallback(SimpleNamespace(eval_dataset=rows))


def test_a_progress_bar_that_is_passed_is_the_only_one(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = trainer(tmp_path, lowtide.RichProgressCallback())
    assert [type(each) for each in made.callback_handler.callbacks if isinstance(each, RichProgress)] == [
        lowtide.RichProgressCallback
    ]
    assert any(isinstance(each, RichProgress) for each in trainer(tmp_path).callback_handler.callbacks)
