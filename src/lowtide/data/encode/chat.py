"""Conversations to token ids, with the tokenizer's chat template, and which of them the assistant wrote.

Templates with `{% generation %}` marks say themselves what the assistant writes. Most published templates have none.
Then turns are taken as they are generated (see `rounds`), or aligned within the whole conversation: the assistant's
turn `k` is what the template adds to `messages[:k]` with a generation prompt to make `messages[:k + 1]`, with the line
break that ChatML writes after the token that ends it, as in the training templates that TRL ships (for Qwen2.5 theirs
also scores the line break before the turn). Where a template renders the beginning of a conversation differently once
more follows there is no such span in the whole, and the conversation is refused rather than guessed at.
"""

import logging
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, reduce
from itertools import groupby
from operator import or_
from pathlib import Path
from typing import Any

from transformers import AddedToken, AutoTokenizer, PreTrainedTokenizerBase

from lowtide.compat.templates.jinja import TEMPLATE_FAILURES, TemplateOverrun, limit_templates
from lowtide.data.encode.message_form import MessageForm
from lowtide.data.encode.named_templates import NAMED, TEMPLATE_SUFFIXES, template_at
from lowtide.data.encode.rounds import Answer, Round, Talk, Turn, UnclearTurn, encode_turns, rounds_of, thought_of
from lowtide.data.encode.turn_ends import TurnEnds
from lowtide.data.formats.conversation import Message, assistant_turns
from lowtide.data.formats.images import in_parts
from lowtide.data.formats.reading import ChatSample, RowPlace
from lowtide.data.report.doubts import NO_DOUBT, Doubt
from lowtide.data.report.unwritten import UnwrittenParts

logger = logging.getLogger(__name__)

GENERATION_MARK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
DRAWS = re.compile(r"\|\s*random\b|\blipsum\b")
"""What in a template draws at random."""
limit_templates()


class ChatEncoder:
    """Encodes conversations with a tokenizer's chat template, or with `template` in its place.

    Args:
        in_parts: the template is given contents in parts, images among them (see `lowtide.data.formats.images`).
        stop_ids: tokens at which generation stops, beside the tokenizer's end token.
        thought_end: what ends a thought that the prompt opens and the template never writes.
        by_turns: the assistant's turns are taken as they are generated, unless the template's marks say what is scored.
        heeds_marks: whether marks say what is scored; else what follows a prompt is, and marks are not read.
        learns_to_stop: whether it is said if no stop token ends a turn; a reward model only reads there.

    Raises:
        ValueError: there is no template.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template: str | None = None,
        *,
        in_parts: bool = False,
        stop_ids: Sequence[int] = (),
        thought_end: str | None = None,
        by_turns: bool = False,
        heeds_marks: bool = True,
        learns_to_stop: bool = True,
    ) -> None:
        if template is None and not tokenizer.chat_template:
            name = tokenizer.name_or_path or type(tokenizer).__name__
            raise ValueError(
                f"the rows are conversations, and the tokenizer {name!r} has no chat template. Set "
                f"chat_template_path to a .jinja file, to a tokenizer that has one, or to one of {', '.join(NAMED)}, "
                "or train on a text column."
            )
        self.tokenizer = tokenizer
        self.template = template
        self.in_parts = in_parts
        self.stop_ids, self.thought_end = tuple(stop_ids), thought_end
        marked = tokenizer.is_fast and GENERATION_MARK.search(tokenizer.get_chat_template(template))
        self.has_marks = bool(heeds_marks and marked)
        self.by_turns = by_turns and not self.has_marks
        self._told_of_ends = not learns_to_stop
        self._unwritten = UnwrittenParts(self.text)

    @classmethod
    def for_rows(
        cls,
        first: ChatSample,
        tokenizer: PreTrainedTokenizerBase,
        template: str | None,
        source: str,
        **how: Any,
    ) -> "ChatEncoder":
        """The encoder of the dataset `source`, of which `first` is a conversation; `how` as for the encoder.

        Raises:
            ValueError: there is no template, it takes too much time or memory, or writes the same whatever is said.
        """
        encoder = cls(tokenizer, template, **how)
        try:
            encoder.look_at(first, source)
        except TemplateOverrun as error:
            raise RowPlace(source, [0]).error(0, _cannot_render(error)) from error
        return encoder

    def look_at(self, first: ChatSample, source: str) -> None:
        """Refuses a template that cannot be trained on, and says what is doubtful in one."""
        self.check_content(first, source)
        if self._draws(first):
            logger.warning(
                "%s: the chat template does not write the same twice: it draws at random, or tells the time. Rows are "
                "rendered once, and a generation prompt or another run has other tokens. Set chat_template_path to a "
                "template that does not.",
                source,
            )
        if self.by_turns:
            self.look_at_ends(first, source)
        elif not self.ends_turns():
            logger.warning(
                "%s: the chat template writes no special token after what the assistant says, and nothing is put "
                "there, so the model does not learn to stop. Set chat_template_path to a template that writes the end "
                "token after it.",
                source,
            )

    def _draws(self, chat: ChatSample) -> bool:
        """Whether the template may write another text for the same conversation."""
        if DRAWS.search(self.tokenizer.get_chat_template(self.template)):
            return True
        try:
            return self.text(chat) != self.text(chat)
        except TemplateOverrun:
            raise
        except TEMPLATE_FAILURES:  # the rows will tell
            return False

    def doubts(self, chats: Sequence[ChatSample]) -> list[Doubt]:
        """What is doubtful in each conversation by what the template leaves out of it."""
        return [Doubt.NOT_SHOWN if self._unwritten.are_in(chat) else NO_DOUBT for chat in chats]

    def loses_thoughts(self, chat: ChatSample, numbers: Collection[int]) -> bool:
        """Whether the template leaves thoughts of these messages out of the conversation as it stands."""
        thoughts = [thought for number in numbers if (thought := thought_of(chat.messages[number]))]
        if not thoughts:
            return False
        written = "".join(self.text(chat).split())
        return any("".join(each.split()) not in written for each in thoughts)

    def encode(
        self, chats: Sequence[ChatSample], place: RowPlace, *, generation_prompt: bool = False
    ) -> list[list[int]]:
        """The token ids of each conversation, and of the header of an assistant's turn after it if asked."""
        return self._apply(chats, place, add_generation_prompt=generation_prompt)["input_ids"]

    def encode_prompts(self, chats: Sequence[ChatSample], place: RowPlace) -> list[list[int]]:
        """The token ids of each conversation's prompt, up to where the assistant's answer begins."""
        return self.encode([chat.until(chat.prompt_messages or 0) for chat in chats], place, generation_prompt=True)

    def encode_with_turns(
        self, chats: Sequence[ChatSample], place: RowPlace, wanted: Sequence[Mapping[int, float]] | None = None
    ) -> tuple[list[list[int]], list[list[float]]]:
        """The token ids of each conversation, and the weight of each that the assistant wrote, else 0.

        Args:
            wanted: of each conversation, the numbers of the assistant's messages that count, with their weights; None
                for all of them with 1.

        Raises:
            ValueError: the template has no generation marks and the turns can't be aligned, or has marks that are not
                one for each turn where some turns don't count.
        """
        turns = [assistant_turns(chat.messages) for chat in chats]
        wanted = [dict.fromkeys(each, 1.0) for each in turns] if wanted is None else wanted
        if not self.has_marks:
            token_ids = self.encode(chats, place)
            return token_ids, self._align_turns(chats, token_ids, place, wanted)
        encoded = self._apply(chats, place, return_assistant_tokens_mask=True)
        masks: list[list[float]] = [[*mask] for mask in encoded["assistant_masks"]]
        for row, (all_of_it, some) in enumerate(zip(turns, wanted, strict=True)):
            if [*some.values()] != [1.0] * len(all_of_it):
                masks[row] = _marked_turns(masks[row], [some.get(turn, 0.0) for turn in all_of_it], row, place)
        return encoded["input_ids"], masks

    def encode_rounds(
        self, chats: Sequence[ChatSample], wanted: Sequence[Collection[int]], place: RowPlace
    ) -> list[list[Round]]:
        """The rows that each conversation becomes, with the places of the turns that are wanted of it, each as it is
        generated.

        Args:
            wanted: of each conversation, the numbers of the assistant's messages that are scored.

        Raises:
            ValueError: the template fails, or does not say what the model would have to write; the message names the
                row.
        """
        turns: list[list[Turn]] = []
        wholes: list[str] = []
        for row, (chat, numbers) in enumerate(zip(chats, wanted, strict=True)):
            with _of_row(row, place):
                talk = self._talk(chat)
                turns.append([self._turn(talk, number, chat) for number in numbers])
                wholes.append(talk.text(len(talk.messages)))
            self._tell_of_ends(turns[-1], place.source)
        pairs = iter(encode_turns([turn for each in turns for turn in each], self._ids, self._anchor))
        of_wholes = zip(turns, self._ids(wholes), strict=True)
        made = [rounds_of([next(pairs) for _ in each], whole) for each, whole in of_wholes]
        return [
            [replace(row, doubt=reduce(or_, (turn.doubt for turn in each), NO_DOUBT)) for row in rows]
            for each, rows in zip(turns, made, strict=True)
        ]

    def encode_answers(self, chats: Sequence[ChatSample], place: RowPlace, generated: Sequence[bool]) -> list[Answer]:
        """The last message of each conversation, which is the assistant's, as it is generated; or what follows the
        prompt, as the template writes the whole conversation.

        Args:
            generated: which of the conversations are taken as they are generated.

        Raises:
            ValueError: as `encode_rounds`.
        """
        made: list[Answer] = [Answer([], [])] * len(chats)
        for encode, how in ((self._generated, True), (self._as_they_stand, False)):
            these = [number for number, each in enumerate(generated) if each == how]
            if these:
                rows = RowPlace(place.source, [place.numbers[number] for number in these])
                for number, answer in zip(these, encode([chats[number] for number in these], rows), strict=True):
                    made[number] = answer
        return made

    def _as_they_stand(self, chats: Sequence[ChatSample], place: RowPlace) -> list[Answer]:
        prompted = [number for number, chat in enumerate(chats) if chat.prompt_messages]
        rows = RowPlace(place.source, [place.numbers[number] for number in prompted])
        prompts = dict(zip(prompted, self.encode_prompts([chats[number] for number in prompted], rows), strict=True))
        return [Answer(prompts.get(number, []), ids) for number, ids in enumerate(self.encode(chats, place))]

    def _generated(self, chats: Sequence[ChatSample], place: RowPlace) -> list[Answer]:
        turns: list[Turn] = []
        for row, chat in enumerate(chats):
            with _of_row(row, place):
                turns.append(self._turn(self._talk(chat), len(chat.messages) - 1, chat))
            self._tell_of_ends(turns[-1:], place.source)
        pairs = encode_turns(turns, self._ids, self._anchor)
        return [
            Answer(context, context + target, turn.doubt) for (context, target), turn in zip(pairs, turns, strict=True)
        ]

    def look_at_ends(self, chat: ChatSample, source: str) -> None:
        """Says if no stop token ends the turns of a dataset, of which this is a conversation."""
        talk, last = self._talk(chat), assistant_turns(chat.messages)[-1:]
        try:
            self._tell_of_ends([self._turn(talk, number, chat) for number in last], source)
        except TemplateOverrun:
            raise
        except TEMPLATE_FAILURES:  # the rows will tell
            return

    def _tell_of_ends(self, turns: Sequence[Turn], source: str) -> None:
        if self._told_of_ends or all(turn.ends for turn in turns):
            return
        self._told_of_ends = True
        logger.warning(
            "%s: the chat template writes no token at which generation stops (%s) after what the assistant says, so "
            "the model does not learn to stop. Set eos_token to the token that the template writes there, or add it to "
            "the eos_token_id of the model's generation config.",
            source,
            ", ".join(map(repr, self._ends.texts)) or "there is none",
        )

    @cached_property
    def _ends(self) -> TurnEnds:
        """Where turns end."""
        own: Any = self.tokenizer.eos_token_id
        stops = dict.fromkeys(each for each in (own, *self.stop_ids) if each is not None and each < len(self.tokenizer))
        texts = {token: str(self.tokenizer.convert_ids_to_tokens(token)) for token in stops}
        return TurnEnds(lambda text: self._ids([text])[0], texts)

    @cached_property
    def _anchor(self) -> str:
        """The text of a special token that leaves what follows it as it is; empty if there is none."""
        added = self.tokenizer.added_tokens_decoder.values()
        return next((token.content for token in added if token.special and not token.rstrip), "")

    def _ids(self, texts: list[str]) -> list[list[int]]:
        """The token ids of texts that the template wrote."""
        encoded: Any = self.tokenizer(texts, add_special_tokens=False) if texts else {"input_ids": []}
        return encoded["input_ids"]

    def _talk(self, chat: ChatSample) -> Talk:
        """A conversation, to be rendered."""
        inputs = {"tools": chat.tools, "chat_template": self.template, **chat.template_kwargs, "tokenize": False}

        def render(messages: Sequence[Message], prompt: bool) -> str:
            options = {**inputs, "add_generation_prompt": prompt}
            given = in_parts(messages) if self.in_parts else list(messages)
            return str(self.tokenizer.apply_chat_template(given, **options))

        return Talk(self._form(chat.messages), render)

    def _turn(self, talk: Talk, number: int, chat: ChatSample) -> Turn:
        shape = bool(chat.tools), sorted(chat.template_kwargs.items())  # on which the form of turns depends too
        return talk.turn(number, self._ends, shape, self.thought_end)

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
            except TemplateOverrun:
                raise
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
        messages = self._form(messages)
        return in_parts(messages) if self.in_parts else messages

    @cached_property
    def _form(self) -> MessageForm:
        """How the template takes messages."""
        return MessageForm.of(self.tokenizer, self.template, in_parts if self.in_parts else list)

    def ends_turns(self) -> bool:
        """Whether the template writes a special token after what the assistant says; also where that is not known."""
        asked, answer = {"role": "user", "content": "Is it?"}, {"role": "assistant", "content": "It is so"}
        try:
            text = self.text(ChatSample([asked, answer]))
        except TemplateOverrun:
            raise
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
        except TemplateOverrun:
            raise
        except TEMPLATE_FAILURES:  # the rows will tell
            return False
        [ids], [mask] = made["input_ids"], made["assistant_masks"]
        scored = [token for token, own in zip(ids, mask, strict=True) if own]
        return str(self.tokenizer.decode(scored)).rstrip().endswith(answer["content"])

    def _align_turns(
        self,
        chats: Sequence[ChatSample],
        token_ids: list[list[int]],
        place: RowPlace,
        wanted: Sequence[Mapping[int, float]],
    ) -> list[list[float]]:
        turns = [(row, turn) for row, numbers in enumerate(wanted) for turn in numbers]
        rows = RowPlace(place.source, [place.numbers[row] for row, _ in turns])
        before = self.encode([chats[row].until(turn) for row, turn in turns], rows, generation_prompt=True)
        after = self.encode([chats[row].until(turn + 1) for row, turn in turns], rows)
        masks = [[0.0] * len(ids) for ids in token_ids]
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
            masks[row][start:stop] = [wanted[row][turn]] * (stop - start)
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
                raise place.error(index, _cannot_render(error)) from error
            for name, rows in encoded.items():
                rows += part.get(name, [])
        return encoded


def _marked_turns(mask: Sequence[float], weights: Sequence[float], row: int, place: RowPlace) -> list[float]:
    """The weights of the tokens of turns, from the mask of all turns, each of which is a run of marks."""
    runs = [(bit, len(list(run))) for bit, run in groupby(mask)]
    if sum(bit for bit, _ in runs) != len(weights):
        raise place.error(
            row,
            f"some of the {len(weights)} messages of the assistant are not to be trained, or with another weight, and "
            "which of the tokens are theirs can't be told from the chat template's {% generation %} marks. Take a "
            "template without marks.",
        )
    each = iter(weights)
    return [value for bit, length in runs for value in [next(each) if bit else 0.0] * length]


@contextmanager
def _of_row(row: int, place: RowPlace) -> Iterator[None]:
    """Names the row of what a template fails on, or can't tell."""
    try:
        yield
    except UnclearTurn as error:
        raise place.error(row, error) from error
    except TEMPLATE_FAILURES as error:
        raise place.error(row, _cannot_render(error)) from error


def _cannot_render(error: BaseException) -> str:
    return f"the chat template can't render the conversation: {str(error) or type(error).__name__}"


def read_chat_template(path: str) -> str:
    """The chat template at `path`: a .jinja file, a folder with a tokenizer or a `chat_template.jinja`, one that is
    built in, by its name, or a tokenizer on the hub.

    Raises:
        ValueError, FileNotFoundError: nothing is there, or no template is in it.
    """
    if (written := template_at(path)) is not None:
        return written
    template = _load_tokenizer(path).chat_template
    if not template:
        raise ValueError(f"chat_template_path: the tokenizer {path!r} has no chat template either.")
    return template["default"] if isinstance(template, dict) else template


def adopt_chat_template(tokenizer: PreTrainedTokenizerBase, path: str) -> list[str]:
    """Give `tokenizer` the chat template at `path`, in place.

    Where a tokenizer is there, or a built-in template is named, added tokens and the end token come along: the template
    writes them. The model's embedding must then be resized to the tokenizer.

    Returns:
        The tokens that were added.
    """
    tokenizer.chat_template = read_chat_template(path)
    place = Path(path)
    if place.suffix in TEMPLATE_SUFFIXES or (place.is_dir() and not (place / "tokenizer_config.json").is_file()):
        return []
    if path in NAMED and not place.exists():
        return _adopt_named(tokenizer, path)
    source = _load_tokenizer(path)
    vocabulary = tokenizer.get_vocab()
    added = [token for token in source.added_tokens_decoder.values() if token.content not in vocabulary]
    tokenizer.add_tokens(added)
    if source.eos_token is not None:
        tokenizer.eos_token = source.eos_token
    return [token.content for token in added]


def _adopt_named(tokenizer: PreTrainedTokenizerBase, name: str) -> list[str]:
    """Gives the tokenizer the tokens of a built-in template; returns those that it had not.

    Raises:
        ValueError: turns would end with the tokenizer's end token, and it has none.
    """
    tokens, end = NAMED[name].tokens, NAMED[name].end
    added = [token for token in tokens if token not in tokenizer.get_vocab()]
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in added])
    if end is not None:
        tokenizer.eos_token = end
    elif tokenizer.eos_token is None:
        raise ValueError(f"chat_template_path={name!r} ends turns with the tokenizer's end token: set eos_token.")
    return added


def _load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"chat_template_path: {path!r} is neither a .jinja file, nor a tokenizer here or on the hub ({error}), nor "
            f"a built-in template ({', '.join(NAMED)})."
        ) from error
