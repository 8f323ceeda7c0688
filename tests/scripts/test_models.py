"""Adapters, quantization, reference copies, chat templates and mixtures: what TRL makes of the same arguments."""

import copy

import pytest
import torch
import trl

import lowtide
from lowtide.demo.model import END, make_model, make_tokenizer

MODELS = [
    {},
    {"use_peft": True},
    {"use_peft": True, "lora_r": 4, "lora_target_modules": ["all-linear"], "use_rslora": True, "use_dora": True},
    {"use_peft": True, "lora_target_modules": ["q_proj", "v_proj"], "lora_modules_to_save": ["lm_head"]},
    {"use_peft": True, "lora_target_parameters": ["experts.w"], "lora_task_type": "SEQ_CLS"},
    {"load_in_8bit": True},
    {"load_in_4bit": True, "dtype": "bfloat16", "use_bnb_nested_quant": True, "bnb_4bit_quant_storage": "uint8"},
]


@pytest.mark.parametrize("given", MODELS)
def test_adapters_and_quantization_are_trls(given):
    for name in ("get_peft_config", "get_quantization_config"):
        ours, theirs = (getattr(each, name)(each.ModelConfig(**given)) for each in (lowtide, trl))
        assert (ours and ours.to_dict()) == (theirs and theirs.to_dict())


@pytest.mark.parametrize("given", [{"lora_dropout": float("nan")}, {"lora_dropout": 1.0}, {"lora_r": 0}])
def test_numbers_out_of_range_are_refused(given):
    [name] = given
    with pytest.raises(ValueError, match=f"{name}="):
        lowtide.ModelConfig(**given)


def test_a_number_without_a_range_is_finite():
    with pytest.raises(ValueError, match="test_split_size=nan must be finite"):
        lowtide.DatasetMixtureConfig(test_split_size=float("nan"))


def test_8_and_4_bits_exclude_each_other_and_the_older_dtype_is_read():
    with pytest.raises(ValueError, match="load_in_8bit=True and load_in_4bit=True exclude each other"):
        lowtide.ModelConfig(load_in_8bit=True, load_in_4bit=True)
    assert lowtide.ModelConfig(torch_dtype="bfloat16").dtype == "bfloat16"
    assert lowtide.get_kbit_device_map() == ({"": 0} if torch.cuda.is_available() else None)


@pytest.fixture
def model():
    return make_model(make_tokenizer(), seed=0)


@pytest.mark.parametrize("shared", [None, 1])
def test_a_reference_copy_is_trls(model, shared):
    from trl.experimental.utils import create_reference_model

    beside = copy.deepcopy(model)
    ours, theirs = lowtide.create_reference_model(model, shared), create_reference_model(beside, shared)
    assert not ours.training
    for (name, weight), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(weight, other)
        assert not weight.requires_grad
        policy, their_policy = model.get_parameter(name), beside.get_parameter(name)
        assert policy.requires_grad == their_policy.requires_grad
        assert (policy.data_ptr() == weight.data_ptr()) == (their_policy.data_ptr() == other.data_ptr())


def test_a_layer_that_there_is_not_is_refused(model):
    with pytest.raises(ValueError, match="num_shared_layers=9: no parameter"):
        lowtide.create_reference_model(model, 9)


@pytest.fixture
def source(tmp_path):
    """A tokenizer's folder, whose template writes tokens that the target has not."""
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<|a|>", "<|b|>"], special_tokens=True)
    tokenizer.eos_token = "<|b|>"
    tokenizer.chat_template = "{% for m in messages %}<|a|>{{ m['content'] }}<|b|>{% endfor %}"
    tokenizer.save_pretrained(tmp_path)
    return str(tmp_path)


@pytest.mark.parametrize("multiple", [None, 64])
def test_a_cloned_template_is_trls(source, multiple):
    made = []
    for library in (lowtide, trl):
        tokenizer = make_tokenizer()
        made.append(library.clone_chat_template(make_model(tokenizer, 0), tokenizer, source, multiple))
    (model, tokenizer, added), (their_model, their_tokenizer, their_added) = made
    assert added == their_added
    assert tokenizer.get_vocab() == their_tokenizer.get_vocab()
    assert (tokenizer.chat_template, tokenizer.eos_token) == (their_tokenizer.chat_template, "<|b|>")
    assert model.config.eos_token_id == their_model.config.eos_token_id == tokenizer.eos_token_id
    assert model.generation_config.eos_token_id == their_model.generation_config.eos_token_id
    assert model.lm_head.weight.shape == their_model.lm_head.weight.shape


def test_chatml_is_set_up_on_a_base_model(tmp_path):
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, 0)
    with pytest.raises(ValueError, match="has a chat template already"):
        lowtide.setup_chat_format(model, tokenizer)
    tokenizer.chat_template = None
    assert lowtide.setup_chat_format(model, tokenizer, resize_to_multiple_of=64) == (model, tokenizer)
    talk = [{"role": "user", "content": "1 + 1"}, {"role": "assistant", "content": "2"}]
    assert tokenizer.apply_chat_template(talk, tokenize=False) == (
        "<|im_start|>user\n1 + 1<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"
    )
    assert tokenizer.apply_chat_template(talk[:1], tokenize=False, add_generation_prompt=True).endswith("assistant\n")
    assert tokenizer.eos_token == tokenizer.pad_token == END
    assert model.config.eos_token_id == model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.get_input_embeddings().weight.shape[0] % 64 == 0


@pytest.mark.parametrize(("shares", "split"), [((None, None), None), ((0.75, 0.25), None), ((None, None), 4)])
def test_a_mixture_is_trls(tmp_path, shares, split):
    from trl.scripts.utils import DatasetConfig

    paths = []
    for name, rows in (("a", 20), ("b", 12)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "train.jsonl").write_text("".join(f'{{"text": "{name}{n}", "id": {n}}}\n' for n in range(rows)))
        paths.append(str(folder))
    found = []
    for library, entry in ((lowtide, lowtide.DatasetConfig), (trl, DatasetConfig)):
        entries = [entry(path=p, fraction=s, columns=["text"]) for p, s in zip(paths, shares, strict=True)]
        found.append(library.get_dataset(library.DatasetMixtureConfig(datasets=entries, test_split_size=split)))
    ours, theirs = found
    assert {name: len(rows) for name, rows in ours.items()} == {name: len(rows) for name, rows in theirs.items()}
    both = [sorted(text for rows in each.values() for text in rows["text"]) for each in found]
    assert both[0] == both[1]
    assert split or ours["train"].to_dict() == theirs["train"].to_dict()
