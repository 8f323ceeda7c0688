"""A conversation between a person and a model, as tokens: the prompt, and what goes on behind what is held already.

A message is rendered by the chat template with all that was said before it. Where that text begins with what the model
has read and written so far, only the rest is new, and keys and values stay held. A template may write earlier turns
otherwise (Qwen3 drops the thoughts of all but the last): then the whole conversation is read anew, as the template has
it. What the model wrote is never encoded again while it is held.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from lowtide.data.encode.chat import TEMPLATE_FAILURES
from lowtide.data.encode.message_form import MessageForm
from lowtide.data.formats.conversation import Message, as_said
from lowtide.rollout.tools import Schema
from lowtide.rollout.turns import Turns


class Talk:
    """A conversation.

    Args:
        tokenizer: of the model, with a chat template.
        system: what the system's message says; None for none, or for what the template says by itself.
        template_kwargs: further keywords of the template.
        stop_ids: tokens that end a turn, beside the tokenizer's end token.
        tools: the schemas of functions that the model may call; the person says what they return.

    Raises:
        ValueError: there is no template, or it does not write tools, or not write or read their calls.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        system: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        stop_ids: Sequence[int] = (),
        tools: Sequence[Schema] = (),
    ) -> None:
        if not tokenizer.chat_template:
            raise ValueError(
                "the tokenizer has no chat template, as that of a model that was not trained on conversations: give "
                "one by --chat_template_path, or write texts with `lowtide generate`"
            )
        self.tokenizer, self.template_kwargs = tokenizer, dict(template_kwargs or {})
        self.turns = Turns(tokenizer, template_kwargs=template_kwargs, stop_ids=stop_ids)
        self.tools: list[Any] = list(tools)
        if self.tools:
            self.turns.try_tools()
            asked: list[Message] = [{"role": "user", "content": "?"}]
            if self.turns.encode(asked, self.tools) == self.turns.encode(asked):
                raise ValueError("the chat template does not write which tools there are: give one that does")
        self._form = MessageForm.of(tokenizer, self.template_kwargs.get("chat_template"))
        self.system = system
        self.messages: list[Message] = []
        self.begin()

    def begin(self) -> None:
        """Forgets what was said, but for the system's message."""
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        self._held: list[int] = []
        self._text = ""

    @property
    def held(self) -> int:
        """Tokens that were read and written."""
        return len(self._held)

    @property
    def text(self) -> str:
        """What they stand for."""
        return self._text

    def say(self, text: str) -> None:
        """Adds a message of the person."""
        self.messages.append({"role": "user", "content": text})

    @property
    def call(self) -> Mapping[str, Any] | None:
        """The first call of the model's last turn that has no result yet, its `name` and `arguments`; None without."""
        place = next((n for n in reversed(range(len(self.messages))) if self.messages[n]["role"] != "tool"), None)
        calls = [] if place is None else self.messages[place].get("tool_calls") or []
        left = [] if place is None else calls[len(self.messages) - place - 1 :]
        return left[0]["function"] if left else None

    def returned(self, result: str) -> None:
        """Adds what the tool of `call` returned."""
        call = self.call
        assert call is not None
        self.messages.append({"role": "tool", "name": call["name"], "content": result})

    def prompt(self) -> list[int]:
        """The tokens of the whole conversation and of the header of the model's turn.

        Raises:
            ValueError: the template cannot render it.
        """
        self._text = self._rendered()
        self._held = self._encoded(self._text)
        return list(self._held)

    def following(self) -> list[int] | None:
        """The tokens from the end of the model's last turn to the header of its next one; None where the whole
        conversation has to be read anew (`prompt`): the template writes earlier turns otherwise, or it has just begun.

        Raises:
            ValueError: the template cannot render the conversation.
        """
        whole = self._rendered()
        if not self._held or not whole.startswith(self._text):
            return None
        rest = self._encoded(whole[len(self._text) :])
        if not rest or self._encoded(whole)[-len(rest) :] != rest:
            return None  # the tokenizer writes the beginning of a text otherwise than its middle
        self._held, self._text = [*self._held, *rest], whole
        return rest

    def answered(self, token_ids: Sequence[int]) -> None:
        """Adds the turn that the model wrote; empty if it wrote nothing."""
        ids = list(token_ids)
        self.messages.append(
            self.turns.read(ids, self._held, self.tools) if ids else {"role": "assistant", "content": ""}
        )
        self._text += str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
        self._held += ids

    def _rendered(self) -> str:
        messages = self._form([as_said(each) for each in self.messages]) if self.tools else list(self.messages)
        try:
            text: Any = self.tokenizer.apply_chat_template(
                messages, tools=self.tools or None, add_generation_prompt=True, tokenize=False, **self.template_kwargs
            )
        except TEMPLATE_FAILURES as error:
            raise ValueError(f"the chat template can't render the conversation: {error}") from error
        return text

    def _encoded(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
