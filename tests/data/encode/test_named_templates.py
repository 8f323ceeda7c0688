"""Built-in chat templates: the texts of the published formats, and turns that are trained as they are generated."""

import copy

import pytest
from datasets import Dataset

from lowtide.data.encode.chat import adopt_chat_template
from lowtide.data.encode.named_templates import NAMED
from lowtide.data.prepare import PrepareOptions, prepare

pytestmark = pytest.mark.usefixtures("datasets_cache")

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "It is 1."},
    {"role": "user", "content": "Two?"},
    {"role": "assistant", "content": "It is 2."},
]
HEADERS = "<|start_header_id|>{}<|end_header_id|>\n\n"
TEXTS = {
    "chatml": "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in TALK),
    "gemma": "<b><start_of_turn>user\nBe brief.\n\nOne?<end_of_turn>\n<start_of_turn>model\nIt is 1.<end_of_turn>\n"
    "<start_of_turn>user\nTwo?<end_of_turn>\n<start_of_turn>model\nIt is 2.<end_of_turn>\n",
    "llama3": "<b>" + "".join(f"{HEADERS.format(m['role'])}{m['content']}<|eot_id|>" for m in TALK),
    "mistral": "<b>[INST] Be brief.\n\nOne? [/INST] It is 1.<e>[INST] Two? [/INST] It is 2.<e>",
    "phi3": "".join(f"<|{m['role']}|>\n{m['content']}<|end|>\n" for m in TALK),
    "zephyr": "".join(f"<|{m['role']}|>\n{m['content']}<e>\n" for m in TALK),
}


@pytest.fixture
def plain(tokenizer):
    """A tokenizer without a chat template."""
    tokenizer.chat_template = None
    tokenizer.add_special_tokens({"bos_token": "<b>", "eos_token": "<e>"})
    return tokenizer


@pytest.mark.parametrize("name", NAMED)
def test_a_built_in_template_writes_its_format_and_scores_the_stop_token(plain, name):
    added = adopt_chat_template(plain, name)
    assert set(added) <= set(NAMED[name].tokens)
    assert plain.apply_chat_template(TALK, tokenize=False) == TEXTS[name]
    options = PrepareOptions(assistant_only_loss=True, vocab_size=len(plain))
    [row] = prepare(Dataset.from_list([{"messages": TALK}]), plain, options, batch_size=1, packing=False)[0]
    scored = plain.decode([label for label in row["labels"] if label != -100])
    end, space = NAMED[name].end or "<e>", " " * (name == "mistral")
    assert scored == f"{space}It is 1.{end}{space}It is 2.{end}"
    assert plain.eos_token == end
    assert all(len(plain.encode(token, add_special_tokens=False)) == 1 for token in (*NAMED[name].tokens, end))
    context = plain.apply_chat_template(TALK[:4], tokenize=False, add_generation_prompt=True)
    assert TEXTS[name].startswith(context)
    assert TEXTS[name][len(context) :].startswith(f"{space}It is 2.{end}")


@pytest.mark.parametrize("name", NAMED)
def test_tool_calls_are_refused_with_the_name(plain, name):
    adopt_chat_template(plain, name)
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    messages = [TALK[1], {"role": "assistant", "content": "", "tool_calls": [call]}]
    options = PrepareOptions(assistant_only_loss=True, vocab_size=len(plain))
    with pytest.raises(ValueError, match=f"the built-in chat template {name} writes texts alone"):
        prepare(Dataset.from_list([{"messages": messages}]), plain, options, batch_size=1, packing=False)


def test_a_tokenizer_without_a_template_is_offered_them(plain):
    options = PrepareOptions(vocab_size=len(plain))
    with pytest.raises(ValueError, match=r"has no chat template.* or to one of chatml, gemma, llama3"):
        prepare(Dataset.from_list([{"messages": TALK}]), plain, options, batch_size=1, packing=False)
    without = copy.deepcopy(plain)
    without.eos_token = None
    with pytest.raises(ValueError, match="chat_template_path='zephyr' ends turns with the tokenizer's end token"):
        adopt_chat_template(without, "zephyr")


def test_a_folder_of_that_name_comes_first(plain, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chatml").mkdir()
    (tmp_path / "chatml" / "chat_template.jinja").write_text("mine")
    assert adopt_chat_template(plain, "chatml") == []
    assert plain.chat_template == "mine"
