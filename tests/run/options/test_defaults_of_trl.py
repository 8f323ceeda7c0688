"""An option that is left out means the same as in TRL: a script that changes its import trains with the same values."""

import dataclasses
import importlib
from typing import Any

import pytest

import lowtide

trl = pytest.importorskip("trl")
EXPERIMENTAL = {"CPOConfig": "cpo", "GKDConfig": "gkd", "ORPOConfig": "orpo", "OnlineDPOConfig": "online_dpo"}
CONFIGS = sorted(
    name for name in lowtide.__all__ if name.endswith("Config") and (hasattr(trl, name) or name in EXPERIMENTAL)
)
OTHERWISE = {
    "padding_free": "rows have no padding unless it is asked for",
    "pad_to_multiple_of": "accepted without effect",
    "GKDConfig.truncation_mode": "TRL's collator of GKD keeps the end of a row, whatever its config says",
    "OnlineDPOConfig.max_new_tokens": "another name of max_completion_length, whose default counts",
    "OnlineDPOConfig.beta": "a list of one value is that value",
}
"""Options whose default differs, and why."""


def defaults_of(config: type) -> dict[str, Any]:
    fields = [each for each in dataclasses.fields(config) if each.init]
    made = {each.name: each.default_factory for each in fields if each.default_factory is not dataclasses.MISSING}
    return {each.name: made[each.name]() if each.name in made else each.default for each in fields}


@pytest.mark.parametrize("name", CONFIGS)
def test_defaults_are_those_of_trl(name):
    module = importlib.import_module(f"trl.experimental.{EXPERIMENTAL[name]}") if name in EXPERIMENTAL else trl
    ours, theirs = defaults_of(getattr(lowtide, name)), defaults_of(getattr(module, name))
    both = (ours.keys() & theirs.keys()) - {each.removeprefix(f"{name}.") for each in OTHERWISE}
    assert len(both) > 20 or name.startswith(("Model", "Dataset")), "options have the names that they have in TRL"
    assert {each: ours[each] for each in both} == {each: theirs[each] for each in both}
