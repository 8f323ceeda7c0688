"""Chat templates of published families, as TRL ships them, with a small tokenizer that knows their tokens, and
conversations of six kinds whose words are all different."""

from __future__ import annotations

import copy
import functools
import json
import re
from pathlib import Path
from typing import Any

import trl
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

FOLDER = Path(trl.__file__).parent / "chat_templates"
PLAIN = sorted(path.stem for path in FOLDER.glob("*.jinja") if not path.stem.endswith("_training"))
KINDS = ("plain", "single", "thoughts", "inline thoughts", "tools", "agent")
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA_SPLIT = QWEN_SPLIT.replace(r"\p{N}|", r"\p{N}{1,3}|", 1)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORD, _SHORT = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
GPT_SPLIT = (
    rf"{_WORD}{_UPPER}*{_LOWER}+{_SHORT}|{_WORD}{_UPPER}+{_LOWER}*{_SHORT}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS = {"qwen": QWEN_SPLIT, "llama": LLAMA_SPLIT, "gpt": GPT_SPLIT}
STOPS = (
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<turn|>", "<|END_OF_TURN_TOKEN|>"),
    *("<end_of_utterance>", "<｜end▁of▁sentence｜>", "<|eot|>", "<|eom|>", "</s>"),
)
STOPS_OF = {"gptoss": ("<|return|>", "<|call|>"), "glm4moe": ("<|endoftext|>", "<|user|>", "<|observation|>")}
"""Of generation configs, where these are other tokens than a template's only end of turn."""
WRITTEN = re.compile(r"<\|?[A-Za-z_▁｜][\w▁｜]*\|?>|<\|[\w▁]+\|?>|</s>|</?think>")
THOUGHTS = {"gptoss": "thinking", "lfm2_2_5": "thinking"}
STRINGS = ("deepseek",)
"""Families whose templates join a call's arguments, which must be a text, to others."""
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Finds it.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "Which."}},
                "required": ["city"],
            },
        },
    }
]


def template(name: str) -> str:
    return (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")


@functools.cache
def tokenizer(kind: str = "qwen") -> PreTrainedTokenizerFast:
    """One that splits and merges texts as a family's does, or by Unigram, with every special token that one of the
    templates writes."""
    corpus = [template(name) for name in PLAIN] + ["a\n\nb\n\n c\n d"] * 50
    tok = _unigram(corpus) if kind == "unigram" else _byte_pairs(corpus, SPLITS[kind])
    written = sorted({found for name in PLAIN for found in WRITTEN.findall(template(name))} | {*STOPS})
    tok.add_special_tokens(written)
    return PreTrainedTokenizerFast(tokenizer_object=tok, pad_token="<pad>", bos_token="<s>", eos_token="<|endoftext|>")


def _unigram(corpus: list[str]) -> Tokenizer:
    tok = Tokenizer(models.Unigram())
    tok.pre_tokenizer, tok.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    special = ["<pad>", "<s>", "<|endoftext|>", "<unk>"]
    alphabet = [chr(code) for code in range(33, 127)] + ["\n"]
    trainer = trainers.UnigramTrainer(
        vocab_size=900, special_tokens=special, unk_token="<unk>", initial_alphabet=alphabet, show_progress=False
    )
    tok.train_from_iterator([line for text in corpus for line in text.splitlines(keepends=True)], trainer)
    return tok


def _byte_pairs(corpus: list[str], pattern: str) -> Tokenizer:
    tok = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tok.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=900, initial_alphabet=alphabet, special_tokens=["<pad>", "<s>", "<|endoftext|>"], show_progress=False
    )
    tok.train_from_iterator(corpus, trainer)
    return tok


def stop_ids(name: str, kind: str = "qwen") -> list[int]:
    return [tokenizer(kind).get_vocab()[text] for text in STOPS_OF.get(name, STOPS)]


def conversation(name: str, kind: str) -> tuple[list[dict[str, Any]], list[Any] | None]:
    """Messages of a kind in the form that a template reads, and the tools of the conversation."""
    words = iter(f"word{number}x" for number in range(100))
    messages: list[dict[str, Any]] = []
    for _ in range(1 if kind == "single" else 3):
        messages.append({"role": "user", "content": f"{next(words)} asks {next(words)}"})
        for _ in range({"tools": 1, "agent": 2}.get(kind, 0)):
            messages += _call(name, next(words), next(words), next(words) if kind == "agent" else None)
        answer = {"role": "assistant", "content": f"{next(words)} answers\n{next(words)}."}
        if kind in ("thoughts", "agent"):
            answer[THOUGHTS.get(name, "reasoning_content")] = f"{next(words)} thinks\n{next(words)}."
        if kind == "inline thoughts":
            answer["content"] = f"<think>\n{next(words)} thinks\n{next(words)}.\n</think>\n\n{answer['content']}"
        messages.append(answer)
    return messages, copy.deepcopy(TOOLS) if kind in ("tools", "agent") else None


def _call(name: str, asked: str, found: str, thought: str | None) -> list[dict[str, Any]]:
    arguments: Any = {"city": asked}
    if name.startswith(STRINGS):
        arguments = json.dumps(arguments)
    function = {"name": "weather", "arguments": arguments}
    turn: dict[str, Any] = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": function}],
    }
    if thought is not None:
        turn[THOUGHTS.get(name, "reasoning_content")] = f"{thought} thinks."
    return [turn, {"role": "tool", "name": "weather", "content": f"{found} found"}]
