"""The demo's tokenizer and model."""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lowtide.demo.data import make_questions
from lowtide.demo.model import END, make_model, make_tokenizer, save


def test_the_tokenizer_gives_every_dialogue_back():
    tokenizer = make_tokenizer()
    for question in make_questions(10, seed=0)[0][::37]:
        for text in (question.text, question.answer):
            ids = tokenizer(text)["input_ids"]
            assert tokenizer.unk_token_id not in ids
            assert tokenizer.decode(ids) == text


def test_the_template_marks_what_the_assistant_says_and_its_end():
    tokenizer = make_tokenizer()
    question = make_questions(1, seed=0)[1][0]
    encoded = tokenizer.apply_chat_template(question.messages, return_dict=True, return_assistant_tokens_mask=True)
    marked = [i for i, mark in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if mark]
    assert tokenizer.decode(marked) == question.answer + END


def test_a_prompt_is_how_its_dialogue_begins():
    tokenizer = make_tokenizer()
    messages = make_questions(1, seed=0)[1][0].messages
    prompt = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    assert tokenizer.apply_chat_template(messages, tokenize=False).startswith(prompt)


def test_saved_model_and_tokenizer_are_those_that_were_made(tmp_path):
    save(tmp_path, seed=1)
    tokenizer, made = make_tokenizer(), make_model(make_tokenizer(), seed=1)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="float32")
    for name, weight in made.state_dict().items():
        assert torch.equal(weight, loaded.state_dict()[name]), name
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again.get_vocab() == tokenizer.get_vocab()
    assert again.chat_template == tokenizer.chat_template
    assert (again.eos_token, again.pad_token, again.padding_side) == (END, "<|pad|>", "left")
