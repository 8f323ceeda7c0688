"""On-policy distillation in its trainer: against the dense computation in float64, what does not change its numbers,
what only one of the two models knows, and what is refused."""

from __future__ import annotations

from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F
from peft import get_peft_model
from torch import Tensor

import lowtide
from lowtide.rollout.generators.generator import Completion
from tests.support.marks import slow_but
from tests.support.references.parity_world import build_model, lora, tokenizer
from tests.support.runs.distilling import build_teacher, losses, other_tokens
from tests.support.runs.online_runs import assert_near, online, prompts, trained, weights

METHOD = "Distillation"
CUTS: dict[str, dict[str, Any]] = {
    "accumulated": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8},
    "within a token budget": {"tokens_per_microbatch": 60},
    "rows in pieces": {"tokens_per_microbatch": 20},
    "prompts repeated": {"prefix_sharing": False},
    "rehearsed": {"rehearsal": True},
    "checkpointed": {"gradient_checkpointing": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("cut", slow_but(["accumulated"], CUTS))
def test_however_a_step_is_cut_it_learns_the_same(cut, tmp_path):
    whole = trained(tmp_path / "whole", METHOD, beta=0.5)
    parts = trained(tmp_path / "parts", METHOD, beta=0.5, **CUTS[cut])
    assert_near(weights(parts), weights(whole))


def dense_loss(student: Any, teacher: Any, rows: list[tuple[list[int], list[int]]], beta: float, heat: float) -> Tensor:
    """Whole logits of both models, a completion at a time."""
    found = []
    for prompt, completion in rows:
        ids, span = torch.tensor([[*prompt, *completion]]), slice(len(prompt) - 1, -1)
        log_q, log_p = (torch.log_softmax(model(ids).logits[0, span] / heat, -1) for model in (student, teacher))
        if beta in (0.0, 1.0):
            a, b = (log_p, log_q) if beta == 0 else (log_q, log_p)
            found.append((a.exp() * (a - b)).sum(-1))
            continue
        log_m = torch.log(beta * log_p.exp() + (1 - beta) * log_q.exp())
        of_p, of_q = (F.kl_div(log_m, each, reduction="none", log_target=True).sum(-1) for each in (log_p, log_q))
        found.append(beta * of_p + (1 - beta) * of_q)
    return torch.cat(found).mean()


@pytest.mark.parametrize("beta", slow_but([0.3], [0.0, 0.3, 1.0]))
def test_loss_and_gradients_are_those_of_whole_logits(beta, tmp_path):
    options = {"beta": beta, "temperature": 0.7, "max_steps": 1, "max_grad_norm": 0.0, "optim": "sgd"}
    trainer = online(tmp_path, METHOD, **options, num_generations=2, learning_rate=1.0)
    seen: list[Any] = []
    finish = trainer.maker.finish
    trainer.maker.finish = lambda *given, **named: (seen.append(finish(*given, **named)), seen[-1])[1]
    start = weights(trainer)
    trainer.train()
    rollout = seen[0].rollout
    rows = [(prompt, each.token_ids) for prompt, each in zip(rollout.prompts, rollout.completions, strict=True)]
    student, teacher = build_model("llama").double(), build_teacher()
    loss = dense_loss(student, teacher, rows, beta, 0.7)
    loss.backward()
    assert losses(trainer).item() == pytest.approx(loss.item(), rel=1e-6)
    moved = weights(trainer)
    for name, parameter in student.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(start[name] - moved[name], parameter.grad, rtol=1e-5, atol=1e-8, msg=name)


@pytest.mark.slow
def test_a_student_comes_closer_to_its_teacher(tmp_path):
    trainer = trained(tmp_path, METHOD, max_steps=12, learning_rate=5e-3)
    assert losses(trainer)[-1] < 0.7 * losses(trainer)[0]


def test_nothing_is_rewarded_and_the_log_says_what_was_written(tmp_path):
    trainer = trained(tmp_path, METHOD, max_steps=1, log_completions=True)
    entry = trainer.state.log_history[0]
    assert {"loss", "entropy", "completions/mean_length", "completions/clipped_ratio", "num_tokens"} <= entry.keys()
    assert not [name for name in entry if "reward" in name]
    lines = dict(trainer.report_lines())
    assert lines["teacher"].startswith("the teacher Qwen2ForCausalLM, ")
    assert lines.keys() == {"teacher", "written by", "rollout"}
    assert not any(p.requires_grad for p in trainer.teacher_model.parameters())
    (file,) = (tmp_path / "completions").glob("*.parquet")
    assert pq.read_table(file).column_names == ["step", "prompt", "completion"]


@pytest.mark.slow
def test_with_adapters_the_model_without_them_can_teach(tmp_path):
    """As a copy of it does."""

    def adapted() -> Any:
        torch.manual_seed(3)
        return get_peft_model(build_model("llama").double(), lora(init_lora_weights=False)).double()

    teachers = {"own": None, "copy": build_model("llama").double()}
    own, copied = (
        trained(tmp_path / name, METHOD, model=adapted(), arguments={"teacher_model": teacher})
        for name, teacher in teachers.items()
    )
    assert losses(own).min() > 0
    assert_near(weights(own), weights(copied))


@pytest.mark.slow
def test_evaluation_writes_its_own_completions(tmp_path):
    held_out = {"eval_dataset": prompts(6)}
    trainer = online(tmp_path, METHOD, arguments=held_out, per_device_eval_batch_size=4)
    found, again = trainer.evaluate(), trainer.evaluate()
    assert found["eval_loss"] == again["eval_loss"] > 0
    assert found["eval_completions/mean_length"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 2])
def test_resumed_anywhere_the_bits_are_the_same(step, tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 1}
    options = {"num_iterations": 2, "gradient_accumulation_steps": 1, "steps_per_generation": 2}
    whole = trained(tmp_path / "whole", METHOD, **options)
    first = online(tmp_path / "parts", METHOD, **options, **saving)
    first.args.max_steps = step
    first.train()
    second = online(tmp_path / "parts", METHOD, **options, **saving)
    second.train(resume_from_checkpoint=str(tmp_path / "parts" / f"checkpoint-{step}"))
    assert_near(weights(second), weights(whole), 0.0)


# -- vocabularies ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "kept"), [([5, 6, 7], [5, 6, 7]), ([5, 330, 7], [5]), ([330, 6], [2])])
def test_a_completion_ends_before_a_token_that_the_teacher_has_not(tokens, kept):
    each = Completion(tokens, [-1.0] * len(tokens), [-1.0] * len(tokens), [True] * len(tokens), "stop")
    found = each.before(320, 2)
    assert found.token_ids == kept
    assert len(found.logprobs) == len(found.plain_logprobs) == len(found.written) == len(kept)


def test_a_student_with_further_rows_writes_what_both_know(tmp_path):
    """And learns as one without these rows does, of which both distributions are."""
    wide = build_model("llama")
    wide.resize_token_embeddings(384)
    wide.lm_head.weight.data[320:] *= 4  # mostly these are drawn
    trainer = online(tmp_path, METHOD, model=wide.double(), max_steps=1)
    rows = [dict(trainer.train_dataset[row]) for row in (0, 0, 1, 1)]
    made = trainer.maker.make(rows, (0, 0, 0), group=2, version=0)
    assert all(max(each.token_ids) < 320 for each in made.rollout.completions)
    trainer.train()
    assert losses(trainer).isfinite().all()


@pytest.mark.slow
def test_a_teacher_that_cannot_share_prompts_gets_them_padded(tmp_path):
    dynamic = build_teacher(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0})
    found = trained(tmp_path / "a", METHOD, arguments={"teacher_model": dynamic})
    assert (found.padding_free, found.reference.padding_free) == (True, False)
    whole = trained(tmp_path / "b", METHOD, arguments={"teacher_model": dynamic}, prefix_sharing=False)
    assert whole.reference.padding_free
    assert_near(weights(found), weights(whole))


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_no_teacher_is_refused(tmp_path):
    with pytest.raises(ValueError, match="there is no teacher: set teacher_model_name_or_path"):
        online(tmp_path, METHOD, arguments={"teacher_model": None})


def test_a_teacher_of_other_tokens_is_refused(tmp_path):
    build_teacher().save_pretrained(tmp_path / "teacher")
    other_tokens().save_pretrained(tmp_path / "teacher")
    with pytest.raises(ValueError, match=r"the tokenizer of teacher_model .* gives other ids"):
        online(tmp_path, METHOD, arguments={"teacher_model": str(tmp_path / "teacher")})


def test_a_revision_is_of_a_teacher_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"teacher_model_revision='main' is for a teacher that is loaded by its name"):
        online(tmp_path, METHOD, teacher_model_revision="main")
    build_teacher().save_pretrained(tmp_path / "teacher")
    tokenizer().save_pretrained(tmp_path / "teacher")
    named = {"arguments": {"teacher_model": str(tmp_path / "teacher")}, "teacher_model_revision": "main"}
    assert online(tmp_path, METHOD, **named).teacher_model is not None
    with pytest.raises(ValueError, match="two revisions of the teacher"):
        online(tmp_path, METHOD, **named, teacher_model_init_kwargs={"revision": "other"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beta": 1.5}, "beta"),
        ({"temperature": 0.0}, "temperature"),
        ({"max_completion_length": None}, "max_completion_length"),
        ({"num_generations": 3, "per_device_train_batch_size": 4}, "num_generations=3 does not divide"),
        ({"reward_weights": [1.0]}, "reward_weights"),
    ],
)
def test_options_that_cannot_work_are_refused(options, message, tmp_path):
    with pytest.raises((ValueError, TypeError), match=message):
        lowtide.DistillationConfig(output_dir=str(tmp_path), use_cpu=True, **options)


def test_a_reward_is_refused(tmp_path):
    with pytest.raises((ValueError, TypeError), match="reward_funcs"):
        online(tmp_path, METHOD, arguments={"reward_funcs": len})
