"""The tokenizer of a model as llama.cpp reads it: tokens, their types, merges, and the name of the pre-tokenizer.

llama.cpp knows how a text is cut before merging by a name alone. The name is told from `tokenizer.json`'s own cutting,
and a tokenizer that is cut otherwise is refused: a wrong name fails silently, on digits and odd spaces.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
SPLITS = {_QWEN2: "qwen2", _LLAMA3: "dbrx"}
"""The names of ways to cut, by the regular expression; `llama-bpe` cuts as `dbrx`, and takes whole words first."""


def pre_tokenizer_name(tokenizer: Mapping[str, Any]) -> str | None:
    """llama.cpp's name of how a tokenizer cuts texts; None where it has none that is known here.

    Args:
        tokenizer: what `tokenizer.json` holds.
    """
    if tokenizer["model"].get("type") != "BPE" or tokenizer["model"].get("byte_fallback"):
        return None
    given = tokenizer.get("pre_tokenizer") or {}
    parts = given.get("pretokenizers", [given])
    kinds = [part.get("type") for part in parts]
    if kinds[-1:] != ["ByteLevel"] or parts[-1].get("add_prefix_space"):
        return None
    whole = parts[-1].get("use_regex", True)
    if kinds == ["ByteLevel"] and whole:
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and whole and parts[0].get("individual_digits"):
        return "smollm"
    if kinds == ["Split", "ByteLevel"] and not whole and parts[0].get("behavior") == "Isolated":
        name = SPLITS.get((parts[0].get("pattern") or {}).get("Regex", ""))
        return "llama-bpe" if name == "dbrx" and tokenizer["model"].get("ignore_merges") else name
    return None


def write_vocabulary(writer: Any, folder: Path, size: int, tokenizer: Any, name: str | None) -> None:
    """Writes the tokenizer of a folder.

    Args:
        writer: gguf's.
        size: tokens of the model's embedding, which may have more than the tokenizer.
        tokenizer: the same as transformers has it.
        name: of the pre-tokenizer, in place of the one that is told from the file.

    Raises:
        ValueError: it is of a kind that is not written here.
    """
    from gguf import TokenType

    held = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    name = name or pre_tokenizer_name(held)
    if name is None:
        raise ValueError(
            f"{folder / 'tokenizer.json'}: llama.cpp's name of how this tokenizer cuts texts is not known here (a "
            f"{held['model'].get('type')} with {json.dumps(held.get('pre_tokenizer'))[:200]}): give it by "
            "--tokenizer_pre if it is a byte-level BPE, or use llama.cpp's convert_hf_to_gguf.py"
        )
    added = {each["id"]: each for each in held["added_tokens"]}
    tokens = {number: text for text, number in held["model"]["vocab"].items()}
    tokens |= {number: each["content"] for number, each in added.items()}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(name)
    writer.add_token_list([tokens.get(number, f"[PAD{number}]") for number in range(size)])
    writer.add_token_types(
        [
            TokenType.CONTROL
            if number in added and added[number].get("special")
            else TokenType.USER_DEFINED
            if number in added
            else TokenType.NORMAL
            if number in tokens
            else TokenType.UNUSED
            for number in range(size)
        ]
    )
    merges = held["model"]["merges"]
    writer.add_token_merges([each if isinstance(each, str) else " ".join(each) for each in merges])
    ids = tokenizer("a")["input_ids"]
    for kind, place in (("bos", 0), ("eos", -1)):
        token = getattr(tokenizer, f"{kind}_token_id")
        if token is not None:
            getattr(writer, f"add_{kind}_token_id")(token)
        getattr(writer, f"add_add_{kind}_token")(token is not None and len(ids) > 1 and ids[place] == token)
    if tokenizer.pad_token_id is not None:
        writer.add_pad_token_id(tokenizer.pad_token_id)
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)
