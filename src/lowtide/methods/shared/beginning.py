"""Models that begin with random weights: the options of the methods that train a model from nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lowtide.data.byte_pairs import LEAST
from lowtide.option import Group, Range, option


@dataclass(kw_only=True)
class BeginningOptions:
    """What a model that begins with random weights is made from."""

    group: ClassVar[Group] = Group.DATA

    config_name: str | None = option(
        None, "Config of a model that begins with random weights: a file, a folder, or a name on the hub."
    )
    model_type: str | None = option(None, "In its place a type of model, such as llama, with transformers' own sizes.")
    config_overrides: dict | str | None = option(
        None, "Values of that config: hidden_size=256,num_hidden_layers=4, or JSON."
    )
    tokenizer_name: str | None = option(
        None, "Its tokenizer: a folder, or a name on the hub. None: the one beside `config_name`."
    )
    train_tokenizer: int | None = option(
        None, "Tokens of a byte-level BPE tokenizer that is learned from the rows, in its place.", Range(least=LEAST)
    )

    @property
    def begins_at_random(self) -> bool:
        """Whether a new model is asked for."""
        return self.config_name is not None or self.model_type is not None

    def check_beginning(self) -> None:
        """Refuses what does not go together.

        Raises:
            ValueError: names the options.
        """
        if self.config_name is not None and self.model_type is not None:
            raise ValueError(
                f"config_name={self.config_name!r} and model_type={self.model_type!r} both say which model begins: "
                "keep one of them"
            )
        if self.tokenizer_name is not None and self.train_tokenizer is not None:
            raise ValueError(
                f"tokenizer_name={self.tokenizer_name!r} and train_tokenizer={self.train_tokenizer} both say which "
                "tokenizer there is: keep one of them"
            )
        for name in ("config_overrides", "tokenizer_name", "train_tokenizer"):
            if getattr(self, name) is not None and not self.begins_at_random:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} is of a model that begins with random weights: say which by "
                    "config_name or model_type"
                )
