"""Resident memory of preparing a dataset, at one number of rows and at ten times as many.

    python bench/preprocessing.py [--rows 100000 1000000] [--packing] [--out FILE.json]

Each size is written to a JSONL file of short rows, then loaded, tokenized and, if asked, packed in a process of its
own, with an empty cache; then once more from the cache. The peaks are above what the process held after its imports.
"Own" is memory that only the process could give back (anonymous pages); it is what must not grow. "Mapped" are pages
of the cache files that the process has touched: the kernel drops them, without writing anything, when something else
wants the memory. "Resident" is both together.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

FIELDS = {"own": "RssAnon", "mapped": "RssFile", "resident": "VmRSS"}
MEGABYTE = 1e6
TEXT = "the ledger says that natalia sold half as many clips in may and forty two of them were blue"
WORDS = TEXT.split()


class MemoryWatch(threading.Thread):
    """The peaks of this process's memory by kind, in bytes, looked at every 5 ms."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.start_bytes = _memory()
        self.peak_bytes = dict(self.start_bytes)
        self.running = True
        self.start()

    def run(self) -> None:
        while self.running:
            now = _memory()
            self.peak_bytes = {kind: max(self.peak_bytes[kind], now[kind]) for kind in FIELDS}
            time.sleep(0.005)

    def finish(self) -> dict[str, int]:
        """The peaks above the start."""
        self.running = False
        self.join()
        return {kind: self.peak_bytes[kind] - self.start_bytes[kind] for kind in FIELDS}


def _memory() -> dict[str, int]:
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return {kind: int(fields[field].split()[0]) * 1024 for kind, field in FIELDS.items()}


def write_rows(path: Path, rows: int) -> None:
    """Write seeded texts of 10 to 40 words."""
    source = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for _ in track(range(rows), description=f"Writing {rows:,} rows", transient=True):
            text = " ".join(source.choices(WORDS, k=source.randint(10, 40)))
            file.write(json.dumps({"text": text}) + "\n")


def tiny_tokenizer() -> Any:
    """A word tokenizer, built here."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: index for index, word in enumerate(["<unk>", "</s>", *dict.fromkeys(WORDS)])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")


def measure(path: Path, packing: bool) -> dict[str, Any]:
    """What the child process does: prepare the rows of `path`, twice, and look at the memory meanwhile."""
    import datasets

    from lowtide.data.prepare import PrepareOptions, prepare
    from lowtide.data.sources.load import load_rows

    datasets.disable_progress_bars()
    tokenizer = tiny_tokenizer()
    options = PrepareOptions(max_length=1024)
    watch = MemoryWatch()
    seconds = {}
    for start in ("first", "second"):
        begin = time.perf_counter()
        rows = load_rows(path)
        _, ledger = prepare(rows, tokenizer, options, batch_size=8, packing=packing)
        seconds[start] = time.perf_counter() - begin
    assert ledger is not None
    return {"rows": ledger.rows, "tokens": ledger.tokens, "seconds": seconds, "peak_above_start_bytes": watch.finish()}


def measure_in_child(rows: int, packing: bool, folder: Path) -> dict[str, Any]:
    path = folder / f"{rows}.jsonl"
    write_rows(path, rows)
    environment = os.environ | {"HF_HOME": str(folder / f"cache-{rows}"), "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, __file__, "--child", str(path), *(["--packing"] if packing else [])]
    child = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(child.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--packing", action="store_true", help="pack the rows as well")
    parser.add_argument("--out", type=Path, help="also write the results as JSON")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure(args.child, args.packing)))
        return
    with tempfile.TemporaryDirectory() as folder:
        results = [measure_in_child(rows, args.packing, Path(folder)) for rows in args.rows]
    table = Table(title="Peaks above the imports, MB" + (", packed" if args.packing else ""))
    for name in ("rows", "tokens", *FIELDS, "first start", "second start"):
        table.add_column(name, justify="right")
    for result in results:
        table.add_row(
            f"{result['rows']:,}",
            f"{result['tokens']:,}",
            *(f"{result['peak_above_start_bytes'][kind] / MEGABYTE:.0f}" for kind in FIELDS),
            *(f"{seconds:.1f} s" for seconds in result["seconds"].values()),
        )
    Console().print(table)
    if args.out:
        args.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
