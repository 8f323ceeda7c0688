"""A process whose addresses are limited lives on where there are none left for its stack."""

from __future__ import annotations

import re
import resource
from pathlib import Path

import pytest
from torch.multiprocessing.spawn import ProcessExitedException

from lowtide.memory.allocators.out_of_memory import STACK_DEPTH, reserve_stack
from tests.support.ranks.processes import run_ranks


def run_full(rank: int, reserved: bool) -> None:
    nested: tuple = ()
    for _ in range(STACK_DEPTH // 2):
        nested = (nested,)
    size = int(re.findall(r"VmSize:\s+(\d+)", Path("/proc/self/status").read_text())[0]) << 10
    resource.setrlimit(resource.RLIMIT_AS, (size + (1 << 23), size + (1 << 23)))
    if reserved:
        reserve_stack()
    held = []
    for exponent in range(22, 11, -1):
        try:
            while True:
                held.append(bytearray(1 << exponent))
        except MemoryError:
            continue
    hash(nested)
    held.clear()


def test_a_reserved_stack_is_there_when_nothing_else_is():
    run_ranks(run_full, True, ranks=1)


def test_without_it_the_system_ends_the_process():
    with pytest.raises(ProcessExitedException, match="SIGSEGV"):
        run_ranks(run_full, False, ranks=1)
