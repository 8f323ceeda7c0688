"""The wheel is complete, and works in an environment that has nothing of the checkout."""

import json
import shutil
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.support.packaging import DEPENDENCIES, MISSING, ROOT, run

SOURCES = ROOT / "src"
UNBUILT = shutil.ignore_patterns("__pycache__", "*.egg-info")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    pytest.importorskip("setuptools", reason=MISSING)
    folder = tmp_path_factory.mktemp("sources")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(SOURCES, folder / "src", ignore=UNBUILT)
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", "dist", ".", folder=folder)
    (built,) = (folder / "dist").glob("*.whl")
    return built


@pytest.mark.slow
def test_the_wheel_has_every_file_of_the_package(wheel):
    there = {name for name in zipfile.ZipFile(wheel).namelist() if not name.split("/")[0].endswith(".dist-info")}
    files = {path.relative_to(SOURCES).as_posix() for path in SOURCES.rglob("*") if path.is_file()}
    assert there == {name for name in files if "__pycache__" not in name and ".egg-info" not in name}
    assert {"lowtide/py.typed", "lowtide/trainers/public.pyi"} <= there
    (metadata,) = (name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".dist-info/METADATA"))
    said = zipfile.ZipFile(wheel).read(metadata).decode().splitlines()
    assert {"Author: The lowtide authors", "License-Expression: Apache-2.0"} <= {*said}
    assert any(line.startswith("Keywords: fine-tuning,") for line in said)


@pytest.mark.slow
def test_the_wheel_in_an_empty_environment_takes_the_engineers_walk(wheel, tmp_path):
    """Logs, signals, exit statuses and JSON, by the Python of that environment (`examples/walk_engineer.py`)."""
    run(sys.executable, "-m", "venv", "--without-pip", "env", folder=tmp_path)
    python = tmp_path / "env" / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, folder=tmp_path)
    report = json.loads(run(tmp_path / "env/bin/lowtide", "doctor", "--json", folder=tmp_path, PYTHONPATH=DEPENDENCIES))
    assert not [each for each in report["versions"] if each["wrong"]]
    recipes = run(tmp_path / "env/bin/lowtide", "recipes", "list", folder=tmp_path, PYTHONPATH=DEPENDENCIES)
    assert "qwen-8gb" in recipes
    where = run(python, "-c", "import lowtide; print(lowtide.__file__)", folder=tmp_path, PYTHONPATH=DEPENDENCIES)
    assert where.startswith(str(tmp_path))
    for name in ("commands.py", "walk_engineer.py"):
        shutil.copy(ROOT / "examples" / name, tmp_path)
    said = run(python, "walk_engineer.py", folder=tmp_path, PYTHONPATH=DEPENDENCIES)
    assert "stopped with status 143" in said
    assert "resumed, and ended after step" in said


def test_versions_agree_and_extras_are_in_the_help_of_doctor():
    import lowtide
    from lowtide.cli.doctor import OPTIONAL

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["version"] == lowtide.__version__
    named = {each.install.removeprefix("lowtide[").removesuffix("]") for each in OPTIONAL if "[" in each.install}
    assert named == project["optional-dependencies"].keys() - {"bench", "dev", "site"}
