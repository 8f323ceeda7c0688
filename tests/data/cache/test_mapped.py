"""Giving back mapped pages: they leave the process, and the data is what it was."""

import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from datasets import Dataset

from lowtide.data.cache.mapped import mapped_files, release_pages


def resident_bytes(path):
    """How much of a mapped file is resident in this process, from the kernel's own account."""
    found = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            found = line.endswith(str(path))
        elif found and line.startswith("Rss:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"{path} is not mapped")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and uses madvise as Linux has it")
def test_pages_leave_the_process_and_come_back(tmp_path):
    path = tmp_path / "rows.arrow"
    table = pa.table({"n": np.arange(1_000_000)})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    dataset = Dataset.from_file(str(path))
    values = dataset.data.column("n").chunk(0).to_numpy()
    total = values.sum()
    assert resident_bytes(path) > 7_000_000
    release_pages(mapped_files(dataset))
    assert resident_bytes(path) < 200_000
    assert values.sum() == total


def test_a_dataset_in_memory_has_nothing_to_give_back():
    dataset = Dataset.from_dict({"n": [1, 2]})
    release_pages(mapped_files(dataset))
    assert dataset["n"][:] == [1, 2]
