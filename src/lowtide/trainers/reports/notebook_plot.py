"""The curves of loss and reward in a notebook, drawn anew with each log while the run goes on: those of `report.html`.

They stand in a frame, so that their styles are their own and the notebook's stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback
from transformers.utils.import_utils import is_in_notebook

from lowtide.html_shell import page
from lowtide.trainers.reports.run_page import STYLE, curves

if TYPE_CHECKING:
    from transformers import Trainer

HEIGHT = 400
"""CSS pixels of one plot, with its heading and axes."""
TIGHT = "main { padding: 0; max-width: none; } h2 { margin: .5rem 0; }"


class NotebookPlot(TrainerCallback):
    """Shows the curves at the first log, and draws them anew at the others."""

    def __init__(self) -> None:
        self.shown: Any = None
        """What IPython updates."""

    @classmethod
    def add_to(cls, trainer: Trainer) -> None:
        """In a notebook; nothing elsewhere."""
        if is_in_notebook():
            trainer.add_callback(cls())

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.shown = None  # a further training has a plot of its own

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        html = framed(state.log_history) if state.is_world_process_zero else ""
        if not html:
            return
        from IPython.display import HTML, display  # type: ignore[import-not-found]

        if self.shown is None:
            self.shown = display(HTML(html), display_id=True)
        else:
            self.shown.update(HTML(html))


def framed(logs: Sequence[Mapping[str, Any]]) -> str:
    """The curves as HTML that stands by itself; nothing where there are none."""
    found = curves(logs)
    if not found:
        return ""
    whole = page("The run", found, style=STYLE + TIGHT)
    height = HEIGHT * found.count("<figure")
    return f'<iframe srcdoc="{escape(whole)}" width="100%" height="{height}" style="border: 0"></iframe>'
