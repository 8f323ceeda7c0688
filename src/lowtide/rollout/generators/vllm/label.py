"""What names the weights that a copy holds."""

from __future__ import annotations

from dataclasses import asdict, dataclass

ADAPTER_NAMES = "lowtide-"
"""What the names of adapters begin with."""


class StaleWeights(ValueError):
    """What was written is not by the weights that it should be by."""


class LostWeights(StaleWeights):
    """Whoever was to write holds nobody's weights: it was started again since it was sent some."""


@dataclass(frozen=True)
class Label:
    """The weights of a run after some steps."""

    run: str
    """Of the process that trains."""
    version: int
    """Optimizer steps that they have taken."""
    copy: int = 0
    """How often this run has copied weights."""
    adapter: bool = False
    """Whether it is an adapter on the base that this run has copied, which bears a name of its own."""

    @property
    def name(self) -> str:
        """Of the adapter in vLLM, where no two versions share one: what is cached of one never serves another."""
        return f"{ADAPTER_NAMES}{self.run}-{self.copy}"

    def check(self, found: object, whose: str) -> None:
        """Refuses what other weights wrote.

        Args:
            found: the label of the weights that wrote, as a dictionary; None if they are nobody's.

        Raises:
            LostWeights: there are none.
            StaleWeights: they are others.
        """
        held = found if isinstance(found, dict) else {}
        if held == asdict(self):
            return
        if not held:
            raise LostWeights(
                f"{whose} does not hold the weights after step {self.version} that it was sent, nor any others: it was "
                "started again, or another run is sending its own"
            )
        if held.get("run") != self.run:
            raise StaleWeights(
                f"{whose} holds the weights of another run, which shares it: give each run a server of its own"
            )
        raise StaleWeights(
            f"{whose} holds stale weights: those after step {held.get('version')} (copy {held.get('copy')}), where "
            f"the policy is at step {self.version} (copy {self.copy})"
        )
