"""Runs lowtide into the faults of this folder, and prints how many of how many came out right.

    python -m tests.faults                     all kinds
    python -m tests.faults kills --only resume  one kind, and of it the cases whose name contains "resume"

Each case runs in a process and a folder of its own, several at a time. The exit status is 1 if a case was wrong or was
not reached in time.
"""

from __future__ import annotations

import argparse
import os
import pkgutil
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.support.ranks.processes import PRELOAD
from tests.support.recording import record_if_asked
from tests.support.signals import in_the_foreground

from .case import CONTEXT, Case, print_to

OUTPUT, REASON = "output.txt", "reason.txt"
"""Files beside a case's folder: what it printed, and why it is wrong."""
RIGHT = "right"
"""The reason of a case that came out right."""
SHOWN_LINES = 15


def kinds() -> dict[str, str]:
    """The kinds of faults, with a line on each."""
    found = {}
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        if module.name.startswith("__"):
            continue
        loaded = import_module(f"{__package__}.{module.name}")
        if hasattr(loaded, "cases"):
            found[module.name] = (loaded.__doc__ or "").strip().split("\n")[0]
    return found


def cases_of(kind: str, seed: int) -> dict[str, Case]:
    """The cases of a kind by name."""
    cases = list(import_module(f"{__package__}.{kind}").cases(seed))
    by_name = {case.name: case for case in cases}
    assert len(by_name) == len(cases), f"{kind} has two cases of one name"
    return by_name


def run_case(kind: str, name: str, seed: int, folder: str) -> None:
    """What the process of a case does; leaves the reason in a file if it is wrong."""
    home = Path(folder)
    os.setpgid(0, 0)  # what it starts can be ended with it
    print_to(home / OUTPUT)
    work = home / "work"
    work.mkdir()
    os.chdir(work)
    try:
        with in_the_foreground():
            cases_of(kind, seed)[name].check(work)
        reason = RIGHT
    except BaseException as error:
        traceback.print_exc()
        reason = f"{type(error).__name__}: {error}"
    (home / REASON).write_text(reason)


@dataclass
class Running:
    """A case that runs."""

    kind: str
    case: Case
    folder: Path
    process: BaseProcess
    begun: float = field(default_factory=time.monotonic)

    def ended(self) -> bool:
        """Whether it is over, by itself or by its time limit."""
        if self.process.exitcode is not None:
            return True
        if time.monotonic() - self.begun <= self.case.seconds:
            return False
        self.end()
        (self.folder / REASON).write_text(f"it took longer than {self.case.seconds:.0f} s")
        return True

    def end(self) -> None:
        """Ends it, with all that it started."""
        try:
            os.killpg(self.process.pid or 0, signal.SIGKILL)
        except ProcessLookupError:
            self.process.kill()
        self.process.join()

    @property
    def reason(self) -> str:
        """Why it is wrong, or `RIGHT`."""
        path = self.folder / REASON
        return path.read_text() if path.exists() else f"its process died with exit code {self.process.exitcode}"

    def printed(self) -> str:
        """The last lines of what it printed."""
        path = self.folder / OUTPUT
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        return "\n".join(f"    {line}" for line in lines[-SHOWN_LINES:])


def run_all(chosen: list[tuple[str, Case]], jobs: int, seed: int, deadline: float) -> Iterator[Running]:
    """Runs cases, some at a time, and gives each as it ends; those that the deadline cuts off are not given."""
    waiting, running = list(reversed(chosen)), []
    with tempfile.TemporaryDirectory(prefix="lowtide-faults-") as root:
        try:
            while (waiting or running) and time.monotonic() < deadline:
                while waiting and len(running) < jobs:
                    kind, case = waiting.pop()
                    folder = Path(tempfile.mkdtemp(dir=root))
                    process = CONTEXT.Process(target=run_case, args=(kind, case.name, seed, str(folder)))
                    process.start()
                    running.append(Running(kind, case, folder, process))
                for each in [each for each in running if each.ended()]:
                    running.remove(each)
                    yield each
                    shutil.rmtree(each.folder, ignore_errors=True)
                time.sleep(0.01)
        finally:
            for each in running:
                each.end()


def main() -> int:
    """Runs what the command line asks for; returns the exit status."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    known = kinds()
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(known)}; all if left out")
    parser.add_argument("--only", default="", metavar="TEXT", help="the cases whose name contains this")
    parser.add_argument("--jobs", type=int, default=2, help="cases that run at a time (2)")
    parser.add_argument("--minutes", type=float, default=10, help="time limit of all of them (10)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and bytes that are drawn (0)")
    given = parser.parse_args()
    if unknown := set(given.kinds) - known.keys():
        parser.error(f"there is no kind {min(unknown)!r}: take some of {', '.join(known)}")
    CONTEXT.set_forkserver_preload([PRELOAD])
    asked = given.kinds or list(known)
    chosen = [(kind, case) for kind in asked for case in cases_of(kind, given.seed).values() if given.only in case.name]
    deadline, begun = time.monotonic() + 60 * given.minutes, time.monotonic()
    right, wrong = dict.fromkeys(asked, 0), 0
    for each in run_all(chosen, given.jobs, given.seed, deadline):
        if each.reason == RIGHT:
            right[each.kind] += 1
            continue
        wrong += 1
        print(f"WRONG {each.kind}: {each.case.name}: {each.reason}\n{each.printed()}", flush=True)
    print(f"\n{'right':>12}  kind")
    for kind in asked:
        count = sum(of == kind for of, _ in chosen)
        print(f"{right[kind]:>5} of {count:>3}  {kind}: {known[kind]}")
    left = len(chosen) - sum(right.values()) - wrong
    late = f", {left} not reached in {given.minutes:g} minutes" if left else ""
    print(f"{sum(right.values()):>5} of {len(chosen):>3}  in {time.monotonic() - begun:.0f} s{late}")
    if wrong or left:
        return 1
    record_if_asked(len(chosen), 0, time.monotonic() - begun)
    return 0
