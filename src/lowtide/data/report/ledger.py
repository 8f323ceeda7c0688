"""The token ledger: where every token of a dataset went, counted before training starts.

A run that cuts a third of its tokens, or scores a tenth of them, trains without a complaint and is found out weeks
later. The ledger says it on the first screen.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from jaxtyping import Int
from rich import box
from rich.table import Table
from rich.text import Text

MOST_LABELS = 9
"""Labels that are listed."""


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """What became of the rows and tokens of one dataset.

    Every token of every row is in exactly one of `tokens`, `tokens_cut` and `tokens_dropped`.
    """

    name: str
    """Which dataset: "train", "eval"."""
    rows: int
    """Rows that are trained on; before packing, where that is done."""
    tokens: int
    """Tokens that the model sees in one epoch."""
    scored_tokens: int
    """Those of them that count for the loss. The first token of a row, or of a piece of one, never does."""
    tokens_cut: int
    """Tokens lost to length limits."""
    rows_cut: int
    """Rows that lost tokens to length limits, and are trained on with what is left."""
    rows_dropped: Mapping[str, int]
    """Rows that are not trained on, by reason."""
    tokens_dropped: int
    """Tokens of these rows."""
    longest_row: int
    """Tokens in the longest row; before packing, where that is done."""
    batch_size: int
    """Rows in the padded batches that `padding_avoided` is about."""
    padding_avoided: float
    """The share of a padded run's tokens that would be padding, with batches of `batch_size` rows in this order."""
    packed_rows: int | None = None
    """Rows after packing; None if there was none."""
    packing_fill: float | None = None
    """The share of the packed rows' capacity that holds tokens."""
    cut_by_part: Mapping[str, int] | None = None
    """For preference rows: `tokens_cut` by part ("prompt", "chosen", "rejected", "completion"). None for others.

    Such a row's prompt is counted once, however many completions share it; `padding_avoided` compares with batches
    that repeat it.
    """

    tokens_shared: int | None = None
    """Tokens that rounds of conversations have from other rounds: the model would see so many more in rows a round.
    None where they share nothing."""

    scored_by_label: Mapping[str, int] | None = None
    """`scored_tokens` by label, for rows that have labels. None for others."""

    read_as: str = ""
    """The format that the rows were read in, with its columns."""

    def to_dict(self) -> dict[str, Any]:
        values = asdict(self) | {"rows_dropped": dict(self.rows_dropped)}
        for name in ("cut_by_part", "tokens_shared", "scored_by_label"):
            if values[name] is None:
                del values[name]
        return values

    def summary(self) -> str:
        """The ledger in one line, for logs."""
        parts = (f"{label} {value}" + (f" ({note})" if note else "") for label, value, note in self.lines())
        return f"{self.name}: {' | '.join(parts)}"

    def __rich__(self) -> Table:
        table = Table(
            title=Text.assemble(("Token ledger", "bold"), f"  {self.name}"),
            title_justify="left",
            title_style="",
            box=box.SIMPLE_HEAD,
            show_header=False,
            pad_edge=False,
        )
        table.add_column(style="bold", no_wrap=True)
        table.add_column(justify="right", no_wrap=True)
        table.add_column(style="dim", overflow="fold")
        for label, value, note in self.lines():
            table.add_row(Text(label), Text(value), Text(note))
        return table

    def lines(self) -> list[tuple[str, str, str]]:
        """What became of the rows: a name, a number, a note."""
        mean = self.tokens / self.rows if self.rows else 0.0
        everything = self.tokens + self.tokens_cut + self.tokens_dropped
        lines = [
            ("rows", f"{self.rows:,}", f"read as {self.read_as}" if self.read_as else ""),
            ("tokens", f"{self.tokens:,}", f"{mean:,.1f} a row, {self.longest_row:,} in the longest"),
            ("scored", f"{self.scored_tokens:,}", f"{_share(self.scored_tokens, self.tokens)} of the tokens"),
            (
                "cut",
                f"{self.tokens_cut:,}",
                f"{_share(self.tokens_cut, everything)} of all tokens, from {_rows(self.rows_cut)}{self._parts_cut()}"
                if self.tokens_cut
                else "no row is longer than the limits",
            ),
            ("dropped rows", f"{sum(self.rows_dropped.values()):,}", self._why_dropped()),
            (
                "padding avoided",
                f"{self.padding_avoided:.1%}",
                f"of what padded batches of {self.batch_size}{self._repeated()} would compute",
            ),
        ]
        if self.scored_by_label is not None:
            lines.append(("labels", f"{len(self.scored_by_label):,}", self._shares_of_labels()))
        if self.tokens_shared:
            share = _share(self.tokens_shared, self.tokens + self.tokens_shared)
            note = f"{share} of the tokens of whole rounds: what rounds have in common is computed once"
            lines.append(("shared", f"{self.tokens_shared:,}", note))
        if self.packing_fill is not None:
            note = f"{_percent(self.packing_fill)} full"
            lines.append(("packed rows", f"{self.packed_rows:,}", note))
        return lines

    def _parts_cut(self) -> str:
        if not self.tokens_cut or self.cut_by_part is None:
            return ""
        return f"; {', '.join(f'{part} {count:,}' for part, count in self.cut_by_part.items())}"

    def _repeated(self) -> str:
        """What a padded batch has more of than its rows."""
        sides = len(self.cut_by_part or ()) - 1
        return f" pairs, each prompt {'twice' if sides == 2 else f'{sides} times'}," if sides > 1 else ""

    def _shares_of_labels(self) -> str:
        """The most frequent labels first."""
        counts = sorted((self.scored_by_label or {}).items(), key=lambda each: -each[1])
        shown = ", ".join(f"{name} {_share(count, self.scored_tokens)}" for name, count in counts[:MOST_LABELS])
        return shown + (f", and {len(counts) - MOST_LABELS} more" if len(counts) > MOST_LABELS else "")

    def _why_dropped(self) -> str:
        reasons = "; ".join(f"{reason}: {count:,}" for reason, count in self.rows_dropped.items())
        return f"{reasons}; {self.tokens_dropped:,} tokens in them" if reasons else "every row has a scored token"


def padding_share(
    lengths: Int[np.ndarray, " rows"],
    batch_size: int,
    *,
    longest: Int[np.ndarray, " rows"] | None = None,
    sequences: int = 1,
) -> float:
    """The share of padding in padded batches of `batch_size` consecutive rows, each as long as its longest row.

    Where a padded run makes several `sequences` of one row, `longest` is the longest of them, and what they repeat
    counts as padding.
    """
    if len(lengths) == 0 or not lengths.any():
        return 0.0
    starts = np.arange(0, len(lengths), batch_size)
    sizes = sequences * np.diff(np.append(starts, len(lengths)))
    padded = int(np.maximum.reduceat(lengths if longest is None else longest, starts).astype(np.int64) @ sizes)
    return 1.0 - int(lengths.sum(dtype=np.int64)) / padded


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "0%"


def _percent(share: float) -> str:
    """A share as a percentage, not rounded up to 100% as long as something is missing."""
    return f"{min(share, 0.99999) if share < 1 else share:.3%}"


def _rows(count: int) -> str:
    return f"{count:,} row" + ("" if count == 1 else "s")
