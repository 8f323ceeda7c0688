"""What reports read of a trainer."""

from __future__ import annotations

from typing import Any, Protocol

from lowtide.data.report.ledger import Ledger
from lowtide.memory.technique import Site, Technique
from lowtide.methods.method import Method
from lowtide.trainers.losses.own_loss import OwnLosses


class Reported(Protocol):
    """A trainer of a method, as far as reports and predictions look at it."""

    args: Any
    model: Any
    state: Any
    train_dataset: Any
    planned: Any
    predicted_bytes: int | None
    optimizer_maker: Any
    resumption: Any
    step_taker: Any
    run_log: Any
    card: Any

    @property
    def method(self) -> Method: ...

    @property
    def site(self) -> Site: ...

    @property
    def techniques(self) -> list[Technique]: ...

    def why_idle(self, technique: Technique) -> str | None: ...

    @property
    def ledger(self) -> Ledger | None: ...

    @property
    def reference(self) -> Any: ...

    @property
    def peak_phase(self) -> str: ...

    @property
    def rehearsed_bytes(self) -> int | None: ...

    @property
    def own_loss(self) -> OwnLosses: ...

    def report_lines(self) -> list[tuple[str, str]]: ...
