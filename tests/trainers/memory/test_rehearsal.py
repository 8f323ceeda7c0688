"""The rehearsal: the heaviest micro-batch runs first, leaves nothing behind, and no step needs more."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from datasets import Dataset

from lowtide.data.batches.heaviest import heaviest_rows, row_lengths
from lowtide.memory.allocators.settings import steady_malloc
from lowtide.planner.profiling.live_storages import LiveStorages
from lowtide.step.rank_sync import OutOfMemory
from lowtide.step.rehearsal import rehearse
from tests.support.marks import slow_but
from tests.support.matrix.matrix import COMMON, build, check_equal, classes, folder, make, tokenizer, watched
from tests.support.matrix.matrix_models import TASKS
from tests.support.runs.sabotage import out_of_memory
from tests.support.runs.small_sft import trainer


def test_the_heaviest_rows_are_the_longest_that_go_together_and_those_that_fill_the_budget():
    lengths = np.array([3, 9, 1, 8, 5, 9])
    assert heaviest_rows(lengths, 3, None) == [[1, 3, 5]]
    assert heaviest_rows(lengths, 3, 20) == [[1, 2, 5]]
    assert heaviest_rows(lengths, 3, 13) == [[0, 1, 2]]
    assert heaviest_rows(lengths, 1, 9) == [[1]]
    assert heaviest_rows(np.array([300, 200, 250, 120]), 4, 400) == [[0], [2, 3]]


def test_lengths_are_of_all_columns_of_tokens():
    tokens = {"prompt_ids": [[1, 2], [3]], "chosen_ids": [[1], [1, 2, 3]], "rejected_ids": [[1], [4]]}
    data = Dataset.from_dict({**tokens, "margin": [0.0, 1.0]})
    assert row_lengths(data).tolist() == [4, 5]
    assert row_lengths(data.select([1])).tolist() == [5]
    assert row_lengths(data, SimpleNamespace(sharing=False)).tolist() == [6, 6]
    assert row_lengths(iter([])) is None


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"tokens_per_microbatch": 40}], ids=str)
def test_it_leaves_nothing_behind(tmp_path, options):
    runs = []
    for on in (True, False):
        runs.append(trainer(tmp_path, rehearsal=on, **options))
        runs[-1].train()
    with_it, without = runs
    assert with_it.rehearsed_bytes
    assert without.rehearsed_bytes is None
    theirs = dict(without.model.named_parameters())
    assert all(torch.equal(p, theirs[name]) for name, p in with_it.model.named_parameters())
    assert with_it.state.log_history[-1]["train_loss"] == without.state.log_history[-1]["train_loss"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", TASKS)
def test_every_task_is_rehearsed_and_learns_the_same(kind):
    found, expected = (watched(make(kind, rehearsal=on)) for on in (True, False))
    assert found.trainer.rehearsed_bytes
    check_equal(found, expected, bits=True)


def test_a_model_that_was_loaded_is_rehearsed_as_it_trains(tmp_path):
    """A loaded model is in evaluation mode, in which layers keep all their activations."""
    run = trainer(tmp_path, max_steps=1)
    run.model.eval()
    modes = []
    run.model.model.layers[0].register_forward_pre_hook(lambda layer, _: modes.append(layer.training))
    run.train()
    assert len(modes) > 2  # the rehearsal's micro-batches and the step's
    assert all(modes)


@pytest.mark.slow
def test_what_will_not_fit_is_found_before_the_first_step(tmp_path):
    run = trainer(tmp_path)
    with out_of_memory(run.model, "forward", 0) as fired:
        run.train()
    assert fired == ["forward"]
    assert run.limits.tokens < 4 * 30  # half of what the rehearsal could not run

    run = trainer(tmp_path, per_device_train_batch_size=1)
    with out_of_memory(run.model, "forward", 0), pytest.raises(OutOfMemory, match="one row of 26 tokens"):
        run.train()
    assert run.state.global_step == 0


@pytest.mark.parametrize("sharing", [True, False])
def test_the_heaviest_pair_is_the_one_whose_prompt_is_repeated(sharing):
    """A long prompt weighs twice where it is computed for each completion."""
    pairs = [{"prompt": "p" * 40, "chosen": "c", "rejected": "r"}] * 4
    pairs += [{"prompt": "p", "chosen": "c" * 25, "rejected": "r" * 25}] * 4
    kind, config = classes("DPO")
    options = {**COMMON, "rehearsal": True, "prefix_sharing": sharing, "per_device_train_batch_size": 4}
    args = config(output_dir=str(folder()), **{**options, "max_steps": 2, "precompute_ref_log_probs": True})
    kind.prepared.clear()  # of other rows
    run = watched(
        kind(model=build("DPO", 64), args=args, train_dataset=Dataset.from_list(pairs), processing_class=tokenizer())
    )
    kind.prepared.clear()
    *_, rehearsed, first, second = run.forwards
    assert rehearsed == max(first, second) > min(first, second)


SCRIPT = """
import json, sys
import torch
torch.set_num_threads(1)
from datasets import Dataset
from transformers import AutoModelForCausalLM, LlamaConfig
from lowtide import SFTConfig, SFTTrainer
from lowtide.memory.allocators.measure import peak_bytes
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=512, hidden_size=256, intermediate_size=1024,
    num_hidden_layers=4, num_attention_heads=4))
lengths = [256] * 4 + [32] * 60
data = Dataset.from_dict({"input_ids": [[7] * n for n in lengths], "labels": [[7] * n for n in lengths]})
args = SFTConfig(sys.argv[1], per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=8, use_cpu=True,
    report_to="none", save_strategy="no", disable_tqdm=True, dataset_kwargs={"skip_prepare_dataset": True},
    gradient_checkpointing=False, train_sampling_strategy="sequential")
run = SFTTrainer(model, args, train_dataset=data)
before = peak_bytes(torch.device("cpu"))
run.train()
print(json.dumps([before, run.rehearsed_bytes, peak_bytes(torch.device("cpu"))]))
"""


@pytest.mark.slow
def test_no_step_needs_more_than_the_rehearsed_peak(tmp_path):
    steady = os.environ | steady_malloc({})
    out = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, env=steady)
    assert out.returncode == 0, out.stderr
    before, rehearsed, peak = json.loads(out.stdout.strip().split("\n")[-1])
    assert rehearsed - before > 100e6
    assert peak - before <= 1.03 * (rehearsed - before)


CASES = {
    "plain": {},
    "several micro-batches": {"gradient_accumulation_steps": 2},
    "in a budget": {"tokens_per_microbatch": 90},
    "checkpointed": {"gradient_checkpointing": True},
    "in backward": {"optimizer_in_backward": True, "max_grad_norm": 0.0},
    "in two passes": {"optimizer_in_backward": "two_pass"},
    "compressed": {"optim": "adamw_compressed"},
    "stochastic": {"optim": "adamw_stochastic_8bit"},
    "prompts repeated": {"prefix_sharing": False},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(["several micro-batches"], CASES))
@pytest.mark.parametrize("kind", slow_but(["DPO"], ["SFT", "DPO", "KTO"]))
def test_no_tensors_of_a_step_take_more_than_the_rehearsed_ones(kind, name, monkeypatch):
    if kind == "SFT" and name == "prompts repeated":
        pytest.skip("its rows have no prompts")
    run = make(kind, **{**CASES[name], "rehearsal": True, "max_steps": 4})
    ends = []

    def rehearsed(*args):
        found = rehearse(*args)
        ends.append(len(recorder.recording.change))
        return found

    monkeypatch.setattr("lowtide.trainers.steps.rehearse", rehearsed)
    with LiveStorages() as recorder:
        run.train()
    held = np.cumsum(recorder.finished().change)
    (end,) = ends
    # micro-batches of as many tokens differ in how many of them are scored
    within = 1.05 if name == "in a budget" else 1.01
    assert held[end:].max() <= within * held[:end].max()


def test_what_is_only_scored_does_not_count_among_what_goes_backward():
    run = make("KTO")
    rows = run.train_dataset
    prompts, own, other = (
        np.array([len(each) for each in rows[name]]) for name in ("prompt_ids", "completion_ids", "kl_completion_ids")
    )
    assert (run.row_lengths() == prompts + own + other).all()
    assert (run.row_lengths(trained=True) == prompts + own).all()
    assert (make("KTO", prefix_sharing=False).row_lengths(trained=True) == prompts + own).all()
