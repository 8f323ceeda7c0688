"""A part of `bench.conversations`, in a process of its own: trains a few steps, predicts their peak, or prepares."""

import statistics
import tempfile
import time
from itertools import pairwise
from typing import Any

from datasets import Dataset

from bench.compare.child import clock, say
from bench.inputs.conversations import DROPPING, thinking_talks
from bench.inputs.rows import longtail_rows
from bench.inputs.shapes import LLAMA_22M, SHAPES, build_model
from bench.inputs.tokenizer import CHATML, load_tokenizer, tokenizer_for
from bench.measuring.arguments import specification
from bench.measuring.measure import PhasePeaks

ROUNDS, STEPS = 20, 3
TALKS, TURNS = 10_000, 10
DIFFERENT = 250
"""Of these conversations; the others are said again."""


def tokenizer_with(template: str) -> Any:
    tokenizer = load_tokenizer(tokenizer_for(longtail_rows()))
    tokenizer.chat_template = template
    return tokenizer


def talks() -> Dataset:
    """A conversation for each step."""
    return Dataset.from_list(thinking_talks(STEPS, ROUNDS))


def config_of(folder: str, sharing: bool) -> Any:
    from lowtide import SFTConfig

    return SFTConfig(
        folder,
        assistant_only_loss=True,
        prefix_sharing=sharing,
        max_length=None,
        per_device_train_batch_size=1,
        max_steps=STEPS,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )


def trained(spec: dict[str, Any]) -> dict[str, Any]:
    """Seconds of a step, tokens and loss of the first, and the peak of the process."""
    from lowtide import SFTTrainer

    ticks = clock("cpu")
    with tempfile.TemporaryDirectory() as folder:
        trainer = SFTTrainer(
            build_model(SHAPES["llama-22m"]),
            config_of(folder, spec["sharing"]),
            train_dataset=talks(),
            processing_class=tokenizer_with(DROPPING),
            callbacks=[ticks],
        )
        phases = PhasePeaks()
        trainer.phases.listeners.append(phases)
        trainer.train()
        phases(trainer.phases.now, "")
    first = trainer.state.log_history[0]
    seconds = statistics.median(end - begin for begin, end in pairwise(ticks.ends))
    peak = max(phases.bytes.values())
    return {"seconds": seconds, "tokens": int(first["num_tokens"]), "loss": first["loss"], "peak_bytes": peak}


def predicted(spec: dict[str, Any]) -> dict[str, Any]:
    """The peak of the same run, with what rounds share."""
    from transformers import AutoConfig

    from lowtide import estimate

    with tempfile.TemporaryDirectory() as folder:
        options = config_of(folder, sharing=True)
        options.model_init_kwargs = {"dtype": "float32"}
        model = AutoConfig.for_model(**LLAMA_22M)
        tokenizer = tokenizer_with(DROPPING)
        found = estimate(options, model, dataset=talks(), processing_class=tokenizer, device="cpu")
    return {"peak_bytes": found.peak_bytes}


def prepared(spec: dict[str, Any]) -> dict[str, Any]:
    """Seconds to prepare conversations, of each of which the assistant says half of the turns."""
    import datasets

    from lowtide.data.prepare import PrepareOptions, prepare

    datasets.disable_caching()
    datasets.disable_progress_bars()
    tokenizer = tokenizer_with(CHATML)
    rows = Dataset.from_list(thinking_talks(DIFFERENT, TURNS) * (TALKS // DIFFERENT))
    options = PrepareOptions(assistant_only_loss=True, turns=spec["turns"], max_length=None)
    began = time.perf_counter()
    prepare(rows, tokenizer, options, batch_size=8, packing=False)
    return {"seconds": time.perf_counter() - began}


PARTS = {"train": trained, "predict": predicted, "prepare": prepared}


if __name__ == "__main__":
    asked = specification(__doc__)
    say("result", **PARTS[asked["what"]](asked))
