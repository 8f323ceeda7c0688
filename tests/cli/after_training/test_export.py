"""`lowtide export --gguf`: the file holds the model's weights, and llama.cpp writes with it what transformers does."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

from lowtide.cli.after_training.gguf_export.families import FAMILIES
from lowtide.cli.after_training.gguf_export.vocabulary import SPLITS, pre_tokenizer_name
from lowtide.cli.main import main
from tests.support.texts.chatml import CHATML

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEXTS = [
    "The tide comes in at 12:45, and out again.",
    "Sand, weed and shells: 3 of each, 9 in all; the tide turns.",
] * 9
SMALL = {
    **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.2},
    **{"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 0},
}
WIDE = {"head_dim": 32}
WINDOWS = {"query_pre_attn_scalar": 32, "sliding_window": 16, **WIDE}
CONFIGS = {
    "llama": {**WIDE, "rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0,
              "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}},
    "mistral": {**WIDE, "sliding_window": None},
    "gemma": WIDE,
    "gemma2": WINDOWS,
    "gemma3_text": WINDOWS,
    "granite": {"attention_multiplier": 0.2, "embedding_multiplier": 3.0, "residual_multiplier": 0.5,
                "logits_scaling": 2.0},
    "starcoder2": {"sliding_window": None},
    "exaone4": {"sliding_window": None, "layer_types": ["full_attention"] * 8},
    **dict.fromkeys(("qwen3", "smollm3", "seed_oss", "arcee", "hunyuan_v1_dense", "glm4"), WIDE),
}  # fmt: skip


def a_tokenizer(cut: str | None = None) -> PreTrainedTokenizerFast:
    """A byte-level BPE; with a regular expression as cut by Qwen2 or Llama 3."""
    made = Tokenizer(models.BPE())
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=cut is None)
    parts = [] if cut is None else [pre_tokenizers.Split(Regex(cut), "isolated")]
    made.pre_tokenizer = pre_tokenizers.Sequence([*parts, whole]) if parts else whole
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(TEXTS, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = CHATML
    return tokenizer


def saved(folder: Path, kind: str, **changes) -> tuple:
    """(model, tokenizer) of a family with random weights, norms and biases too, in a folder."""
    torch.manual_seed(0)
    tokenizer = a_tokenizer()
    config = AutoConfig.for_model(kind, **{**SMALL, **CONFIGS.get(kind, {}), "vocab_size": len(tokenizer), **changes})
    model = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                weight += torch.randn_like(weight) * 0.1
    model.generation_config = GenerationConfig(eos_token_id=[2, 0], do_sample=True, temperature=0.5)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model, tokenizer


def test_the_file_holds_the_weights_the_tokens_and_the_template(tmp_path, capsys):
    gguf = pytest.importorskip("gguf", reason="needs the gguf extra")
    saved(tmp_path / "run", "qwen3")
    for kind, bound in {"f32": 0.0, "f16": 2**-11, "bf16": 2**-8, "q8_0": 2**-6}.items():
        path = tmp_path / f"{kind}.gguf"
        assert main(["export", str(tmp_path / "run"), "--gguf", kind, "--output", str(path)]) == 0
        reader = gguf.GGUFReader(path)
        weights = load_file(tmp_path / "run" / "model.safetensors")
        held = {each.name: gguf.quants.dequantize(each.data, each.tensor_type) for each in reader.tensors}
        assert len(held) == len(weights)
        for name, own in {
            "blk.1.attn_q": "layers.1.self_attn.q_proj",
            "blk.0.ffn_down": "layers.0.mlp.down_proj",
        }.items():
            wanted = weights[f"model.{own}.weight"].numpy()
            assert np.abs(held[f"{name}.weight"] - wanted).max() <= bound * np.abs(wanted).max()
        assert (held["blk.0.attn_norm.weight"] == weights["model.layers.0.input_layernorm.weight"].numpy()).all()
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert fields["tokenizer.ggml.pre"] == "gpt-2"
    assert fields["tokenizer.chat_template"] == CHATML
    assert fields["tokenizer.ggml.eos_token_id"] == 2
    assert fields["qwen3.attention.key_length"] == 32
    assert (tmp_path / "Modelfile").read_text() == (
        'FROM ./q8_0.gguf\nPARAMETER stop "<|im_end|>"\nPARAMETER stop "<|endoftext|>"\nPARAMETER temperature 0.5\n'
    )
    assert "ollama create run --file" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAMILIES)
def test_llama_cpp_writes_what_transformers_writes(kind, tmp_path, capfd):
    xllamacpp = pytest.importorskip("xllamacpp", reason="needs llama.cpp (pip install xllamacpp)")
    pytest.importorskip("gguf", reason="needs the gguf extra")
    model, tokenizer = saved(tmp_path / "run", kind)
    path = tmp_path / "run.gguf"
    assert main(["export", str(tmp_path / "run"), "--gguf", "f32", "--output", str(path)]) == 0
    settings = xllamacpp.CommonParams()
    settings.model.path, settings.n_ctx, settings.warmup, settings.cpuparams.n_threads = str(path), 256, False, 1
    settings.cache_type_k = settings.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    settings.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server, seen = xllamacpp.Server(settings), set[int]()
    for text in (TEXTS[1][:30], TEXTS[0][5:40], "shells 12:45, \tüber the sand", "3 of 9"):
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        how = GenerationConfig(max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=[2, 0])
        found = model.generate(ids, generation_config=how)[0, ids.shape[1] :]
        asked = {"prompt": text, "n_predict": 12, "temperature": 0, "cache_prompt": False, "logprobs": 1}
        written = server.handle_completions(asked)
        [choice] = (json.loads(written) if isinstance(written, str) else written)["choices"]
        wanted = tokenizer.decode(found, skip_special_tokens=True)
        assert choice["text"].rstrip("\ufffd") == wanted.rstrip("\ufffd")
        with torch.no_grad():
            first = float(model(ids).logits[0, -1].log_softmax(-1).max())
        shown = choice["logprobs"]["content"][0]
        if shown["id"] == int(found[0]):  # llama.cpp joins tokens that are parts of a character
            assert shown["logprob"] == pytest.approx(first, abs=5e-3)  # its GELU is a table of float16
        seen |= set(found.tolist())
    assert len(seen) > 3


@pytest.mark.parametrize(("cut", "name"), [(None, "gpt-2"), *SPLITS.items(), (r"\s+", None)])
def test_the_pre_tokenizer_is_told_from_how_texts_are_cut(cut, name):
    held = json.loads(a_tokenizer(cut).backend_tokenizer.to_str())
    assert pre_tokenizer_name(held) == name
    if name == "dbrx":
        held["model"]["ignore_merges"] = True
        assert pre_tokenizer_name(held) == "llama-bpe"
    held["model"]["byte_fallback"] = True  # of SentencePiece
    assert pre_tokenizer_name(held) is None


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("gpt2", {}, "is a gpt2, and what is written is llama, mistral"),
        ("mistral", {"sliding_window": 16}, "has a sliding window of 16 tokens"),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "type 'linear'"),
        ("gemma2", {"query_pre_attn_scalar": 8}, "has query_pre_attn_scalar=8"),
        ("smollm3", {"no_rope_layers": [1] * 8}, "leaves out positions in other layers"),
    ],
)
def test_what_llama_cpp_would_pass_over_is_refused(kind, changes, message, tmp_path, capsys):
    pytest.importorskip("gguf", reason="needs the gguf extra")
    given = (
        {**SMALL, **CONFIGS.get(kind, {}), **changes} if kind != "gpt2" else {"n_layer": 1, "n_embd": 8, "n_head": 2}
    )
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, vocab_size=400, **given)).save_pretrained(tmp_path)
    a_tokenizer().save_pretrained(tmp_path)
    assert main(["export", str(tmp_path), "--gguf", "f32"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "convert_hf_to_gguf.py" in error
    assert not list(tmp_path.glob("*.gguf*"))


def test_a_missing_package_is_said_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("lowtide.cli.after_training.export.find_spec", lambda name: None)
    for kind, extra in {"--gguf f32": "gguf", "--quantize int8": "ao"}.items():
        assert main(["export", str(tmp_path), *kind.split()]) == 2
        assert f"pip install 'lowtide[{extra}]'" in capsys.readouterr().err


def adapted(folder: Path, base: Path, kind: str) -> None:
    """An adapter of random numbers on a model of random weights, each in its folder, the adapter with the tokenizer."""
    model, tokenizer = saved(base, kind)
    model.name_or_path = str(base)
    torch.manual_seed(1)
    with_adapter = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    with_adapter.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_an_adapter_is_merged_as_the_file_is_written(tmp_path, capsys, kind):
    gguf = pytest.importorskip("gguf", reason="needs the gguf extra")
    adapted(tmp_path / "run", tmp_path / "base", kind)
    before = sorted(tmp_path.iterdir())
    assert main(["merge", "--adapter", str(tmp_path / "run"), "--output_dir", str(tmp_path / "whole/run")]) == 0
    assert main(["export", str(tmp_path / "whole/run"), "--gguf", "f32", "--output", str(tmp_path / "a.gguf")]) == 0
    assert main(["export", str(tmp_path / "run"), "--gguf", "f32", "--output", str(tmp_path / "b.gguf")]) == 0
    two, one = (gguf.GGUFReader(tmp_path / name) for name in ("a.gguf", "b.gguf"))
    tensors = [{each.name: np.array(each.data) for each in reader.tensors} for reader in (two, one)]
    assert tensors[0].keys() == tensors[1].keys()
    assert all((tensors[0][name] == tensors[1][name]).all() for name in tensors[0])
    assert not np.array_equal(tensors[1]["blk.0.ffn_up.weight"], plain(tmp_path / "base", "layers.0.mlp.up_proj"))
    fields = [{name: field.contents() for name, field in reader.fields.items()} for reader in (two, one)]
    assert fields[0] == fields[1]
    assert 'PARAMETER stop "<|endoftext|>"' in (tmp_path / "Modelfile").read_text()  # as the base's config says
    made = {tmp_path / name for name in ("whole", "a.gguf", "b.gguf", "Modelfile")}
    assert {*tmp_path.iterdir()} == {*before, *made}


def plain(folder: Path, name: str) -> np.ndarray:
    return load_file(folder / "model.safetensors")[f"model.{name}.weight"].numpy()


CONVERTER = """
import argparse, json, pathlib, sys
parser = argparse.ArgumentParser()
parser.add_argument("model", type=pathlib.Path)
parser.add_argument("--outfile", type=pathlib.Path)
parser.add_argument("--outtype")
given = parser.parse_args()
assert given.model.name == "run" and (given.model / "tokenizer.json").is_file()
assert json.loads((given.model / "config.json").read_text())["model_type"] == "gpt2"
assert (given.model / "model.safetensors").is_file()
if given.outtype == "f16":
    sys.exit("Model GPT2LMHeadModel is not supported")
given.outfile.write_bytes(b"GGUF and more" if given.outtype == "bf16" else b"none")
"""


@pytest.mark.parametrize("began", ["an adapter's base", "the model of run.yaml"])
def test_a_converter_finds_the_file_of_sentencepiece_where_the_run_began(tmp_path, began):
    """transformers leaves it out as it saves a tokenizer."""
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("gpt2", vocab_size=400, n_layer=1, n_embd=8, n_head=2)
    )
    run, base = tmp_path / "run", tmp_path / "base"
    for folder in (run, base):
        model.save_pretrained(folder)
        a_tokenizer().save_pretrained(folder)
    (base / "tokenizer.model").write_bytes(b"pieces")
    if began == "the model of run.yaml":
        (run / "run.yaml").write_text(f"model: {base}\n")
    else:
        (run / "config.json").unlink()
        (run / "model.safetensors").unlink()
        model.name_or_path = str(base)
        get_peft_model(model, LoraConfig(r=2, target_modules=["c_attn"])).save_pretrained(run)
    (tmp_path / "convert.py").write_text(
        f"{CONVERTER}assert (given.model / 'tokenizer.model').read_bytes() == b'pieces'\n"
    )
    words = ["export", str(run), "--converter", str(tmp_path / "convert.py"), "--gguf", "bf16"]
    assert main(words) == 0
    assert not (run / "tokenizer.model").exists()
    other = a_tokenizer()
    assert other.add_tokens(["<|tide|>"])
    other.save_pretrained(base)
    assert main(words) == 2  # a file of another vocabulary stays away


def test_a_converter_that_lacks_a_package_is_told_which(tmp_path, capsys):
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("gpt2", vocab_size=400, n_layer=1, n_embd=8, n_head=2)
    )
    model.save_pretrained(tmp_path / "run")
    a_tokenizer().save_pretrained(tmp_path / "run")
    (tmp_path / "convert.py").write_text("import lacking_package.part\n")
    assert main(["export", str(tmp_path / "run"), "--gguf", "bf16", "--converter", str(tmp_path / "convert.py")]) == 2
    said = capsys.readouterr().err
    assert "pip install lacking_package)" in said
    assert "leave out torch and transformers" in said


@pytest.mark.parametrize("adapter", [False, True])
def test_a_converter_writes_what_is_not_written_here(tmp_path, capsys, adapter):
    tokenizer = a_tokenizer()
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("gpt2", vocab_size=400, n_layer=1, n_embd=8, n_head=2)
    )
    model.save_pretrained(tmp_path / ("base" if adapter else "run"))
    tokenizer.save_pretrained(tmp_path / "run")
    if adapter:
        model.name_or_path = str(tmp_path / "base")
        get_peft_model(model, LoraConfig(r=2, target_modules=["c_attn"])).save_pretrained(tmp_path / "run")
    (tmp_path / "convert.py").write_text(CONVERTER)
    words = ["export", str(tmp_path / "run"), "--converter", str(tmp_path / "convert.py"), "--gguf"]
    assert main([*words, "bf16"]) == 0
    output = tmp_path / "run" / "run-bf16.gguf"
    assert output.read_bytes() == b"GGUF and more"
    assert f"llama-cli --model {output}" in capsys.readouterr().out
    for kind, said in {"f16": "status 1, and said:\nModel GPT2LMHeadModel is not", "f32": "wrote no GGUF file"}.items():
        assert main([*words, kind]) == 2
        assert said in capsys.readouterr().err
    assert {each.name for each in tmp_path.iterdir()} == {"run", "convert.py", *(["base"] if adapter else [])}
    assert not (tmp_path / "run" / "run-f32.gguf").exists()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "int8_dynamic"])
@pytest.mark.parametrize("adapter", [False, True])
def test_a_quantized_folder_is_read_by_transformers(tmp_path, capsys, kind, adapter):
    pytest.importorskip("torchao", reason="needs the ao extra")
    if adapter:
        adapted(tmp_path / "run", tmp_path / "base", "qwen3")
        main(["merge", "--adapter", str(tmp_path / "run"), "--output_dir", str(tmp_path / "whole")])
    else:
        saved(tmp_path / "run", "qwen3")
    assert main(["export", str(tmp_path / "run"), "--quantize", kind]) == 0
    output = tmp_path / f"run-{kind}"
    assert f"vllm serve {output}" in capsys.readouterr().out
    said = json.loads((output / "config.json").read_text())["quantization_config"]
    assert said["quant_method"] == "torchao"
    read = AutoModelForCausalLM.from_pretrained(output, dtype=torch.bfloat16).eval()
    assert "Int8" in type(read.model.layers[0].mlp.up_proj.weight).__name__
    source = tmp_path / ("whole" if adapter else "run")
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).eval()
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        ours, theirs = read(ids).logits.float(), model(ids).logits.float()
    assert 0 < (ours - theirs).norm() / theirs.norm() < 0.1
    assert json.loads((output / "tokenizer.json").read_text()) == json.loads((source / "tokenizer.json").read_text())
    assert main(["export", str(tmp_path / "run"), "--quantize", kind]) == 2
    assert "is there already" in capsys.readouterr().err


def test_options_that_do_not_go_together_are_refused(tmp_path, capsys):
    (tmp_path / "convert.py").touch()
    wrong = {
        "--quantize int8 --tokenizer_pre qwen2": "--tokenizer_pre goes with --gguf",
        "--gguf f32 --converter no.py": "there is no file 'no.py'",
        f"--gguf f32 --converter {tmp_path}/convert.py --tokenizer_pre qwen2": "--tokenizer_pre has no effect",
        "--gguf f32 --quantize int8": "not allowed with argument",
        "": "one of the arguments --gguf --quantize is required",
    }
    for words, said in wrong.items():
        assert main(["export", str(tmp_path), *words.split()]) == 2
        assert said in capsys.readouterr().err


def test_what_is_there_and_is_no_gguf_stays(tmp_path, capsys):
    pytest.importorskip("gguf", reason="needs the gguf extra")
    saved(tmp_path / "run", "llama")
    weights = (tmp_path / "run" / "model.safetensors").read_bytes()
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "Modelfile").symlink_to(tmp_path / "mine")
    words = ["export", str(tmp_path / "run"), "--gguf", "f32", "--output"]
    assert main([*words, str(tmp_path / "run" / "model.safetensors")]) == 2
    assert "is a file of another kind, which would be lost" in capsys.readouterr().err
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == weights
    for _ in range(2):  # what was written here is written again
        assert main([*words, str(tmp_path / "a.gguf")]) == 0
    assert (tmp_path / "mine").read_text() == "mine"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("generation_config.json", b"[]", "generation_config.json holds a JSON list where an object belongs"),
        ("generation_config.json", b'{"eos_token_id": "x"}', "says eos_token_id='x', which is a number"),
        ("generation_config.json", b'{"temperature": "x\\nFROM y"}', "says temperature="),
        ("model.safetensors", b"\x00" * 20, "model.safetensors"),
    ],
)
def test_files_of_the_model_that_cannot_be_used_are_named(name, content, message, tmp_path, capsys):
    pytest.importorskip("gguf", reason="needs the gguf extra")
    saved(tmp_path, "llama")
    (tmp_path / name).write_bytes(content)
    assert main(["export", str(tmp_path), "--gguf", "f32"]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.glob("*.gguf*"))
