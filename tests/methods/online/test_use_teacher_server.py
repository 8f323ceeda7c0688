"""`use_teacher_server` of self-distillation: the live teacher is this process's policy, which is said; else refused."""

from __future__ import annotations

from typing import Any

import pytest

from lowtide import SDFTConfig, SDPOConfig

WRITTEN: dict[str, Any] = {
    **{"use_teacher_server": True, "use_vllm": True, "vllm_mode": "server", "teacher_model_kind": "live"},
    **{"distillation_mode": "sampled_token", "distillation_alpha": 1.0},
}
CONFIGS = pytest.mark.parametrize("config", [SDFTConfig, SDPOConfig])


@CONFIGS
def test_a_live_teacher_is_asked_here_and_this_is_said(config, tmp_path):
    made = config(output_dir=str(tmp_path), **WRITTEN)
    assert any("use_teacher_server=True asks no server" in each for each in made.advice)
    likeliest = config(
        output_dir=str(tmp_path), **WRITTEN | {"distillation_mode": "topk_logits", "distillation_topk": 5}
    )
    assert any("on the teacher's likeliest tokens" in each for each in likeliest.advice)
    assert not config(output_dir=str(tmp_path)).advice


@CONFIGS
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vllm_mode": "colocate"}, "set use_vllm=True and vllm_mode='server'"),
        ({"teacher_model_kind": "ema"}, "teacher_model_kind='ema' is another"),
        ({"distillation_mode": "full_logits"}, "distillation_mode='sampled_token' or 'topk_logits' and"),
    ],
)
def test_what_the_server_could_not_say_is_refused(config, options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        config(output_dir=str(tmp_path), **WRITTEN | options)
