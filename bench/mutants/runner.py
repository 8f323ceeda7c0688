"""Do the fast tests notice faults? Makes small changes of the source, one at a time, and runs the tests of their lines.

    python -m bench.mutants [--count 300] [--seed 0] [--workers 2] [--only PART] [--again] [--record]

A seeded sample of changes (`changes.py`) is spread over the packages that compute. First each file of tests runs once
under coverage, which tells the fast tests of each line (`covering.py`). Then each change is made in a copy of the tree,
and the tests of its line run in a fork of a process that has imported the libraries already (`warm.py`), until one
fails. Everything is noted at once in build/mutants, so that a run that was ended goes on where it was; `--again` runs
those that survived once more. What survives is listed in survivors.json, where people write the reason: a change whose
reason begins with "equivalent" changes no result, and does not count.

mutmut 3 was considered: it selects tests by function, and has no changes of this field, such as a missing detach, a
denominator, or min for max. Cosmic Ray was too: it starts pytest anew for each change, and importing torch and
transformers takes longer than most tests.
"""

from __future__ import annotations

import argparse
import bisect
import importlib.util
import itertools
import json
import multiprocessing
import os
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from .changes import PACKAGES, Change, sample
from .covering import MOST_SECONDS, Covered, Covering, traced
from .warm import ENDED, FAILED, TOO_LONG, Recorder, in_fork, run_tests, warm_up

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build/mutants"
RESULTS = FOLDER / "results.jsonl"
SURVIVORS = Path(__file__).with_name("survivors.json")
SURVIVED, NOT_COVERED = "survived", "not covered"
CAUGHT = (FAILED, TOO_LONG)
FILES_AT_ONCE = 4
"""Of tests in one session of pytest: the next begins only where none failed."""
SLACK, SLOWER = 30, 3
"""A change has so many seconds of CPU time, and so many times those that its tests took under coverage."""


def main(argv: list[str] | None = None) -> int:
    options = _parse(argv)
    changes = [each for each in sample(ROOT, options.count, options.seed) if options.only in each.key]
    FOLDER.mkdir(parents=True, exist_ok=True)
    if importlib.util.find_spec("coverage") is None:
        raise SystemExit("coverage is needed, which lines a test runs cannot be told without it: pip install coverage")
    warm_up()
    covering = Covering(ROOT, FOLDER / "covers")
    missing = [each for each in covering.missing() if each.startswith(tuple(options.tests))]
    trees = [_tree(number) for number in range(options.workers)]
    for file, found in _over(trees, missing, _trace):
        if found.get("outcome") != ENDED:
            covering.note(file, found)
        outcomes = Counter(test["outcome"] for test in found.get("tests", {}).values())
        print(f"{file}: {dict(outcomes) or found.get('outcome', 'no fast test')}", flush=True)
    if not options.only_trace:
        known = {each["key"]: each for each in _known() if each["outcome"] in CAUGHT or not options.again}
        tests = covering.read()
        jobs = [_job(change, tests, options.most_seconds) for change in changes if change.key not in known]
        for job, found in _over(trees, jobs, _try):
            _note(job, found)
    return _report(changes, options)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.mutants", description=__doc__.splitlines()[0])  # type: ignore
    parser.add_argument("--count", type=int, default=300, help="how many changes")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="at once, each with a thread")
    parser.add_argument("--only", default="", help="changes that have this text in their file or lines")
    parser.add_argument("--tests", nargs="*", default=["tests/"], help="beginnings of the paths of tests to run")
    parser.add_argument(
        "--most-seconds", type=float, default=40, help="of CPU time of the tests of a change, as coverage timed them"
    )
    parser.add_argument("--again", action="store_true", help="run those that survived once more")
    parser.add_argument("--only-trace", action="store_true", help="find which tests run which lines, and end")
    parser.add_argument("--record", action="store_true", help="write the score to bench/results")
    return parser.parse_args(argv)


# -- workers -----------------------------------------------------------------------------------------------------------


def _tree(number: int) -> Path:
    """A copy of the files of the checkout, brought up to date."""
    tree = FOLDER / f"tree-{number}"
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, check=True, text=True).stdout.split("\0")
    wanted = {name for name in names if name and (ROOT / name).is_file()}
    for name in wanted:
        source, copy = ROOT / name, tree / name
        if not copy.exists() or copy.read_bytes() != source.read_bytes():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, copy)
    for copy in [each for each in tree.rglob("*") if each.is_file() and "__pycache__" not in each.parts]:
        if str(copy.relative_to(tree)) not in wanted:
            copy.unlink()
    return tree


def _over(
    trees: list[Path], jobs: list[Any], work: Callable[[Path, Any], dict]
) -> Iterator[tuple[Any, dict[str, Any]]]:
    """What some work makes of each job, as it ends; a worker has a tree of its own."""
    context = multiprocessing.get_context("fork")
    waiting, found = context.Queue(), context.Queue()
    for number in range(len(jobs)):
        waiting.put(number)
    for _ in trees:
        waiting.put(None)

    def serve(tree: Path) -> None:
        while (number := waiting.get()) is not None:
            found.put((number, work(tree, jobs[number])))

    workers = [context.Process(target=serve, args=(tree,)) for tree in trees]
    for worker in workers:
        worker.start()
    for _ in jobs:
        number, answer = found.get()
        yield jobs[number], answer
    for worker in workers:
        worker.join()


def _trace(tree: Path, file: str) -> dict[str, Any]:
    return in_fork(tree, lambda: traced(tree, file), MOST_SECONDS, original=True)


# -- one change --------------------------------------------------------------------------------------------------------


def _job(change: Change, tests: Covered, most_seconds: float) -> dict[str, Any]:
    """The quickest tests of a change, as many as take no longer than `most_seconds`, by their files."""
    names = tests.of(change)
    ends = [*itertools.accumulate(tests.seconds[name] for name in names)]
    taken = names[: max(bisect.bisect_right(ends, most_seconds), 1)]
    files: dict[str, list[str]] = {}
    for name in taken:
        files.setdefault(name.split("::")[0], []).append(name)
    seconds = ends[len(taken) - 1] if taken else 0.0
    return {"change": change, "files": [*files.values()], "seconds": seconds, "left_out": len(names) - len(taken)}


def _try(tree: Path, job: dict[str, Any]) -> dict[str, Any]:
    """Makes a change in a tree, runs its tests, and takes it back."""
    if not job["files"]:
        return {"outcome": NOT_COVERED}
    change, file = job["change"], tree / job["change"].path
    original, times = file.read_bytes(), file.stat()
    begun = time.monotonic()
    file.write_bytes(change.made_in(original))
    try:
        limit = SLACK + SLOWER * job["seconds"]
        found = in_fork(tree, lambda: _run(job["files"]), limit, original=False)
    finally:
        file.write_bytes(original)
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    if found["outcome"] not in (SURVIVED, TOO_LONG):
        found["outcome"] = FAILED
    return found | {"took": round(time.monotonic() - begun, 1)}


def _run(files: list[list[str]]) -> dict[str, Any]:
    for first in range(0, len(files), FILES_AT_ONCE):
        some = files[first : first + FILES_AT_ONCE]
        recorder = Recorder({name for names in some for name in names})
        status = run_tests([names[0].split("::")[0] for names in some], recorder, first_failure=True)
        if status not in (0, 5):
            return {"outcome": FAILED, "test": recorder.failed or "could not be imported"}
    return {"outcome": SURVIVED}


# -- what is kept ------------------------------------------------------------------------------------------------------


def _known() -> Iterable[dict[str, Any]]:
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def _note(job: dict[str, Any], found: dict[str, Any]) -> None:
    change = job["change"]
    tests = {"tests": sum(map(len, job["files"])), "tests_left_out": job["left_out"]}
    entry = {"key": change.key, "kind": change.kind, "line": change.first, **found, **tests}
    with RESULTS.open("a") as file:
        file.write(json.dumps(entry) + "\n")
    print(f"{found['outcome']:>11} {change.path}:{change.first} {change.before}  ->  {change.after}", flush=True)


def _report(changes: list[Change], options: argparse.Namespace) -> int:
    """Prints the score and the survivors, and keeps the list of them."""
    latest = {each["key"]: each for each in _known()}
    found = {change.key: latest[change.key] for change in changes if change.key in latest}
    survivors = {key: each for key, each in found.items() if each["outcome"] not in CAUGHT}
    reasons = json.loads(SURVIVORS.read_text()) if SURVIVORS.exists() else {}
    caught = found.keys() - survivors.keys()
    reasons = {key: reason for key, reason in reasons.items() if key not in caught} | {
        key: reasons.get(key, "") for key in survivors
    }
    SURVIVORS.write_text(json.dumps(dict(sorted(reasons.items())), indent=1, ensure_ascii=False) + "\n")
    equivalent = {key for key in survivors if reasons[key].startswith("equivalent")}
    counted = len(found) - len(equivalent)
    for key in sorted(survivors):
        print(f"{survivors[key]['outcome']}: {key}\n    {reasons[key] or 'no reason given'}")
    print(f"{len(caught)} of {counted} changes were noticed; {len(equivalent)} more change no result", end="; ")
    print(f"{len(changes) - len(found)} of the sample were not run")
    if options.record and found:
        _record(found, reasons, len(equivalent), options)
    return 0


def _record(found: dict[str, dict], reasons: dict[str, str], equivalent: int, options: argparse.Namespace) -> None:
    from bench.measuring.measure import hardware
    from bench.measuring.results import versions, write

    outcomes = Counter(each["outcome"] for each in found.values())
    by_package = {
        package: dict(
            Counter(each["outcome"] for key, each in found.items() if key.startswith(f"src/lowtide/{package}/"))
        )
        for package in PACKAGES
    }
    by_kind: dict[str, Counter[str]] = {}
    for each in found.values():
        by_kind.setdefault(each["kind"], Counter())[each["outcome"]] += 1
    write(
        "mutants",
        {
            "kind": "mutants",
            "hardware": hardware("cpu"),
            "versions": versions(),
            "seed": options.seed,
            "sample": options.count,
            "run": len(found),
            "equivalent": equivalent,
            "outcomes": dict(outcomes),
            "score": sum(outcomes[each] for each in CAUGHT) / max(len(found) - equivalent, 1),
            "by_package": by_package,
            "by_kind": {kind: dict(counted) for kind, counted in sorted(by_kind.items())},
            "survivors": [
                {"change": key, "outcome": each["outcome"], "reason": reasons[key]}
                for key, each in sorted(found.items())
                if each["outcome"] not in CAUGHT
            ],
        },
    )
