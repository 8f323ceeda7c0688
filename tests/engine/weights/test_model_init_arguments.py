"""What `model_init_kwargs` say twice, or in a form that nothing reads."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig

from lowtide.engine.weights.loading import saved_config
from lowtide.engine.weights.model_init import model_init


def test_two_dtypes_are_told_and_equal_ones_are_not(caplog):
    assert model_init({"dtype": "float16", "torch_dtype": torch.float64})["dtype"] == "float16"
    (said,) = caplog.messages
    assert "dtype='float16' and torch_dtype=torch.float64" in said
    assert "dtype='float16' is taken" in said
    assert model_init({"dtype": "float16", "torch_dtype": torch.float16})["dtype"] == "float16"
    assert model_init({"torch_dtype": "bfloat16"})["dtype"] == "bfloat16"
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("config", ["config.json", {"num_hidden_layers": 1}, 3])
def test_a_config_that_is_none_is_refused(config):
    with pytest.raises(ValueError, match=r"config=.* is no configuration .* would have no effect: give the values"):
        model_init({"config": config})


def test_a_config_that_is_given_is_the_models(tmp_path):
    given = LlamaConfig(num_hidden_layers=1)
    assert saved_config(str(tmp_path), model_init({"config": given})) is given
