"""Chat templates: put on a model and its tokenizer, with the tokens that they write, and tried for training."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Iterator
from typing import Any, cast

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lowtide.data.encode.chat import ChatEncoder, adopt_chat_template
from lowtide.data.formats.conversation import Message, assistant_turns
from lowtide.data.formats.reading import ChatSample, RowPlace
from lowtide.engine.forward import embedding_weight
from lowtide.scripts.chats import ANSWER, VALUE, supports_tool_calling, trial_call

logger = logging.getLogger(__name__)

START, END = "<|im_start|>", "<|im_end|>"
ROLES = ("user", "assistant")
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


def get_training_chat_template(processing_class: Any = None, tokenizer: Any = None) -> str | None:
    """None: a tokenizer's or processor's own template is fit for training with `assistant_only_loss`, which takes the
    assistant's turns as they are generated, or by the template's `{% generation %}` marks. TRL's gives a template with
    such marks where the own one has none; here it is tried on conversations whether it needs them.

    Args:
        tokenizer: TRL's older name of `processing_class`.

    Raises:
        ValueError: it is not fit: says why, and what to do. Where answers with thoughts alone are fit, it is a warning.
        TypeError: both are given, or neither.
    """
    if (processing_class is None) == (tokenizer is None):
        raise TypeError("get_training_chat_template takes one tokenizer or processor, as processing_class")
    if tokenizer is not None:
        warnings.warn("get_training_chat_template: tokenizer= is called processing_class by now", FutureWarning, 2)
    whole: Any = tokenizer if processing_class is None else processing_class
    own = getattr(whole, "tokenizer", whole)
    template = None if own is whole else whole.chat_template
    template = template["default"] if isinstance(template, dict) else template
    trials = {"a conversation": _talk()}
    if supports_tool_calling(whole):
        trials["a conversation with a tool's call"] = _talk_with_a_call()
    for which, (messages, said) in trials.items():
        trial = functools.partial(_try, own, template, said=said, in_parts=own is not whole)
        try:
            trial(messages, which)
        except ValueError as error:
            try:
                trial(_with_thoughts(messages), f"{which} with thoughts")
            except ValueError:
                raise error from None
            logger.warning("%s. With a thought before each answer (reasoning_content) it can", error)
    return None


def _try(
    tokenizer: Any, template: str | None, messages: list[Message], which: str, *, said: dict[str, bool], in_parts: bool
) -> None:
    """Refuses a template of which other words are scored than those that the assistant says."""
    source, trial = f"{which} made for a trial", ChatSample(messages)
    encoder = ChatEncoder.for_rows(trial, tokenizer, template, source, in_parts=in_parts, by_turns=True)
    scored = "".join(_scored(encoder, trial, RowPlace(source, [0])))
    for words, by_assistant in said.items():
        if by_assistant != (words in scored):
            raise ValueError(
                f"{source}: the chat template's {{% generation %}} marks {'leave out' if by_assistant else 'cover'} "
                f"{words!r}, which the assistant {'says' if by_assistant else 'does not say'}: mend them, or take "
                "a template without marks, of which the assistant's turns are taken as they are generated"
            )


def _talk() -> tuple[list[Message], dict[str, bool]]:
    """A conversation, and whether the assistant says these words of it."""
    said = {"asks once": False, "answers once": True, "asks again": False, "answers again": True}
    return [{"role": ROLES[own], "content": words} for words, own in said.items()], said


def _talk_with_a_call() -> tuple[list[Message], dict[str, bool]]:
    """The same with a call of a tool, which the assistant writes, and what the tool says."""
    messages, said = _talk()
    return [messages[0], *trial_call(), *messages[1:]], {**said, VALUE: True, ANSWER: False}


def _with_thoughts(messages: list[Message]) -> list[Message]:
    return [{**each, **({"reasoning_content": "thinks"} if each["role"] == ROLES[1] else {})} for each in messages]


def _scored(encoder: ChatEncoder, trial: ChatSample, place: RowPlace) -> Iterator[str]:
    """What is scored of a conversation."""
    if encoder.has_marks:
        [ids], [mask] = encoder.encode_with_turns([trial], place)
        yield str(encoder.tokenizer.decode([token for token, weight in zip(ids, mask, strict=True) if weight]))
        return
    [rows] = encoder.encode_rounds([trial], [assistant_turns(trial.messages)], place)
    for row in rows:
        for begin, end in row.turns:
            yield str(encoder.tokenizer.decode(row.token_ids[begin:end]))
