"""The card of a trained model, which `push_to_hub` writes: what it is, how it was trained, how to use it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.utils import HFValidationError, validate_repo_id

from lowtide.own_files import writing

SETTINGS = (
    *("learning_rate", "lr_scheduler_type", "per_device_train_batch_size", "gradient_accumulation_steps", "optim"),
    *("beta", "loss_type", "max_length", "packing", "seed"),
)
"""The options that the card tells."""
FIGURES = {"train_loss": "loss, mean over training", "loss": "loss, last", "eval_loss": "loss on the evaluation set"}
PACKAGES = ("lowtide", "transformers", "torch", "datasets", "tokenizers")


class Card:
    """The card of what a trainer trained, in its output folder."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.args, self.method = trainer, trainer.args, trainer.method

    def write(
        self, model_name: str | None, dataset_name: str | None, tags: str | list[str] | None, **metadata: Any
    ) -> None:
        """Writes `README.md`; the arguments are those of `create_model_card`."""
        folder = Path(str(self.args.output_dir))
        name = model_name or folder.resolve().name
        own = ["generated_from_trainer", "lowtide", self.method.name]
        given = [tags] if isinstance(tags, str) else list(tags or [])
        data = ModelCardData(
            model_name=name,
            base_model=_on_hub(self._base_model),
            datasets=_on_hub(dataset_name),
            library_name="peft" if self._is_adapter else "transformers",
            pipeline_tag=self.method.head.pipeline,
            tags=list(dict.fromkeys([*own, *given])),
            **metadata,
        )
        folder.mkdir(parents=True, exist_ok=True)
        card = ModelCard(f"---\n{data.to_yaml()}\n---\n\n{self._card_text(name, dataset_name)}")
        with writing(folder / "README.md") as beside:
            card.save(beside)

    @property
    def _base_model(self) -> str | None:
        return self.trainer.model.config.name_or_path or None

    @property
    def _is_adapter(self) -> bool:
        return hasattr(self.trainer.model, "peft_config")

    def _card_text(self, name: str, dataset_name: str | None) -> str:
        parts = [f"# {name}", self._what_it_is(dataset_name), "## Use", self._use(name)]
        parts += ["## Training", *self._training(), "## Versions"]
        parts.append(_table(("package", "version"), ((each, version(each)) for each in PACKAGES)))
        if self.method.paper is not None:
            parts += ["## Citation", f"The method is from:\n\n```bibtex\n{self.method.paper.citation}\n```"]
        return "\n\n".join(parts) + "\n"

    def _what_it_is(self, dataset_name: str | None) -> str:
        what = "An adapter of" if self._is_adapter else "A fine-tuned version of"
        base = _linked(self._base_model, "") or "a new model"
        data = f" on {_linked(dataset_name, 'datasets/')}" if dataset_name else ""
        paper = self.method.paper
        method = f"[{self.method.title}]({paper.url})" if paper is not None else self.method.title
        return f"{what} {base}, trained with {method}{data} by lowtide."

    def _use(self, name: str) -> str:
        lines = self.method.head.usage(self.trainer.hub_model_id or name)
        names = ", ".join(self.method.head.used)
        return "\n".join(["```python", f"from transformers import {names}", "", *lines, "```"])

    def _training(self) -> list[str]:
        """What it took and came to, its settings, and where a tracker shows it."""
        state = self.trainer.state
        last = {name: value for logs in state.log_history for name, value in logs.items()}
        figures: dict[str, Any] = {"optimizer steps": f"{state.global_step:,}"}
        if state.epoch is not None:
            figures["epochs"] = f"{state.epoch:.3g}"
        if last.get("num_tokens"):
            figures["tokens"] = f"{last['num_tokens']:,.0f}"
        figures |= {words: f"{last[each]:.4g}" for each, words in FIGURES.items() if each in last}
        settings = {each: getattr(self.args, each, None) for each in SETTINGS}
        parts = [
            _table(("figure", "value"), figures.items()),
            _table(("setting", "value"), ((f"`{k}`", f"`{_plain(v)}`") for k, v in settings.items() if v is not None)),
        ]
        run = getattr(sys.modules.get("wandb"), "run", None)
        return [*parts, f"Its curves: {run.url}"] if run is not None else parts


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
