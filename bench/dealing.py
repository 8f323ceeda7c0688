"""`python -m bench.dealing`: how long ranks wait for the heaviest of them, in the order of the rows and dealt.

Ranks of a step meet when the one with most tokens is done. Printed is how many tokens that one has, for each that ranks
have on average: 1.2 means that a sixth of the time of all others is waiting. Rows are those of the other benchmarks, in
shuffled order. No model runs.
"""

import argparse
import random
import statistics
import sys
from itertools import islice

import numpy as np
from rich.console import Console
from rich.table import Table
from torch.utils.data import BatchSampler

from bench.inputs.rows import CASES
from bench.inputs.tokenizer import load_tokenizer, tokenizer_for
from lowtide.trainers.order import DealtEvenly

RANKS, ROWS_EACH = (2, 4, 8), (2, 4, 16)


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    table = Table(title="tokens of the heaviest rank, for each of the mean")
    for column in ("rows", "ranks", "rows of each", "in order", "dealt"):
        table.add_column(column, justify="left" if column == "rows" else "right")
    for name in options.cases:
        lengths = lengths_of(name)
        for ranks in RANKS:
            for each in ROWS_EACH:
                plain = BatchSampler(shuffled(len(lengths)), each, drop_last=True)
                found = [
                    heaviest([*batches], lengths, ranks) for batches in (plain, DealtEvenly(plain, lengths, ranks, 1))
                ]
                table.add_row(name, str(ranks), str(each), *(f"{share:.2f}" for share in found))
    Console().print(table)
    return 0


def lengths_of(name: str) -> np.ndarray:
    """[rows]: tokens of each."""
    rows = CASES["sft"][name].rows()
    tokenizer = load_tokenizer(tokenizer_for(rows))
    chats = (tokenizer.apply_chat_template(row["messages"], return_dict=True) for row in rows)
    return np.array([len(chat["input_ids"]) for chat in chats])


def shuffled(count: int) -> list[int]:
    return random.Random(0).sample(range(count), count)


def heaviest(batches: list[list[int]], lengths: np.ndarray, ranks: int) -> float:
    """Over all steps that are full: tokens of the heaviest rank by the mean of ranks."""
    most, means = [], []
    turns = iter(batches)
    while len(step := list(islice(turns, ranks))) == ranks:
        tokens = [int(lengths[batch].sum()) for batch in step]
        most.append(max(tokens))
        means.append(statistics.mean(tokens))
    return sum(most) / sum(means)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=list(CASES["sft"]), default=list(CASES["sft"]))
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
