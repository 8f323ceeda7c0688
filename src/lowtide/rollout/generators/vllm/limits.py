"""What a server is held to once it is there; no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """What a server is held to once it is there."""

    request_timeout: float | None = None
    """Seconds that a request for completions may take; None: those of any call."""
    weight_sync_timeout: float | None = None
    """Seconds that a copy of the weights may take; None: those of any call for each bucket."""
    max_inflight_tasks: int | None = None
    """The most completions that a rank asks for at a time; None: all of a batch, or as many as the server is asked for
    anyway."""
    adapters_held: int = 2
    """Versions of the adapter that it is to hold at a time, the newest among them."""
    checked_every: int = 0
    """Copies of the weights between two checks that it writes by them; 0: none is made."""
    retries: int = 0
    """How often what failed is asked for again: a server that cannot be reached, hangs, fails, or answers wrongly."""
    pause: float = 0.0
    """Seconds before each of these."""
