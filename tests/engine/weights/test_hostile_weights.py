"""A file of weights that would run code is called what it is."""

import os
import pickle

import pytest
import torch
from transformers import LlamaConfig

from lowtide.engine.weights.loading import load_model


class Hostile:
    def __reduce__(self):
        return os.system, ("true",)


@pytest.mark.parametrize("how", ["torch", "pickle"])
def test_a_pickle_that_runs_code_is_called_so(tmp_path, how):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    LlamaConfig(**sizes, vocab_size=32).save_pretrained(tmp_path)
    path = tmp_path / "pytorch_model.bin"
    if how == "torch":
        torch.save({"a": Hostile()}, path)
    else:
        path.write_bytes(pickle.dumps({"a": Hostile()}))
    with pytest.raises(ValueError, match="could run code and are never loaded: take one") as caught:
        load_model(str(tmp_path))
    assert "weights_only" not in str(caught.value)
