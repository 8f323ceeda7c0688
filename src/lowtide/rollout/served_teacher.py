"""A teacher behind `vllm serve`: the log-probabilities that it gives the tokens of texts, and its likeliest ones.

It is asked for as many as are compared, by `prompt_logprobs` of vLLM's completions, as TRL 1.16 does. What it answers
is looked at: a text of other tokens, a place without the token that stands there, or with fewer tokens than were asked
for, ends the run with what is missing.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from lowtide.data.teacher_logprobs import Answers, Asked, no_answers
from lowtide.rollout.generators.vllm.http import Calls, Refused, ServerError

logger = logging.getLogger(__name__)

AT_A_TIME = 32
"""Texts that are asked of the server at a time."""
BYTES_OF_LOGPROB = 256
"""The most that an answer has for the log-probability of a token: its number, its text and its rank."""
SAMPLE = "The answer to 12 + 30 is 42, which isn't 24 (naïve über-Größe): \n\tfor i in range(3): print(i)"
"""A text whose tokens the server and the student have to agree on."""
START = "start the server by: vllm serve TEACHER --max-logprobs -1"


class ServedTeacher:
    """A `vllm serve` that is asked for log-probabilities.

    Args:
        url: its address.
        top: tokens of a place that are asked for.
        temperature: divisor of the teacher's logits.
        timeout: seconds to wait for it to be there, and for an answer.
        vocabulary: the student's tokens.
        tokenizer: the student's; None where its tokens are not compared.

    Raises:
        ServerError: no server answers.
        ValueError: the address is none, or it has other tokens than the student.
    """

    def __init__(
        self, url: str, *, top: int, temperature: float, timeout: float, vocabulary: int, tokenizer: Any = None
    ) -> None:
        self.top, self.temperature, self.vocabulary = top, temperature, vocabulary
        try:
            self.calls = Calls(url, timeout, "teacher_model_server_timeout")
        except ValueError as error:
            raise ValueError(
                f"teacher_model_server_url={url!r} is no address of a server, such as http://localhost:8000"
            ) from error
        self.whose = f"the teacher's server at {self.calls.url}"
        try:
            self.calls.wait("/health")
        except ServerError as error:
            raise ServerError(
                f"no server answers at teacher_model_server_url={url!r} within teacher_model_server_timeout="
                f"{timeout:g} seconds: {START}"
            ) from error
        try:
            card = self.calls.get("/v1/models")["data"][0]
            self.model: str = card["id"]
            self.longest: int | None = card.get("max_model_len")
        except (Refused, KeyError, IndexError, TypeError) as error:
            raise ValueError(f"what answers at teacher_model_server_url={url!r} is no vLLM server: {START}") from error
        if tokenizer is not None:
            self._check_tokens(tokenizer)
        self._check_temperature()

    def _check_tokens(self, tokenizer: Any) -> None:
        """Whether the server cuts a text into the student's tokens."""
        ours = tokenizer.encode(SAMPLE, add_special_tokens=False)
        try:
            asked = {"model": self.model, "prompt": SAMPLE, "add_special_tokens": False}
            theirs = self.calls.post("/tokenize", asked)["tokens"]
        except (Refused, KeyError, TypeError):
            logger.warning(
                f"{self.whose} does not say which tokens it cuts a text into, so that it is not known whether they are "
                "the student's: check that both models have one tokenizer"
            )
            return
        if theirs != ours:
            raise ValueError(
                f"{self.whose} cuts a text into other tokens than the student's tokenizer ({theirs[:5]}.. and "
                f"{ours[:5]}..): its log-probabilities are of other tokens. Serve a teacher with the student's "
                "tokenizer, or take GOLD with a teacher that is loaded (use_uld_loss=True)"
            )

    def _check_temperature(self) -> None:
        """Says it where the server leaves the temperature out."""
        if self.temperature == 1:
            return
        text = Asked([1, 2, 3], [1, 2])
        plain, warm = (self._of(self._call(text, each), text).written for each in (1.0, self.temperature))
        if torch.equal(plain, warm):
            logger.warning(
                f"{self.whose} gives log-probabilities at a temperature of 1, whatever it is asked for, and the "
                f"student's are at {self.temperature:g}: the two are not brought together. Set the temperature to 1"
            )

    def ask(self, texts: Sequence[Asked]) -> Answers:
        """As of `data.teacher_logprobs.Teacher`.

        Raises:
            ServerError: the server went away, took too long, or refused.
            ValueError: it answered something else than it was asked for.
        """
        if not texts:
            return no_answers(self.top)
        for text in texts:
            if self.longest is not None and len(text.token_ids) >= self.longest:
                raise ValueError(
                    f"a row has {len(text.token_ids):,} tokens, and {self.whose} takes fewer than {self.longest:,}: "
                    "lower max_length or max_completion_length, or start it with a larger --max-model-len"
                )
        with ThreadPoolExecutor(min(AT_A_TIME, len(texts))) as pool:
            return Answers.concat(list(pool.map(self._one, texts)))

    def _one(self, text: Asked) -> Answers:
        return self._of(self._call(text, self.temperature), text)

    def _call(self, text: Asked, temperature: float) -> Any:
        asked = {
            "model": self.model,
            "prompt": text.token_ids,
            "max_tokens": 1,
            "temperature": temperature,
            "prompt_logprobs": self.top,
        }
        try:
            return self.calls.post("/v1/completions", asked, len(text.token_ids) * (self.top + 1) * BYTES_OF_LOGPROB)
        except Refused as error:
            raise ServerError(
                f"{error}. It was asked for prompt_logprobs={self.top} of {len(text.token_ids):,} tokens: a server "
                "gives 20 at most by default, so start it with --max-logprobs -1, and with a --max-model-len that "
                "rows fit into"
            ) from error

    def _of(self, found: Any, text: Asked) -> Answers:
        """What it answered of a text."""
        try:
            places = found["choices"][0]["prompt_logprobs"]
        except (KeyError, IndexError, TypeError) as error:
            raise ValueError(f"{self.whose} answered /v1/completions without {error}: {START}") from error
        if not isinstance(places, list) or len(places) != len(text.token_ids):
            count = len(places) if isinstance(places, list) else "no"
            raise ValueError(
                f"{self.whose} gave log-probabilities of {count} tokens for a text of {len(text.token_ids)}: {START}"
            )
        tokens, logprobs, written = [], [], []
        for place in text.places:
            own, ranked = self._place(places[place], text.token_ids[place])
            written.append(own)
            tokens.append([token for _, token, _ in ranked])
            logprobs.append([value for _, _, value in ranked])
        found = torch.tensor(tokens, dtype=torch.long), torch.tensor(logprobs), torch.tensor(written)
        return Answers(*found)

    def _place(self, said: Any, token: int) -> tuple[float, list[tuple[int, int, float]]]:
        """The log-probability of the token of a place, and (rank, token, log-probability) of the likeliest ones."""
        try:
            known = {int(each): (int(value["rank"]), float(value["logprob"])) for each, value in _entries(said)}
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{self.whose} gave log-probabilities that cannot be read ({error}): {START}") from error
        if token not in known:
            raise ValueError(
                f"{self.whose} gave log-probabilities of the tokens {sorted(known)[:5]} where the token {token} "
                "stands: it was asked of another text than it answers of"
            )
        ranked = sorted((rank, each, value) for each, (rank, value) in known.items() if rank <= self.top)
        if len(ranked) < self.top:
            raise ValueError(
                f"{self.whose} gave {len(ranked)} of the {self.top} log-probabilities of a place that it was asked for "
                f"(loss_top_k): start it with --max-logprobs -1, or lower loss_top_k"
            )
        wrong = [each for _, each, _ in ranked if not 0 <= each < self.vocabulary]
        if wrong:
            raise ValueError(
                f"{self.whose} names the token {wrong[0]}, and the student has {self.vocabulary} tokens: serve a "
                "teacher with the student's tokenizer"
            )
        own = known[token][1]
        if not math.isfinite(own) or any(not math.isfinite(value) for _, _, value in ranked):
            raise ValueError(
                f"{self.whose} gave log-probabilities that are no numbers, of the token {token} or of its likeliest "
                "ones: its weights or its dtype overflow"
            )
        return own, ranked[: self.top]


def _entries(said: Any) -> Any:
    """Of a place; None of those that it has none for."""
    if not isinstance(said, Mapping):
        raise TypeError("a place has none")
    return said.items()
