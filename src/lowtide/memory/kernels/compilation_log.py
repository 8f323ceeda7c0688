"""Says when layers are compiled, which takes minutes on some machines and looks like a run that hangs.

One line as compilation begins, with what is compiled, and one once a forward ran without any, with the seconds and
where the result is kept. torch finds compiled graphs again in later runs. Its own folder is the system's for temporary
files, which many machines empty, so another is named here unless the environment names one.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from lowtide.compat.torch import watch_compilations
from lowtide.terminal import Console

FOLDER = "TORCHINDUCTOR_CACHE_DIR"
"""The environment variable of torch that names the folder of compiled graphs."""

logger = logging.getLogger(__name__)


class CompilationLog:
    """Watches a model whose layers are compiled when they first run.

    Args:
        model: whose forwards are counted.
        what: what is compiled, in words.
        quiet: writes to the log alone.
    """

    def __init__(self, model: nn.Module, what: str, *, quiet: bool = False) -> None:
        self.what, self.quiet = what, quiet
        self.graphs, self.seconds, self.pending, self.began = 0, 0.0, False, 0.0
        self.compiled_since = False
        self.end_watch = watch_compilations(self._begins, self._ends)
        self.hook = model.register_forward_pre_hook(lambda *_: self._look())

    def remove(self) -> None:
        """Ends the watch."""
        self.hook.remove()
        self.end_watch()
        self._finish()

    def _begins(self, _: Any) -> None:
        self.began, self.compiled_since = time.perf_counter(), True
        if not self.pending:
            self.pending = True
            self._say(f"compiling {self.what}; forward and backward of the first steps wait for it")

    def _ends(self, _: Any) -> None:
        self.graphs += 1
        self.seconds += time.perf_counter() - self.began

    def _look(self) -> None:
        """At each forward: compilation is over if nothing was compiled since the one before."""
        if not self.compiled_since:
            self._finish()
        self.compiled_since = False

    def _finish(self) -> None:
        if self.pending:
            found = f"later runs find them in {cache_folder()}"
            self._say(f"compiled {self.graphs} graphs in {self.seconds:.0f} s; {found}")
            self.pending, self.graphs, self.seconds = False, 0, 0.0

    def _say(self, text: str) -> None:
        logger.info(text)
        if not self.quiet:
            Console(stderr=True, highlight=False).print(text, markup=False)


def keep_compiled() -> None:
    """Names a folder for compiled graphs that outlives a restart, unless the environment names one."""
    if FOLDER not in os.environ:
        os.environ[FOLDER] = str(cache_folder())


def cache_folder() -> Path:
    """Where compiled graphs are."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get(FOLDER) or Path(home, "lowtide", "inductor"))


def watched(model: nn.Module, what: str, *, quiet: bool) -> Callable[[], None]:
    """Keeps and watches what is compiled; returns what ends the watch."""
    keep_compiled()
    return CompilationLog(model, what, quiet=quiet).remove
