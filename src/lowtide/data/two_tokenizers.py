"""The same text as two tokenizers cut it, for a student and a teacher with other vocabularies.

A text is cut where both end a token; what lies between two such places is a span, of one token or several of each. The
student's tokens are given, and are read as bytes, so that tokens that hold a part of a character are aligned too; the
teacher's are those of the text. In the place of an image stands what the teacher's own processor writes for it. Where
the bytes of a tokenizer's tokens are not known, tokens are paired by their places (`by_text=False`), as in the
universal logit distillation of Boizard et al. (arXiv 2402.12030).
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, cast

from transformers import PreTrainedTokenizerBase

from lowtide.data.batches.images import ImageReader, ReadyImage, identity
from lowtide.ragged import SegmentImage

logger = logging.getLogger(__name__)

SPACE = "▁"
UNKNOWN = "\ufffd"
"""In the place of a byte that is no part of a letter."""
BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
PROBE = "a b c"
LOOKED_AT = 64
"""Tokens whose text is compared with what the tokenizer itself makes of them."""


class Span(NamedTuple):
    """Tokens of both that stand for the same text, by their places in the completion."""

    ours: range
    theirs: range


class Read(NamedTuple):
    """A prompt and a completion as the teacher reads them."""

    prompt: list[int]
    completion: list[int]
    spans: list[Span]
    images: list[SegmentImage]
    """Those of the prompt, made ready for the teacher; what they start at is a place in its tokens."""


@functools.cache
def _bytes_of_letters() -> dict[str, int]:
    """The letters by which byte-level tokenizers write bytes (GPT-2's): those that can be printed are themselves."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + number): byte for number, byte in enumerate(others)}


def _byte_level(piece: str) -> bytes | None:
    found = [_bytes_of_letters().get(letter) for letter in piece]
    return None if None in found else bytes(byte for byte in found if byte is not None)


def _metaspace(piece: str) -> bytes:
    byte = BYTE.fullmatch(piece)
    return bytes([int(byte[1], 16)]) if byte else piece.replace(SPACE, " ").encode()


class TokenBytes:
    """What the tokens of a tokenizer stand for.

    Args:
        what: whose it is, as messages name it.

    Raises:
        ValueError: it writes its tokens in a way that is not known here.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, what: str) -> None:
        self.tokenizer = tokenizer
        self._added = {token: str(each).encode() for token, each in tokenizer.added_tokens_decoder.items()}
        self._known: dict[int, bytes] = {}
        for pieces in (_byte_level, _metaspace):
            self._pieces: Callable[[str], bytes | None] = pieces
            self._known.clear()
            if self._gives_text_back():
                return
        raise ValueError(
            f"the tokens of {what} ({type(tokenizer).__name__}) do not give back the text that they stand for, so that "
            "those of two tokenizers can't be aligned by text: set use_extended_uld=False, which pairs them by place"
        )

    def _gives_text_back(self) -> bool:
        """Whether a text is what its tokens stand for, or, where there are none of its letters, pairs of tokens that
        are whole letters stand for what they are decoded to."""
        read: Any = self.tokenizer(PROBE, add_special_tokens=False)["input_ids"]
        if b"".join(self.of(read)).lstrip() == PROBE.encode():
            return True
        ids = [each for each in sorted(self.tokenizer.get_vocab().values()) if each not in self._added]
        some = ids[:: max(len(ids) // LOOKED_AT, 1)]
        pairs = [[*pair] for pair in pairwise(some)]
        texts = [(pair, b"".join(self.of(pair)).decode(errors="replace")) for pair in pairs]
        whole = [(pair, text) for pair, text in texts if "\ufffd" not in text]
        return bool(whole) and all(_decoded(self.tokenizer, pair).lstrip() == text.lstrip() for pair, text in whole)

    def of(self, ids: Sequence[int]) -> list[bytes]:
        """The bytes of each token; none of one that is not known."""
        return [self._known[each] if each in self._known else self._learn(each) for each in ids]

    def _learn(self, token: int) -> bytes:
        found = self._added.get(token)
        if found is None:
            piece: Any = self.tokenizer.convert_ids_to_tokens(token)
            found = b"" if piece is None else self._pieces(piece)
        self._known[token] = b"" if found is None else found
        return self._known[token]


@dataclass(frozen=True)
class WithoutEnds:
    """Whether the token that ends a text is left out of what is compared."""

    ours: bool = True
    """The student's; likewise the teacher's."""
    theirs: bool = True


class TwoTokenizers:
    """A student's tokenizer and its teacher's.

    Args:
        ends: tokens that end a text of the student.
        by_text: align tokens by text; False pairs them by place.
        without_ends: which ends are not compared.
    """

    def __init__(
        self,
        student: PreTrainedTokenizerBase,
        teacher: PreTrainedTokenizerBase,
        *,
        ends: Sequence[int] = (),
        by_text: bool = True,
        without_ends: WithoutEnds = WithoutEnds(),
    ) -> None:
        self.student, self.teacher, self.ends, self.without_ends = student, teacher, frozenset(ends), without_ends
        self.ours = TokenBytes(student, "the student") if by_text else None
        self.theirs = TokenBytes(teacher, "teacher_model") if by_text else None
        self.reader: ImageReader | None = None
        """Makes images ready for the teacher, where rows show some."""

    @functools.cached_property
    def common(self) -> tuple[list[int], list[int]]:
        """The tokens that both have, by the numbers of each, in the order of the teacher's."""
        ours, theirs = self.student.get_vocab(), self.teacher.get_vocab()
        pairs = sorted((number, ours[token]) for token, number in theirs.items() if token in ours)
        return [own for _, own in pairs], [number for number, _ in pairs]

    def read(
        self,
        prompt: Sequence[int],
        completion: Sequence[int],
        images: Sequence[SegmentImage] = (),
        known: dict[Any, ReadyImage] | None = None,
    ) -> Read:
        """The teacher's tokens of what the student's stand for, and what of the completion is compared.

        Args:
            prompt: the student's tokens before what is learned.
            completion: those that are learned, with their end if they have one.
            images: those among the tokens of the prompt.
            known: images that were made ready for the teacher before, which is added to.

        Raises:
            ValueError: the teacher's tokens of the prompt have no place for each image, or its processor takes one not.
        """
        completion = list(completion)
        ended = bool(completion) and completion[-1] in self.ends
        content = completion[:-1] if ended else completion
        text, lengths = self._text(content)
        theirs: Any = self.teacher(text, add_special_tokens=False)["input_ids"]
        before, shown = self._prompt(prompt, images, {} if known is None else known)
        end = self.teacher.eos_token_id
        spans = self._spans(lengths, theirs, text)
        if end is not None:
            if ended and not self.without_ends.ours and not self.without_ends.theirs:
                spans.append(Span(range(len(content), len(content) + 1), range(len(theirs), len(theirs) + 1)))
            theirs = [*theirs, end]
        return Read(before, list(theirs), spans, shown)

    def _prompt(
        self, prompt: Sequence[int], images: Sequence[SegmentImage], known: dict[Any, ReadyImage]
    ) -> tuple[list[int], list[SegmentImage]]:
        """The teacher's tokens of a prompt, without an end, and the images among them."""
        texts, start, ready = [], 0, []
        for image in images:
            assert self.reader is not None, "rows show images"
            assert image.source is not None, "rows of a data set say where their images come from"
            stored, first = image.source.stored, image.start - image.source.before
            texts.append(self._text(prompt[start:first])[0])
            start = first + image.source.tokens
            ready.append(known.get(identity(stored)) or self.reader.ready(stored))
            known[identity(stored)] = ready[-1]
        texts.append(self._text(prompt[start:])[0])
        mark = "" if self.reader is None else self.reader.processor.image_token
        ids: list[int] = list(cast(Any, self.teacher(mark.join(texts)))["input_ids"])
        if ids and ids[-1] == self.teacher.eos_token_id:
            ids.pop()
        if self.reader is None:
            return ids, []
        if (places := ids.count(self.reader.mark)) != len(ready):
            raise ValueError(
                f"a prompt shows {len(ready)} images, and the text of it has {places} places of images for the teacher "
                f"({mark!r}): take such texts out of the rows"
            )
        return _with_images(ids, self.reader.mark, ready)

    def _text(self, ids: Sequence[int]) -> tuple[str, list[int]]:
        """What the student's tokens say, and how many bytes of it each does."""
        if self.ours is None:
            return _decoded(self.student, ids), [1] * len(ids)
        return spoken(self.ours.of(ids))

    def _spans(self, own: Sequence[int], theirs: Sequence[int], text: str) -> list[Span]:
        if self.theirs is None:
            both = range(min(len(own), len(theirs)))
            return [Span(range(each, each + 1), range(each, each + 1)) for each in both]
        pieces = self.theirs.of(theirs)
        other, said, wanted = [len(each) for each in pieces], b"".join(pieces), text.encode()
        if said == b" " + wanted and other:  # which SentencePiece puts before a text
            other[0] -= 1
        elif said != wanted:
            _tell_of_unknown(type(self.teacher).__name__)
            return []
        return aligned(own, other)


def _with_images(ids: Sequence[int], mark: int, images: Sequence[ReadyImage]) -> tuple[list[int], list[SegmentImage]]:
    """Tokens with those of images in the places of their marks, and the images among them."""
    left, tokens, shown = iter(images), [], []
    for each in ids:
        if each != mark:
            tokens.append(each)
            continue
        image = next(left)
        shown.append(replace(image.shown, start=len(tokens) + image.shown.start))
        tokens += image.token_ids
    return tokens, shown


def spoken(pieces: Sequence[bytes]) -> tuple[str, list[int]]:
    """The text of bytes that come in pieces, and the bytes of it that are each piece's; a byte that is no part of a
    letter has a replacement character in its place."""
    text, sizes = b"".join(pieces).decode(errors="surrogateescape"), []
    for letter in text:
        known = not "\udc80" <= letter <= "\udcff"
        sizes += [1] * len(letter.encode()) if known else [len(UNKNOWN.encode())]
    ends = [0, *accumulate(sizes)]
    places = [0, *accumulate(map(len, pieces))]
    lengths = [ends[stop] - ends[start] for start, stop in pairwise(places)]
    return "".join(UNKNOWN if "\udc80" <= letter <= "\udcff" else letter for letter in text), lengths


def aligned(ours: Sequence[int], theirs: Sequence[int]) -> list[Span]:
    """The spans of two cuts of a text.

    Args:
        ours: the length of each token, likewise `theirs`. What lies behind the last place that both cut is one span.
    """
    found, ends = [], list(accumulate(theirs))
    first = start = other = 0
    for place, end in enumerate(accumulate(ours)):
        while other < len(ends) and ends[other] < end:
            other += 1
        if other < len(ends) and ends[other] == end:
            found.append(Span(range(first, place + 1), range(start, other + 1)))
            first, start = place + 1, other + 1
            other = start
    if first < len(ours) and start < len(theirs):
        found.append(Span(range(first, len(ours)), range(start, len(theirs))))
    return found


def _decoded(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    return str(tokenizer.decode([*ids], skip_special_tokens=False, clean_up_tokenization_spaces=False))


@functools.cache
def _tell_of_unknown(kind: str) -> None:
    logger.warning(
        f"the teacher's tokenizer ({kind}) has no tokens for some of the texts: nothing is learned of the rows of "
        "these. use_extended_uld=False pairs tokens by place instead"
    )
