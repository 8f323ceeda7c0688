"""Prompts to token ids, for methods that write completions themselves; what else a row holds stays beside them.

The tokens are those of TRL 1.16's `GRPOTrainer`: a text is tokenized with the special tokens that its tokenizer adds,
a conversation is rendered with the header of the assistant's turn, its messages in the form that the template takes
(`data.encode.message_form`), as they are for training. Other columns are for reward functions. The images
of a prompt stay in their columns, as they are stored, and their tokens are among those of the prompt.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from datasets import Dataset, IterableDataset
from transformers import PreTrainedTokenizerBase

from lowtide.compat.datasets import fingerprint_of
from lowtide.compat.templates.jinja import TEMPLATE_FAILURES
from lowtide.data.batches.images import ImageReader
from lowtide.data.cache.cached_map import reading
from lowtide.data.cache.fingerprint import VERSION, combine, tokenizer_fingerprint
from lowtide.data.encode.images import ImageExpander, fingerprint_of_processor
from lowtide.data.encode.message_form import MessageForm
from lowtide.data.encode.truncation import Truncation
from lowtide.data.formats.columns import PROMPT, check_media, check_prompts
from lowtide.data.formats.conversation import as_said
from lowtide.data.formats.images import IMAGE_COLUMNS, in_parts, of_prompt, shows_images, shows_part, undecoded
from lowtide.process.ways_out import in_python

PROMPT_IDS = "prompt_ids"
TEACHER_IDS = "teacher_prompt_ids"
"""The column for the tokens that a teacher reads in place of a prompt."""

OPTIMAL_VALUE = "optimal_value"
"""The column for what the best policy's completions of a prompt are worth."""
ADDED = (PROMPT_IDS, TEACHER_IDS, OPTIMAL_VALUE)
"""Columns that are not the rows' own."""


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
    uncut: int | None = None
    """Tokens at the end of a prompt that stay whatever is written after it; None where all of them do."""

    def __call__(self, prompt: Any, row: int = 0) -> list[int]:
        """The token ids of one prompt.

        Raises:
            ValueError: it is neither text nor messages, shows an image, cannot be rendered, or is empty; names the row.
        """
        if shows_part(prompt):
            raise ValueError(
                f"{self.where(row)}: the prompt shows an image, and prompts are read as text here. Images need a "
                f"vision-language model, its processor (saved beside it{in_python('; or as processing_class')}), and a "
                "data set whose first row shows one too, or has the column 'images', which may be empty"
            )
        return self.cut(self.whole(prompt, row))

    def where(self, row: int) -> str:
        """What messages call a row."""
        return f"{self.source}, row {row}"

    def of_row(self, row: Mapping[str, Any], number: int) -> list[int]:
        """The token ids of the prompt of a row."""
        return self(copy.copy(row[PROMPT]), number)

    def whole(self, prompt: Any, row: int) -> list[int]:
        """The token ids of one prompt of any length."""
        if isinstance(prompt, str):
            ids = list(self.tokenizer(text=prompt)["input_ids"])
        elif isinstance(prompt, Sequence) and prompt and all(isinstance(each, Mapping) for each in prompt):
            ids = list(self.rendered([as_said(each) for each in prompt], row, tokenize=True)["input_ids"][0])
        else:
            raise ValueError(
                f"{self.where(row)}: `prompt` is {prompt!r:.80}, and a prompt is a text or a list of messages: mend or "
                "drop the row"
            )
        if not ids:
            raise ValueError(
                f"{self.where(row)}: the prompt has no tokens, so that nothing can be written after it: drop the row"
            )
        return ids

    def cut(self, ids: list[int]) -> list[int]:
        """At most so many tokens as are wanted."""
        return ids if self.most is None else ids[-self.most :]

    def rendered(self, messages: list[dict[str, Any]], row: int, *, tokenize: bool) -> Any:
        """What the chat template makes of messages, as a batch of one: texts, or a dictionary of token ids.

        Raises:
            ValueError: it cannot render them.
        """
        how: dict[str, Any] = {"tokenize": True, "return_dict": True} if tokenize else {"tokenize": False}
        try:
            return self.tokenizer.apply_chat_template(
                [self._form(messages)], add_generation_prompt=True, **how, **self.template_kwargs
            )
        except TEMPLATE_FAILURES as error:
            raise ValueError(f"{self.where(row)}: the chat template can't render the prompt: {error}") from error

    @cached_property
    def _form(self) -> MessageForm:
        """How the template takes messages."""
        return MessageForm.of(self.tokenizer, self.template_kwargs.get("chat_template"))


@dataclass(frozen=True)
class ImagePromptEncoder:
    """From prompts that show images to token ids, those of the images among them."""

    texts: PromptEncoder
    """Its template is the processor's, and is given contents in parts."""
    images: ImageExpander

    @classmethod
    def of(cls, encoder: PromptEncoder, reader: ImageReader) -> ImagePromptEncoder:
        """For prompts that an encoder would read as texts."""
        template = {"chat_template": reader.processor.chat_template, **encoder.template_kwargs}
        kept = min((most for most in (encoder.most, encoder.uncut) if most is not None), default=None)
        limit = Truncation(max_length=kept, mode="keep_end")
        return cls(replace(encoder, template_kwargs=template), ImageExpander(reader, encoder.source, limit))

    def of_row(self, row: Mapping[str, Any], number: int) -> list[int]:
        """The token ids of the prompt of a row.

        Raises:
            ValueError: as `PromptEncoder`; or an image cannot be read, has no place, or would be cut.
        """
        prompt, shown = self._marked(row, number)
        return self.texts.cut(self.images.tokens_of(self.texts.whole(prompt, number), shown, number))

    def check_first(self, row: Mapping[str, Any]) -> None:
        """Refuses a processor that makes other tokens of the first prompt as a whole than of its parts.

        Raises:
            ValueError: names the processor.
        """
        prompt, self.images.first = self._marked(row, 0)
        if isinstance(prompt, list):
            [text] = self.texts.rendered(prompt, 0, tokenize=False)
            self.images.check_text(self.texts.whole(prompt, 0), text)

    def _marked(self, row: Mapping[str, Any], number: int) -> tuple[Any, list[Any]]:
        """A prompt with a mark in the place of each image; and the images, as they are stored."""
        whole = {name: [value] for name, value in of_prompt(row).items()}
        rest, [shown] = self.images.take(whole, [number])
        [prompt] = rest[PROMPT]
        if isinstance(prompt, list):
            prompt = in_parts(self.images.checked(prompt, PROMPT, number))
        return prompt, shown


def prepare_prompts(
    dataset: Dataset | IterableDataset,
    encoder: PromptEncoder,
    *,
    num_proc: int | None = None,
    reader: ImageReader | None = None,
    column: str = PROMPT_IDS,
) -> Dataset | IterableDataset:
    """The rows with a column of token ids; of a conversational prompt/completion row the prompt alone is read.

    Args:
        reader: makes the images of rows ready, for a vision-language model; the columns of images are left undecoded.
        column: that the token ids become.

    Raises:
        ValueError: there is no prompt, or one cannot be used; names the row.
    """
    dataset = dataset if reader is None else undecoded(dataset)
    with reading(dataset, encoder.source, column) as first:
        check_prompts(list(first), encoder.source)
    check_media([name for name in first if reader is None or name not in IMAGE_COLUMNS], encoder.source)
    tokens, depends = _Tokens(encoder.of_row, column), [column, getattr(encoder, "template", "")]
    if reader is not None and shows_prompt_images(first):
        of_images = ImagePromptEncoder.of(encoder, reader)
        of_images.check_first(first)
        tokens, depends = _Tokens(of_images.of_row, column), [fingerprint_of_processor(reader.processor)]
        encoder = of_images.texts
    if isinstance(dataset, IterableDataset):
        return dataset.map(tokens, with_indices=True)
    options = (encoder.most, encoder.uncut, sorted(encoder.template_kwargs.items(), key=str), *depends)
    named = combine(VERSION, fingerprint_of(dataset), tokenizer_fingerprint(encoder.tokenizer), options)
    return dataset.with_format(None).map(
        tokens, with_indices=True, num_proc=num_proc or None, new_fingerprint=named, desc=f"Preparing {encoder.source}"
    )


def shows_prompt_images(row: Mapping[str, Any]) -> bool:
    """Whether the prompts of a dataset show images, as its first row says."""
    wanted = of_prompt(row)
    return shows_images(list(wanted), wanted)


@dataclass(frozen=True)
class _Tokens:
    """What `datasets.map` calls."""

    of_row: Callable[[Mapping[str, Any], int], list[int]]
    column: str

    def __call__(self, row: Mapping[str, Any], number: int) -> dict[str, list[int]]:
        return {self.column: self.of_row(row, number)}
