"""A model's config by its name: what is said at once where there is none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, BambaConfig, LlamaConfig

from lowtide.planner.tracing import described_model
from lowtide.planner.tracing.described_model import DescribedModel, config_of_model


@pytest.mark.parametrize("name", ["./nothere", "../nothere", "/nothere/at/all", "~/nothere"])
def test_a_path_without_a_folder_is_said_to_be_one(name, monkeypatch):
    monkeypatch.setattr(described_model, "get_hf_file_metadata", None)  # nobody asks the hub
    with pytest.raises(ValueError, match=r"is a path, and there is no such folder: /.*nothere"):
        config_of_model(name)


def test_a_hub_that_does_not_answer_is_asked_once_and_then_the_cache(monkeypatch):
    asked: list[Any] = []

    def unreachable(url: str) -> None:
        asked.append(url)
        raise ConnectionError("no route to the hub")

    def cached(name: str, **options: Any) -> LlamaConfig:
        asked.append((name, options))
        if name == "some/model":
            return LlamaConfig()
        raise OSError("couldn't find it in the cached files")

    monkeypatch.setattr(described_model, "get_hf_file_metadata", unreachable)
    monkeypatch.setattr(AutoConfig, "from_pretrained", cached)
    assert isinstance(config_of_model("some/model", revision="old"), LlamaConfig)
    url, read = asked
    assert url.endswith("some/model/resolve/old/config.json")
    assert read == ("some/model", {"revision": "old", "local_files_only": True})
    with pytest.raises(ValueError, match=r"not in the cache, and the hub cannot be reached \(no route to the hub\)"):
        config_of_model("some/other")


def test_a_folder_is_read_without_asking_the_hub(tmp_path, monkeypatch):
    LlamaConfig(hidden_size=64).save_pretrained(tmp_path)
    monkeypatch.setattr(described_model, "get_hf_file_metadata", None)
    assert config_of_model(str(tmp_path)).hidden_size == 64


def test_a_value_of_the_wrong_type_is_one_message(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": "abc"}')
    with pytest.raises(ValueError, match=r"has no config that can be read: .*hidden_size"):
        config_of_model(str(tmp_path))


@pytest.mark.parametrize("tied", [False, True])
def test_a_described_model_ties_its_head_as_its_config_says(tied):
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    described = DescribedModel(LlamaConfig(**sizes, tie_word_embeddings=tied), torch.float32)
    for made in (described.of_layers(1), described.on_meta(1)):
        model: Any = made
        assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) is tied


def test_layers_that_a_config_counts_by_itself_are_as_many_as_asked_for():
    """Bamba's kinds of layers follow from where attention is, and cannot be set."""
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    states = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 4, "num_key_value_heads": 2}
    config = BambaConfig(**sizes, **states, num_hidden_layers=6, attn_layer_indices=[1])
    model: Any = DescribedModel(config, torch.float32).on_meta(3)
    assert [layer.block_type for layer in model.model.layers] == [
        "linear_attention",
        "full_attention",
        "linear_attention",
    ]
