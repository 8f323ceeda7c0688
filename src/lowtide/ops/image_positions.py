"""Positions on three axes of rows with images (M-RoPE, arXiv 2409.12191, section 2.1).

A text token has the same position on the axes of time, height and width. An image's tokens have one time, and their
row and column in the image as height and width, all counted from where the image begins. What follows goes on from the
largest of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from lowtide.ragged import SegmentImage

GRID = "image_grid_thw"
"""Input of an image: its patches in time, height and width, [1, 3]."""


@dataclass(frozen=True)
class GridPositions:
    """The positions of models of the Qwen2-VL family."""

    merge: int
    """Patches that are merged into one token, along height and along width."""

    def positions(self, tokens: int, images: Sequence[SegmentImage]) -> Int[Tensor, "3 tokens"]:
        """Of a row of so many tokens, some of which are of images; starts are places in the row."""
        found, place, position = [], 0, 0
        for image in images:
            text = image.start - place
            found.append(torch.arange(position, position + text).expand(3, -1))
            position += text
            times, height, width = (int(n) for n in image.inputs[GRID][0])
            height, width = height // self.merge, width // self.merge
            axes = torch.meshgrid(*(torch.arange(n) for n in (times, height, width)), indexing="ij")
            found.append(torch.stack(axes).flatten(1) + position)
            position += max(height, width)
            place = image.start + image.tokens
        found.append(torch.arange(position, position + tokens - place).expand(3, -1))
        return torch.cat(found, 1)
