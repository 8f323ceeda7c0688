"""Chat templates: token ids as `apply_chat_template` gives them, and which of them the assistant wrote."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lowtide.data.encode.chat import ChatEncoder, adopt_chat_template, read_chat_template
from lowtide.data.formats.reading import ChatSample, RowPlace
from tests.support.texts.chatml import CHATML, MARKED_CHATML

PLACE = RowPlace("data.jsonl", list(range(10, 20)))
TEXT = st.text(alphabet="ab \n<>|é42", min_size=1, max_size=8)


def chat(*texts, system=None):
    roles = ["user", "assistant"] * len(texts)
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    return ChatSample(([{"role": "system", "content": system}] if system else []) + messages)


CHATS = [chat("hello", "hi", "the answer?", "42"), chat("May?", "April", system="be brief"), chat("alone")]


def scored_texts(tokenizer, token_ids, mask):
    """The runs of tokens that a mask marks, decoded."""
    runs, previous = [], 0
    for token, bit in zip(token_ids, mask, strict=True):
        if bit and not previous:
            runs.append([])
        if bit:
            runs[-1].append(token)
        previous = bit
    return [tokenizer.decode(run) for run in runs]


@pytest.mark.parametrize("generation_prompt", [False, True])
def test_a_batch_has_the_ids_of_each_conversation_alone(tokenizer, generation_prompt):
    encoded = ChatEncoder(tokenizer).encode(CHATS, PLACE, generation_prompt=generation_prompt)
    for ids, sample in zip(encoded, CHATS, strict=True):
        alone = tokenizer.apply_chat_template(sample.messages, add_generation_prompt=generation_prompt)
        assert ids == alone["input_ids"]


def test_rows_with_their_own_tools_and_keywords_keep_them(tokenizer):
    tokenizer.chat_template = "{{ tools | length if tools else 0 }}{{ mood }}{{ messages[0].content }}"
    tools = [{"type": "function", "function": {"name": "f"}}]
    samples = [
        ChatSample([{"role": "user", "content": "a"}], tools=tools),
        ChatSample([{"role": "user", "content": "b"}], tools=tools),
        ChatSample([{"role": "user", "content": "c"}], template_kwargs={"mood": "fine"}),
    ]
    assert tokenizer.batch_decode(ChatEncoder(tokenizer).encode(samples, PLACE)) == ["1a", "1b", "0finec"]


@pytest.mark.parametrize("which", ["tokenizer", "marked_tokenizer"])
def test_the_assistant_wrote_its_turns_with_their_end(which, request):
    tokenizer = request.getfixturevalue(which)
    token_ids, masks = ChatEncoder(tokenizer).encode_with_turns(CHATS, PLACE)
    texts = [scored_texts(tokenizer, ids, mask) for ids, mask in zip(token_ids, masks, strict=True)]
    assert texts == [["hi<|im_end|>\n", "42<|im_end|>\n"], ["April<|im_end|>\n"], []]


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.lists(TEXT, min_size=1, max_size=5), min_size=1, max_size=4))
def test_aligned_turns_are_those_that_marks_would_give(tokenizer, conversations):
    samples = [chat(*texts) for texts in conversations]
    aligned = ChatEncoder(tokenizer, CHATML).encode_with_turns(samples, PLACE)
    marked = ChatEncoder(tokenizer, MARKED_CHATML).encode_with_turns(samples, PLACE)
    assert aligned == marked


def test_a_template_that_renders_the_beginning_differently_is_refused(tokenizer):
    tokenizer.chat_template = (
        "{% for message in messages %}"
        "{{ message.content if message.role == 'user' or loop.last else message.content.upper() }}|"
        "{% endfor %}"
    )
    encoder = ChatEncoder(tokenizer)
    assert encoder.encode_with_turns([chat("a", "b")], PLACE)[1]
    problem = r"data.jsonl, row 11 .* assistant's tokens in message 1: .*no \{% generation %\} marks"
    with pytest.raises(ValueError, match=problem):
        encoder.encode_with_turns([chat("a", "b"), chat("a", "b", "c", "d")], PLACE)


THINKING = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ message['content'].split('</think>')[-1] if not loop.last else message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("answer", ["It is four.", "<think>two and two</think>It is four."])
def test_turns_whose_thoughts_the_template_drops_later_are_told(tokenizer, answer):
    """As templates of Qwen3 do: the last turn has (empty) thoughts, earlier ones stand without theirs."""
    tokenizer.chat_template = THINKING
    encoder = ChatEncoder(tokenizer)
    talk = chat("What is 2 + 2?", answer, "And 1 + 1?", answer, "And 0?", "It is nought.")
    [ids], [mask] = encoder.encode_with_turns([talk], RowPlace("rows", [0]))
    earlier = "It is four.<|im_end|>\n"
    scored = tokenizer.decode([token for token, own in zip(ids, mask, strict=True) if own])
    assert scored == f"{earlier}{earlier}<think>\n\n</think>\n\nIt is nought.<|im_end|>\n"
    assert ids == encoder.encode([talk], RowPlace("rows", [0]))[0]


def test_a_template_that_fails_on_a_row_names_it(tokenizer):
    tokenizer.chat_template = "{% if messages | length > 2 %}{{ raise_exception('too long') }}{% endif %}a"
    with pytest.raises(ValueError, match=r"row 11 .* can't render the conversation: too long"):
        ChatEncoder(tokenizer).encode([chat("a", "b"), chat("a", "b", "c")], PLACE)


def test_a_tokenizer_without_a_template_is_refused(tokenizer):
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match=r"has no chat template\. Set chat_template_path"):
        ChatEncoder(tokenizer)


def test_a_template_is_read_from_a_file_a_folder_or_a_tokenizer(tokenizer, tmp_path):
    (tmp_path / "own.jinja").write_text("own", encoding="utf-8")
    (tmp_path / "chat_template.jinja").write_text("folder", encoding="utf-8")
    tokenizer.save_pretrained(tmp_path / "saved")
    assert read_chat_template(str(tmp_path / "own.jinja")) == "own"
    assert read_chat_template(str(tmp_path)) == "folder"
    assert read_chat_template(str(tmp_path / "saved")) == tokenizer.chat_template


def test_adopting_a_tokenizers_template_brings_its_tokens_and_its_end(tokenizer, trained_tokenizer, tmp_path):
    tokenizer.add_special_tokens({"eos_token": "<|eot|>"})
    tokenizer.chat_template = "{{ messages[0].content }}<|eot|>"
    tokenizer.save_pretrained(tmp_path)
    import copy

    target = copy.deepcopy(trained_tokenizer)
    assert adopt_chat_template(target, str(tmp_path)) == ["<|eot|>"]
    assert (target.chat_template, target.eos_token) == (tokenizer.chat_template, "<|eot|>")
    assert len(target) == len(trained_tokenizer) + 1


@pytest.mark.parametrize(
    ("path", "error", "problem"),
    [
        ("missing.jinja", FileNotFoundError, "there is no file"),
        ("./missing-folder", ValueError, "neither a .jinja file, nor a tokenizer"),
    ],
)
def test_a_template_that_is_not_there_is_named(path, error, problem):
    with pytest.raises(error, match=problem):
        read_chat_template(path)


def test_a_source_tokenizer_without_a_template_is_named(tokenizer, tmp_path):
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has no chat template either"):
        read_chat_template(str(tmp_path))
