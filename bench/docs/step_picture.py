"""Draws docs/a-step.svg: the plan of one step on two ranks, as `lowtide.step_plan` makes it.

The rows of the first rank are those of the example on the page.
"""

from collections.abc import Sequence
from pathlib import Path

from bench.docs.drawing import box, document, text
from bench.measuring.processes import ROOT
from lowtide.ragged import Segment
from lowtide.step_plan import (
    IDLE,
    Act,
    Join,
    Limits,
    MicroBatch,
    Needs,
    Score,
    Summary,
    Train,
    cut_rows,
    even_acts,
    pieces_first,
)

PICTURE = ROOT / "docs" / "a-step.svg"
RANKS = (((6, 4, 3), (8, 5, 4), (40, 20, 12)), ((8, 6, 5), (6, 4, 4), (7, 6, 3)))
"""Of each rank, the tokens of its rows' prompts, chosen and rejected answers."""
LIMITS = Limits(tokens=32)
NEEDS = Needs(loss_over="row", meet="each forward")
FILLS = ("#9ecae1", "#fdbe85", "#a1d99b")
"""Of micro-batches, in the order of the plan."""
SCALE, LANE, SLOT, JOIN, TOP = 5.4, 74, 68, 48, 42
"""Pixels: of a token, of the height of a rank's acts, of the width of an act and of a `Join`, of what is above rows."""
NOTES = (
    "Score: forward without gradients    Join: the loss, and its slope at each score",
    "Train: forward and backward    dashed: an empty micro-batch",
)


def segments_of(rows: Sequence[tuple[int, int, int]]) -> list[Segment]:
    """Pairs as a batch has them: a prompt, and two answers that go on from it and are scored."""
    found: list[Segment] = []
    token = score = 0
    for row, (prompt, *answers) in enumerate(rows):
        before = len(found)
        found.append(Segment(token, token + prompt, -1, row, score, score, key=row + 1))
        token += prompt
        for length in answers:
            found.append(Segment(token, token + length, before, row, score, score + length))
            token, score = token + length, score + length
    return found


def planned() -> list[tuple[list[MicroBatch], list[Act]]]:
    """Of each rank its micro-batches, and the acts that it runs."""
    parts = [pieces_first(cut_rows(segments_of(rows), LIMITS)) for rows in RANKS]
    said = [Summary.of(each, NEEDS) for each in parts]
    return [(each, even_acts(each, NEEDS, said)) for each in parts]


def picture() -> str:
    """The text of the SVG."""
    ranks = planned()
    drawn: list[str] = []
    for number, (parts, _) in enumerate(ranks):
        drawn += _rows(number, parts, TOP + number * 62)
    top = TOP + len(ranks) * 62 + 46
    columns = _columns([acts for _, acts in ranks])
    x = 70
    drawn.append(text(10, top - 22, "The acts, from left to right; ranks run their passes side by side", "h"))
    for number in range(len(ranks)):
        drawn.append(text(10, top + number * (LANE + 12) + 36, f"rank {number}"))
    for column in columns:
        join = any(isinstance(act, Join) for act in column)
        for number, act in enumerate(column):
            if act is not None:
                drawn += _act(act, ranks[number][0], x, top + number * (LANE + 12))
        x += (JOIN if join else SLOT) + 8
    bottom = top + len(ranks) * (LANE + 12) + 16
    for number, note in enumerate(NOTES):
        drawn.append(text(70, bottom + 17 * number, note, "s q"))
    bottom += 17 * (len(NOTES) - 1)
    drawn.insert(0, text(10, 24, f"The rows, cut to {LIMITS.tokens} tokens a micro-batch", "h"))
    title = "Two ranks: rows, micro-batches, and the acts of one step"
    return document(title, drawn, x + 10, bottom + 16)


def _rows(rank: int, parts: Sequence[MicroBatch], y: int) -> list[str]:
    """The rows of a rank in its micro-batches, with the pieces of a long one."""
    found, x = [text(10, y + 20, f"rank {rank}")], 70.0
    sizes = [sum(row) for row in RANKS[rank]]
    for number, part in enumerate(parts):
        begin = x
        boxes = [(f"piece {n}", piece.tokens) for n, piece in enumerate(part.pieces)]
        boxes = boxes or [(f"row {row}", sizes[row]) for row in part.rows]
        for name, tokens in boxes:
            found.append(box(x, y, tokens * SCALE, 30, FILLS[number]))
            found.append(text(x + 5, y + 19, f"{name}: {tokens}", "s"))
            x += tokens * SCALE
        what = f"micro-batch {number}" + (f", row {part.rows[0]} in pieces" if part.pieces else "")
        found.append(text(begin, y + 45, what, "s q"))
        x += 16
    return found


def _columns(everyones: Sequence[Sequence[Act]]) -> list[list[Act | None]]:
    """What ranks do beside one another: a `Join` has a column of its own, since no rank waits in it."""
    left, columns = [list(acts) for acts in everyones], []
    while any(left):
        joins = [bool(acts) and isinstance(acts[0], Join) for acts in left]
        columns.append(
            [acts.pop(0) if acts and join >= any(joins) else None for acts, join in zip(left, joins, strict=True)]
        )
    return columns


def _act(act: Act, parts: Sequence[MicroBatch], x: float, y: float) -> list[str]:
    if isinstance(act, Join):
        return [
            box(x, y, JOIN, LANE, FILLS[act.parts[0]]),
            text(x + 12, y + 26, "Join"),
            text(x + 8, y + 44, f"part {act.parts[0]}", "s"),
        ]
    kind = "Train" if isinstance(act, Train) else "Score"
    assert isinstance(act, Score | Train)
    if act.part == IDLE:
        return [box(x, y, SLOT, LANE, "", "idle"), text(x + 8, y + 20, kind), text(x + 8, y + 38, "nothing", "s q")]
    part = parts[act.part]
    tokens = part.pieces[act.piece].tokens if part.pieces else part.tokens
    piece = [text(x + 7, y + 50, f"piece {act.piece}", "s")] if part.pieces else []
    return [
        box(x, y, SLOT, LANE, FILLS[act.part], kind.lower()),
        text(x + 7, y + 19, kind),
        text(x + 7, y + 35, f"part {act.part}", "s"),
        *piece,
        text(x + 7, y + 66, f"{tokens} tokens", "s q"),
    ]


def write_step_picture(path: Path = PICTURE) -> None:
    path.write_text(picture(), encoding="utf-8")
