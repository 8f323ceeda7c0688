"""Resident memory of preparing a dataset, at one number of rows and at ten times as many.

    python -m bench.preprocessing [--rows 100000 1000000] [--packing] [--out FILE.json]

Each size is written to a JSONL file of short rows, then loaded, tokenized and, if asked, packed in a process of its
own, with an empty cache; then once more from the cache. The peaks are above what the process held after its imports.
"Own" is memory that only the process could give back (anonymous pages); it is what must not grow. "Mapped" are pages
of the cache files that the process has touched: the kernel drops them, without writing anything, when something else
wants the memory. "Resident" is both together.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench.measuring.arguments import parser_of
from bench.measuring.processes import ROOT
from bench.preprocessing.child import FIELDS, WORDS

MEGABYTE = 1e6


def write_rows(path: Path, rows: int) -> None:
    """Write seeded texts of 10 to 40 words."""
    source = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for _ in track(range(rows), description=f"Writing {rows:,} rows", transient=True):
            text = " ".join(source.choices(WORDS, k=source.randint(10, 40)))
            file.write(json.dumps({"text": text}) + "\n")


def measure_in_child(rows: int, packing: bool, folder: Path) -> dict[str, Any]:
    path = folder / f"{rows}.jsonl"
    write_rows(path, rows)
    environment = os.environ | {"HF_HOME": str(folder / f"cache-{rows}"), "TOKENIZERS_PARALLELISM": "false"}
    spec = json.dumps({"path": str(path), "packing": packing})
    command = [sys.executable, "-m", "bench.preprocessing.child", spec]
    child = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(child.stdout.splitlines()[-1])


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--packing", action="store_true", help="pack the rows as well")
    parser.add_argument("--out", type=Path, help="also write the results as JSON")
    args = parser.parse_args()
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
