"""Settings of transformers' `generate` in generation_kwargs: that writes, and log-probs are those of the policy."""

from __future__ import annotations

import pytest
import torch
from transformers import GenerationConfig

from lowtide.engine.reference import logprobs
from tests.support.marks import slow_but
from tests.support.runs.online_runs import assert_near, online, trained, weights

BEAMS = {"do_sample": False, "num_beams": 3, "length_penalty": -0.1}


def written(trainer, count=2):
    rows = [dict(trainer.train_dataset[row]) for row in range(count) for _ in range(4)]
    return trainer.maker.make(rows, (0, 0, 0), group=4, version=0).rollout


def test_beams_are_those_of_generate(tmp_path):
    trainer = online(tmp_path, generation_kwargs=BEAMS, num_iterations=2)
    assert "transformers' generate, since the model is to write by num_beams, length_penalty" in trainer.written_by
    rollout = written(trainer)
    for prompt, completion in zip(rollout.prompts[::4], rollout.completions[::4], strict=True):
        config = GenerationConfig(
            **BEAMS, max_new_tokens=12, pad_token_id=0, eos_token_id=trainer.maker.writer.stop_ids, use_cache=True
        )
        ids = torch.tensor([prompt])
        trainer.model.eval()
        expected = trainer.model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        found = completion.token_ids
        assert found == expected[0, len(prompt) :][: len(found)].tolist()


def test_what_is_compared_with_is_scored_by_the_policy(tmp_path):
    trainer = online(tmp_path, generation_kwargs={"num_beams": 2, "no_repeat_ngram_size": 3}, num_iterations=2)
    batch = written(trainer).batch()
    expected = logprobs(trainer.model, batch, padding_free=True)
    torch.testing.assert_close(batch.score_values["old"].double(), expected, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("method", slow_but(["GRPO"], ["GRPO", "RLOO"]))
def test_a_run_with_beams_learns_however_its_steps_are_cut(method, tmp_path):
    options = {"generation_kwargs": {"do_sample": True, "top_k": 50, "num_beams": 2, "length_penalty": -0.1}}
    before = weights(online(tmp_path / "before", method))
    whole = weights(trained(tmp_path / "whole", method, **options))
    assert any(not torch.equal(whole[name], value) for name, value in before.items())
    parts = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    assert_near(weights(trained(tmp_path / "parts", method, **options, **parts)), whole)


def test_settings_hold(tmp_path):
    trainer = online(tmp_path, generation_kwargs={"min_new_tokens": 9, "suppress_tokens": [5, 6, 7]})
    completions = written(trainer).completions
    assert all(len(each.token_ids) >= 9 for each in completions)
    assert not {5, 6, 7} & {token for each in completions for token in each.token_ids}


@pytest.mark.slow
def test_do_sample_alone_leaves_the_generator(tmp_path):
    drawn = online(tmp_path / "drawn", generation_kwargs={"do_sample": True})
    assert drawn.written_by.startswith("lowtide's own")
    likeliest = online(tmp_path / "likeliest", generation_kwargs={"do_sample": False})
    assert likeliest.written_by.startswith("lowtide's own")
    assert len({tuple(each.token_ids) for each in written(likeliest, 1).completions}) == 1
    assert len({tuple(each.token_ids) for each in written(drawn, 1).completions}) > 1
