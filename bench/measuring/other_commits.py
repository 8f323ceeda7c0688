"""Other commits' lowtide, timed in turns with this one: the benchmark's own code stays this commit's."""

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.measuring.processes import ROOT

AGAINST = "a commit whose lowtide takes turns with this one's; public names alone are called"


@contextlib.contextmanager
def source_of(commit: str | None) -> Iterator[dict[str, str]]:
    """Around the runs of children: the variables under which one imports the library as it was at a commit; of None,
    as it is here."""
    if commit is None:
        yield importing(ROOT)
        return
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder, "source")
        subprocess.run(["git", "worktree", "add", "-q", "--detach", tree, commit], check=True, cwd=ROOT)
        try:
            yield importing(tree)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", tree], check=True, cwd=ROOT)


def importing(tree: Path) -> dict[str, str]:
    """The variables under which a process imports the library of a source tree."""
    return {"PYTHONPATH": os.pathsep.join([str(tree / "src"), str(ROOT)])}
