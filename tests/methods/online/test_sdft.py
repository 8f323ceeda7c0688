"""Self-distillation fine-tuning: the teacher's prompts, what a run does with them, and what is refused. The loss is
compared with TRL's in `tests/parity/test_self_distillation_parity.py`, the divergence on likely tokens with dense
logits in `tests/ops/logits/test_divergence.py`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig

import lowtide
from lowtide.data.prompts import PromptEncoder
from lowtide.data.teacher_prompts import TeacherPromptEncoder
from lowtide.methods.online.self_taught import token_weights
from lowtide.rollout.generators.generator import Completion
from lowtide.rollout.rollout import Rollout
from tests.support.references.parity_world import build_model, lora, tokenizer, trained_before, user
from tests.support.runs.online_runs import assert_near, online, told_prompts, trained, weights

OPTIONS: dict[str, Any] = {"max_steps": 1, "num_generations": 2, "max_completion_length": 6, "optim": "sgd"}
OPTIONS |= {"arguments": {"train_dataset": told_prompts()}, "max_grad_norm": 0.0, "learning_rate": 1.0}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["topk_logits", "sampled_token"])
def test_micro_batches_pieces_and_repeated_prompts_change_nothing(mode, tmp_path):
    options = OPTIONS | {"distillation_mode": mode, "distillation_alpha": 1.0, "distillation_topk": 30}
    expected = weights(trained(tmp_path / "whole", "SDFT", **options))
    ways: list[dict[str, Any]] = [{"tokens_per_microbatch": 60, "prefix_sharing": False}, {"tokens_per_microbatch": 16}]
    for number, way in enumerate(ways):
        assert_near(weights(trained(tmp_path / f"parts {number}", "SDFT", **options, **way)), expected)


def test_the_teacher_reads_the_same_completions_after_its_own_prompts(tmp_path):
    prompts, taught = [[5, 6], [5, 6]], [[7, 8, 9], [4]]
    completions = [Completion([n, n + 1], [0.0] * 2, [0.0] * 2, [True] * 2) for n in (10, 20)]
    rollout = Rollout(prompts, completions, 0, learned=[True, False], teacher_prompts=taught)
    rollout.save(tmp_path / "rollout")
    found, _ = Rollout.load(tmp_path / "rollout")
    assert found.teacher_prompts == taught
    ours, theirs = found.batch(), found.taught.batch(sharing=False)
    assert ours.score_target.tolist() == theirs.score_target.tolist() == [10, 11]
    assert theirs.token_ids.tolist() == [7, 8, 9, 10, 11, 4, 20, 21]
    both = Rollout.concat([rollout, rollout])
    assert both.teacher_prompts == taught * 2


def test_prompts_of_the_teacher():
    encoder = TeacherPromptEncoder(tokenizer(), template="{privileged_context} -> {prompt}")
    plain = PromptEncoder(tokenizer())
    told = [{"role": "assistant", "content": "a{b}"}, {"role": "assistant", "content": [{"type": "text", "text": "c"}]}]
    assert encoder.of_row({"prompt": "x", "privileged_context": told}, 0) == plain("a{b}\nc -> x")
    talk = [{"role": "system", "content": "s"}, user("x")]
    assert encoder.of_row({"prompt": talk, "privileged_context": "y"}, 0) == plain([talk[0], user("y -> x")])
    with pytest.raises(ValueError, match=r"row 3: `privileged_context` is None"):
        encoder.of_row({"prompt": "x", "privileged_context": None}, 3)
    with pytest.raises(ValueError, match=r"row 2: the teacher's prompt .* ends with a message of the user"):
        encoder.of_row({"prompt": [*talk, {"role": "assistant", "content": "z"}], "privileged_context": "y"}, 2)


def test_completions_count_alike():
    assert token_weights(4, 0).tolist() == [0.25] * 4
    assert token_weights(4, 2).tolist() == [0, 0, 0.5, 0.5]
    assert token_weights(2, 3).tolist() == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["base", "ema"])
def test_adapters_alone_learn(kind, tmp_path):
    arguments = OPTIONS["arguments"] | {"peft_config": lora()}
    trainer = online(tmp_path, "SDFT", **OPTIONS | {"arguments": arguments}, teacher_model_kind=kind)
    before = weights(trainer)
    trainer.train()
    changed = {name for name, value in weights(trainer).items() if not torch.equal(value, before[name])}
    assert changed
    assert all("lora_" in name for name in changed)


def test_what_cannot_work_is_refused(tmp_path):
    for options, said in (
        ({"distillation_mode": "sampled_token"}, "distillation_alpha=0.5: set distillation_alpha=1"),
        ({"distillation_topk": None}, "requires distillation_topk"),
        ({"teacher_model_kind": "ema", "ref_model_storage": "8bit"}, "'ema' moves it"),
        ({"teacher_prompt_template": "{prompt}"}, "has no place {privileged_context}"),
        ({"teacher_prompt_template": "{prompt}{privileged_context}{x}"}, "can't be filled in"),
        ({"teacher_model_kind": "other"}, "teacher_model_kind='other'"),
    ):
        with pytest.raises(ValueError, match=said):
            lowtide.SDFTConfig(output_dir=str(tmp_path), use_cpu=True, **options)  # type: ignore[arg-type]
    without = told_prompts().remove_columns("privileged_context")
    with pytest.raises(ValueError, match="no column `privileged_context`"):
        online(tmp_path, "SDFT", arguments={"train_dataset": without})


def test_a_trained_head_does_not_read_the_states_of_the_policy_as_it_arrived(tmp_path):
    model = trained_before(build_model("llama").double(), LoraConfig(r=4, target_modules=["q_proj", "lm_head"]))
    with pytest.raises(ValueError, match="of the head is trained, and the teacher is the policy as it was before"):
        online(tmp_path, "SDFT", model=model, **OPTIONS)
