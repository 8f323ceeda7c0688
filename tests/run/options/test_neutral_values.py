"""Values that are the default, or that switch something off, are never refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

import lowtide
from lowtide.cli.training.run_file import read_run_file
from lowtide.option_values import options_of

OF_OTHERS = {"DatasetConfig", "DatasetMixtureConfig", "MergeConfig", "ModelConfig"}
CONFIGS = sorted(name for name in lowtide.__all__ if name.endswith("Config") and name not in OF_OTHERS)
BASE: dict[str, Any] = {"output_dir": "run", "use_cpu": True, "report_to": "none"}
OFF: dict[str, Any] = {
    **{"fsdp": "", "deepspeed": None, "use_liger_kernel": False, "router_aux_loss_coef": 0.0, "sync_ref_model": False},
    **{"label_smoothing": 0, "label_smoothing_factor": 0, "neftune_noise_alpha": None, "loss_weights": None},
    **{"parallelism_config": None, "fsdp_config": None, "peft_config": None, "average_tokens_across_devices": False},
    **{"use_vllm": False, "precompute_ref_log_probs": False, "ref_model_mixup_alpha": 0.0, "max_grad_norm": 0},
    **{"warmup_steps": 0, "weight_decay": 0, "eval_delay": 0, "dataloader_num_workers": 0, "beta": 0.0},
    **{"generate_during_eval": False, "is_encoder_decoder": None, "padding_value": None, "reference_free": False},
    **{"simpo_gamma": 0.0, "vespo_k_pos": 0.0, "span_geometric_p": 0.0, "entropy_coef": 0.0, "eval_steps": None},
}
"""What asks for nothing, whether or not a method has it. Options of one method are off in all others."""
NEEDED = {("OnlineDPOConfig", "beta"), ("AsyncGRPOConfig", "use_vllm")}
"""Nothing works without these: a divisor, and the server of a trainer beside one."""


def default_of(field: dataclasses.Field) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


@pytest.mark.parametrize("name", CONFIGS)
def test_each_option_may_be_set_to_its_default(name: str):
    kind = getattr(lowtide, name)
    for field in dataclasses.fields(kind):
        if field.init:
            kind(**{**BASE, field.name: default_of(field)})


@pytest.mark.parametrize("name", CONFIGS)
def test_all_options_may_be_set_to_their_defaults_at_once(name: str):
    kind = getattr(lowtide, name)
    made = kind(**{**{each.name: default_of(each) for each in dataclasses.fields(kind) if each.init}, **BASE})
    plain = kind(**BASE)
    assert made.to_dict() == plain.to_dict()


@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_off_may_be_said(name: str):
    kind = getattr(lowtide, name)
    own = {each.name for each in dataclasses.fields(kind)}
    for option, value in OFF.items():
        if (name, option) not in NEEDED and (option in own or option not in ("fsdp_config", "peft_config")):
            made = kind(**{**BASE, option: value})
            assert option in own or option not in made.requested


@pytest.mark.parametrize("kind", [lowtide.DPOConfig])
def test_one_loss_may_have_its_weight(kind: Any):
    assert kind(**BASE, loss_type=["sigmoid"], loss_weights=[1.0]).loss_weights == [1.0]


def test_what_is_off_in_a_run_file_is_passed_over(tmp_path: Path):
    path = tmp_path / "run.yaml"
    path.write_text("seed: 1\ngenerate_during_eval: false\npadding_value: null\n")
    assert read_run_file(path, options_of(lowtide.SFTConfig)) == {"seed": 1}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"generate_during_eval": True}, "LogCompletionsCallback"),
        ({"router_aux_los_coef": 0.0}, "router_aux_loss_coef"),
        ({"packing": True}, "it is of sft"),
    ],
)
def test_what_is_on_or_unknown_is_refused(options: dict[str, Any], message: str):
    with pytest.raises(TypeError, match=message):
        lowtide.DPOConfig(**BASE, **options)
