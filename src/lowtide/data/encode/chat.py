"""Conversations to token ids, with the tokenizer's chat template, and which of them the assistant wrote.

Templates with `{% generation %}` marks say themselves what the assistant writes. Most published templates have
none; for those the turns are aligned: the assistant's turn `k` is what the template adds to `messages[:k]` with a
generation prompt to make `messages[:k + 1]`. That is what the model would have to generate there, so it includes
the token that ends the turn, and the line break that ChatML writes after it, as in the training templates that TRL
ships (for Qwen2.5 theirs also scores the line break before the turn, which a model is never asked to write). Where
a template renders the beginning of a conversation differently once more follows (Qwen3 drops earlier thoughts, for
one) there is no such span, and the conversation is refused rather than guessed at.
"""

import logging
import re
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from lowtide.compat.templates.jinja import limit_templates
from lowtide.data.formats.conversation import Message
from lowtide.data.formats.images import in_parts
from lowtide.data.formats.reading import ChatSample, RowPlace

logger = logging.getLogger(__name__)

GENERATION_MARK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
TEMPLATE_SUFFIXES = (".jinja", ".j2")
limit_templates()
TEMPLATE_FAILURES = (
    *(TemplateError, TypeError, ValueError, LookupError, AttributeError),
    *(ArithmeticError, RecursionError, MemoryError),
)
"""What a template raises: ranges that are too large end in an `OverflowError`."""


class ChatEncoder:
    """Encodes conversations with a tokenizer's chat template, or with `template` in its place.

    Args:
        in_parts: the template is given contents in parts, images among them (see `lowtide.data.formats.images`).

    Raises:
        ValueError: there is no template.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, template: str | None = None, *, in_parts: bool = False
    ) -> None:
        if template is None and not tokenizer.chat_template:
            name = tokenizer.name_or_path or type(tokenizer).__name__
            raise ValueError(
                f"the rows are conversations, and the tokenizer {name!r} has no chat template. Set "
                "chat_template_path to a .jinja file or to a tokenizer that has one, or train on a text column."
            )
        self.tokenizer = tokenizer
        self.template = template
        self.in_parts = in_parts
        self.has_marks = bool(tokenizer.is_fast and GENERATION_MARK.search(tokenizer.get_chat_template(template)))

    @classmethod
    def for_rows(
        cls,
        first: ChatSample,
        tokenizer: PreTrainedTokenizerBase,
        template: str | None,
        source: str,
        *,
        in_parts: bool = False,
    ) -> "ChatEncoder":
        """The encoder of the dataset `source`, of which `first` is a conversation.

        Raises:
            ValueError: there is no template, or it writes the same whatever is said.
        """
        encoder = cls(tokenizer, template, in_parts=in_parts)
        encoder.check_content(first, source)
        if not encoder.ends_turns():
            logger.warning(
                "%s: the chat template writes no special token after what the assistant says, and nothing is put "
                "there, so the model does not learn to stop. Set chat_template_path to a template that writes the end "
                "token after it.",
                source,
            )
        return encoder

    def encode(
        self, chats: Sequence[ChatSample], place: RowPlace, *, generation_prompt: bool = False
    ) -> list[list[int]]:
        """The token ids of each conversation, and of the header of an assistant's turn after it if asked."""
        return self._apply(chats, place, add_generation_prompt=generation_prompt)["input_ids"]

    def encode_prompts(self, chats: Sequence[ChatSample], place: RowPlace) -> list[list[int]]:
        """The token ids of each conversation's prompt, up to where the assistant's answer begins."""
        return self.encode([chat.until(chat.prompt_messages or 0) for chat in chats], place, generation_prompt=True)

    def encode_with_turns(
        self, chats: Sequence[ChatSample], place: RowPlace
    ) -> tuple[list[list[int]], list[list[int]]]:
        """The token ids of each conversation, and 1 for each that the assistant wrote, else 0.

        Raises:
            ValueError: the template has no generation marks and the turns can't be aligned.
        """
        if self.has_marks:
            encoded = self._apply(chats, place, return_assistant_tokens_mask=True)
            return encoded["input_ids"], encoded["assistant_masks"]
        token_ids = self.encode(chats, place)
        return token_ids, self._align_turns(chats, token_ids, place)

    def check_content(self, chat: ChatSample, source: str) -> None:
        """Refuse a template that writes the same text whatever is said: rendered twice, with different content.

        Args:
            chat: a conversation of the dataset `source`, for its roles.

        Raises:
            ValueError: it writes the same for other content, or for other answers.
        """
        spoken = [turn for turn, message in enumerate(chat.messages) if isinstance(message.get("content"), str)]
        answers = [turn for turn in spoken if chat.messages[turn]["role"] == "assistant"]
        answers = [turn for turn in answers if not chat.messages[turn].get("tool_calls")]
        for turns, whose in ((spoken, "messages say"), (answers, "assistant says")):
            try:
                texts = [self._render_saying(chat, turns, words) for words in ("one thing", "and another")]
            except TEMPLATE_FAILURES:  # the rows will tell
                return
            if turns and texts[0] == texts[1]:
                raise ValueError(
                    f"{source}: the chat template writes the same text whatever the {whose} ({texts[0][:80]!r}), so "
                    "there is nothing to learn from. It must write message['content']: set chat_template_path to a "
                    "template that does."
                )

    def _render_saying(self, chat: ChatSample, turns: Sequence[int], words: str) -> str:
        """The text of a conversation with other words in these turns."""
        messages = [{**m, "content": words} if turn in turns else m for turn, m in enumerate(chat.messages)]
        inputs = {"tools": chat.tools, "chat_template": self.template, **chat.template_kwargs, "tokenize": False}
        return str(self.tokenizer.apply_chat_template(self._given(messages), **inputs))

    def text(self, chat: ChatSample) -> str:
        """What the template writes for a conversation."""
        return self._render_saying(chat, (), "")

    def _given(self, messages: list[Message]) -> list[Message]:
        """Messages as the template takes them."""
        return in_parts(messages) if self.in_parts else messages

    def ends_turns(self) -> bool:
        """Whether the template writes a special token after what the assistant says; also where that is not known."""
        asked, answer = {"role": "user", "content": "Is it?"}, {"role": "assistant", "content": "It is so"}
        try:
            text = self.text(ChatSample([asked, answer]))
        except TEMPLATE_FAILURES:  # the rows will tell
            return True
        _, said, after = text.rpartition(answer["content"])
        added = [token.content for token in self.tokenizer.added_tokens_decoder.values()]
        return not said or any(token in after for token in (*added, *self.tokenizer.all_special_tokens))

    def leaves_ends_out(self) -> bool:
        """Whether the template's marks leave out what ends a turn, so that the model would not learn to stop."""
        if not self.has_marks:
            return False
        asked, answer = {"role": "user", "content": "Is it?"}, {"role": "assistant", "content": "It is"}
        options = {"chat_template": self.template, "return_assistant_tokens_mask": True}
        try:
            made: Any = self.tokenizer.apply_chat_template([self._given([asked, answer, asked])], **options)
        except TEMPLATE_FAILURES:  # the rows will tell
            return False
        [ids], [mask] = made["input_ids"], made["assistant_masks"]
        scored = [token for token, own in zip(ids, mask, strict=True) if own]
        return str(self.tokenizer.decode(scored)).rstrip().endswith(answer["content"])

    def _align_turns(self, chats: Sequence[ChatSample], token_ids: list[list[int]], place: RowPlace) -> list[list[int]]:
        turns = [
            (row, turn)
            for row, chat in enumerate(chats)
            for turn, message in enumerate(chat.messages)
            if message["role"] == "assistant"
        ]
        rows = RowPlace(place.source, [place.numbers[row] for row, _ in turns])
        before = self.encode([chats[row].until(turn) for row, turn in turns], rows, generation_prompt=True)
        after = self.encode([chats[row].until(turn + 1) for row, turn in turns], rows)
        masks = [[0] * len(ids) for ids in token_ids]
        for (row, turn), opening, whole_turn in zip(turns, before, after, strict=True):
            start, stop = len(opening), len(whole_turn)
            ids = token_ids[row]
            begins = start <= stop and ids[:start] == opening == whole_turn[:start]
            if begins and ids[:stop] != whole_turn:
                stop = start + self._still_there(whole_turn[start:], ids[start:], chats[row].messages[turn])
            if not begins or stop == start < len(whole_turn):
                raise place.error(
                    row,
                    f"assistant_only_loss can't tell the assistant's tokens in message {turn}: the chat template "
                    "has no {% generation %} marks, and renders the beginning of this conversation differently "
                    "when it stands alone. Set chat_template_path to a template with these marks.",
                )
            masks[row][start:stop] = [1] * (stop - start)
        return masks

    def _still_there(self, alone: list[int], within: list[int], message: Message) -> int:
        """How many tokens a turn has within a conversation, of which the template drops the beginning once others
        follow, such as its thoughts: the longest end of the turn that stands there. 0 if none has what is said."""
        content = message.get("content")
        said = content.split("</think>")[-1].strip() if isinstance(content, str) else ""
        for dropped in range(1, len(alone)):
            end = alone[dropped:]
            if within[: len(end)] == end:
                return len(end) if said and said in str(self.tokenizer.decode(end)) else 0
        return 0

    def _apply(self, chats: Sequence[ChatSample], place: RowPlace, **options: Any) -> dict[str, list[list[int]]]:
        """Apply the template to runs of conversations that share tools and keywords, each in one call."""
        encoded: dict[str, list[list[int]]] = {"input_ids": [], "assistant_masks": []}
        for (tools, kwargs), run in groupby(chats, key=lambda chat: (chat.tools, chat.template_kwargs)):
            messages = [self._given(chat.messages) for chat in run]
            inputs = {**options, "tools": tools, "chat_template": self.template, **kwargs}
            try:
                part: Any = self.tokenizer.apply_chat_template(messages, **inputs)
            except TEMPLATE_FAILURES:
                part = self._apply_one_by_one(messages, inputs, place, first=len(encoded["input_ids"]))
            for name, rows in encoded.items():
                rows += part.get(name, [])
        return encoded

    def _apply_one_by_one(
        self, messages: list[list[Message]], inputs: dict[str, Any], place: RowPlace, first: int
    ) -> dict[str, list[list[int]]]:
        """The same, to find out which row the template fails on."""
        encoded: dict[str, list[list[int]]] = {"input_ids": [], "assistant_masks": []}
        for index, conversation in enumerate(messages, start=first):
            try:
                part: Any = self.tokenizer.apply_chat_template([conversation], **inputs)
            except TEMPLATE_FAILURES as error:
                said = str(error) or type(error).__name__
                raise place.error(index, f"the chat template can't render the conversation: {said}") from error
            for name, rows in encoded.items():
                rows += part.get(name, [])
        return encoded


def read_chat_template(path: str) -> str:
    """The chat template at `path`: a .jinja file, a folder with a tokenizer or a `chat_template.jinja`, or a
    tokenizer on the hub.

    Raises:
        ValueError, FileNotFoundError: nothing is there, or no template is in it.
    """
    place = Path(path)
    if place.suffix in TEMPLATE_SUFFIXES:
        if not place.is_file():
            raise FileNotFoundError(f"chat_template_path: there is no file {path!r}.")
        return place.read_text(encoding="utf-8")
    if (place / "chat_template.jinja").is_file():
        return (place / "chat_template.jinja").read_text(encoding="utf-8")
    template = _load_tokenizer(path).chat_template
    if not template:
        raise ValueError(f"chat_template_path: the tokenizer {path!r} has no chat template either.")
    return template["default"] if isinstance(template, dict) else template


def adopt_chat_template(tokenizer: PreTrainedTokenizerBase, path: str) -> list[str]:
    """Give `tokenizer` the chat template at `path`, in place.

    Where a tokenizer is there, its added tokens and its end token come along: the template writes them. The
    model's embedding must then be resized to the tokenizer.

    Returns:
        The tokens that were added.
    """
    tokenizer.chat_template = read_chat_template(path)
    place = Path(path)
    if place.suffix in TEMPLATE_SUFFIXES or (place.is_dir() and not (place / "tokenizer_config.json").is_file()):
        return []
    source = _load_tokenizer(path)
    vocabulary = tokenizer.get_vocab()
    added = [token for token in source.added_tokens_decoder.values() if token.content not in vocabulary]
    tokenizer.add_tokens(added)
    if source.eos_token is not None:
        tokenizer.eos_token = source.eos_token
    return [token.content for token in added]


def _load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"chat_template_path: {path!r} is neither a .jinja file, nor a tokenizer here or on the hub ({error})."
        ) from error
