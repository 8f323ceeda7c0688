"""The options of the commands that write: which model, and how tokens are drawn."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lowtide.cli.options import add_options, read_options
from lowtide.option import COUNT, NOT_NEGATIVE, POSITIVE, SHARE, Range, option
from lowtide.option_values import options_of

if TYPE_CHECKING:
    from lowtide.cli.after_training.loaded_run import LoadedRun
    from lowtide.rollout.generators.generator import Sampling

OF_THE_MODEL = "None: as the model's generation config says"
DRAWN_BY = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
DTYPES = ["auto", "float32", "bfloat16", "float16"]


@dataclass(kw_only=True)
class WritingOptions:
    """How a trained model writes."""

    max_new_tokens: int = option(512, "Most tokens of an answer.", COUNT)
    temperature: float | None = option(
        None, f"Divisor of the logits; 0 takes the likeliest token. {OF_THE_MODEL}.", NOT_NEGATIVE
    )
    top_k: int | None = option(None, f"Draw among so many of the likeliest tokens; 0 among all. {OF_THE_MODEL}.",
                               NOT_NEGATIVE)  # fmt: skip
    top_p: float | None = option(
        None,
        f"Draw among the fewest likeliest tokens with so much probability. {OF_THE_MODEL}.",
        Range(above=0, most=1),
    )
    min_p: float | None = option(
        None, f"Draw among tokens at least so many times as likely as the likeliest. {OF_THE_MODEL}.", SHARE
    )
    repetition_penalty: float | None = option(
        None, f"Above 1, tokens that were there already become less likely. {OF_THE_MODEL}.", POSITIVE
    )
    seed: int = option(0, "Of the random numbers.", NOT_NEGATIVE)
    dtype: str = option("auto", "Of the weights; auto: as they are stored.", choices=DTYPES)
    device: str | None = option(None, "Such as cpu or cuda:1. None: a GPU where there is one.")
    chat_template_path: str | None = option(None, "A chat template in place of the tokenizer's own, as in training.")
    chat_template_kwargs: dict | None = option(None, "Keywords of the chat template, such as enable_thinking.")
    trust_remote_code: bool = option(False, "Run Python code that comes with the model.")

    def load(self, run: str) -> LoadedRun:
        """The model that writes.

        Raises:
            ValueError: there is none, or it writes nothing.
        """
        from lowtide.cli.after_training.loaded_run import load_run

        return load_run(
            run,
            dtype=self.dtype,
            device=self.device,
            chat_template_path=self.chat_template_path,
            trust_remote_code=self.trust_remote_code,
        )

    def sampling(self, loaded: LoadedRun, max_new_tokens: int | None = None) -> Sampling:
        """How the model draws tokens, so many at most (by default `max_new_tokens`)."""
        given = {name: getattr(self, name) for name in DRAWN_BY}
        return loaded.sampling(given, max_new_tokens or self.max_new_tokens)


def add_writing_options(parser: argparse.ArgumentParser) -> None:
    """Adds the run and the options to a subcommand's parser; `read_writing_options` reads the latter."""
    parser.add_argument(
        "model", metavar="RUN", help="a run's output_dir, a checkpoint, an adapter, a model's folder, or a hub name"
    )
    add_options(parser.add_argument_group("writing"), options_of(WritingOptions).values())


def read_writing_options(arguments: argparse.Namespace) -> WritingOptions:
    """The options that a command line gives.

    Raises:
        UsageError: a value is none of its option's; names the option.
    """
    given: dict[str, Any] = read_options(arguments, options_of(WritingOptions))
    return WritingOptions(**given)


def told(sampling: Sampling) -> str:
    """How tokens are drawn, in words."""
    if sampling.temperature == 0:
        drawn = "the likeliest token"
    else:
        cuts = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
        kept = [f"{name} {getattr(sampling, name):g}" for name, off in cuts.items() if getattr(sampling, name) != off]
        drawn = ", ".join([f"temperature {sampling.temperature:g}", *kept])
    penalty = sampling.repetition_penalty
    return drawn if penalty == 1 else f"{drawn}, repetition penalty {penalty:g}"
