"""Prompts to token ids, for methods that write completions themselves; what else a row holds stays beside them.

The tokens are those of TRL 1.16's `GRPOTrainer`: a text is tokenized with the special tokens that its tokenizer adds,
a conversation is rendered with the header of the assistant's turn. Other columns are for reward functions.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from datasets import Dataset, IterableDataset
from transformers import PreTrainedTokenizerBase

from lowtide.compat.datasets import fingerprint_of
from lowtide.data.cache.cached_map import reading
from lowtide.data.cache.fingerprint import VERSION, combine, tokenizer_fingerprint
from lowtide.data.encode.chat import TEMPLATE_FAILURES
from lowtide.data.formats.columns import check_media
from lowtide.spelling import nearest

PROMPT = "prompt"
PROMPT_IDS = "prompt_ids"


@dataclass(frozen=True)
class PromptEncoder:
    """From a prompt, a text or a list of messages, to its token ids."""

    tokenizer: PreTrainedTokenizerBase
    most: int | None = None
    """Tokens of a prompt at most; its end is kept."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Passed to the chat template."""
    source: str = "the train dataset"
    """What messages call the rows."""

    def __call__(self, prompt: Any, row: int = 0) -> list[int]:
        """The token ids of one prompt.

        Raises:
            ValueError: it is neither text nor messages, cannot be rendered, or is empty; names the row.
        """
        where = f"{self.source}, row {row}"
        if isinstance(prompt, str):
            ids = list(self.tokenizer(text=prompt)["input_ids"])
        elif isinstance(prompt, Sequence) and prompt and all(isinstance(each, Mapping) for each in prompt):
            ids = self._rendered([dict(each) for each in prompt], where)
        else:
            raise ValueError(
                f"{where}: `prompt` is {prompt!r:.80}, and a prompt is a text or a list of messages: mend or drop "
                "the row"
            )
        if not ids:
            raise ValueError(
                f"{where}: the prompt has no tokens, so that nothing can be written after it: drop the row"
            )
        return ids if self.most is None else ids[-self.most :]

    def _rendered(self, messages: list[dict[str, Any]], where: str) -> list[int]:
        try:
            made: Any = self.tokenizer.apply_chat_template(
                [messages],
                add_generation_prompt=True,
                tokenize=True,
                return_dict=True,
                **self.template_kwargs,
            )
        except TEMPLATE_FAILURES as error:
            raise ValueError(f"{where}: the chat template can't render the prompt: {error}") from error
        return list(made["input_ids"][0])


def prepare_prompts(
    dataset: Dataset | IterableDataset, encoder: PromptEncoder, *, num_proc: int | None = None
) -> Dataset | IterableDataset:
    """The rows with a column `prompt_ids`; of a conversational prompt/completion row the prompt alone is read.

    Raises:
        ValueError: there is no prompt, or one cannot be used; names the row.
    """
    with reading(dataset, encoder.source, "prompt_ids") as first:
        if PROMPT not in first:
            raise ValueError(
                f"{encoder.source} has no column `prompt`{nearest(PROMPT, list(first))}, only "
                f"{', '.join(sorted(first))}: rename the column of prompts to `prompt`"
            )
    check_media(list(first), encoder.source)
    tokens = _Tokens(encoder)
    if isinstance(dataset, IterableDataset):
        return dataset.map(tokens, with_indices=True)
    options = (encoder.most, sorted(encoder.template_kwargs.items(), key=str))
    named = combine(VERSION, fingerprint_of(dataset), tokenizer_fingerprint(encoder.tokenizer), options)
    return dataset.with_format(None).map(
        tokens, with_indices=True, num_proc=num_proc, new_fingerprint=named, desc=f"Preparing {encoder.source}"
    )


@dataclass(frozen=True)
class _Tokens:
    """What `datasets.map` calls."""

    encoder: PromptEncoder

    def __call__(self, row: Mapping[str, Any], number: int) -> dict[str, list[int]]:
        return {PROMPT_IDS: self.encoder(copy.copy(row[PROMPT]), number)}
