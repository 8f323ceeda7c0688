"""Prepared rows: the token ids and labels that TRL's SFTTrainer prepares from the same rows.

Its `_prepare_dataset` is called as it is, on an object that has what it reads of a trainer.
"""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from datasets import Dataset

from lowtide.data.encode.chat import ChatEncoder
from lowtide.data.formats.reading import ChatSample, RowPlace
from lowtide.data.prepare import PrepareOptions, prepare

trl = pytest.importorskip("trl", reason="the comparison needs the bench extra (trl)")

pytestmark = pytest.mark.usefixtures("datasets_cache")

GSM8K = Path(__file__).parents[3] / "shared" / "data" / "gsm8k_train.messages.jsonl"
EOS = "<|im_end|>"


def message(role, content):
    return {"role": role, "content": content}


TALKS = [
    [message("user", "How many clips?"), message("assistant", "72 clips in May.")],
    [
        message("system", "Be brief."),
        message("user", "Half of 48?"),
        message("assistant", "24"),
        message("user", "And half of that? " * 5),
        message("assistant", "12, says the ledger " * 4),
    ],
    [message("user", "long " * 30), message("assistant", "short")],
]
PAIRS = [("How many? ", "72 clips."), ("Ends inside a wo", "rd, Natalia"), ("", "no prompt"), ("a" * 60, " b" + EOS)]

DATASETS = {
    "text": [{"text": "Natalia sold clips."}, {"text": "It ends by itself." + EOS}, {"text": "The weather " * 20}],
    "messages": [{"messages": talk} for talk in TALKS],
    "conversations": [{"conversations": [{"from": m["role"], "value": m["content"]} for m in talk]} for talk in TALKS],
    "prompt-completion": [{"prompt": prompt, "completion": completion} for prompt, completion in PAIRS],
    "conversational prompt-completion": [{"prompt": talk[:-1], "completion": talk[-1:]} for talk in TALKS],
    "input_ids": [{"input_ids": [5, 6, 7, 8] * 8}, {"input_ids": [9, 10]}],
    "input_ids and labels": [{"input_ids": [5, 6, 7] * 9, "labels": [-100, 6, 7] * 9}],
    "keywords of the template, by row": [
        {"messages": talk, "chat_template_kwargs": {"brief": number % 2 == 0}} for number, talk in enumerate(TALKS)
    ],
    "input_ids and both masks": [
        {"input_ids": [5, 6, 7] * 9, "assistant_masks": [0, 1, 1] * 9, "completion_mask": [0] * 9 + [1] * 18}
    ],
    "input_ids and assistant_masks": [{"input_ids": [5, 6, 7] * 9, "assistant_masks": [0, 1, 1] * 9}],
}


def prepared_by_trl(
    rows, tokenizer, completion_only_loss=None, assistant_only_loss=False, formatting_func=None, **more
):
    if completion_only_loss is None:  # a completion_mask alone is used here, and by TRL when asked to
        completion_only_loss = "completion" in rows[0] or "completion_mask" in rows[0]
    trainer = SimpleNamespace(_tokenizer=tokenizer, chat_template=None, completion_only_loss=completion_only_loss)
    args = SimpleNamespace(
        dataset_num_proc=None,
        dataset_text_field="text",
        assistant_only_loss=assistant_only_loss,
        shuffle_dataset=more.get("shuffle", False),
        seed=more.get("seed", 42),
        max_length=more.get("max_length", 1024),
        truncation_mode=more.get("truncation_mode", "keep_start"),
    )
    prepare_dataset = trl.SFTTrainer._prepare_dataset
    dataset = prepare_dataset(trainer, Dataset.from_list(rows), tokenizer, args, False, formatting_func, "train")
    return [{"input_ids": row["input_ids"], "labels": row["labels"]} for row in dataset]


def prepared_here(rows, tokenizer, **options):
    options = {"turns": "whole", **options}
    dataset, _ = prepare(Dataset.from_list(rows), tokenizer, PrepareOptions(**options), batch_size=8, packing=False)
    return list(dataset)


@pytest.mark.parametrize("name", DATASETS)
@pytest.mark.parametrize(
    "options",
    [{}, {"max_length": 20}, {"max_length": 20, "truncation_mode": "keep_end"}, {"max_length": None, "shuffle": True}],
    ids=str,
)
def test_every_format_has_trls_ids_and_labels(tokenizer, name, options):
    rows = DATASETS[name]
    expected = prepared_by_trl(rows, tokenizer, **options)
    assert expected
    assert prepared_here(rows, tokenizer, **options) == expected


@pytest.mark.parametrize("name", ["prompt-completion", "conversational prompt-completion"])
def test_without_completion_only_loss_prompts_are_scored(tokenizer, name):
    options = {"completion_only_loss": False}
    expected = prepared_by_trl(DATASETS[name], tokenizer, **options)
    assert all(row["input_ids"] == row["labels"] for row in expected)
    assert prepared_here(DATASETS[name], tokenizer, **options) == expected


@pytest.mark.parametrize("name", ["messages", "conversations", "conversational prompt-completion"])
@pytest.mark.parametrize("completion_only_loss", [None, False, True])
def test_assistant_only_loss_from_generation_marks(marked_tokenizer, name, completion_only_loss):
    rows = DATASETS[name]
    options = {"assistant_only_loss": True, "completion_only_loss": completion_only_loss}
    expected = prepared_by_trl(rows, marked_tokenizer, **options)
    assert any(-100 in row["labels"] for row in expected)
    assert prepared_here(rows, marked_tokenizer, **options) == expected


@pytest.mark.parametrize(
    "name", ["cohere", "cohere2", "gemma", "gemma3", "lfm2", "llama3", "qwen3_instruct_2507", "qwen3_vl", "smolvlm"]
)
def test_turns_of_published_templates_are_what_trls_marks_give(tokenizer, name):
    """Without marks we align; TRL has a copy of each of these templates with marks added."""
    tokenizer.add_special_tokens({"bos_token": "<|endoftext|>"})
    folder = Path(trl.__file__).parent / "chat_templates"
    plain, marked = ((folder / f"{name}{kind}.jinja").read_text(encoding="utf-8") for kind in ("", "_training"))
    samples = [ChatSample(talk) for talk in TALKS if talk[0]["role"] == "user"]
    samples.append(ChatSample(TALKS[1][1:]))
    place = RowPlace(name, range(len(samples)))
    aligned = ChatEncoder(tokenizer, plain).encode_with_turns(samples, place)
    assert aligned == ChatEncoder(tokenizer, marked).encode_with_turns(samples, place)


def test_a_formatting_func(tokenizer):
    rows = [{"question": "How many?", "answer": "72"}, {"question": "Half of 48?", "answer": "24"}]
    options = {"formatting_func": lambda row: f"{row['question']} {row['answer']}"}
    assert prepared_here(rows, tokenizer, **options) == prepared_by_trl(rows, tokenizer, **options)


def test_tools_and_template_keywords(tokenizer):
    tokenizer.chat_template = (
        "{% if tools %}{{ tools | tojson }}{% endif %}{{ mood }}"
        "{% for message in messages %}{{ message.role }}: {{ message.content }}"
        "{% if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}\n{% endfor %}"
    )
    calls = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]
    rows = [
        {
            "messages": [
                message("user", "1 + 1?"),
                {"role": "assistant", "content": "", "tool_calls": calls},
                message("tool", "2"),
                message("assistant", "2"),
            ],
            "tools": json.dumps([{"type": "function", "function": {"name": "add", "parameters": {}}}]),
            "chat_template_kwargs": {"mood": "fine"},
        }
    ]
    assert prepared_here(rows, tokenizer) == prepared_by_trl(rows, tokenizer)


def test_keywords_of_the_template_are_those_of_each_row(tokenizer):
    tokenizer.chat_template = "{{ mood }}: {% for message in messages %}{{ message.content }} {% endfor %}"
    moods = [{"mood": "glad"}, {"mood": "sad"}, {"mood": "glad"}]
    talks = [{"messages": talk, "chat_template_kwargs": mood} for talk, mood in zip(TALKS, moods, strict=True)]
    asked = [
        {"prompt": talk[:-1], "completion": talk[-1:], "chat_template_kwargs": mood}
        for talk, mood in zip(TALKS, moods, strict=True)
    ]
    for rows in (talks, asked):
        expected = prepared_by_trl(rows, tokenizer)
        assert [tokenizer.decode(row["input_ids"]).split(":")[0] for row in expected] == ["glad", "sad", "glad"]
        assert prepared_here(rows, tokenizer) == expected


def test_a_tokenizer_that_begins_texts_with_a_token(tokenizer):
    from tokenizers.processors import TemplateProcessing

    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    for name in ("text", "messages", "prompt-completion"):
        assert prepared_here(DATASETS[name], tokenizer) == prepared_by_trl(DATASETS[name], tokenizer)


@pytest.mark.slow
@pytest.mark.skipif(not GSM8K.exists(), reason=f"no {os.path.relpath(GSM8K)}")
@pytest.mark.parametrize("assistant_only_loss", [False, True])
def test_gsm8k(marked_tokenizer, assistant_only_loss):
    with GSM8K.open(encoding="utf-8") as file:
        rows = [json.loads(line) for line, _ in zip(file, range(300), strict=False)]
    options = {"assistant_only_loss": assistant_only_loss, "max_length": 120}
    assert prepared_here(rows, marked_tokenizer, **options) == prepared_by_trl(rows, marked_tokenizer, **options)
