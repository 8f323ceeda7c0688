"""Chat templates put on a model and its tokenizer, with the tokens that they write."""

from __future__ import annotations

from typing import Any, cast

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lowtide.data.encode.chat import adopt_chat_template
from lowtide.engine.forward import embedding_weight

START, END = "<|im_start|>", "<|im_end|>"
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' "
    "+ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def clone_chat_template(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    source_tokenizer_path: str,
    resize_to_multiple_of: int | None = 64,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, list[int]]:
    """The chat template of another tokenizer, with its added tokens and its end token, on model and tokenizer in place.

    Args:
        source_tokenizer_path: a tokenizer's folder or hub name, or a `.jinja` file, whose tokens are known already.
        resize_to_multiple_of: round the embedding's rows up to it. The tokenizer gets `<extra_id_N>` for the rest.

    Returns:
        model, tokenizer, and the ids of the tokens that were added.

    Raises:
        ValueError: there is no such template.
    """
    added = adopt_chat_template(tokenizer, source_tokenizer_path)
    _end_at(tokenizer.eos_token_id, model)
    model.resize_token_embeddings(len(tokenizer.get_vocab()), pad_to_multiple_of=resize_to_multiple_of)
    number, rows = 0, embedding_weight(model).shape[0]
    while len(tokenizer.get_vocab()) < rows:
        if tokenizer.add_tokens(f"<extra_id_{number}>"):
            added.append(f"<extra_id_{number}>")
        number += 1
    return model, tokenizer, cast(list[int], tokenizer.convert_tokens_to_ids(added))


def setup_chat_format(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    format: str = "chatml",
    resize_to_multiple_of: int | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """ChatML's template and tokens on a base model and its tokenizer, in place. TRL had this until 0.25.

    A text begins with `<|im_start|>`, ends with `<|im_end|>`, and is padded with that.

    Args:
        resize_to_multiple_of: round the embedding's rows up to it.

    Raises:
        ValueError: the tokenizer has a template already, or `format` is another one.
    """
    if tokenizer.chat_template is not None:
        raise ValueError(
            "setup_chat_format: the tokenizer has a chat template already, which training would part from: keep it, "
            "set tokenizer.chat_template to None first, or take clone_chat_template"
        )
    if format != "chatml":
        raise ValueError(f"setup_chat_format: format={format!r} is not 'chatml', the only one there is")
    tokenizer.add_special_tokens({"additional_special_tokens": [START, END]})
    tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token = START, END, END
    tokenizer.chat_template = CHATML
    model.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=resize_to_multiple_of)
    _end_at(tokenizer.eos_token_id, model)
    for config in (model.config.get_text_config(), getattr(model, "generation_config", None)):
        if config is not None:
            config.bos_token_id, config.pad_token_id = tokenizer.bos_token_id, tokenizer.pad_token_id
    return model, tokenizer


def _end_at(token: Any, model: PreTrainedModel) -> None:
    """Has a model's config, and its generation, end a text at a token."""
    model.config.get_text_config().eos_token_id = token
    generation = getattr(model, "generation_config", None)
    if generation is not None and model.can_generate():
        generation.eos_token_id = token
