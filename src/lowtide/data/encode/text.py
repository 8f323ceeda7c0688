"""Plain texts to token ids: with the end token, and with the special tokens that the tokenizer adds itself."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from lowtide.data.formats.reading import RowPlace, TextSample


class TextEncoder:
    """Encodes texts; the counterpart of `ChatEncoder`.

    Raises:
        ValueError: there is no end token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if tokenizer.eos_token is None:
            raise ValueError(
                "the tokenizer has no end token, and a text must end with one so that the model learns to stop. "
                "Set eos_token to a token of its vocabulary."
            )
        self.tokenizer = tokenizer
        self.eos_token = str(tokenizer.eos_token)

    def encode(self, samples: Sequence[TextSample], place: RowPlace) -> list[list[int]]:
        """The token ids of each text after its prompt, if it has one, and of the end token after it."""
        return self._tokenize([(sample.prompt or "") + self._ended(sample.text) for sample in samples])

    def encode_prompts(self, samples: Sequence[TextSample], place: RowPlace) -> list[list[int]]:
        """The token ids of each prompt alone."""
        return self._tokenize([sample.prompt or "" for sample in samples])

    def _ended(self, text: str) -> str:
        return text if text.endswith(self.eos_token) else text + self.eos_token

    def _tokenize(self, texts: list[str]) -> list[list[int]]:
        encoded = self.tokenizer(texts, return_attention_mask=False, return_token_type_ids=False, verbose=False)
        return encoded["input_ids"]
