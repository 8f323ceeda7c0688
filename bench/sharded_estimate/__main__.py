"""`python -m bench.sharded_estimate`: the peak of a rank predicted, and the same ranks measured.

Each run is predicted in one process, and trained over gloo on a CPU, each rank in a process of its own with one thread.
What is compared is the resident peak of the whole process of the rank that holds most, loading included. Its heap is
as the `lowtide` command sets it up. All micro-batches are the heaviest one, which not all engines rehearse. See
`cases.py` for the runs.
"""

import sys

from bench.estimate.comparison import Comparison, compare, parse
from bench.measuring.results import SHARDED_ESTIMATE
from bench.sharded_estimate.cases import CASES

SUMMARY = "Compare the predicted peak of a rank with measured ones."
RANKS = Comparison("sharded-estimate", SHARDED_ESTIMATE, CASES)


def main(argv: list[str] | None = None) -> int:
    """Measures, prints and records; returns 1 where a run fails."""
    return compare(RANKS, parse(argv, RANKS, SUMMARY))


if __name__ == "__main__":
    sys.exit(main())
