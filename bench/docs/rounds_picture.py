"""Draws docs/chats.svg: the rounds of a conversation as rows of their own, and as they are laid.

The conversation is made up: lengths in tokens of what is asked, thought and answered. Earlier thoughts are dropped.
"""

from pathlib import Path

import numpy as np

from bench.docs.drawing import box, document, text
from bench.measuring.processes import ROOT
from lowtide.data.batches.shared_rounds import Sharing, share_rounds
from lowtide.data.batches.token_rows import IGNORED, TokenRows, flatten

PICTURE = ROOT / "docs" / "chats.svg"
ROUNDS = ((14, 16, 8), (8, 20, 9), (11, 14, 10))
"""Of each round, the tokens of the question, the thought and the answer."""
SCALE, HEIGHT, GAP, LEFT = 8.0, 26, 14, 10
CONTEXT, SCORED = "#d9d9d9", "#a1d99b"


def rounds() -> TokenRows:
    """Each round as a row: what was asked and answered before, the question, and what is scored."""
    tokens, labels, past = [], [], []
    for number, (asked, thought, answer) in enumerate(ROUNDS):
        said = [[100 * number + 10 * part + 1] * count for part, count in enumerate((asked, thought, answer))]
        context, target = [*past, *said[0]], [*said[1], *said[2]]
        tokens.append([*context, *target])
        labels.append([*[IGNORED] * len(context), *target])
        past = [*context, *said[2]]
    ids, offsets = flatten(tokens)
    return TokenRows(ids, flatten(labels)[0], offsets, groups=np.array([0, len(tokens)]))


def picture() -> str:
    """The text of the SVG."""
    whole = rounds()
    laid, prefix, seen = share_rounds(whole, Sharing())
    drawn = [text(LEFT, 22, f"A row for each round: {len(whole.token_ids)} tokens", "h")]
    y = 34.0
    for number in range(len(whole)):
        drawn += _row(whole, number, LEFT, y)
        y += HEIGHT + GAP
    drawn.append(text(LEFT, y + 16, f"As they are computed: {len(laid.token_ids)} tokens", "h"))
    y += 28
    lines, rows = list[str](), list[str]()
    for number, (other, before) in enumerate(zip(prefix.tolist(), seen.tolist(), strict=True)):
        x = LEFT + max(before, 0) * SCALE
        if other >= 0:
            top = y - (number - other) * (HEIGHT + GAP) + HEIGHT
            lines.append(f'<path d="M{x:.1f} {top:.1f}V{y + HEIGHT / 2:.1f}" stroke="#444" fill="none"/>')
            rows.append(text(x - 6, y + 17, f"sees {before} tokens", "s q end"))
        rows += _row(laid, number, x, y)
        y += HEIGHT + GAP
    drawn += lines + rows
    drawn += [box(LEFT, y, 14, 14, CONTEXT), text(LEFT + 20, y + 11, "context", "s q")]
    drawn += [box(LEFT + 90, y, 14, 14, SCORED), text(LEFT + 110, y + 11, "scored", "s q")]
    width = LEFT * 2 + max(whole.lengths) * SCALE
    return document("Three rounds of a conversation, whole and as a tree", drawn, width, y + 24)


def _row(rows: TokenRows, number: int, x: float, y: float) -> list[str]:
    """What of a row is context, and what is scored."""
    labels = rows.labels[slice(*rows.offsets[number : number + 2])]
    context = int((labels == IGNORED).sum())
    found = []
    for fill, count in ((CONTEXT, context), (SCORED, len(labels) - context)):
        if count:
            found.append(box(x, y, count * SCALE, HEIGHT, fill))
            found.append(text(x + 5, y + 17, f"{count}", "s"))
            x += count * SCALE
    return found


def write_rounds_picture(path: Path = PICTURE) -> None:
    path.write_text(picture(), encoding="utf-8")
