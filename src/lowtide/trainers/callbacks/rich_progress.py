"""`RichProgressCallback`: the progress bar that every trainer has, by TRL's name, for scripts that add it."""

from __future__ import annotations

from lowtide.trainers.reports.progress import RichProgress


class RichProgressCallback(RichProgress):
    """Steps done, time left and the last metrics. A trainer to which it is passed adds no bar of its own."""
