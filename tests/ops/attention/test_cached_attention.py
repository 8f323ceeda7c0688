"""Which keys are seen, of those that are kept while tokens are written."""

from __future__ import annotations

import pytest
import torch

from lowtide.ops.attention.attention_plan import Sight
from lowtide.ops.attention.cached_attention import seen


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("chunk", [None, 1, 4])
def test_tokens_see_the_keys_of_their_window_and_chunk_that_come_before_them(window, chunk):
    positions, keys = [5, 0, 8], range(10)
    found = seen(torch.tensor(positions)[:, None], torch.tensor(keys)[None], Sight(window, chunk))
    expected = [
        [
            key <= place
            and (window is None or place - key < window)
            and (chunk is None or place // chunk == key // chunk)
            for key in keys
        ]
        for place in positions
    ]
    assert found.tolist() == expected
