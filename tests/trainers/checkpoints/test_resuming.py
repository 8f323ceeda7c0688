"""What a checkpoint holds: a killed run, resumed, is the run that was not killed, and the best model is found again."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import Trainer, TrainerCallback

from lowtide.memory.optimizers.low_rank import loading_projectors
from lowtide.trainers.hooks import LowtideTrainer
from tests.support.marks import slow_but
from tests.support.matrix.matrix import LOW_RANK, Run, check_equal, classes, make, rows, tokenizer
from tests.support.matrix.matrix_models import TASKS


class Kill(TrainerCallback):
    """Ends a run after its third step, as a kill would."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3:
            raise KeyboardInterrupt


def resumed(kind: str, folder: Path, **options: Any) -> tuple[Run, Run]:
    """A run of five steps, and one that was killed after step 3 and goes on from its checkpoint of step 2."""
    options |= {"train_sampling_strategy": "random", "save_strategy": "steps", "save_steps": 2}
    whole = trained(make(kind, output_dir=str(folder / "whole"), **options))
    killed = make(kind, output_dir=str(folder / "killed"), **options)
    killed.add_callback(Kill())
    with pytest.raises(KeyboardInterrupt):
        killed.train()
    again = make(kind, output_dir=str(folder / "killed"), **options)
    found = trained(again, resume_from_checkpoint=True)
    assert again.state.global_step == 5
    return whole, found


def trained(trainer: Any, **options: Any) -> Run:
    """A training whose modules nothing looks at, so that layers run as they do for a user."""
    trainer.train(**options)
    trainer.run.weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    return trainer.run


def check_same(whole: Run, again: Run) -> None:
    """From step 3 on they are one run, bit by bit."""
    assert whole.losses[2:] == again.losses
    whole.losses = again.losses
    check_equal(again, whole, bits=True)


IN_BACKWARD = {"optimizer_in_backward": True, "max_grad_norm": 0.0}


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    slow_but(
        [{"optim": "adamw_compressed", **IN_BACKWARD}],
        [
            {"optim": "adamw_compressed"},
            {"optim": "adamw_stochastic_8bit", "intermediate_size": 160},
            IN_BACKWARD,
            {"optim": "adamw_compressed", **IN_BACKWARD},
            {"optim": "adamw_stochastic_8bit", "intermediate_size": 160, **IN_BACKWARD},
            {"optim": "adamw_flash", "intermediate_size": 160},
            {"optim": "adamw_flash", "intermediate_size": 160, **IN_BACKWARD},
            {"optim": "muon"},
            {"optim": "muon", **IN_BACKWARD},
        ],
    ),
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_states_of_our_own_optimizers_go_on(options, tmp_path):
    check_same(*resumed("SFT", tmp_path, **options))


@pytest.mark.slow
@pytest.mark.parametrize("kind", TASKS)
def test_every_task_goes_on(kind, tmp_path):
    check_same(*resumed(kind, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("optim", slow_but(["galore_adamw"], ["galore_adamw", "galore_adafactor", "apollo_adamw"]))
@pytest.mark.parametrize("more", slow_but([{}], [{}, IN_BACKWARD]), ids=["", "in backward"])
def test_projections_of_gradients_go_on(optim, more, tmp_path):
    pytest.importorskip("galore_torch" if "galore" in optim else "apollo_torch")
    arguments = "rank=16,update_proj_gap=3,scale=2"  # the matrix of step 1 serves the steps after the kill too
    check_same(*resumed("SFT", tmp_path, **LOW_RANK | {"optim": optim, "optim_args": arguments}, **more))


def test_a_projection_comes_to_its_parameters_device():
    module = pytest.importorskip("galore_torch.galore_projector")
    parameter = nn.Parameter(torch.empty(4, 4, device="meta"))
    optimizer = torch.optim.SGD([parameter])
    projector = module.GaLoreProjector(rank=2, proj_type="full")
    projector.ortho_matrix = [torch.ones(4, 2), torch.ones(2, 4)]
    with loading_projectors(optimizer):
        optimizer.state[parameter]["projector"] = projector
    assert [matrix.device.type for matrix in projector.ortho_matrix] == ["meta", "meta"]
    assert projector.rank == 2


MOVING = {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["DPO", "KTO"])
def test_a_reference_that_moves_goes_on_from_where_it_was(kind, tmp_path):
    whole, again = resumed(kind, tmp_path, **MOVING)
    check_same(whole, again)
    theirs = again.trainer.reference.model.state_dict()
    assert all(torch.equal(value, theirs[name]) for name, value in whole.trainer.reference.model.state_dict().items())


def test_a_reference_that_does_not_move_is_in_no_checkpoint(tmp_path):
    make("DPO", output_dir=str(tmp_path), save_strategy="steps", max_steps=1, save_steps=1).train()
    assert not (tmp_path / "checkpoint-1" / "reference.safetensors").exists()


def test_a_checkpoint_without_the_reference_that_moved_is_refused(tmp_path):
    make("DPO", output_dir=str(tmp_path), save_strategy="steps", max_steps=1, save_steps=1).train()
    moving = make("DPO", output_dir=str(tmp_path), **MOVING)
    with pytest.raises(ValueError, match=r"checkpoint-1 has no reference\.safetensors: .* start a new run"):
        moving.train(resume_from_checkpoint=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", slow_but(["SFT"], ["SFT", "DPO"]))
def test_tokens_are_counted_on(kind, tmp_path):
    # Those of step 1 are logged, those of step 2 are in the checkpoint only.
    whole, again = resumed(kind, tmp_path, logging_steps=3)
    counted = [
        {entry["step"]: entry["num_tokens"] for entry in run.trainer.state.log_history if "num_tokens" in entry}
        for run in (whole, again)
    ]
    assert counted[0] == counted[1]
    assert counted[0][3] > 0


class OutOnce:
    """A forward that runs out of memory once."""

    def __init__(self, model: Any):
        self.left = 1
        model.model.norm.register_forward_hook(self)

    def __call__(self, *_: Any) -> None:
        if self.left:
            self.left -= 1
            raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize("option", [None, 10_000])
def test_a_budget_that_an_out_of_memory_made_smaller_stays(option, tmp_path):
    options = {"output_dir": str(tmp_path), "tokens_per_microbatch": option}
    first = make("SFT", **options, save_strategy="steps", save_steps=1, max_steps=1)
    OutOnce(first.model)
    first.train()
    smaller = first.runner.token_budget
    assert smaller < 10_000
    second = make("SFT", **options, max_steps=2)
    run = watched_on(second)
    assert second.runner.token_budget == smaller
    assert len(run.forwards) > 1
    assert max(run.forwards) <= smaller
    third = make("SFT", **options | {"tokens_per_microbatch": smaller - 1}, max_steps=2)
    watched_on(third)
    assert third.runner.token_budget == smaller - 1


def test_a_budget_that_held_may_be_raised_for_the_rest_of_a_run(tmp_path):
    options = {"output_dir": str(tmp_path), "rehearsal": True}
    make("SFT", **options, tokens_per_microbatch=100, save_strategy="steps", save_steps=1, max_steps=1).train()
    second = make("SFT", **options, tokens_per_microbatch=10_000, max_steps=2)
    watched_on(second)
    assert second.limits.tokens == 10_000


def watched_on(trainer: Any) -> Run:
    """A training that goes on from the last checkpoint, with the tokens of its forwards."""
    trainer.model.get_input_embeddings().register_forward_pre_hook(
        lambda _, inputs: trainer.run.forwards.append(inputs[0].numel())
    )
    trainer.train(resume_from_checkpoint=True)
    return trainer.run


# -- the best model --------------------------------------------------------------------------------------------------


def judged(kind: str, folder: Path, limit: int | None, steps: int, scores: list[float]) -> Any:
    """A trainer that saves after each step, and is told how good it is then."""
    trainer_class, config_class = classes(kind)
    model = make(kind).model
    given = iter(scores)
    return trainer_class(
        model=model,
        args=config_class(
            output_dir=str(folder),
            per_device_train_batch_size=8,
            per_device_eval_batch_size=16,
            max_steps=steps,
            learning_rate=2e-3,
            lr_scheduler_type="constant",
            eval_strategy="steps",
            eval_steps=1,
            save_strategy="steps",
            save_steps=1,
            save_total_limit=limit,
            load_best_model_at_end=True,
            metric_for_best_model="score",
            greater_is_better=True,
            rehearsal=False,
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            bf16=False,
        ),
        train_dataset=rows(kind),
        eval_dataset=rows(kind),
        processing_class=tokenizer(),
        compute_metrics=lambda _: {"score": next(given)},
    )


def best_named_in(folder: Path) -> dict[str, str | None]:
    """By checkpoint, the best one that its state names."""
    states = {each.name: json.loads((each / "trainer_state.json").read_text()) for each in folder.glob("checkpoint-*")}
    return {name: state["best_model_checkpoint"] for name, state in states.items()}


SCORES = [1.0, 3.0, 2.0, 0.0]
"""Of the four steps of a run; the second is the best."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", slow_but(["SFT"], ["SFT", "DPO"]))
@pytest.mark.parametrize("limit", slow_but([1], [None, 1, 2]))
def test_the_best_model_is_kept_and_loaded_as_transformers_does(kind, limit, tmp_path, monkeypatch):
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    trainer = judged(kind, ours, limit, 4, SCORES)
    trainer.train()
    with monkeypatch.context() as patch:
        patch.setattr(LowtideTrainer, "_save_checkpoint", Trainer._save_checkpoint)
        patch.setattr(LowtideTrainer, "_finalize_training", Trainer._finalize_training)
        expected = judged(kind, theirs, limit, 4, SCORES)
        expected.train()
    best = ours / "checkpoint-2"
    assert trainer.state.best_model_checkpoint == str(best)
    assert trainer.state.best_global_step == 2
    named = best_named_in(ours)
    assert named == {name: path and path.replace("theirs", "ours") for name, path in best_named_in(theirs).items()}
    assert named["checkpoint-2"] == str(best)
    saved = load_file(best / "model.safetensors")
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(parameter, saved[name])
        assert torch.equal(parameter, expected.model.get_parameter(name))


@pytest.mark.slow
@pytest.mark.parametrize("limit", [None, 1, 2])
@pytest.mark.parametrize("killed", [2, 3])
def test_the_best_model_of_before_a_kill_is_the_best_after_it(limit, killed, tmp_path):
    first = judged("SFT", tmp_path, limit, 4, SCORES)
    first.add_callback(KillAfterSaving(killed))
    with pytest.raises(KeyboardInterrupt):
        first.train()
    assert f"checkpoint-{killed}" in os.listdir(tmp_path)
    saved = load_file(tmp_path / "checkpoint-2" / "model.safetensors")
    again = judged("SFT", tmp_path, limit, 4, SCORES[killed:])
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 4
    assert again.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")
    assert all(torch.equal(p, saved[name]) for name, p in again.model.named_parameters())


class KillAfterSaving(TrainerCallback):
    """Ends a run when the checkpoint of a step is there."""

    def __init__(self, step: int):
        self.step = step

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise KeyboardInterrupt
