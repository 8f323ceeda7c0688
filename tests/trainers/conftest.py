from __future__ import annotations

from typing import Any

import pytest

from lowtide.run.options.sharding import sharding_of
from tests.support.matrix import matrix


@pytest.fixture
def read(monkeypatch, tmp_path):
    """From options to the `Sharding` that they say on so many processes."""
    config = matrix.classes("SFT")[1](output_dir=str(tmp_path), use_cpu=True, report_to="none")

    def sharding(ranks: int, **options: Any) -> Any:
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        for name, value in options.items():
            setattr(config, name, value)
        return sharding_of(config)

    return sharding
