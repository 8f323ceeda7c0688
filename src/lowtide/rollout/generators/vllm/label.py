"""What names the weights that a copy holds."""

from __future__ import annotations

from dataclasses import dataclass


class StaleWeights(ValueError):
    """What was written is not by the weights that it should be by."""


@dataclass(frozen=True)
class Label:
    """The weights of a run after some steps."""

    run: str
    """Of the process that trains."""
    version: int
    """Optimizer steps that they have taken."""
    copy: int = 0
    """How often this run has copied weights."""

    def check(self, found: object, whose: str) -> None:
        """Refuses what other weights wrote.

        Args:
            found: the label of the weights that wrote, as a dictionary; None if they are nobody's.

        Raises:
            StaleWeights: they are others.
        """
        held = found if isinstance(found, dict) else {}
        if held.get("run") != self.run:
            raise StaleWeights(
                f"{whose} does not hold the weights of this run (another run shares it, or it was started again): give "
                "each run a server of its own"
            )
        if held.get("version") != self.version or held.get("copy", self.copy) != self.copy:
            raise StaleWeights(
                f"{whose} holds stale weights: those after step {held.get('version')} (copy {held.get('copy')}), where "
                f"the policy is at step {self.version} (copy {self.copy})"
            )
