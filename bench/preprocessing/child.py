"""One run of `bench.preprocessing`: rows are prepared twice, and memory is looked at meanwhile."""

import json
import threading
import time
from pathlib import Path
from typing import Any

from bench.measuring.arguments import specification

FIELDS = {"own": "RssAnon", "mapped": "RssFile", "resident": "VmRSS"}
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


if __name__ == "__main__":
    asked = specification(__doc__)
    print(json.dumps(measure(Path(asked["path"]), asked["packing"])))
