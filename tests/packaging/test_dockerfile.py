"""The Dockerfile: its lines, run one after the other in an empty environment, since no image can be built here.

What is run is what an image would be made of but for the base, Debian's packages and the user. Packages are taken from
where the tests have them.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.support.packaging import DEPENDENCIES, MISSING, ROOT, run

OFFLINE = {"PIP_NO_DEPS": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_NO_INDEX": "1", "PYTHONPATH": DEPENDENCIES}
OF_ROOT = ("apt-get", "useradd")
"""What begins the lines that need a machine of one's own."""


def instructions() -> list[tuple[str, str]]:
    """The words of each line: (`RUN`, what it runs)."""
    text = re.sub(r"\\\n\s*", " ", (ROOT / "Dockerfile").read_text(encoding="utf-8"))
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines)]


def kept_of(pattern: str) -> bool:
    """Whether .dockerignore lets a path of the Dockerfile into an image."""
    return f"!{pattern}" in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()


def test_what_it_copies_is_there_and_is_let_in():
    copied = [name for word, rest in instructions() if word == "COPY" for name in rest.split()[:-1]]
    assert {"pyproject.toml", "constraints.txt", "src"} <= {*copied}
    for name in copied:
        assert (ROOT / name).exists()
        assert kept_of(name), f".dockerignore leaves out {name}"


def test_its_extras_and_its_python_are_those_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    arguments = dict(rest.split("=") for word, rest in instructions() if word == "ARG")
    assert {*json.loads(arguments["EXTRAS"]).split(",")} <= project["optional-dependencies"].keys()
    (base,) = (rest for word, rest in instructions() if word == "FROM")
    python = base.removeprefix("python:").removesuffix("-slim")
    assert f"Programming Language :: Python :: {python}" in project["classifiers"]


@pytest.mark.slow
def test_its_lines_make_an_environment_with_the_command(tmp_path):
    pytest.importorskip("setuptools", reason=MISSING)
    run(sys.executable, "-m", "venv", "env", folder=tmp_path)
    build, said = tmp_path / "lowtide", {}
    build.mkdir()
    surroundings = {**os.environ, **OFFLINE, "PATH": f"{tmp_path}/env/bin:{os.environ['PATH']}"}
    for word, rest in instructions():
        if word == "ARG":
            name, _, value = rest.partition("=")
            surroundings[name] = json.loads(value)
        elif word == "COPY":
            for name in rest.split()[:-1]:
                source, target = ROOT / name, build / name
                if source.is_dir():
                    shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
                else:
                    shutil.copy(source, target)
        elif word == "RUN" and not rest.startswith(OF_ROOT):
            done = subprocess.run(["sh", "-c", rest], cwd=build, env=surroundings, capture_output=True, text=True)
            assert done.returncode == 0, f"{rest}\n{done.stdout}{done.stderr}"
            said[rest.split()[-1]] = done.stdout
        elif word in ("ENTRYPOINT", "CMD"):
            said[word] = json.loads(rest)
    assert "already satisfied: torch" in said["torch"]  # pip took it for one that is installed
    shutil.rmtree(build)
    shown = run(f"{tmp_path}/env/bin/{said['ENTRYPOINT'][0]}", *said["CMD"], folder=tmp_path, PYTHONPATH=DEPENDENCIES)
    assert "doctor" in shown
    assert Path(tmp_path, "env/bin/lowtide").is_file()
