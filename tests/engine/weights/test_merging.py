"""A merged model written shard by shard is the one that PEFT merges in memory, and is never held whole."""

import json
import os
import subprocess
import sys
import textwrap

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from lowtide.engine.weights.merging import save_merged
from tests.support.models.adapted_models import CASES, MERGED, QUANTIZED, adapted, build, dequantized, moe, quantized

IDS = torch.tensor([[5, 6, 7, 8, 9, 10]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    folder = str(tmp_path_factory.mktemp("model"))
    build().save_pretrained(folder)
    return folder


def saved_weights(folder) -> dict[str, torch.Tensor]:
    return {name: w for file in folder.glob("*.safetensors") for name, w in load_file(file).items()}


def reloaded(folder, dtype=torch.float32):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


@pytest.mark.parametrize("name", sorted(CASES.keys() - MERGED))
def test_a_bias_that_has_nowhere_to_go_is_refused_before_anything_is_written(name, tmp_path):
    make, options = CASES[name]
    with pytest.raises(ValueError, match=r"adapter 'default' has a bias .* at .*(q_proj|lm_head)"):
        save_merged(adapted(make(), **options), tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("make", "options"), MERGED.values(), ids=MERGED.keys())
def test_the_files_are_those_of_peft(make, options, dtype, tmp_path):
    model = adapted(make().to(dtype), **options)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    save_merged(model, tmp_path / "ours", max_shard_bytes=20_000)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    logits = model.eval()(IDS).logits
    assert not any(getattr(module, "merged_adapters", []) for module in model.modules())
    got = reloaded(tmp_path / "ours", dtype)
    torch.testing.assert_close(got(IDS).logits, logits.to(dtype), rtol=0, atol=1e-4 if dtype == torch.float32 else 0.5)
    if make().config.tie_word_embeddings and "modules_to_save" not in options:
        assert not got.config.tie_word_embeddings  # PEFT merges an adapter of one into both
        return
    model.merge_and_unload().save_pretrained(tmp_path / "theirs")
    ours, theirs = saved_weights(tmp_path / "ours"), saved_weights(tmp_path / "theirs")
    assert ours.keys() == theirs.keys()
    unlike = [name for name in ours if not torch.equal(ours[name], theirs[name])]
    if dtype == torch.bfloat16:  # of embeddings and of experts, PEFT rounds the adapter's part before it adds it
        for name in (name for name in unlike if "embed_tokens" in name or "experts" in name):
            torch.testing.assert_close(ours[name], theirs[name], rtol=2**-6, atol=2**-9)
        unlike = [name for name in unlike if "embed_tokens" not in name and "experts" not in name]
    assert unlike == []
    configs = [json.loads((tmp_path / side / "config.json").read_text()) for side in ("ours", "theirs")]
    assert configs[0] == configs[1]
    assert (tmp_path / "ours" / "generation_config.json").is_file()


def test_shards_stay_below_their_size_and_the_index_names_them(tmp_path):
    save_merged(adapted(build()), tmp_path, max_shard_bytes=1 << 30)
    assert [file.name for file in tmp_path.glob("*.safetensors")] == ["model.safetensors"]
    save_merged(adapted(build()), tmp_path, max_shard_bytes=40_000)
    files = sorted(file.name for file in tmp_path.glob("*.safetensors"))
    assert files == [f"model-{number:05}-of-{len(files):05}.safetensors" for number in range(1, len(files) + 1)]
    assert len(files) > 3
    for file in files:
        weights = load_file(tmp_path / file)
        assert sum(w.numel() * 4 for w in weights.values()) <= 40_000
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(w.numel() * 4 for w in saved_weights(tmp_path).values())
    assert {*index["weight_map"].values()} == {*files}


def test_experts_are_written_as_their_checkpoints_have_them(tmp_path):
    model = adapted(moe(), target_modules=["q_proj"], target_parameters=["mlp.experts.down_proj"])
    save_merged(model, tmp_path)
    assert "model.layers.0.mlp.experts.3.down_proj.weight" in saved_weights(tmp_path)


def test_a_model_without_adapters_is_written_in_another_dtype(tmp_path):
    model = build()
    save_merged(model, tmp_path, dtype=torch.bfloat16)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    weights = saved_weights(tmp_path)
    assert {w.dtype for w in weights.values()} == {torch.bfloat16}
    assert torch.equal(weights["lm_head.weight"], model.lm_head.weight.bfloat16())


def test_weights_beyond_the_range_of_a_dtype_are_told(tmp_path, caplog):
    model = build()
    save_merged(model, tmp_path, dtype=torch.float16)
    assert "NaN or infinity" not in caplog.text
    model.lm_head.weight.data[0, 0] = 1e6
    save_merged(model, tmp_path, dtype=torch.float16)
    assert "1 of the weights that are written hold NaN or infinity (lm_head.weight first)" in caplog.text


@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.parametrize("make", QUANTIZED.values(), ids=QUANTIZED.keys())
def test_a_quantized_base_is_dequantized(make, use_dora, folder, tmp_path):
    model = quantized(folder, make())
    if use_dora and any(type(p).__module__.startswith("torchao") for p in model.parameters()):
        pytest.skip("PEFT has no DoRA over torchao")
    dense = dequantized(folder, model)
    options = {"target_modules": ["q_proj", "down_proj"], "use_dora": use_dora}
    model, dense = adapted(model, **options), adapted(dense, **options)
    save_merged(model, tmp_path)
    wanted = dense.merge_and_unload().state_dict()
    got = reloaded(tmp_path)
    assert not hasattr(got.config, "quantization_config")
    for name, value in got.state_dict().items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_what_is_held_beside_the_model_is_a_shard(tmp_path):
    """Resident memory, in a process of its own, whose model has weights of 64 MB."""
    script = """
        import resource, sys, torch
        from pathlib import Path
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM, LlamaConfig
        from lowtide.engine.weights.merging import save_merged

        config = LlamaConfig(vocab_size=64, hidden_size=1024, intermediate_size=4096, num_hidden_layers=12,
                             num_attention_heads=8, num_key_value_heads=8)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
        weights = sum(p.numel() * p.element_size() for p in model.parameters()) >> 20
        small = get_peft_model(AutoModelForCausalLM.from_config(LlamaConfig(**{**config.to_dict(), "hidden_size": 64,
            "intermediate_size": 64, "num_hidden_layers": 1})), LoraConfig(r=2, target_modules="all-linear"))
        save_merged(small, Path(sys.argv[1], "small"))  # what imports take
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        save_merged(model, Path(sys.argv[1], "large"), max_shard_bytes=32 << 20)
        print(weights, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10) - before)
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"},  # so that nothing freed stays resident
    )
    assert run.returncode == 0, run.stderr
    weights, grown = map(int, run.stdout.split())
    assert weights > 380
    one_in_float32, shard, layer = 4 * 4, 32, 34
    assert grown < shard + layer + 2 * one_in_float32 + 24, (weights, grown)
