"""What tests of the package as it is installed share."""

import os
import subprocess
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parents[2]
DEPENDENCIES = sysconfig.get_paths()["purelib"]
"""The packages that the tests run with; as a plain entry of the path it brings no editable install with it."""
MISSING = "needs setuptools in the environment, to build without a network"


def run(*words: str | Path, folder: Path, **environment: str) -> str:
    """What a command prints; raises where it fails."""
    done = subprocess.run(
        [str(word) for word in words], cwd=folder, capture_output=True, text=True, env=os.environ | environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
