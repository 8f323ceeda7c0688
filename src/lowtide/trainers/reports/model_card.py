"""The card of a trained model (`README.md`): what it is, how it was trained, how to use it, what repeats the run.

It is written at every save, into checkpoints too, and again by `create_model_card` and `push_to_hub`. PEFT would leave
an empty template beside adapters. A README that somebody else wrote is left alone by saves.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.utils import HFValidationError, validate_repo_id
from transformers.trainer_utils import has_length

from lowtide.engine.heads.language_model import LanguageModel
from lowtide.memory.allocators.measure import bytes_text
from lowtide.own_files import writing
from lowtide.process.versions import version_of

MARK = "<!-- lowtide writes this card anew at each save; without this line it is left alone -->"
"""The line by which a card is known as one that no one has made their own."""
TEMPLATE_OF_PEFT = "# Model Card for Model ID"
SETTINGS = (
    *("learning_rate", "lr_scheduler_type", "per_device_train_batch_size", "gradient_accumulation_steps", "optim"),
    *("beta", "loss_type", "max_length", "packing", "seed"),
)
"""The options that the card tells."""
FIGURES = {"train_loss": "loss, mean over training", "loss": "loss, last", "eval_loss": "loss on the evaluation set"}
NOT_METRICS = ("_runtime", "_per_second", "eval_loss", "num_tokens")
"""Ends of the names of logged numbers that say nothing of the model."""
PACKAGES = ("lowtide", "transformers", "torch", "datasets", "tokenizers")


class Card:
    """The card of what a trainer trains.

    Attributes:
        dataset_name: what the model is trained on: a name on the hub, or a path.
        command: the words that repeat the run; None of a script.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.args = trainer, trainer.args
        self.dataset_name: str | None = None
        self.command: list[str] | None = None
        self._name: str | None = None
        self._tags: list[str] = []
        self._metadata: dict[str, Any] = {}

    @property
    def method(self) -> Any:
        """That of the trainer."""
        return self.trainer.method

    def set(
        self, model_name: str | None, dataset_name: str | None, tags: str | list[str] | None, **metadata: Any
    ) -> None:
        """What this card and those of later saves say; the arguments are those of `create_model_card`."""
        self._name, self.dataset_name = model_name or self._name, dataset_name or self.dataset_name
        self._tags = [tags] if isinstance(tags, str) else list(tags or self._tags)
        self._metadata |= metadata

    def write_beside(self, folder: Path) -> None:
        """Writes the card of a model that was saved in a folder, unless somebody else's is there."""
        path = folder / "README.md"
        if path.is_file():
            there = path.read_text(encoding="utf-8", errors="replace")
            if MARK not in there and TEMPLATE_OF_PEFT not in there:
                return
        self.write(folder)

    def write(self, folder: Path) -> None:
        """Writes `README.md` into a folder, in place of what is there."""
        name = self._name or Path(str(self.args.output_dir)).resolve().name
        own = ["generated_from_trainer", "lowtide", self.method.name]
        data = ModelCardData(
            model_name=name,
            base_model=_on_hub(self._base_model),
            datasets=_on_hub(self.dataset_name),
            library_name="peft" if self._is_adapter else "transformers",
            pipeline_tag=self.method.head.pipeline,
            tags=list(dict.fromkeys([*own, *self._tags])),
            **self._metadata,
        )
        folder.mkdir(parents=True, exist_ok=True)
        card = ModelCard(f"---\n{data.to_yaml()}\n---\n\n{self._card_text(name)}")
        with writing(folder / "README.md") as beside:
            card.save(beside)

    @property
    def _base_model(self) -> str | None:
        return self.trainer.model.config.name_or_path or None

    @property
    def _is_adapter(self) -> bool:
        return hasattr(self.trainer.model, "peft_config")

    def _card_text(self, name: str) -> str:
        parts = [f"# {name}", self.what_it_is(linked=True), "## Use", *self._use(name)]
        parts += ["## Training", *self._training()]
        if self.command is not None:
            parts.append(f"This repeats the run:\n\n```bash\n{shlex.join(map(without_folder, self.command))}\n```")
        parts += ["## Versions", _table(("package", "version"), self.versions.items())]
        if self.method.paper is not None:
            parts += ["## Citation", f"The method is from:\n\n```bibtex\n{self.method.paper.citation}\n```"]
        return "\n\n".join([*parts, MARK]) + "\n"

    @property
    def versions(self) -> dict[str, str]:
        """Of the packages that trained."""
        packages = (*PACKAGES, "peft") if self._is_adapter else PACKAGES
        return {each: version_of(each, "run from its sources") for each in packages}

    def what_it_is(self, *, linked: bool = False) -> str:
        """A sentence; with links as Markdown has them, or without any."""
        what = "An adapter of" if self._is_adapter else "A fine-tuned version of"
        named: Callable[[str | None, str], str] = _linked if linked else lambda name, _: without_folder(name or "")
        base = named(self._base_model, "") or "a new model"
        data = f" on {named(self.dataset_name, 'datasets/')}" if self.dataset_name else ""
        paper = self.method.paper
        method = f"[{self.method.title}]({paper.url})" if linked and paper is not None else self.method.title
        return f"{what} {base}, trained with {method}{data} by lowtide."

    def _use(self, name: str) -> list[str]:
        head, where = self.method.head, self.trainer.hub_model_id or name
        lines = ["```python", f"from transformers import {', '.join(head.used)}", "", *head.usage(where), "```"]
        chat = f"Or talk with it:\n\n```bash\nlowtide chat {shlex.quote(where)}\n```"
        return ["\n".join(lines), *([chat] if head is LanguageModel else [])]

    def _training(self) -> list[str]:
        """What it took and came to, its settings, and where a tracker shows it."""
        state = self.trainer.state
        last = {name: value for logs in state.log_history for name, value in logs.items()}
        figures: dict[str, Any] = {"optimizer steps": f"{state.global_step:,}"}
        if state.epoch is not None:
            figures["epochs"] = f"{state.epoch:.3g}"
        if self._rows is not None:
            figures["rows"] = f"{self._rows:,}"
        if last.get("num_tokens"):
            figures["tokens"] = f"{last['num_tokens']:,.0f}"
        figures |= {words: f"{last[each]:.4g}" for each, words in FIGURES.items() if each in last}
        figures |= _metrics(last) | self._memory()
        settings = {each: getattr(self.args, each, None) for each in SETTINGS}
        parts = [
            _table(("figure", "value"), figures.items()),
            _table(("setting", "value"), ((f"`{k}`", f"`{_plain(v)}`") for k, v in settings.items() if v is not None)),
        ]
        run = getattr(sys.modules.get("wandb"), "run", None)
        return [*parts, f"Its curves: {run.url}"] if run is not None else parts

    @property
    def _rows(self) -> int | None:
        rows = self.trainer.train_dataset
        return len(rows) if has_length(rows) else None

    def _memory(self) -> dict[str, str]:
        """The peak so far, and the one that was predicted."""
        trainer = self.trainer
        device, measured = trainer.args.device.type, trainer.run_log.mark.bytes
        predicted = trainer.predicted_bytes if trainer.predicted_bytes is not None else trainer.rehearsed_bytes
        found = {f"peak memory ({device})": measured, f"peak memory ({device}), predicted": predicted}
        return {name: bytes_text(value) for name, value in found.items() if value}


def _metrics(logged: Mapping[str, Any]) -> dict[str, str]:
    """The metrics of the last evaluation."""
    names = [each for each in logged if each.startswith("eval_") and not each.endswith(NOT_METRICS)]
    return {f"`{name}`": f"{logged[name]:.4g}" for name in names if isinstance(logged[name], float)}


def without_folder(word: str) -> str:
    """A word of a command; a path by its last part, which says nothing of its machine."""
    return Path(word).name if os.path.exists(word) and not _on_hub(word) else word


def _on_hub(name: str | None) -> str | None:
    """A name of the hub's, which alone may stand in the YAML; None for a path."""
    if not name or os.path.exists(name):
        return None
    try:
        validate_repo_id(name)
    except HFValidationError:
        return None
    return name


def _linked(name: str | None, kind: str) -> str:
    """A name with its link if it is the hub's; a path is told by its last part, which says nothing of its machine."""
    if not name:
        return ""
    return f"[{name}](https://huggingface.co/{kind}{name})" if _on_hub(name) else f"`{Path(name).name}`"


def _table(head: tuple[str, str], rows: Iterable[tuple[str, Any]]) -> str:
    lines = [head, ("---", "---"), *rows]
    return "\n".join(f"| {name} | {value} |" for name, value in lines)


def _plain(value: Any) -> Any:
    return getattr(value, "value", value)
