"""An option that is left out means the same as in TRL: a script that changes its import trains with the same values."""

import dataclasses
import importlib
from typing import Any

import pytest

import lowtide

trl = pytest.importorskip("trl")
EXPERIMENTAL = {
    "A2POConfig": "a2po",
    "AsyncGRPOConfig": "async_grpo",
    "CPOConfig": "cpo",
    "GKDConfig": "gkd",
    "GMPOConfig": "gmpo",
    "GOLDConfig": "gold",
    "IWOPDConfig": "iw_opd",
    "ORPOConfig": "orpo",
    "OnlineDPOConfig": "online_dpo",
    "SDFTConfig": "sdft",
    "SDPOConfig": "sdpo",
    "TPOConfig": "tpo",
}
CONFIGS = sorted(
    name for name in lowtide.__all__ if name.endswith("Config") and (hasattr(trl, name) or name in EXPERIMENTAL)
)
OTHERWISE = {
    "padding_free": "rows have no padding unless it is asked for",
    "pad_to_multiple_of": "accepted without effect",
    "A2POConfig.top_k": "None is 0, which is all tokens",
    "AsyncGRPOConfig.remove_unused_columns": "reward functions read the other columns, in TRL too",
    "AsyncGRPOConfig.ignore_data_skip": "a resumed run goes on where it was",
    "GKDConfig.truncation_mode": "TRL's collator of GKD keeps the end of a row, whatever its config says",
    "GMPOConfig.loss_type": "TRL's is GRPO's, which its trainer does not read",
    "GMPOConfig.use_bias_correction_kl": "TRL's is GRPO's, which its trainer does not read",
    "GOLDConfig.max_completion_length": "another name of max_new_tokens, whose default counts",
    "GOLDConfig.truncation_mode": "TRL's trainer keeps the end of a row, whatever its config says",
    "GOLDConfig.uld_token_merge_strategy": "TRL's compares predictions of other places of the text",
    "IWOPDConfig.remove_unused_columns": "environments read the other columns, which TRL's trainer does not have",
    "OnlineDPOConfig.max_new_tokens": "another name of max_completion_length, whose default counts",
    "OnlineDPOConfig.beta": "a list of one value is that value",
}
"""Options whose default differs, and why."""


SETTLED = {"output_dir", "use_cpu", "report_to", "debug", "dataloader_pin_memory"}
"""Options that are given here, or that transformers settles by what is given."""


@pytest.fixture(scope="module")
def configs() -> dict[str, type]:
    """TRL's, which take seconds to be imported."""
    places = {name: f"trl.experimental.{EXPERIMENTAL[name]}" if name in EXPERIMENTAL else "trl" for name in CONFIGS}
    return {name: getattr(importlib.import_module(place), name) for name, place in places.items()}


def defaults_of(config: type) -> dict[str, Any]:
    fields = [each for each in dataclasses.fields(config) if each.init]
    made = {each.name: each.default_factory for each in fields if each.default_factory is not dataclasses.MISSING}
    return {each.name: made[each.name]() if each.name in made else each.default for each in fields}


@pytest.mark.parametrize("name", CONFIGS)
def test_defaults_are_those_of_trl(name, configs, tmp_path):
    ours, theirs = defaults_of(getattr(lowtide, name)), defaults_of(configs[name])
    both = (ours.keys() & theirs.keys()) - {each.removeprefix(f"{name}.") for each in OTHERWISE}
    assert len(both) > 20 or name.startswith(("Model", "Dataset")), "options have the names that they have in TRL"
    assert {each: ours[each] for each in both} == {each: theirs[each] for each in both}

    given = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": "none"}
    made = getattr(lowtide, name)(**{each: value for each, value in given.items() if each in ours})
    left = {each for each in both if theirs[each] is not None} - SETTLED
    assert {each: getattr(made, each) for each in left} == {each: theirs[each] for each in left}
