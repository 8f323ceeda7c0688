"""Runs tests in forks of a process that has imported the libraries already: what a change costs is its tests.

A fork imports lowtide from a copy of the tree that belongs to its worker, so that the checkout is never changed. It is
ended with all that it started when its time is over.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

LIBRARIES = (
    *(
        "torch",
        "transformers",
        "peft",
        "accelerate",
        "datasets",
        "trl",
        "hypothesis",
        "pytest",
        "matplotlib",
        "coverage",
    ),
    *("transformers.trainer", "transformers.models.auto.modeling_auto", "transformers.models.llama.modeling_llama"),
    *("torch._dynamo", "torch.distributed", "jaxtyping", "beartype", "rich.console", "scipy", "sklearn"),
)
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRITON_INTERPRET": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "COVERAGE_CORE": "ctrace",
}
MOST_BYTES = 8 << 30
"""Of a fork: a changed loop may add to a list for ever."""
QUIETLY = ["-o", "addopts=", "-q", "-p", "no:cacheprovider", "--strict-markers", "-n", "0"]
LONGEST_TEST = 120
"""Seconds after which a test has failed, as the clock counts them: one that waits for ever uses no CPU time."""
WAITING = 4
"""A fork has so many times its CPU time to come to its end: it shares the machine, and may wait."""
OWN = ("lowtide", "tests", "bench")
FAILED, TOO_LONG, ENDED = "failed", "too long", "ended"


def warm_up() -> None:
    """Imports everything that does not belong to the tree. Threads would not survive a fork."""
    os.environ |= ENVIRONMENT
    for name in LIBRARIES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    importlib.import_module("torch").set_num_threads(1)


def in_fork(tree: Path, work: Callable[[], dict[str, Any]], seconds: float, *, original: bool) -> dict[str, Any]:
    """What some work in a copy of the tree returns; `{"outcome": ...}` where it did not come to its end.

    Args:
        seconds: of CPU time, which a busy machine does not use up.
        original: whether the tree is unchanged; compiled files are kept then.
    """
    answer = tree.parent / f"{tree.name}.answer"
    answer.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(seconds), math.ceil(seconds) + 5))
        _work(tree, work, answer, original)
    until = time.monotonic() + WAITING * seconds
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > until:
            _end(child)
            os.waitpid(child, 0)
            return {"outcome": TOO_LONG}
        time.sleep(0.02)
    _end(child)
    if os.WIFSIGNALED(ended[1]) and os.WTERMSIG(ended[1]) == signal.SIGXCPU:
        return {"outcome": TOO_LONG}
    return json.loads(answer.read_text()) if answer.exists() else {"outcome": ENDED}


def _end(group: int) -> None:
    """Ends all processes that a fork left behind."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def _work(tree: Path, work: Callable[[], dict[str, Any]], answer: Path, original: bool) -> None:
    try:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
        log = os.open(tree.parent / f"{tree.name}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(log, stream)
        os.chdir(tree)
        for name in [each for each in sys.modules if each.split(".")[0] in OWN]:
            del sys.modules[name]
        sys.path[:] = [str(tree / "src"), str(tree), *(each for each in sys.path if not _is_own(each))]
        sys.dont_write_bytecode = not original
        os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])
        part = answer.with_suffix(".part")
        part.write_text(json.dumps(work()))
        part.replace(answer)
    except BaseException as error:
        print(repr(error), flush=True)
    finally:
        sys.stdout.flush()
        os._exit(0)


def _is_own(folder: str) -> bool:
    return folder == "" or (Path(folder) / "lowtide").is_dir() or (Path(folder) / "bench/mutants").is_dir()


def run_tests(files: Sequence[str], plugin: object, *, first_failure: bool) -> int:
    """Runs the fast tests of some files in this process; returns pytest's status."""
    import pytest

    # In brackets, since `not slow` alone fails tests of more than some seconds, and coverage makes tests slower.
    words = [*files, "-m", "(not slow)", *QUIETLY]
    return int(pytest.main([*words, *(["-x"] if first_failure else [])], plugins=[plugin]))


def cpu_seconds() -> float:
    """CPU time of this process, and of those children of it that have ended."""
    return sum(os.times()[:4])


def _give_up(*_: object) -> None:
    raise TimeoutError(f"a fast test took longer than {LONGEST_TEST} s")


class Recorder:
    """A plugin of pytest: keeps the tests that are wanted, and notes how each came out and its CPU time.

    Args:
        wanted: tests by their ids; None for all.
        begins: is told which test begins.
    """

    def __init__(self, wanted: set[str] | None = None, begins: Callable[[str], object] = lambda test: None) -> None:
        self.wanted, self.begins = wanted, begins
        self.outcomes: dict[str, str] = {}
        self.seconds: dict[str, float] = {}
        self.began = 0.0

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        if self.wanted is not None:
            items[:] = [each for each in items if each.nodeid in self.wanted]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.begins(nodeid)
        self.began = cpu_seconds()
        signal.signal(signal.SIGALRM, _give_up)
        signal.alarm(LONGEST_TEST)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        signal.alarm(0)
        self.seconds[nodeid] = cpu_seconds() - self.began

    def pytest_runtest_logreport(self, report: Any) -> None:
        name = report.nodeid
        if self.outcomes.get(name, "passed") == "passed":
            self.outcomes[name] = report.outcome

    @property
    def failed(self) -> str | None:
        return next((name for name, outcome in self.outcomes.items() if outcome == "failed"), None)
