"""Rows that come as token ids: what their columns may hold, and the tokens that are padding.

A tokenizer that pads leaves an `attention_mask` with zeros. TRL 1.16 does not read it, and trains on the padding; here
those tokens are left out, which is what the mask means. Whatever else cannot be kept to is refused: a mask with a hole,
numbers in a mask that say neither yes nor no, positions that do not count on from 0.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from lowtide.data.formats.conversation import describe
from lowtide.data.formats.samples import TokenSample

MASKS = ("completion_mask", "assistant_masks")
TOKEN_COLUMNS = ("labels", *MASKS, "attention_mask", "position_ids")
"""Beside `input_ids`, where they are there."""


def read_tokens(row: Mapping[str, Any]) -> TokenSample:
    """A row of token ids with its labels or masks, without its padding.

    Raises:
        ValueError: a column is no list of integers, is longer or shorter than the others, or cannot be kept to.
    """
    columns = {name: row[name] for name in ("input_ids", *TOKEN_COLUMNS) if row.get(name) is not None}
    if "input_ids" not in columns:
        raise ValueError("'input_ids' is null; it must be a list of token ids.")
    for name, values in columns.items():
        if not (is_token_list(values) if name in ("input_ids", "labels") else is_integer_list(values)):
            raise ValueError(f"{name!r} must be a list of integers.")
        if len(values) != len(columns["input_ids"]):
            raise ValueError(
                f"{name!r} has {len(values)} values and 'input_ids' {len(columns['input_ids'])}; they must be as "
                "long as each other."
            )
    for name in MASKS:
        check_mask(columns.get(name, ()), name)
    attended = attended_range(columns.pop("attention_mask", None), "attention_mask", len(columns["input_ids"]))
    columns = {name: values[attended] for name, values in columns.items()}
    _check_positions(columns.pop("position_ids", None))
    return TokenSample(**columns)


def is_integer_list(values: Any) -> bool:
    """Whether a mask or its like is a list of integers, or of true and false."""
    return isinstance(values, list) and all(isinstance(value, int) for value in values)


def is_token_list(values: Any) -> bool:
    """Whether token ids are a list of integers: true and false are a mask that stands in the wrong column."""
    return is_integer_list(values) and not any(isinstance(value, bool) for value in values)


def check_mask(values: Sequence[int], name: str) -> None:
    """Refuses a mask that holds other numbers than 0 and 1."""
    wrong = next((index for index, value in enumerate(values) if value not in (0, 1)), None)
    if wrong is not None:
        raise ValueError(
            f"{name}[{wrong}] is {values[wrong]}; a mask holds 0 and 1, and tokens cannot be weighted. Make it 1 where "
            "the token is scored."
        )


def attended_range(mask: Any, name: str, length: int) -> slice:
    """The tokens of a row that are not padding.

    Raises:
        ValueError: the mask is none, or leaves out tokens between others.
    """
    if mask is None:
        return slice(0, length)
    if not isinstance(mask, list) or len(mask) != length:
        found = f"{len(mask)} values" if isinstance(mask, list) else describe(mask)
        raise ValueError(f"{name!r} is {found}; it must be a list of {length} values, one for each token.")
    check_mask(mask, name)
    seen = [index for index, value in enumerate(mask) if value]
    first, last = (seen[0], seen[-1] + 1) if seen else (0, 0)
    if last - first != len(seen):
        hole = first + mask[first:last].index(0)
        raise ValueError(
            f"{name}[{hole}] is 0 between tokens where it is 1: only padding at the ends can be left out. Take such "
            "tokens out of the row."
        )
    return slice(first, last)


def _check_positions(positions: Sequence[int] | None) -> None:
    """Refuses positions that are not those that the row has anyway."""
    wrong = next((index for index, value in enumerate(positions or ()) if value != index), None)
    if positions is not None and wrong is not None:
        packed = wrong > 0 and positions[wrong] == 0
        raise ValueError(
            f"position_ids[{wrong}] is {positions[wrong]}; positions count on from 0 in each row. "
            + (
                "This row is packed of several: give each as a row of its own, and set packing=True."
                if packed
                else "Remove the column."
            )
        )
