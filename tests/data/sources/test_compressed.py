"""Compressed files that are cut off or broken are refused with the file and the line, read whole and as a stream."""

import bz2
import gzip
import lzma

import pytest

from lowtide.data.sources import json_lines
from lowtide.data.sources.load import load_rows

LINES = b"".join(b'{"text": "%d"}\n' % n for n in range(50))
COMPRESS = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}


def rows(path, streaming):
    return [row["text"] for row in load_rows(path, streaming=streaming)]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("suffix", COMPRESS)
def test_a_whole_file_is_read(suffix, streaming, tmp_path):
    path = tmp_path / f"rows.jsonl.{suffix}"
    path.write_bytes(COMPRESS[suffix](LINES))
    assert rows(path, streaming) == [str(n) for n in range(50)]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("cut", [9, None])
def test_a_broken_file_is_named(suffix, streaming, cut, tmp_path):
    path = tmp_path / f"rows.jsonl.{suffix}"
    path.write_bytes(COMPRESS[suffix](LINES)[:-cut] if cut else b"not compressed")
    with pytest.raises(ValueError, match=rf"rows.jsonl.{suffix}, line \d+: cannot be decompressed .*cut off or broken"):
        rows(path, streaming)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_broken_line_of_a_compressed_file_is_named(streaming, tmp_path):
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(LINES + b"{nothing"))
    with pytest.raises(ValueError, match=r"rows.jsonl.gz, line 51: not JSON"):
        rows(path, streaming)


@pytest.mark.parametrize("name", ["rows.json", "rows.txt", "rows.csv"])
@pytest.mark.parametrize("suffix", COMPRESS)
def test_a_small_file_that_comes_to_gigabytes_is_refused(name, suffix, tmp_path, monkeypatch):
    monkeypatch.setattr(json_lines, "MOST_LINE_BYTES", 1 << 20)
    path = tmp_path / f"{name}.{suffix}"
    path.write_bytes(COMPRESS[suffix](b'[{"text": "' + bytes(b"a" * (3 << 20)) + b'"}]'))
    with pytest.raises(ValueError, match=rf"{name}.{suffix} comes to more than 1 MiB, 200 times its size"):
        load_rows(path)


def test_a_compressed_file_without_a_line_has_no_rows(tmp_path):
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(b""))
    with pytest.raises(ValueError, match=r"rows.jsonl.gz has no rows"):
        load_rows(path)
