"""The page of licences has what is installed."""

import tomllib
from importlib.metadata import PackageNotFoundError, version

import pytest

from bench.docs.licences import (
    EXTRAS,
    IN_A_FILE,
    PAGE,
    SAID_NOTHING,
    Licence,
    canonical,
    kept_rows,
    licence_of,
    licences,
    page,
    written,
)
from tests.support.packaging import ROOT

PINNED = dict(
    line.split("==") for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines() if "==" in line
)


class Package:
    """What a package's metadata say."""

    def __init__(self, classifiers: list[str], **said: str) -> None:
        self.metadata = self
        self.said, self.classifiers = said, classifiers

    def get(self, name: str) -> str | None:
        return self.said.get(name.replace("-", "_"))

    def get_all(self, name: str) -> list[str]:
        return self.classifiers


def test_everything_that_lowtide_needs_is_on_the_page_with_a_licence():
    there = written()
    needed = licences()
    assert len(needed) > 30
    assert {each.name for each in needed} - there.keys() == set(), "python -m bench.docs.licences"
    assert [each.name for each in needed if each.licence == SAID_NOTHING] == []
    for name, pinned in PINNED.items():
        try:
            installed = version(name).split("+")[0]
        except PackageNotFoundError:
            continue
        if installed == pinned and canonical(name) in there:
            assert there[canonical(name)].version.split("+")[0] == pinned, f"{name}: python -m bench.docs.licences"


def test_the_page_is_as_the_command_writes_it():
    assert page(written().values()).count("\n| ") == PAGE.read_text(encoding="utf-8").count("\n| ")


@pytest.mark.parametrize(
    ("package", "said"),
    [
        (Package([], License_Expression="MIT", License="x"), "MIT"),
        (Package(["License :: OSI Approved :: BSD License"], License="long " * 40), "BSD License"),
        (Package(["Topic :: X"], License="UNKNOWN"), SAID_NOTHING),
        (Package([], License_File="LICENSE"), IN_A_FILE),
    ],
)
def test_a_licence_is_told_from_what_the_metadata_say(package, said):
    assert licence_of(package) == said


def test_the_extras_that_are_looked_at_are_some():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert {*EXTRAS} <= project["optional-dependencies"].keys()


def test_rows_of_extras_that_are_not_installed_here_stay():
    recorded = {name: Licence(name, "1", "MIT", extra) for name, extra in {"a": "", "g": "gguf", "b": "bnb"}.items()}
    kept, lacking = kept_rows([recorded["a"]], recorded, {"gguf": ["g"], "bnb": []})
    assert kept == [recorded["g"]]  # what nothing needs any more goes
    assert lacking == {"gguf": ["g"]}
