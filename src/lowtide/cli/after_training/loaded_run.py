"""A trained model that writes: the folder of a run's model, the model with its tokenizer, and who writes with it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase

from lowtide.compat.hub import go_offline_if_unreachable
from lowtide.data.encode.chat import adopt_chat_template
from lowtide.engine.forward import install
from lowtide.engine.weights.complete_weights import ADAPTER_CONFIG, MODEL_CONFIG, base_of_adapters
from lowtide.engine.weights.loading import load_model, load_tokenizer, saved_config
from lowtide.rollout.generators.generator import Sampling
from lowtide.rollout.generators.ragged import RaggedGenerator
from lowtide.rollout.generators.support import why_not
from lowtide.rollout.generators.transformers import TransformersGenerator
from lowtide.run.inputs.loading import stop_ids
from lowtide.trainers.checkpoints.choosing import last_whole

OF_CLASSIFIERS = ("SequenceClassification", "TokenClassification", "QuestionAnswering")
"""Ends of the names of classes whose models write nothing."""


@dataclass(frozen=True)
class LoadedRun:
    """A model with what it takes to write with it."""

    model: Any
    tokenizer: PreTrainedTokenizerBase
    generator: RaggedGenerator | TransformersGenerator
    by: str
    """Who writes, and why, in words."""
    stop_ids: list[int]
    wishes: GenerationConfig = field(default_factory=GenerationConfig)
    """The model's generation config."""

    def sampling(self, given: dict[str, Any], max_new_tokens: int) -> Sampling:
        """How tokens are drawn: as it is given, and what is not (or is None) as transformers' `generate` would by the
        model's generation config."""
        wishes = self.wishes
        drawn: dict[str, Any] = {"temperature": 0.0}
        if wishes.do_sample or given.get("temperature"):
            top_k = wishes.top_k if wishes.do_sample else 0
            drawn = {
                "temperature": wishes.temperature if wishes.temperature is not None else 1.0,
                "top_k": 50 if top_k is None else top_k,  # transformers' own default
                "top_p": wishes.top_p if wishes.do_sample and wishes.top_p is not None else 1.0,
                "min_p": wishes.min_p if wishes.do_sample and wishes.min_p is not None else 0.0,
            }
        penalty = wishes.repetition_penalty
        drawn |= {"repetition_penalty": 1.0 if penalty is None else penalty}
        drawn |= {name: value for name, value in given.items() if value is not None}
        return Sampling(max_new_tokens=max_new_tokens, stop_ids=tuple(self.stop_ids), **drawn)

    @property
    def context(self) -> int | None:
        """The positions that the model was made for, where its config says so."""
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", None)


def folder_of(run: str) -> str:
    """The folder of a run's model: its own, or that of its last whole checkpoint. A name on the hub stays.

    Raises:
        ValueError: a folder holds no model, adapter or whole checkpoint.
    """
    folder = Path(run).expanduser()
    if not folder.is_dir():
        if folder.is_file() or run.startswith((".", "/", "~")) or run.count("/") > 1:
            raise ValueError(f"there is no folder {run!r}: give the output_dir of a run, or a model's name on the hub")
        go_offline_if_unreachable([run])
        return run
    if any((folder / name).is_file() for name in (MODEL_CONFIG, ADAPTER_CONFIG)):
        return str(folder)
    chosen = last_whole(folder, without_states=True)
    if chosen is None:
        raise ValueError(f"{folder} holds no model, no adapter and no checkpoint: give the output_dir of a run")
    return str(chosen.folder)


def load_run(
    run: str,
    *,
    dtype: str = "auto",
    device: str | None = None,
    chat_template_path: str | None = None,
    trust_remote_code: bool = False,
) -> LoadedRun:
    """The model of a run, an adapter with its base, or a model from the hub, ready to write.

    Args:
        run: a folder or a name on the hub.
        dtype: of the weights; "auto" as they are stored.
        device: None for a GPU where there is one.
        chat_template_path: of a template in place of the tokenizer's own, as in training.

    Raises:
        ValueError: there is no such model or device, or a model writes nothing.
    """
    where = device_of(device)
    name = folder_of(run)
    _check_writes(name, trust_remote_code)
    tokenizer = _tokenizer(name, trust_remote_code)
    if chat_template_path is not None:
        adopt_chat_template(tokenizer, chat_template_path)
    model: Any = load_model(name, trust_remote_code=trust_remote_code, dtype=dtype)
    model.to(where)
    model.eval()
    install(model)
    reason = why_not(model)
    if reason is None:
        generator, by = RaggedGenerator(tokenizer), "lowtide's own generator"
    else:
        install(model, padding_free=False)
        generator, by = TransformersGenerator(tokenizer), f"transformers' generate, since the model {reason}"
    wishes = getattr(model, "generation_config", None) or GenerationConfig()
    return LoadedRun(model, tokenizer, generator, by, stop_ids(model, tokenizer), wishes)


def device_of(given: str | None) -> torch.device:
    """The device of a name; of None a GPU where there is one.

    Raises:
        ValueError: there is none, or it holds no values.
    """
    if given is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(given)
        torch.empty(1, device=device).cpu()  # which fails on "meta", where there are no values
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"--device {given!r} cannot be used here: {str(error).splitlines()[0]}") from error
    return device


def _check_writes(name: str, trust_remote_code: bool) -> None:
    """Refuses a model that writes no text, before its weights are read."""
    config = saved_config(base_of_adapters(name) or name, {"trust_remote_code": trust_remote_code})
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            f"{name!r} is an encoder-decoder, which answers a source and no conversation: "
            "`transformers.pipeline` writes with it"
        )
    kinds = [each for each in getattr(config, "architectures", None) or () if each.endswith(OF_CLASSIFIERS)]
    if kinds:
        raise ValueError(f"{name!r} is a {kinds[0]}, which gives scores and writes no text: give a language model")


def _tokenizer(name: str, trust_remote_code: bool) -> Any:
    """That of a model or adapter; of a processor the tokenizer."""
    made = load_tokenizer(name, trust_remote_code=trust_remote_code)
    inner = getattr(made, "tokenizer", made)
    if inner is not made and not inner.chat_template:
        inner.chat_template = made.chat_template
    return inner
