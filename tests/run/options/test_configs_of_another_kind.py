"""A config that is not lowtide's: what it says of options that lowtide has counts, and the rest is named."""

import dataclasses
import logging

import pytest
from transformers import TrainingArguments

from lowtide import DPOConfig, SFTConfig
from lowtide.run.inputs.loading import config_of

trl = pytest.importorskip("trl")


def test_a_config_of_trl_keeps_its_options(tmp_path):
    theirs = trl.SFTConfig(output_dir=str(tmp_path), max_length=17, learning_rate=1e-3, use_cpu=True, bf16=False)
    ours = config_of(SFTConfig, theirs, "model", "SFT")
    assert (ours.max_length, ours.learning_rate, ours.bf16) == (17, 1e-3, False)
    theirs = trl.DPOConfig(output_dir=str(tmp_path), beta=0.3, loss_type=["ipo"], use_cpu=True, bf16=False)
    ours = config_of(DPOConfig, theirs, "model", "DPO")
    assert (ours.beta, ours.loss_type) == (0.3, ["ipo"])


@dataclasses.dataclass
class Script(TrainingArguments):
    """Arguments of somebody's script."""

    beta: float = 0.1
    colour: str = "blue"


def test_options_that_lowtide_does_not_have_are_named(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "lowtide"):
        assert config_of(DPOConfig, Script(str(tmp_path), beta=0.2, use_cpu=True), "model", "DPO").beta == 0.2
        assert "colour" not in caplog.text
        config_of(DPOConfig, Script(str(tmp_path), colour="red", use_cpu=True), "model", "DPO")
    assert "args is a Script, whose colour DPOConfig does not have" in caplog.text
