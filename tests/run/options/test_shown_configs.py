"""What `repr` and `help` say of a config."""

import copy
import pickle

import pytest

from lowtide import AsyncGRPOConfig, DPOConfig, GRPOConfig, SFTConfig
from lowtide.option_values import options_of

ON_A_CPU = {"use_cpu": True, "bf16": False, "report_to": "none"}


def test_repr_has_what_differs_from_the_defaults(tmp_path):
    args = SFTConfig(str(tmp_path), **ON_A_CPU, learning_rate="1e-3", max_length=1024, hub_token="hf_secret")
    said = f"SFTConfig(output_dir={str(tmp_path)!r}, learning_rate=0.001, bf16=False, use_cpu=True)"
    assert repr(args) == repr(copy.deepcopy(args)) == repr(pickle.loads(pickle.dumps(args))) == said
    args.num_train_epochs, args.max_length = 5, None
    assert repr(args) == said.replace(" learning", " num_train_epochs=5, learning")[:-1] + ", max_length=None)"
    args.num_train_epochs, args.max_length = 3, 1024
    assert repr(args) == said


def test_a_repr_makes_the_config_again(tmp_path):
    args = DPOConfig(str(tmp_path), **ON_A_CPU, loss_type=["sigmoid", "sft"], loss_weights=[1, 0.5], eval_steps=3)
    again = eval(repr(args), {"DPOConfig": DPOConfig})
    assert again == args
    assert again.loss_weights == [1.0, 0.5]
    assert repr(AsyncGRPOConfig(str(tmp_path), **ON_A_CPU)).startswith("AsyncGRPOConfig(output_dir=")


@pytest.mark.parametrize("config", [SFTConfig, GRPOConfig])
def test_help_has_each_option_once_in_its_group(config):
    groups = {}
    for line in config.__doc__.splitlines():
        if line.endswith(":") and not line.startswith(" "):
            own = groups.setdefault(line[:-1], [])
        elif line.startswith("    "):
            own.append(line.split(" = ")[0].strip())
    listed = [name for own in groups.values() for name in own]
    assert len(listed) == len({*listed})
    assert {*listed} <= {*options_of(config)} - {*config.without_effect}
    assert next(iter(groups)) == config.method.title
    assert "max_prompt_length" in groups[config.method.title]
    assert "memory_budget" in groups["memory and precision"]
    assert "save_steps" in groups["evaluation, logging and saving"]
