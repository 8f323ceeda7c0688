"""Log-probabilities of a teacher: what it is asked, what it answers, and a folder of answers that were written before.

A teacher is asked of texts as they are in a batch: the tokens of each, and the places whose tokens are predicted. The
folder is a `datasets` table with one row for each text, which anything that has the columns can write:

- `input_ids`: the tokens of the text, up to the last that is predicted;
- `positions`: the places in it whose tokens are predicted, in ascending order;
- `token_ids`: of each place the teacher's likeliest tokens, by falling probability, one list of them after the other;
- `logprobs`: their log-probabilities;
- `written`: of each place the log-probability of the token that stands there.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from datasets import Dataset, Features, List, Value, load_from_disk
from jaxtyping import Float, Int
from torch import Tensor

from lowtide.ragged import RaggedBatch

FACTS = "teacher.json"
"""The file of a folder that says what its answers are of."""
FEATURES = Features(
    {
        "input_ids": List(Value("int32")),
        "positions": List(Value("int32")),
        "token_ids": List(Value("int32")),
        "logprobs": List(Value("float32")),
        "written": List(Value("float32")),
    }
)


class Asked(NamedTuple):
    """A text, and the places in it of which a teacher is asked."""

    token_ids: list[int]
    places: list[int]

    @property
    def key(self) -> bytes:
        """The same for the same tokens."""
        return _key(np.asarray(self.token_ids, np.int32))


class Answers(NamedTuple):
    """What a teacher says of places, in host memory."""

    tokens: Int[Tensor, "places top"]
    """Its likeliest tokens, by falling probability."""
    logprobs: Float[Tensor, "places top"]
    written: Float[Tensor, " places"]
    """The log-probability of the token that stands there."""

    @classmethod
    def concat(cls, parts: Sequence[Answers]) -> Answers:
        return cls(*(torch.cat(each) for each in zip(*parts, strict=True)))


class Teacher(Protocol):
    """Who is asked."""

    def ask(self, texts: Sequence[Asked]) -> Answers:
        """What it says of the places of all texts, one text after the other.

        Raises:
            ValueError: it knows too little; says what, and what to do.
        """
        ...


def texts_of(batch: RaggedBatch) -> list[Asked]:
    """The texts of a batch, each with the places of its scores, in the order of the scores."""
    tokens, index, target = batch.token_ids.tolist(), batch.score_index.tolist(), batch.score_target.tolist()
    found = []
    for part in batch.segments:
        if part.score_start == part.score_stop:
            continue
        before = part.prefix_among(batch.segments)
        seen = [] if before is None else tokens[before.start : before.stop]
        text, places = [*seen, *tokens[part.start : part.stop]], []
        for score in range(part.score_start, part.score_stop):
            own = part.start <= index[score] < part.stop
            assert own or before is not None
            first = part.start - len(seen) if own or before is None else before.start
            places.append(index[score] - first + 1)
            if places[-1] == len(text):
                text.append(target[score])
            assert text[places[-1]] == target[score], "a teacher says what follows in a text"
        found.append(Asked(text[: max(places) + 1], places))
    return found


@dataclass(frozen=True)
class WrittenFacts:
    """What the answers of a folder are of."""

    teacher: str
    top_logprobs: int
    """Tokens of a place."""
    temperature: float = 1.0
    """Divisor of the teacher's logits."""


class WrittenTeacher:
    """A folder of answers that were written before.

    Args:
        top: tokens of a place that are read.
        vocabulary: the student's tokens.

    Raises:
        ValueError: there is no such folder, or it has too few tokens of a place; says what to do.
    """

    def __init__(self, folder: str | Path, *, top: int, temperature: float, vocabulary: int) -> None:
        self.folder, self.top, self.vocabulary = Path(folder), top, vocabulary
        try:
            said = json.loads((self.folder / FACTS).read_text())
            self.facts = WrittenFacts(**{name: said[name] for name in WrittenFacts.__dataclass_fields__})
            self._rows: Any = load_from_disk(str(self.folder)).with_format("numpy")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"teacher_logprobs={str(folder)!r} is no folder of a teacher's log-probabilities ({error}): write one "
                "by `lowtide teacher-logprobs gkd`, with the options of this run"
            ) from error
        if self.facts.top_logprobs < top:
            raise ValueError(
                f"loss_top_k={top} compares {top} tokens of a place, and teacher_logprobs={str(folder)!r} has "
                f"{self.facts.top_logprobs}: lower loss_top_k, or write more by --top_logprobs {top}"
            )
        if self.facts.temperature != temperature:
            raise ValueError(
                f"teacher_logprobs={str(folder)!r} was written at a temperature of {self.facts.temperature:g}, and the "
                f"divergence is at {temperature:g} (divergence_temperature): set that to {self.facts.temperature:g}, "
                "or write anew"
            )
        self._numbers = {key: number for number, key in enumerate(_keys(self._rows))}

    def ask(self, texts: Sequence[Asked]) -> Answers:
        """As of `Teacher`."""
        return Answers.concat([self._of(text) for text in texts]) if texts else no_answers(self.top)

    def has(self, text: Asked) -> bool:
        """Whether it has answers of a text."""
        return text.key in self._numbers

    def _of(self, text: Asked) -> Answers:
        number = self._numbers.get(text.key)
        if number is None:
            raise ValueError(
                f"teacher_logprobs={str(self.folder)!r} has nothing of a row of {len(text.token_ids)} tokens; "
                f"{self._nearest(text.token_ids)}: it was written of other rows, or with another tokenizer, template "
                "or max_length. Write it anew by `lowtide teacher-logprobs gkd`, with the options of this run"
            )
        row = self._rows[number]
        at = np.searchsorted(row["positions"], text.places)
        if (at == len(row["positions"])).any() or (row["positions"][at] != text.places).any():
            raise ValueError(
                f"teacher_logprobs={str(self.folder)!r} has not all tokens of a row of {len(text.token_ids)} that are "
                "scored now: it was written with another completion_only_loss or assistant_only_loss. Write it anew"
            )
        tokens, logprobs = (
            row[name].reshape(len(row["positions"]), -1)[at, : self.top] for name in ("token_ids", "logprobs")
        )
        if tokens.max(initial=0) >= self.vocabulary:
            raise ValueError(
                f"teacher_logprobs={str(self.folder)!r} names the token {tokens.max()}, and the student has "
                f"{self.vocabulary}: the teacher has other tokens"
            )
        return Answers(
            torch.from_numpy(tokens).long(), torch.from_numpy(logprobs), torch.from_numpy(row["written"][at])
        )

    def _nearest(self, token_ids: list[int]) -> str:
        """Which of the texts begins as one that is not there for longest, and where it goes on otherwise."""
        if not len(self._rows):
            return "it has no text at all"
        texts = (row["input_ids"].tolist() for row in self._rows.select_columns(["input_ids"]))
        alike, nearest = max(((_alike(each, token_ids), each) for each in texts), key=lambda each: each[0])
        shown = [" ".join(map(str, each[alike : alike + 3])) or "nothing more" for each in (token_ids, nearest)]
        return (
            f"of its {len(self._rows)} texts the nearest has {len(nearest)} tokens and begins with the same {alike} "
            f"(then {shown[1]}, and the row {shown[0]})"
        )


class WrittenTeachers:
    """Several folders, as of several teachers: a text is answered by the first that has it."""

    def __init__(self, folders: Sequence[WrittenTeacher]) -> None:
        self.folders = folders

    def ask(self, texts: Sequence[Asked]) -> Answers:
        """As of `Teacher`."""
        return answers_of([each.ask for each in self.folders], texts, [self._first(text) for text in texts])

    def _first(self, text: Asked) -> int:
        return next((number for number, each in enumerate(self.folders) if each.has(text)), 0)


def answers_of(
    teachers: Sequence[Callable[[Sequence[Asked]], Answers]], texts: Sequence[Asked], numbers: Sequence[int]
) -> Answers:
    """What several teachers say, each of its own texts, in the order of the texts."""
    found: dict[int, Answers] = {}
    for teacher, ask in enumerate(teachers):
        own = [place for place, number in enumerate(numbers) if number == teacher]
        counts = [len(texts[place].places) for place in own]
        parts = zip(*(each.split(counts) for each in ask([texts[place] for place in own])), strict=True)
        found |= {place: Answers(*each) for place, each in zip(own, parts, strict=True)}
    return Answers.concat([found[place] for place in range(len(texts))]) if texts else teachers[0]([])


def no_answers(top: int) -> Answers:
    """Of no places."""
    return Answers(torch.zeros(0, top, dtype=torch.long), torch.zeros(0, top), torch.zeros(0))


def write_answers(folder: str | Path, facts: WrittenFacts, answered: Iterable[tuple[Asked, Answers]]) -> int:
    """Writes a folder of answers; of a text that comes again those of all its places. Gives the number of texts.

    Raises:
        ValueError: something is in the folder already.
    """
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"there is something in {folder} already: name a new folder for the log-probabilities")
    known: dict[bytes, tuple[Asked, Answers]] = {}
    for text, answers in answered:
        if text.key in known:
            text, answers = _together(known[text.key], (text, answers))
        known[text.key] = text, answers
    Dataset.from_list([_row(*each) for each in known.values()], features=FEATURES).save_to_disk(str(folder))
    (folder / FACTS).write_text(json.dumps(facts.__dict__))
    return len(known)


def _alike(one: list[int], other: list[int]) -> int:
    """How many tokens two texts begin with alike."""
    return next(
        (at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), min(len(one), len(other))
    )


def _together(one: tuple[Asked, Answers], other: tuple[Asked, Answers]) -> tuple[Asked, Answers]:
    """The answers of two that are of the same text."""
    places = one[0].places + other[0].places
    at = [places.index(place) for place in sorted({*places})]
    answers = Answers.concat([one[1], other[1]])
    return Asked(one[0].token_ids, [places[each] for each in at]), Answers(*(each[at] for each in answers))


def _row(text: Asked, answers: Answers) -> dict[str, Any]:
    return {
        "input_ids": text.token_ids,
        "positions": text.places,
        "token_ids": answers.tokens.flatten().tolist(),
        "logprobs": answers.logprobs.flatten().tolist(),
        "written": answers.written.tolist(),
    }


def _key(token_ids: Int[np.ndarray, " tokens"]) -> bytes:
    return hashlib.blake2b(token_ids.tobytes(), digest_size=16).digest()


def _keys(rows: Dataset) -> Iterator[bytes]:
    """Of the texts of a table, in its order."""
    for part in rows.with_format("arrow").select_columns(["input_ids"]).iter(batch_size=1000):
        column: Any = part["input_ids"].combine_chunks()  # type: ignore[index]
        ends = np.cumsum(column.value_lengths().to_numpy())
        yield from map(_key, np.split(column.flatten().to_numpy(), ends[:-1]))
