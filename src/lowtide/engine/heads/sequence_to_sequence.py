"""The head of an encoder-decoder: log-probabilities of the tokens of a target, given its source.

It is a language model's, read at the tokens that the decoder is given. Those are the target shifted right, behind the
token that starts it, as the model's own `prepare_decoder_input_ids_from_labels` has it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoModelForSeq2SeqLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES

from lowtide.compat.torch import without_modes
from lowtide.engine.heads.head import is_one_of
from lowtide.engine.heads.language_model import LanguageModel
from lowtide.process.ways_out import in_python
from lowtide.score_rules import ShiftedRight

KNOWN = frozenset(MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.values())


class SequenceToSequence(LanguageModel):
    """Log-probabilities over a vocabulary, of the tokens of targets."""

    models = "encoder-decoders"
    auto_class = AutoModelForSeq2SeqLM
    task_type = "SEQ_2_SEQ_LM"
    pipeline = "text2text-generation"
    used = ("AutoModelForSeq2SeqLM", "AutoTokenizer")
    virtual_tokens = False

    @classmethod
    def why_not(cls, model: nn.Module) -> str | None:
        inner: Any = model
        if not inner.config.is_encoder_decoder:
            return "is no encoder-decoder, and reads no source"
        return None if is_one_of(model, KNOWN) else "has no head that predicts a target"

    @classmethod
    def score_rule(cls, model: PreTrainedModel) -> ShiftedRight:
        """How the decoder's tokens follow from a target, asked of the model.

        Raises:
            ValueError: it does not know by which token a target starts, or shifts targets in a way that is not known.
        """
        inner: Any = model
        start, labels = inner.config.decoder_start_token_id, [3, 4, 5]
        if hasattr(inner, "prepare_decoder_input_ids_from_labels"):
            try:
                with without_modes():
                    start, *rest = inner.prepare_decoder_input_ids_from_labels(torch.tensor([labels]))[0].tolist()
            except (TypeError, ValueError, RuntimeError):
                start = None
            else:
                assert rest == labels[:-1], f"{type(model).__name__} gives its decoder {rest} for {labels}"
                if start == labels[-1]:
                    return ShiftedRight(None, inner.config.pad_token_id)
        if start is None or inner.config.pad_token_id is None:
            which = "decoder_start_token_id" if inner.config.decoder_start_token_id is None else "pad_token_id"
            raise ValueError(
                f"the config of {type(model).__name__} has no {which}, and its decoder is given targets behind "
                "decoder_start_token_id, with pad_token_id where a token is not scored: set "
                f"{in_python('model.config.')}{which}{in_python('', ' in its config.json')}; T5 "
                "starts targets with its padding token, BART with its end token"
            )
        return ShiftedRight(start, inner.config.pad_token_id)

    @classmethod
    def usage(cls, where: str) -> list[str]:
        return [
            f'tokenizer = AutoTokenizer.from_pretrained("{where}")',
            f'model = AutoModelForSeq2SeqLM.from_pretrained("{where}")',
            'written = model.generate(**tokenizer("a source", return_tensors="pt"), max_new_tokens=128)',
            "print(tokenizer.decode(written[0], skip_special_tokens=True))",
        ]
