"""The assistant's turns as they are generated: what the model is given, and what it has to write.

The context of turn `k` is the template's text of `messages[:k]` with a generation prompt. Its target is what the text
of `messages[:k + 1]` adds, up to and including the token at which generation stops. Both are encoded as at inference:
no token reaches from one into the other.

Many templates keep what they wrote earlier. All turns are then parts of one row. Others render the past otherwise once
more follows (Qwen3 drops the thoughts of earlier answers): turns whose context and target begin no other turn's row get
a row of their own, in practice one for each round of tool calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lowtide.data.batches.completion_rounds import CompletionRound
from lowtide.data.encode.turn_ends import MARK, TurnEnds, marked_message
from lowtide.data.formats.conversation import THOUGHTS, Message
from lowtide.data.report.doubts import NO_DOUBT, Doubt
from lowtide.score_rules import IGNORE

THOUGHT_END = "</think>"
SHOWN = 40
"""Characters of a text that messages show."""


class UnclearTurn(ValueError):
    """A template does not say what the model would have to write."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What the model is given for a turn of the assistant, and what it has to write."""

    context: str
    target: str
    ends: bool = True
    """Whether the target ends with a token at which generation stops."""
    doubt: Doubt = NO_DOUBT


@dataclass(frozen=True, slots=True)
class Round:
    """A row of token ids, and the places in it that turns of the assistant have."""

    token_ids: list[int]
    turns: list[tuple[int, int]] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    """Which of the conversation's scored turns these are."""
    doubt: Doubt = NO_DOUBT
    """What is doubtful in the conversation."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The token ids of a prompt and of what follows it."""

    prompt: list[int]
    """Of the prompt alone; none where a row does not say where it ends."""
    token_ids: list[int]
    """Of both together; of several rounds those of the prompt, and behind them each round's without what it has of the
    prompt."""
    doubt: Doubt = NO_DOUBT
    rounds: tuple[CompletionRound, ...] = ()
    """Of an answer of several turns."""


class Talk:
    """The renderings of one conversation, each made once.

    Args:
        render: from messages to their text, with a generation prompt if asked.
    """

    def __init__(self, messages: Sequence[Message], render: Callable[[Sequence[Message], bool], str]) -> None:
        self.messages = messages
        self._render, self._made = render, dict[tuple[int, bool], str]()

    def text(self, stop: int, *, prompt: bool = False) -> str:
        """The text of the first `stop` messages, with a generation prompt if asked."""
        if (stop, prompt) not in self._made:
            self._made[stop, prompt] = self._render(self.messages[:stop], prompt)
        return self._made[stop, prompt]

    def turn(self, number: int, ends: TurnEnds, shape: object = (), thought_end: str | None = None) -> Turn:
        """The turn that is message `number`.

        Args:
            shape: what the form of turns depends on beside their fields, such as a template's keywords.
            thought_end: what ends a thought that the prompt opens and the template never writes; None if it is not
                known.

        Raises:
            UnclearTurn: the template writes no continuation of the prompt.
        """
        if self.messages[number]["role"] != "assistant":
            return self._spoken(number, ends, shape)
        context, whole = self.text(number, prompt=True), self.text(number + 1)
        thought = ""
        try:
            written = whole[len(context) :] if whole.startswith(context) else self._behind_header(number)
        except UnclearTurn:
            if thought_end is None or thought_end.strip() in self._header(number):
                raise
            written = self._answer_alone(number)
            thought = _thought_of(self.messages[number], written) + thought_end
        target, stops = ends.cut(written, self.messages[: number + 1], self._alone, str(shape))
        return Turn(context, thought + target, stops, _doubt_of(self.messages[number], thought + target))

    def _spoken(self, number: int, ends: TurnEnds, shape: object) -> Turn:
        """A message that no prompt asks for: what it says, and the stop token that ends it if there is one."""
        whole = self.text(number + 1)
        marked = self._alone([*self.messages[:number], marked_message(self.messages[number], MARK)])
        start = marked.find(MARK)
        if start < 0 or whole[:start] != marked[:start]:
            raise UnclearTurn(
                f"the chat template does not show where message {number} begins: leave its role out of roles_to_train."
            )
        role = self.messages[number]["role"]
        target, _ = ends.cut(whole[start:], self.messages[: number + 1], self._alone, f"{role} {shape}")
        return Turn(whole[:start], target)

    def _alone(self, messages: Sequence[Message]) -> str:
        return self._render(messages, False)

    def _header(self, number: int) -> str:
        """What a generation prompt adds to the messages before one."""
        context = self.text(number, prompt=True)
        return context[_alike(context, self.text(number)) :]

    def _answer_alone(self, number: int) -> str:
        """What the template writes of a turn from where an answer would begin, whatever thought the prompt opens."""
        whole = self.text(number + 1)
        plain = self._alone([*self.messages[:number], {"role": "assistant", "content": MARK}])
        start = plain.find(MARK)
        if start < 0 or whole[:start] != plain[:start]:
            raise UnclearTurn(_why_unclear(number, self.text(number, prompt=True), whole))
        return whole[start:]

    def _behind_header(self, number: int) -> str:
        """What the model has to write where the template, with the turn there, renders what stands before it otherwise
        than for its prompt: what follows the turn's header, which is what a generation prompt adds."""
        context, whole, header = self.text(number, prompt=True), self.text(number + 1), self._header(number)
        marked = self._alone([*self.messages[:number], marked_message(self.messages[number], MARK)])
        first = marked.find(MARK)
        start = marked.rfind(header, 0, first) if header and first >= 0 else -1
        if start < 0 or whole[: start + len(header)] != marked[: start + len(header)]:
            raise UnclearTurn(_why_unclear(number, context, whole))
        return whole[start + len(header) :]


def thought_of(message: Message) -> str:
    """The thought in a field of a message; empty if there is none."""
    return str(next((message[name] for name in THOUGHTS if message.get(name)), ""))


def _doubt_of(message: Message, target: str) -> Doubt:
    """What is doubtful in a turn of the assistant, by what the template writes of it."""
    thought = thought_of(message)
    calls = [call.get("function", call) for call in message.get("tool_calls") or () if isinstance(call, Mapping)]
    names = [str(call["name"]) for call in calls if isinstance(call, Mapping) and call.get("name")]
    written = "".join(target.split())
    doubt = NO_DOUBT
    if any("".join(each.split()) not in written for each in (thought, *names)):
        doubt |= Doubt.NOT_SHOWN
    if not thought and THOUGHT_END in target and THOUGHT_END not in (message.get("content") or ""):
        doubt |= Doubt.EMPTY_THOUGHT
    return doubt


def _thought_of(message: Message, answer: str) -> str:
    """The thought of a turn, from its field, or from its content where the template takes it out of that."""
    thought = next((message[name] for name in THOUGHTS if message.get(name)), None)
    content = message.get("content") or ""
    if thought is None and THOUGHT_END in content and THOUGHT_END not in answer:
        thought = content.rpartition(THOUGHT_END)[0].strip().removeprefix("<think>")
    return "" if thought is None else str(thought).strip("\n")


def _alike(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many characters, or tokens, both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def _why_unclear(number: int, context: str, whole: str) -> str:
    shared = _alike(context, whole)
    return (
        f"message {number} can't be trained as it is generated: the prompt for it ends with {context[-SHOWN:]!r}, and "
        f"with the message there the chat template goes on with {whole[max(shared - 10, 0) : shared + SHOWN]!r} and "
        "never writes what the prompt has opened. Where that is a thought, say what ends it (such as thought_end="
        "'\\n</think>\\n\\n'); or give a chat template or chat_template_kwargs whose prompt goes with the messages "
        "(such as enable_thinking=False for answers without thoughts), or set turns='whole'."
    )


def encode_turns(
    turns: Sequence[Turn], encode: Callable[[list[str]], list[list[int]]], anchor: str
) -> list[tuple[list[int], list[int]]]:
    """The token ids of contexts and of targets.

    Args:
        encode: from texts to token ids, without special tokens around them.
        anchor: the text of a special token, behind which a target is encoded where it would merge with its context;
            tokenizers may encode the beginning of a text in another way. Empty for none.
    """
    texts = [text for turn in turns for text in (turn.context, turn.context + turn.target)]
    encoded = encode(texts) if texts else []
    contexts, joint = encoded[::2], encoded[1::2]
    pairs = [(context, ids[len(context) :]) for context, ids in zip(contexts, joint, strict=True)]
    merging = [n for n, context in enumerate(contexts) if joint[n][: len(context)] != context]
    if merging:
        before, *apart = encode([anchor, *(anchor + turns[n].target for n in merging)])
        for number, ids in zip(merging, apart, strict=True):
            pairs[number] = (contexts[number], ids[len(before) :])
    return pairs


def rounds_of(turns: Sequence[tuple[list[int], list[int]]], whole: list[int]) -> list[Round]:
    """The rows of a conversation, from contexts and targets of its turns: one for each turn, but that a turn is part
    of another's row where that row begins with it.

    Args:
        whole: the tokens of the conversation as it stands, which is the row where that begins with all turns.
    """
    rows = [
        Round(context + target, [(len(context), len(context) + len(target))], [number])
        for number, (context, target) in enumerate(turns)
    ]
    kept: list[Round] = []
    for row in sorted(rows, key=lambda each: -len(each.token_ids)):
        home = next((each for each in kept if each.token_ids[: len(row.token_ids)] == row.token_ids), None)
        if home is None:
            kept.append(row)
        else:
            home.turns.extend(row.turns)
            home.numbers.extend(row.numbers)
    for row in kept:  # both ascend with the tokens before a turn
        row.turns.sort()
        row.numbers.sort()
    if not kept or (len(kept) == 1 and whole[: len(kept[0].token_ids)] == kept[0].token_ids):
        return [Round(whole, kept[0].turns, kept[0].numbers) if kept else Round(whole)]
    return [row for row in rows if any(row is each for each in kept)]


def answers_of_rounds(sides: Sequence[Sequence[Round]]) -> list[Answer]:
    """The answers to one prompt, from the rounds of each, of which all have scored turns: the prompt is what the
    contexts of their first turns begin with."""
    ordered = [sorted(rounds, key=lambda each: each.numbers) for rounds in sides]
    contexts = [first.token_ids[: first.turns[0][0]] for first, *_ in ordered]
    prompt = contexts[0][: min(_alike(contexts[0], other) for other in contexts)]
    answers = []
    for rounds in ordered:
        parts = tuple(_behind(prompt, each) for each in rounds)
        tokens = [token for part in parts for token in part.token_ids]
        answers.append(Answer(prompt, prompt + tokens, rounds[0].doubt, parts))
    return answers


def _behind(prompt: list[int], whole: Round) -> CompletionRound:
    """A round, up to the end of its last turn, without what it has of the prompt before what is scored."""
    labels = [IGNORE] * len(whole.token_ids)
    for start, stop in whole.turns:
        labels[start:stop] = whole.token_ids[start:stop]
    seen, last = min(_alike(prompt, whole.token_ids), whole.turns[0][0]), whole.turns[-1][1]
    return CompletionRound(whole.token_ids[seen:last], labels[seen:last], seen)
