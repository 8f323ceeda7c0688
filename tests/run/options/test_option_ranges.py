"""Every number among the options has a range, and a value outside of it is refused at construction."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

import lowtide
from lowtide.cli.training.adapters import AdapterOptions
from lowtide.engine.weights.model_init import model_init
from lowtide.option_values import options_of
from lowtide.run.options.inherited_ranges import INHERITED_RANGES
from tests.support.matrix.matrix import classes, make
from tests.support.matrix.matrix_models import TRAINERS

CONFIGS = {kind: classes(kind)[1] for kind in TRAINERS}
CONFIGS |= {kind: getattr(lowtide, f"{kind}Config") for kind in ("GRPO", "RLOO", "OnlineDPO", "PPO")}


def numbers(config) -> dict:
    """The options that take numbers, by name."""
    options = options_of(config)
    return {n: o for n, o in options.items() if {int, float} & {*o.kinds, o.items} and n not in refused(config)}


def refused(config) -> set[str]:
    return set(getattr(config, "refused", ()))


def outside(option) -> list[float]:
    """Numbers of the option's kind that are just outside of its range, and far."""
    limits, whole = option.range, int in option.kinds
    step = 1 if whole else 1e-3
    edges = {
        None if limits.least is None else limits.least - step,
        None if limits.most is None else limits.most + step,
        limits.above,
        limits.below,
    } - {None, limits.also}
    return [*(int(each) if whole else each for each in edges), *([] if whole else [math.nan, math.inf, -math.inf])]


@pytest.mark.parametrize("config", [*CONFIGS.values(), AdapterOptions])
def test_every_number_has_a_range(config):
    unranged = [n for n, o in numbers(config).items() if o.range is None]
    assert unranged == []


def test_the_table_names_fields_that_there_are():
    assert set(INHERITED_RANGES) <= set(options_of(CONFIGS["SFT"]))


@pytest.mark.parametrize("kind", CONFIGS)
def test_every_number_outside_its_range_is_refused(kind, tmp_path):
    config = CONFIGS[kind]
    for name, option in numbers(config).items():
        for value in outside(option):
            given = [value] if list in option.kinds else value
            with pytest.raises(ValueError, match=rf"^{name}=.* must be .*{option.range}"):
                config(output_dir=str(tmp_path), use_cpu=True, **{name: given})


@pytest.mark.parametrize(
    ("kind", "name", "value", "message"),
    [
        ("SFT", "gradient_accumulation_steps", -1, "at least 1"),
        ("SFT", "gradient_accumulation_steps", 0, "at least 1"),
        ("SFT", "per_device_train_batch_size", 0, "at least 1"),
        ("SFT", "max_steps", 0, "at least 1, or -1 .*-1 trains for num_train_epochs"),
        ("SFT", "max_steps", -5, "at least 1, or -1"),
        ("SFT", "weight_decay", -100, "at least 0"),
        ("SFT", "save_steps", 0, "above 0 with save_strategy='steps'"),
        ("SFT", "save_steps", -1, "at least 0"),
        ("SFT", "save_total_limit", -1, "at least 1, or None .*None keeps all checkpoints"),
        ("SFT", "logging_steps", -1, "at least 0"),
        ("SFT", "max_grad_norm", math.nan, "finite and at least 0 .*0 trains without clipping"),
        ("SFT", "tokens_per_microbatch", 0, "at least 1, or None"),
        ("DPO", "beta", -1, r"at least 0 \(How closely the policy keeps to the reference"),
        ("DPO", "ref_model_sync_steps", 0, "at least 1"),
        ("CPO", "simpo_gamma", math.nan, "finite and at least 0"),
        ("Reward", "center_rewards_coefficient", -1, "at least 0"),
    ],
)
def test_the_message_says_range_and_meaning(kind, name, value, message, tmp_path):
    with pytest.raises(ValueError, match=f"^{name}={value} must be {message}"):
        CONFIGS[kind](output_dir=str(tmp_path), **{name: value})


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("DPO", {"loss_type": "ipo", "beta": 0}, "beta=0 must be above 0 for loss_type='ipo'"),
        ("CPO", {"loss_type": "simpo", "beta": 0}, "beta=0 must be above 0 for loss_type='simpo'"),
        ("DPO", {"loss_type": "robust", "label_smoothing": 0.5}, "must be below 0.5 for loss_type='robust'"),
    ],
)
def test_a_range_that_a_loss_narrows(kind, options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        CONFIGS[kind](output_dir=str(tmp_path), **options)


def test_numbers_with_a_meaning_of_their_own_are_taken(tmp_path):
    given = {
        "max_steps": -1,
        "save_total_limit": None,
        "max_grad_norm": 0,
        "warmup_steps": 0.1,
        "logging_steps": 0.25,
        "beta": 0,
        "label_smoothing": 0,
        "max_length": None,
    }
    made = CONFIGS["DPO"](output_dir=str(tmp_path), use_cpu=True, **given)
    assert {name: getattr(made, name) for name in given} == given


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
@pytest.mark.parametrize("in_backward", [False, "two_pass"])
def test_a_norm_to_clip_at_that_is_none_is_refused_whatever_steps(value, in_backward, tmp_path):
    with pytest.raises(ValueError, match=r"^max_grad_norm="):
        make("SFT", optimizer_in_backward=in_backward, max_grad_norm=value)
    trainer = make("SFT", optimizer_in_backward=in_backward, max_grad_norm=1.0)
    trainer.args.max_grad_norm = value
    with pytest.raises(ValueError, match=r"^max_grad_norm="):
        type(trainer)(model=trainer.model, args=trainer.args, train_dataset=trainer.train_dataset)


@pytest.mark.parametrize(
    ("name", "given", "taken"),
    [
        ("learning_rate", "1e-4", 1e-4),
        ("learning_rate", np.float32(0.5), 0.5),
        ("max_steps", np.int64(7), 7),
        ("max_steps", 7.0, 7),
        ("max_steps", "7", 7),
        ("max_length", "none", None),
        ("gradient_checkpointing", "false", False),
        ("model_init_kwargs", '{"dtype": "bfloat16"}', {"dtype": "bfloat16"}),
        ("loss_weights", ["1", 2], [1.0, 2]),
    ],
)
def test_a_value_of_another_kind_is_converted_as_on_the_command_line(name, given, taken, tmp_path):
    more = {"loss_type": ["sigmoid", "sft"]} if name == "loss_weights" else {}
    value = getattr(CONFIGS["DPO"](output_dir=str(tmp_path), use_cpu=True, **{name: given}, **more), name)
    assert value == taken
    assert type(value) is type(taken)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("beta", "high", "beta='high' must be a number"),
        ("beta", True, "beta=True must be a number"),
        ("beta", None, "beta=None must be a number"),
        ("max_steps", 2.5, "max_steps=2.5 must be a whole number"),
        ("max_steps", True, "max_steps=True must be a whole number"),
        ("max_length", [1], r"max_length=\[1\] must be a whole number or none"),
        ("prefix_sharing", "maybe", "prefix_sharing='maybe' must be true or false"),
        ("model_init_kwargs", "dtype", "model_init_kwargs='dtype' must be a mapping"),
        ("lr_scheduler_kwargs", "nowhere.json", "lr_scheduler_kwargs='nowhere.json' must be a mapping"),
        ("lr_scheduler_type", "cosin", "lr_scheduler_type='cosin' is not one of .*did you mean 'cosine'"),
        ("ddp_timeout", 10**20, "ddp_timeout=1.* must be at most 9223372036854775807"),
        ("ddp_backend", "mpi", "ddp_backend='mpi' did not start"),
        ("loss_type", ["sigmoid", "ipoo"], r"loss_type=\['sigmoid', 'ipoo'\] is not one of .*did you mean 'ipo'"),
    ],
)
def test_a_value_of_a_wrong_kind_is_refused_with_what_it_takes(name, value, message, tmp_path):
    with pytest.raises(ValueError, match=f"^{message}"):
        CONFIGS["DPO"](output_dir=str(tmp_path), **{name: value})


@pytest.mark.parametrize("name", ["cosin", None])
def test_an_option_that_a_method_declares_anew_is_checked_too(name, tmp_path):
    with pytest.raises(ValueError, match=f"^lr_scheduler_type={name!r} "):
        lowtide.PretrainConfig(output_dir=str(tmp_path), lr_scheduler_type=name)


def test_a_subclass_keeps_the_ranges_of_what_it_gives_another_default(tmp_path):
    @dataclasses.dataclass
    class Mine(CONFIGS["DPO"]):
        beta: float = 0.5
        own: dict[str, int] | None = None

    assert Mine(output_dir=str(tmp_path)).beta == 0.5
    with pytest.raises(ValueError, match=r"^beta=-1 must be at least 0"):
        Mine(output_dir=str(tmp_path), beta=-1)


FLAGS = [
    ("accelerator_config", "split_batches"),
    ("gradient_checkpointing_kwargs", "use_reentrant"),
    ("dataset_kwargs", "skip_prepare_dataset"),
]


@pytest.mark.parametrize(("option", "name"), FLAGS)
@pytest.mark.parametrize("value", ["no", 3, [True]])
def test_a_word_is_not_taken_for_true(option, name, value, tmp_path):
    with pytest.raises(ValueError, match=rf"{option}: {name}=.* must be true or false"):
        lowtide.SFTConfig(output_dir=str(tmp_path), **{option: {name: value}})


def test_code_that_comes_with_a_model_is_not_run_for_a_word():
    with pytest.raises(ValueError, match="model_init_kwargs: trust_remote_code='no' must be true or false"):
        model_init({"trust_remote_code": "no"})
