"""Every technique in SFT and DPO on CUDA: the numbers of the run without it, and what it is seen by."""

from collections.abc import Iterator

import pytest

from tests.support.matrix import matrix
from tests.support.matrix.matrix import COMMON, TECHNIQUES, cell, check_equal, known_run

ON_CUDA = {"use_cpu": False, "bf16": False, "tf32": False, "fused_layers": False}
WITHIN = 5e-3
"""Kernels sum in an order of their own, and some in another one each time. A first step of AdamW goes by the signs of
gradients, and so of those that are rounding alone."""


@pytest.fixture(scope="module", autouse=True)
def _on_cuda() -> Iterator[None]:
    def nearly(run: matrix.Run, other: matrix.Run, *, bits: bool, within: float = WITHIN) -> None:
        check_equal(run, other, bits=False, within=max(within, WITHIN))

    with pytest.MonkeyPatch.context() as patched:
        for name, value in ON_CUDA.items():
            patched.setitem(COMMON, name, value)
        patched.setattr(matrix, "check_equal", nearly)
        known_run.cache_clear()
        yield
    known_run.cache_clear()


@pytest.mark.parametrize("kind", ["SFT", "DPO"])
@pytest.mark.parametrize("name", TECHNIQUES)
def test_a_technique_does_what_its_table_says(name: str, kind: str):
    found = cell(kind, TECHNIQUES[name])
    if found.word.startswith("needs") or found.word == "refused":  # as on a CPU, whose tests hold the reasons
        pytest.skip(f"{found.word}: {found.why}")
    assert found.word in ("exact", "not exact", "no such option")
