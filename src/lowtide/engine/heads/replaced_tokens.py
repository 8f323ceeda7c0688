"""The head that tells which tokens of a text were replaced (ELECTRA, arXiv 2003.10555), and the generator before it.

The generator is a small masked language model. It is a module of the discriminator, `generator`, which `attach` adds,
so that one optimizer, one norm and one checkpoint are of both. In a forward of the discriminator it runs first: it
predicts the masked tokens, and draws one in the place of each, without gradient. Then the discriminator's body runs on
the text so made, and its head gives a logit for each token. The generator may share the discriminator's embeddings.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import AutoModelForMaskedLM, AutoModelForPreTraining, PretrainedConfig, PreTrainedModel

from lowtide.compat.transformers import declare_tied
from lowtide.engine.heads.head import Head, Held, Replacements, ScoreOutput, Scores, Stats, at_least_float32, is_one_of
from lowtide.engine.heads.head_parts import head_parts
from lowtide.engine.heads.language_model import LanguageModel, met_by_head, reading
from lowtide.engine.heads.masked_language_model import MaskedLanguageModel
from lowtide.engine.heads.next_token import read_off
from lowtide.engine.heads.own_head import own_head
from lowtide.engine.weights.load_errors import one_line
from lowtide.engine.weights.weight_files import saved_module
from lowtide.ops.logits.drawing import draw
from lowtide.score_rules import OWN_TOKEN

GENERATOR = "generator"
"""The module's name in the discriminator."""
GENERATOR_CONFIG = "generator_config"
"""The value of the discriminator's config that is the generator's."""
GENERATOR_SIZE = 0.25
"""Of the discriminator's width, where nothing else is asked for: as in the paper's smaller models."""
DISCRIMINATORS = frozenset({"ElectraForPreTraining"})


class ReplacedTokens(Head):
    """A logit for each token: that it was replaced."""

    numbers = statistic = "logits"
    number = "logit"
    models = "discriminators"
    auto_class = AutoModelForPreTraining
    added_module = GENERATOR
    task_type = "FEATURE_EXTRACTION"
    pipeline = "feature-extraction"
    virtual_tokens = False
    hides_tokens = True
    of_tokens = frozenset({"all_logits", "replaced", "present"})
    of_all_scores = frozenset({"logprobs"})
    trains_beside = "a generator"
    rule = OWN_TOKEN

    @classmethod
    def is_saved(cls, config: PretrainedConfig) -> bool:
        return not DISCRIMINATORS.isdisjoint(getattr(config, "architectures", None) or ())

    @classmethod
    def why_not(cls, model: nn.Module) -> str | None:
        return None if is_one_of(model, DISCRIMINATORS) else "has no head that tells which tokens were replaced"

    @classmethod
    def beside(cls, model: nn.Module) -> PreTrainedModel | None:
        return getattr(model, GENERATOR, None)

    @classmethod
    def attach(cls, model: PreTrainedModel, options: Any = None) -> None:
        """Adds the generator: that of the folder which the model came from, one that is named, or a new one.

        Raises:
            ValueError: it is no masked language model with the same tokens, or its embeddings cannot be shared.
        """
        if cls.beside(model) is not None:
            return
        generator = _generator(model, options)
        if getattr(options, "share_embeddings", True):
            _share_embeddings(model, generator)
        setattr(model.config, GENERATOR_CONFIG, generator.config.to_diff_dict())
        model.add_module(GENERATOR, generator)

    @classmethod
    def run_first(
        cls, model: PreTrainedModel, scores: Scores, inputs: dict[str, Any], held: Held | None = None
    ) -> tuple[Scores, dict[str, Any]]:
        """The generator: it draws a token in the place of each score."""
        if scores.draws is None:
            return scores, inputs
        token_ids, mask = inputs["input_ids"], inputs.get("attention_mask")
        flat = token_ids.flatten()
        replaced = torch.zeros_like(flat, dtype=torch.bool)
        asked = Scores(scores.index, scores.target, draws=scores.draws, accumulate=scores.accumulate, head=DrawnTokens)
        found = cast(Any, cls.beside(model))(**inputs, scores=asked).stats  # of no score too: others wait for it
        logprobs, drawn = found["logprobs"], found["drawn"]
        own = scores
        if held is not None:
            place, own = held(scores)
            drawn = drawn[place]
        flat = flat.index_copy(0, own.index, drawn)
        replaced = replaced.index_copy(0, own.index, drawn != own.target)
        present = torch.ones_like(replaced) if mask is None else mask.flatten().bool()
        made = Replacements(logprobs, replaced, present)
        return replace(scores, replacements=made), {**inputs, "input_ids": flat.view_as(token_ids)}

    @classmethod
    def outputs(cls, model: PreTrainedModel, hidden: Tensor, scores: Scores) -> ScoreOutput:
        """Of a batch with replacements also what these are, and the logits of all its positions."""
        logits = at_least_float32(own_head(model, hidden[:, None]).flatten())
        stats, found = {"logits": logits.index_select(0, scores.index)}, scores.replacements
        return ScoreOutput(stats=stats if found is None else {**stats, **vars(found), "all_logits": logits})

    @classmethod
    def chunk_rows(cls, config: PretrainedConfig, dtype: torch.dtype, device: str) -> int:
        return LanguageModel.chunk_rows(config, dtype, device)

    @classmethod
    def packed_elements(cls, config: PretrainedConfig) -> int:
        """Of the generator's head."""
        return config.vocab_size * config.embedding_size

    @classmethod
    def usage(cls, where: str) -> list[str]:
        return [
            f'reader = pipeline("{cls.pipeline}", model="{where}")',
            'print(reader("The tide comes in.")[0][0][:4])',
        ]


class DrawnTokens(MaskedLanguageModel):
    """Log-probabilities of the masked tokens, and tokens that are drawn in their places, from the same forward."""

    @classmethod
    def outputs(cls, model: PreTrainedModel, hidden: Tensor, scores: Scores) -> ScoreOutput:
        (scores, at_vocabulary), parts = met_by_head(model, hidden, scores), head_parts(model)
        fused, draws = reading(model, parts, scores), scores.draws
        assert draws is not None, "a generator draws with numbers that it is given"

        def read(logits: Float[Tensor, "rows vocab"], span: slice) -> Int[Tensor, "1 rows"]:
            return draw(torch.softmax(logits, -1), draws[span])[None]

        def both(x: Tensor) -> Stats:
            with torch.no_grad():
                drawn = read_off(model, parts, x, scores.index, read)[0]
            return {**fused(x), "drawn": drawn}

        return ScoreOutput(stats=at_vocabulary(both))


# -- making it ---------------------------------------------------------------------------------------------------------


def _generator(model: PreTrainedModel, options: Any) -> PreTrainedModel:
    """The generator of a discriminator, in the dtype of its weights and where they are."""
    like = cast(nn.Embedding, model.get_input_embeddings()).weight
    named, size = (getattr(options, name, None) for name in ("generator_model_name_or_path", "generator_size"))
    known = getattr(model.config, GENERATOR_CONFIG, None)
    if named is not None:
        try:
            generator = AutoModelForMaskedLM.from_pretrained(named, dtype=like.dtype)
        except (OSError, ValueError) as error:
            said = one_line(error)
            raise ValueError(f"generator_model_name_or_path={named!r} cannot be loaded: {said}") from error
        _check_tokens(model, generator, named)
        return generator.to(like.device)
    if known is not None and size is not None:
        raise ValueError(
            f"generator_size={size} is of a new generator, and the model has one already: leave generator_size out"
        )
    config = (
        smaller(model.config, GENERATOR_SIZE if size is None else size)
        if known is None
        else type(model.config).from_dict({**known})
    )
    with torch.device(like.device):
        generator = AutoModelForMaskedLM.from_config(config, dtype=like.dtype)
    saved = {} if known is None else saved_module(model.config.name_or_path or "", GENERATOR)
    if saved:
        generator.load_state_dict(saved, strict=False)
    return generator


def smaller(config: PretrainedConfig, share: float) -> PretrainedConfig:
    """The config of a generator so much narrower than a discriminator; as deep, with the same embeddings."""
    made = copy.deepcopy(config)
    made.num_attention_heads = heads = max(1, round(config.num_attention_heads * share))
    made.hidden_size = heads * max(1, round(config.hidden_size * share / heads))
    made.intermediate_size = max(1, round(config.intermediate_size * share))
    made.name_or_path = ""
    return made


def _check_tokens(model: PreTrainedModel, generator: PreTrainedModel, name: str) -> None:
    if generator.config.model_type != model.config.model_type or generator.config.vocab_size != model.config.vocab_size:
        kind, count = generator.config.model_type, generator.config.vocab_size
        raise ValueError(
            f"generator_model_name_or_path={name!r} is a {kind} of {count:,} tokens, and the discriminator an "
            f"{model.config.model_type} of {model.config.vocab_size:,}: the generator's tokens are what the "
            "discriminator reads. Name one of the same type and tokens, or leave it out for a new one"
        )


def _share_embeddings(model: PreTrainedModel, generator: PreTrainedModel) -> None:
    """The generator embeds tokens, positions and types as the discriminator does, by the same weights."""
    ours, theirs = cast(Any, model.base_model), cast(Any, generator.base_model)
    if any(hasattr(module, "active_adapters") for module in ours.embeddings.modules()):
        raise ValueError(
            "share_embeddings=True: the generator would embed tokens through adapters, which are the discriminator's: "
            "leave the embeddings out of target_modules and modules_to_save, or set share_embeddings=False"
        )
    if ours.config.embedding_size != theirs.config.embedding_size:
        raise ValueError(
            f"share_embeddings=True: the generator's embeddings have {theirs.config.embedding_size} numbers a token, "
            f"and the discriminator's {ours.config.embedding_size}: set share_embeddings=False, or name another one"
        )
    theirs.embeddings = ours.embeddings
    generator.tie_weights()
    prefix = f"{model.base_model_prefix}.embeddings."
    names = [f"{prefix}{name}" for name, _ in ours.embeddings.named_parameters()]
    declare_tied(model, {f"{GENERATOR}.{name}": name for name in names})
