"""A teacher that is asked in place of being loaded: a server, or what it said before.

All that is known of it are log-probabilities: of the tokens that it has likeliest at a place, and of the token that
stands there. Distributions are compared on these tokens, under the names and by the rules of TRL 1.16's
`ServerDistillationTrainer`:

- `beta=0` compares the teacher's likeliest tokens;
- `beta=1` with one token compares the token that stands there;
- else it is both together: TRL has this with one likeliest token alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar
from urllib.parse import urlsplit

import torch
from torch import Tensor

from lowtide.data.batches.values import NAMED_LOGPROBS, NAMED_TOKENS, REFERENCE, TEACHER_NUMBER
from lowtide.data.teacher_logprobs import Answers
from lowtide.methods.shared.options import TeacherOptions, check_whole_vocabulary
from lowtide.ops.logits.logit_rows import Support
from lowtide.option import COUNT, POSITIVE, Group, option
from lowtide.ragged import RaggedBatch

OF_LOADED = (
    "teacher_model_name_or_path",
    "teacher_model_names_or_paths",
    "teacher_model_revision",
    "teacher_model_init_kwargs",
)
"""Options of a teacher that is loaded."""

ASKED = ("teacher_model_server_url", "teacher_model_server_urls", "teacher_logprobs")
"""Options that say whom to ask."""


@dataclass(kw_only=True)
class ServedTeacherOptions(TeacherOptions):
    """Of the methods whose teacher may be a server."""

    group: ClassVar[Group] = Group.REFERENCE

    teacher_model_server_url: str | None = option(
        None, "The address of a `vllm serve` with the teacher, such as http://localhost:8000: no teacher is loaded."
    )
    teacher_model_server_urls: dict | None = option(
        None, "Those of several teachers, by names of yours; a column of the rows says which teacher is a row's."
    )
    teacher_model_names_or_paths: dict | None = option(
        None, "Folders or hub names of several teachers that are loaded, by names of yours, with the same column."
    )
    teacher_column: str = option("teacher", "Of several teachers: the column that names the teacher of a row.")
    teacher_model_server_timeout: float = option(
        240.0, "Seconds to wait for that server to be there, and for each of its answers.", POSITIVE
    )

    @property
    def asked(self) -> str | None:
        """The option that says whom to ask, as messages name it; None where the teacher is loaded."""
        given = {name: getattr(self, name, None) for name in ASKED}
        return next((f"{name}={value!r}" for name, value in given.items() if value is not None), None)

    @property
    def teacher_names(self) -> list[str]:
        """Of several teachers; none where there is one."""
        return [*(self.teacher_model_server_urls or ()), *(self.teacher_model_names_or_paths or ())]

    def teacher_numbers(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Which teacher is asked of each row, as a value of rows; none where there is one.

        Raises:
            ValueError: a row names none; says which there are.
        """
        names, column = self.teacher_names, self.teacher_column
        if not names:
            return {}
        for row in rows:
            if row.get(column) not in names:
                raise ValueError(
                    f"a row has {row.get(column)!r:.80} in the column `{column}` (teacher_column), which is no "
                    f"teacher's name: name one of {', '.join(names)}"
                )
        return {TEACHER_NUMBER: torch.tensor([names.index(row[column]) for row in rows])}

    @property
    def compares(self) -> bool:
        """Whether there is a teacher in memory."""
        return self.asked is None

    @property
    def asks_for(self) -> int:
        """Likeliest tokens of a place that a teacher is asked for."""
        return 1

    def said(self, answers: Answers, written: Tensor) -> dict[str, Tensor]:
        """What is read of answers, as values of scores.

        Args:
            answers: of a teacher that is asked, with `asks_for` tokens of each score.
            written: the token that stands at each score.
        """
        return {REFERENCE: answers.written}

    def unsaid(self, scores: int) -> dict[str, Tensor]:
        """The same of so many scores that no teacher was asked of."""
        return {REFERENCE: torch.full((scores,), -1.0)}

    def check_asked(self) -> None:
        """Refuses what a teacher that is asked does not go with.

        Raises:
            ValueError: naming the options and the way out.
        """
        for name, plain in (("teacher_model_server_timeout", 240.0), ("teacher_column", "teacher")):
            value, of_several = getattr(self, name), name == "teacher_column"
            if value != plain and not (self.teacher_names if of_several else self.asked):
                needs = "teacher_model_server_urls or teacher_model_names_or_paths" if of_several else ASKED[0]
                raise ValueError(f"{name}={value!r} requires {needs}: set that, or leave it out")
        if self.asked is None:
            self._check_loaded()
            return
        url, urls = self.teacher_model_server_url, self.teacher_model_server_urls
        if urls is not None and (url is not None or not urls):
            raise ValueError(
                f"teacher_model_server_url={url!r} and teacher_model_server_urls={urls!r}: give the address of one "
                "teacher, or of several by their names"
            )
        for name, address in [("teacher_model_server_url", url), *((ASKED[1], each) for each in (urls or {}).values())]:
            if address is not None and not is_address(address):
                raise ValueError(f"{name} has {address!r}, which is no address of a server as http://localhost:8000 is")
        for name in OF_LOADED:
            if (value := getattr(self, name)) is not None:
                raise ValueError(f"{name}={value!r} loads a teacher, and {self.asked} asks one: leave one of them out")
        if self.ref_model_storage != "same":
            raise ValueError(
                f"ref_model_storage={self.ref_model_storage!r} is of a teacher that is loaded, and {self.asked} asks "
                "one: leave it out"
            )

    def _check_loaded(self) -> None:
        """Refuses several loaded teachers where they are not whole on each process."""
        named, one = self.teacher_model_names_or_paths, self.teacher_model_name_or_path
        if named is None:
            return
        if one is not None:
            raise ValueError(
                f"teacher_model_name_or_path={one!r} is one teacher, and teacher_model_names_or_paths={named!r} are "
                "several: leave one of them out"
            )
        if not named or not all(isinstance(each, str) for each in named.values()):
            raise ValueError(
                f"teacher_model_names_or_paths={named!r} is to have a folder or a name on the hub for each teacher: "
                "{'math': 'FOLDER', 'code': 'OTHER'}"
            )
        sharding: Any = getattr(self, "sharding", None)
        if getattr(sharding, "same_rows", 1) > 1 or getattr(sharding, "cuts_weights", False):
            raise ValueError(
                f"several loaded teachers ({', '.join(self.teacher_names)}) are whole on each process, each of which "
                "has rows of its own: leave fsdp, ZeRO-3, sp_size, tp_size and pipeline_parallel_size out, or serve "
                "the teachers (teacher_model_server_urls)"
            )


@dataclass(kw_only=True)
class NamingTeacherOptions(ServedTeacherOptions):
    """Of the methods that compare distributions, of which the teacher may name a few tokens alone."""

    group: ClassVar[Group] = Group.REFERENCE

    loss_top_k: int = option(
        1, "Of a teacher that is asked: how many of its likeliest tokens are compared. One that is loaded: all.", COUNT
    )
    loss_add_tail: bool = option(
        True, "Of a teacher that is asked: all other tokens count as one more. False has what is left add up to 1."
    )
    reverse_kl_top_1_mode: str = option(
        "sampled",
        "Of a teacher that is asked: which token `beta` above 0 compares beside; a server knows the one that stands "
        "there alone.",
        choices=["sampled"],
    )

    @property
    def support(self) -> Support | None:
        """What is compared of a teacher that is asked; None of one that is loaded."""
        return None if self.asked is None else Support(self.loss_top_k, self.loss_add_tail, named=True)

    @property
    def asks_for(self) -> int:
        return self.loss_top_k

    @property
    def names(self) -> int:
        """Tokens of a place that are compared."""
        beta: float = getattr(self, "beta")  # noqa: B009  # each method's own
        return self.loss_top_k + (beta > 0 and not self._written_alone)

    @property
    def _written_alone(self) -> bool:
        return getattr(self, "beta") == 1 and self.loss_top_k == 1  # noqa: B009

    def check_asked(self) -> None:
        super().check_asked()
        if self.asked is None:
            for name, plain in (("loss_top_k", 1), ("loss_add_tail", True)):
                if (value := getattr(self, name)) != plain:
                    raise ValueError(
                        f"{name}={value!r} is of a teacher that is asked, and one that is loaded is compared on all "
                        "tokens: set teacher_model_server_url, or leave it out"
                    )
            return
        check_whole_vocabulary(self, f"{self.asked} gives log-probabilities of some tokens")

    def said(self, answers: Answers, written: Tensor) -> dict[str, Tensor]:
        tokens, logprobs, _ = answers
        own, of_own = written[:, None], answers.written[:, None]
        if self._written_alone:
            tokens, logprobs = own, of_own
        elif self.names > self.loss_top_k:
            twice = (tokens == own).any(-1, keepdim=True)
            tokens = torch.cat([tokens, own], -1)
            logprobs = torch.cat([logprobs, of_own.masked_fill(twice, -torch.inf)], -1)
        return {NAMED_TOKENS: tokens, NAMED_LOGPROBS: logprobs}

    def unsaid(self, scores: int) -> dict[str, Tensor]:
        tokens = (torch.arange(self.names) % self.loss_top_k).repeat(scores, 1)
        return {NAMED_TOKENS: tokens, NAMED_LOGPROBS: torch.full(tokens.shape, -10.0)}


def is_address(value: Any) -> bool:
    """Whether it is that of a server over HTTP."""
    try:
        parts = urlsplit(str(value))
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname)


def unsaid(options: Any) -> Callable[[RaggedBatch, int], RaggedBatch] | None:
    """Gives a batch what a teacher that is asked would say of it, whatever that is: what a step is rehearsed and
    planned on. None where the teacher is loaded."""
    asks = isinstance(options, ServedTeacherOptions) and options.asked is not None
    return functools.partial(_with_any, options=options) if asks else None


def _with_any(batch: RaggedBatch, epoch: int, options: ServedTeacherOptions) -> RaggedBatch:
    blank = options.unsaid(batch.scores)
    if not blank.keys().isdisjoint(batch.score_values):
        return batch
    moved = {name: each.to(batch.token_ids.device) for name, each in blank.items()}
    return replace(batch, score_values={**batch.score_values, **moved})
