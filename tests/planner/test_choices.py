"""What may be chosen: never what a user set, and what changes numbers only where it was asked for."""

from __future__ import annotations

import dataclasses

import pytest
from transformers import AutoConfig

import lowtide
from lowtide.engine.layers.mixers import has_recurrences
from lowtide.planner.choices import FROZEN_BFLOAT16, Setting, axes
from lowtide.planner.search import Sizes

SIZES = Sizes(200, 2000)
DPO = vars(lowtide.DPOConfig(output_dir="run", use_cpu=True))
SFT = vars(lowtide.SFTConfig(output_dir="run", use_cpu=True))


def setting(device: str = "cpu", exact: bool = True, layers: int = 24, **given) -> Setting:
    names = {*DPO, "dtype", "use_peft"}
    return Setting(names, defaults=DPO, requested=given, device_kind=device, exact=exact, layers=layers)


def choices(of: Setting) -> list:
    return [choice for axis in axes(of, SIZES) for choice in axis.choices]


def test_recurrences_alone_are_computed_again_where_a_model_has_some():
    for recurrent in (False, True):
        (axis, *_) = axes(dataclasses.replace(setting(), recurrent=recurrent), SIZES)
        policies = [choice.options.get("checkpointing_policy") for choice in axis.choices]
        assert ("outside_recurrences" in policies) == recurrent
    kinds = {"qwen3_5_text": True, "nemotron_h": True, "mamba": True, "lfm2": False, "llama": False}
    assert {kind: has_recurrences(AutoConfig.for_model(kind)) for kind in kinds} == kinds


def test_exact_choices_change_nothing_and_others_say_what_they_change():
    assert all(choice.changes is None for choice in choices(setting()))
    changing = [choice for choice in choices(setting(exact=False)) if choice.changes]
    assert {"use_peft", "dtype", "bf16", "optim"} <= {name for choice in changing for name in choice.options}


@pytest.mark.parametrize(
    "given",
    [
        {"gradient_checkpointing": True},
        {"gradient_checkpointing": False},
        {"checkpointing_policy": "attention"},
        {"checkpointing_every": 3},
        {"activation_offloading": True},
        {"mlp_tile_tokens": 64},
        {"optim": "sgd"},
        {"optimizer_in_backward": False},
        {"max_grad_norm": 1.0},
        {"precompute_ref_log_probs": False},
        {"bf16": False},
        {"dtype": "float32", "use_peft": False},
        {"ref_model_storage": "same"},
    ],
)
def test_what_a_user_set_is_never_overruled(given):
    for choice in choices(setting("cuda", exact=False, **given)):
        assert not given.keys() & choice.options.keys(), choice


@pytest.mark.parametrize(("layers", "every"), [(28, [4, 2, 1.33]), (27, [3, 1.5]), (26, [2]), (61, [2])])
def test_layers_are_checkpointed_by_parts_that_divide_them(layers, every):
    some = "checkpointing_every"
    found = [each for each in choices(setting("cuda", layers=layers)) if some in each.options]
    assert [each.options[some] for each in found] == every
    assert [each.between.share for each in found] == pytest.approx([1 / each for each in every], rel=0.01)
    given = choices(setting("cuda", layers=layers, gradient_checkpointing=True))
    assert [each.between for each in given if some in each.options] == [None] * len(every), (
        "one of the two is not there"
    )


def test_the_plain_choice_comes_first_and_is_the_fastest():
    for axis in axes(setting(), SIZES):
        if axis.scales:
            assert axis.choices[0].options == {"gradient_checkpointing": False}
            assert [each.slower for each in axis.choices] == sorted(each.slower for each in axis.choices)
        else:
            assert not axis.choices[0].options


def test_a_choice_writes_only_what_differs_from_the_defaults():
    for choice in choices(setting()):
        assert all(DPO.get(name) != value for name, value in choice.options.items())


def test_steps_in_backward_clip_exactly_or_not_at_all():
    def in_backward(**given):
        found = choices(setting(**given))
        return [each.options["optimizer_in_backward"] for each in found if "optimizer_in_backward" in each.options]

    assert in_backward() == ["two_pass"]
    assert in_backward(max_grad_norm=0.0) == [True]
    assert in_backward(gradient_accumulation_steps=4) == []


def test_a_reference_is_chosen_where_there_is_one():
    names = {choice.name for choice in choices(setting("cuda"))}
    assert {"precomputed reference", "reference in host memory"} <= names
    adapted = dataclasses.replace(setting("cuda"), adapters=True)
    assert not {"precomputed reference", "reference in host memory"} & {each.name for each in choices(adapted)}
    streamed = dataclasses.replace(setting(), streamed=True)
    assert "precomputed reference" not in {each.name for each in choices(streamed)}


def test_frozen_weights_are_streamed_in_the_dtype_of_their_files():
    def streamed(**more) -> list[tuple[dict, str | None]]:
        adapted = dataclasses.replace(setting("cuda", exact=False), adapters=True, **more)
        return [(each.options, each.changes) for each in choices(adapted) if "base_weights" in each.options]

    assert streamed() == []
    assert streamed(dtype="bfloat16", files_dtype="bfloat16") == [({"base_weights": "stream"}, None)]
    assert streamed(files_dtype="bfloat16") == [({"base_weights": "stream", "dtype": "bfloat16"}, FROZEN_BFLOAT16)]
    assert streamed(dtype="bfloat16", files_dtype="float32") == []


def test_weights_that_are_trained_are_streamed_without_a_reference():
    def in_file(of: Setting) -> list[dict]:
        return [each.options for each in choices(of) if "trained_weights" in each.options]

    without = SFT.keys() | {"dtype", "use_peft"}
    sft = Setting(names=without, defaults=SFT, requested={}, device_kind="cpu")
    assert in_file(sft) == [{"optimizer_in_backward": "two_pass", "trained_weights": "stream"}]
    assert in_file(dataclasses.replace(sft, device_kind="cuda")) == in_file(sft)
    assert in_file(dataclasses.replace(sft, adapters=True)) == []
    assert in_file(setting()) == []


def test_rows_in_pieces_have_their_keys_somewhere_and_no_step_in_backward():
    found = [choice for axis in axes(setting("cuda"), Sizes(200, 2000, in_pieces=True)) for choice in axis.choices]
    assert {"chain_storage": "host"} in [choice.options for choice in found]
    assert not any("optimizer_in_backward" in choice.options for choice in found)
    assert not any("chain_storage" in choice.options for choice in choices(setting("cuda")))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_copy_of_weights_to_write_by_may_be_left_out(device):
    online = vars(lowtide.GRPOConfig(output_dir="run", use_cpu=True))
    asked = dataclasses.replace(setting(device), names={*online, "dtype", "use_peft"}, defaults=online)
    written = [choice for choice in choices(asked) if choice.options == {"generation_weights": "trained"}]
    assert len(written) == 1
    given = dataclasses.replace(asked, requested={"generation_weights": "copy"})
    assert not any("generation_weights" in choice.options for choice in choices(given))
