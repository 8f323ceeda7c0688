"""The manifest of a checkpoint: the size and the checksum of each file, written last.

A checkpoint gets its name when all of it is written, so a kill leaves none that is half written. What happens to it
later (a disk that fails, a copy that was cut off) shows in the manifest. The checksum is CRC-32 (`zlib.crc32`), which
finds damage and runs at 1.8 GB/s on one core, five times as fast as BLAKE2; it is no protection against an attacker,
who could write another manifest. Against one stands that no file is loaded that could run code.
"""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path

from lowtide.parsing import parse_json
from lowtide.trainers.checkpoints.durable import flush

MANIFEST = "manifest.json"
BLOCK = 1 << 22
"""Bytes that are read at a time."""


def checksum(path: Path) -> str:
    """CRC-32 of a file, as eight hexadecimal digits."""
    value, block = 0, memoryview(bytearray(BLOCK))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            value = zlib.crc32(block[:count], value)
    return f"{value:08x}"


def seal(folder: Path) -> None:
    """Writes the manifest of all files in a folder, and waits until all of it is on the disk.

    Raises:
        OSError: a file cannot be read or flushed.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    entries = {}
    for path in files:
        flush(path)
        entries[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size, "crc32": checksum(path)}
    manifest = folder / MANIFEST
    manifest.write_text(json.dumps({"files": entries}, indent=2) + "\n", encoding="utf-8")
    flush(manifest)
    for each in {path.parent for path in files} | {folder}:
        flush(each)


def read_manifest(folder: Path) -> dict[str, dict] | None:
    """The entries of a folder's manifest by file; None where it has no manifest.

    Raises:
        ValueError: the manifest is damaged.
    """
    try:
        text = (folder / MANIFEST).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    files = parse_json(text)["files"] if text.startswith("{") else None
    if not isinstance(files, dict) or not all({"bytes", "crc32"} <= entry.keys() for entry in files.values()):
        raise ValueError("it lists no files")
    return files


def difference(path: Path, entry: dict) -> str | None:
    """How a file differs from its entry in the manifest; None where it does not."""
    try:
        size = os.stat(path).st_size
    except FileNotFoundError:
        return "it is missing"
    if size != entry["bytes"]:
        return f"it has {size:,} bytes and was written with {entry['bytes']:,}"
    if checksum(path) != entry["crc32"]:
        return "its bytes are not those that were written"
    return None
