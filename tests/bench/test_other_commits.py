"""Children that import the library of another commit."""

import os
import subprocess
import sys

import pytest

from bench.measuring.other_commits import source_of
from bench.measuring.processes import ROOT

pytestmark = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="the source is no git repository")
WHERE = "import importlib.util as util; print(util.find_spec('lowtide').origin, util.find_spec('bench').origin)"


def imported(environment: dict[str, str]) -> list[str]:
    command = [sys.executable, "-c", WHERE]
    done = subprocess.run(command, env=os.environ | environment, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_a_commits_library_is_imported_with_this_ones_benchmarks():
    with source_of("HEAD") as environment:
        library, benchmarks = imported(environment)
    tree = environment["PYTHONPATH"].split(os.pathsep)[0]
    assert library.startswith(tree)
    assert benchmarks.startswith(str(ROOT))
    assert not os.path.exists(tree)


def test_no_commit_is_what_is_here():
    with source_of(None) as environment:
        library, _ = imported(environment)
    assert library.startswith(str(ROOT / "src"))
