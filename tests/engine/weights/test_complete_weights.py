"""A model is loaded whole or refused: weights that its files lack, of another shape, or in files that are broken."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import AdaLoraConfig, IA3Config, LoHaConfig, LoraConfig, PromptTuningConfig, VeraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, Glm4MoeConfig, LlamaConfig

from lowtide.engine.heads.value import Value
from lowtide.engine.weights.complete_weights import load_adapters
from lowtide.engine.weights.loading import load_model, load_tokenizer
from lowtide.engine.weights.merging import save_merged
from tests.support.models.masked_texts import tokenizer

UP = "model.layers.1.mlp.up_proj.weight"
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> dict[str, Path]:
    """A small Llama, with its head tied to its embedding, with one of its own, and in shards."""
    folders = {}
    for name, tied in (("tied", True), ("untied", False)):
        config = LlamaConfig(
            **{"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2},
            **{"num_attention_heads": 2, "tie_word_embeddings": tied},
        )
        torch.manual_seed(0)
        folders[name] = tmp_path_factory.mktemp(name)
        AutoModelForCausalLM.from_config(config).save_pretrained(folders[name])
    folders["shards"] = tmp_path_factory.mktemp("shards")
    load_model(str(folders["untied"])).save_pretrained(folders["shards"], max_shard_size="8KB")
    return folders


@pytest.fixture
def folder(saved, tmp_path):
    """A copy of one of them, of whose weights some were taken away or replaced."""

    def make(kind: str = "untied", *without: str, **replaced: torch.Tensor) -> Path:
        copy = Path(shutil.copytree(saved[kind], tmp_path / kind, dirs_exist_ok=True))
        if without or replaced:
            weights = load_file(copy / "model.safetensors")
            kept = {name: tensor for name, tensor in weights.items() if name not in without}
            save_file(kept | replaced, copy / "model.safetensors", metadata={"format": "pt"})
        return copy

    return make


def test_whole_models_load_as_before_and_say_nothing(saved, caplog):
    for name in ("tied", "untied", "shards"):
        ours = load_model(str(saved[name])).state_dict()
        theirs = AutoModelForCausalLM.from_pretrained(saved[name], dtype=torch.float32).state_dict()
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    assert not caplog.records


@pytest.mark.parametrize("weight", [UP, "lm_head.weight", "model.embed_tokens.weight"])
def test_a_weight_that_the_files_lack_is_named(folder, weight):
    with pytest.raises(ValueError, match=f"is incomplete: its files hold no {weight}, which would be trained from"):
        load_model(str(folder("untied", weight)))


def test_a_tied_head_is_not_missing_and_its_embedding_is(folder):
    path = folder("tied")
    assert "lm_head.weight" not in load_file(path / "model.safetensors")
    with pytest.raises(ValueError, match=r"hold no lm_head.weight, model.embed_tokens.weight"):
        load_model(str(folder("tied", "model.embed_tokens.weight")))


def test_many_weights_are_counted(folder):
    names = [f"model.layers.1.mlp.{name}_proj.weight" for name in ("up", "down", "gate")]
    names += [f"model.layers.1.self_attn.{name}_proj.weight" for name in "qkvo"]
    with pytest.raises(ValueError, match=r"up_proj.weight, .* and 3 more, which"):
        load_model(str(folder("untied", *names)))


def test_an_index_without_some_weights_and_a_shard_that_is_gone(folder):
    path = folder("shards")
    index = json.loads((path / INDEX).read_text())
    shard = index["weight_map"][UP]
    lost = sorted(name for name, file in index["weight_map"].items() if file == shard)
    kept = {name: file for name, file in index["weight_map"].items() if file != shard}
    (path / INDEX).write_text(json.dumps({**index, "weight_map": kept}))
    with pytest.raises(ValueError, match=f"is incomplete: its files hold no {', '.join(lost[:4])}"):
        load_model(str(path))
    (path / INDEX).write_text(json.dumps(index))
    (path / shard).unlink()
    with pytest.raises(ValueError, match=f"{shard} is not there, which {INDEX} names"):
        load_model(str(path))


def test_another_shape_is_refused_unless_it_is_asked_for(folder, caplog):
    path = folder("untied", **{UP: torch.zeros(3, 3)})
    with pytest.raises(
        ValueError, match=rf"does not fit its config.json: {UP} \(stored \(3, 3\), the model's \(32, 16\)"
    ):
        load_model(str(path))
    assert not caplog.records
    assert load_model(str(path), ignore_mismatched_sizes=True).state_dict()[UP].shape == (32, 16)
    assert f"{UP} is new: it begins with random values" in caplog.text


def test_weights_that_the_model_has_no_place_for_are_said(folder, caplog):
    load_model(str(folder("untied", **{"model.extra.weight": torch.zeros(3)})))
    assert "LlamaForCausalLM has no place for model.extra.weight, which are not used" in caplog.text
    assert "LOAD REPORT" not in caplog.text


def test_the_head_of_a_reward_model_may_be_new_and_its_body_not(folder, caplog):
    model = load_model(str(folder("untied")), head=Value)
    assert model.num_labels == 1
    assert "score.weight is new: it begins with random values" in caplog.text
    assert "lm_head" not in caplog.text
    with pytest.raises(ValueError, match=f"hold no {UP}, which"):
        load_model(str(folder("untied", UP)), head=Value)


def test_a_reward_model_that_lost_its_head_is_refused(saved, tmp_path):
    AutoModelForSequenceClassification.from_pretrained(saved["tied"], num_labels=1).save_pretrained(tmp_path)
    assert load_model(str(tmp_path), head=Value)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["score.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"hold no score.weight, which"):
        load_model(str(tmp_path), head=Value)


def test_a_classifier_of_several_labels_is_no_reward_model(saved, tmp_path):
    AutoModelForSequenceClassification.from_pretrained(saved["tied"], num_labels=3).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"score.weight \(stored \(3, 16\), the model's \(1, 16\)\)"):
        load_model(str(tmp_path), head=Value)


@pytest.mark.parametrize(
    ("weight", "named"),
    [
        ("mlp.gate.e_score_correction_bias", "hold no model.layers.1.mlp.gate.e_score_correction_bias"),  # a buffer
        ("mlp.experts.1.up_proj.weight", "model.layers.1.mlp.experts.gate_up_proj cannot be joined"),
    ],
)
def test_buffers_and_single_experts_are_named(tmp_path, weight, named):
    config = Glm4MoeConfig(
        **{"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "moe_intermediate_size": 16},
        **{"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8},
        **{"n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    assert load_model(str(tmp_path))
    del weights[f"model.layers.1.{weight}"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=named):
        load_model(str(tmp_path))


def test_quantized_models_are_whole_too(folder):
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(load_in_4bit=True)
    model = load_model(str(folder("untied")), quantization_config=config)
    assert model.is_loaded_in_4bit
    with pytest.raises(ValueError, match=f"hold no {UP}"):
        load_model(str(folder("untied", UP)), quantization_config=config)
    model.save_pretrained(path := folder("untied").parent / "four")
    assert load_model(str(path)).is_loaded_in_4bit


@pytest.fixture
def adapters(folder, tmp_path) -> Path:
    """A folder of adapters on a folder of a model."""
    base = AutoModelForCausalLM.from_pretrained(folder("untied"))
    get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)).save_pretrained(
        tmp_path / "adapters"
    )
    return tmp_path / "adapters"


def change_adapters(folder: Path, change) -> None:
    weights = load_file(folder / "adapter_model.safetensors")
    change(weights)
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def as_model(path: Path, base: Path):
    return load_model(str(path))


def as_adapters(path: Path, base: Path):
    return load_adapters(load_model(str(base)), str(path))


@pytest.mark.parametrize("load", [as_model, as_adapters])
def test_adapters_are_whole_or_refused(adapters, folder, load, tmp_path):
    base, tokens = tmp_path / "untied", torch.arange(9)[None]
    expected = AutoModelForCausalLM.from_pretrained(adapters)(tokens).logits
    assert torch.allclose(load(adapters, base)(tokens).logits, expected, atol=1e-6)
    change_adapters(adapters, lambda weights: weights.update(alien=torch.zeros(2)))
    with pytest.raises(ValueError, match=r"no place for alien"):
        load(adapters, base)
    change_adapters(adapters, lambda weights: [weights.pop("alien"), weights.pop(next(iter(weights)))])
    with pytest.raises(ValueError, match=r"adapters' are incomplete: their files hold no .*lora_A"):
        load(adapters, base)
    (adapters / "adapter_model.safetensors").write_bytes(b"\0" * 99)
    with pytest.raises(ValueError, match=r"adapter_model.safetensors \(99 bytes\) is truncated"):
        load(adapters, base)
    folder("untied", UP)
    with pytest.raises(ValueError, match=rf"hold no {UP}"):
        load(adapters, base)


KINDS = {
    "dora": lambda: LoraConfig(r=2, use_dora=True, target_modules=["q_proj"], init_lora_weights=False),
    "adalora": lambda: AdaLoraConfig(total_step=9, target_modules=["q_proj"], init_lora_weights=False),
    "vera": lambda: VeraConfig(r=2, target_modules=["q_proj"], init_weights=False),
    "loha": lambda: LoHaConfig(r=2, target_modules=["q_proj"], init_weights=False),
    "ia3": lambda: IA3Config(target_modules=["q_proj"], feedforward_modules=[], init_ia3_weights=False),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("load", [as_model, as_adapters])
def test_adapters_of_other_kinds_are_read_whole(kind, load, folder, tmp_path):
    base, tokens = folder("untied"), torch.arange(9)[None]
    made = get_peft_model(AutoModelForCausalLM.from_pretrained(base), KINDS[kind]()).eval()
    made.save_pretrained(tmp_path / kind)
    found = load(tmp_path / kind, base).eval()(tokens).logits
    assert torch.allclose(found, made(tokens).logits, atol=1e-6)
    assert not torch.allclose(found, AutoModelForCausalLM.from_pretrained(base)(tokens).logits, atol=1e-4)


def test_virtual_tokens_are_put_before_rows_and_into_no_model(folder, tmp_path):
    base, tokens, path = folder("untied"), torch.arange(9)[None], tmp_path / "virtual"
    options = PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    made = get_peft_model(AutoModelForCausalLM.from_pretrained(base), options)
    made.save_pretrained(path)
    read = as_adapters(path, base)
    assert torch.allclose(read(tokens).logits, made(tokens).logits, atol=1e-6)
    with pytest.raises(ValueError, match=r"virtual tokens \(PROMPT_TUNING\), which stand before the rows"):
        load_model(str(path))
    with pytest.raises(ValueError, match=r"virtual tokens \(PROMPT_TUNING\) .* nothing to merge"):
        save_merged(read, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_adapters_without_a_tokenizer_have_that_of_their_base(adapters, tmp_path):
    tokenizer().save_pretrained(tmp_path / "untied")
    assert load_tokenizer(str(adapters)).get_vocab() == tokenizer().get_vocab()


def test_a_tokenizer_that_panics_or_pads_without_end_is_named(adapters, tmp_path):
    tokenizer().save_pretrained(tmp_path / "untied")
    file = tmp_path / "untied" / "tokenizer.json"
    plain = json.loads(file.read_text())
    endless = {"strategy": {"Fixed": 10**12}, "direction": "Right", "pad_to_multiple_of": None}
    file.write_text(json.dumps(plain | {"padding": endless | {"pad_id": 0, "pad_type_id": 0, "pad_token": "<pad>"}}))
    assert len(load_tokenizer(str(adapters))("a")["input_ids"]) < 9
    unknown = [{"SpecialToken": {"id": "nowhere", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    broken = {"type": "TemplateProcessing", "single": unknown, "pair": [], "special_tokens": {}}
    file.write_text(json.dumps(plain | {"post_processor": broken}))
    with pytest.raises(ValueError, match=r"no tokenizer at .*untied.*: save one beside the model"):
        load_tokenizer(str(adapters))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


BREAK = {
    "empty": lambda path: path.write_bytes(b""),
    "truncated": truncate,
    "garbage": lambda path: path.write_bytes(b"garbage" * 999),
    "another object": lambda path: torch.save([1, 2], path),
}


@pytest.mark.parametrize("how", BREAK)
@pytest.mark.parametrize("kind", ["safetensors", "shard", "bin", "index"])
def test_the_file_that_is_broken_is_named(folder, how, kind):
    path = folder("shards" if kind in ("shard", "index") else "untied")
    file = {"safetensors": "model.safetensors", "bin": "pytorch_model.bin", "index": INDEX}.get(
        kind, "model-00002-of-00004.safetensors"
    )
    if kind == "bin":
        torch.save(load_file(path / "model.safetensors"), path / file)
        (path / "model.safetensors").unlink()
    assert (path / file).is_file(), sorted(each.name for each in path.iterdir())
    BREAK[how](path / file)
    with pytest.raises(ValueError, match=f"cannot be loaded: .*{file}.*: copy or download the folder again") as caught:
        load_model(str(path))
    assert len(str(caught.value).splitlines()) == 1
