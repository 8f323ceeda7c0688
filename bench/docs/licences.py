"""`python -m bench.docs.licences`: the licences of what `pip install lowtide` brings, in docs/licences.md.

Names, versions and licences are those of the packages that are installed here, as their own metadata say. A package
that says nothing is named as such: look at its repository.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from typing import Any, NamedTuple

from packaging.requirements import Requirement

from bench.measuring.arguments import no_options
from bench.measuring.processes import ROOT

PAGE = ROOT / "docs" / "licences.md"
IN_A_FILE = "in the file LICENSE of its wheel"
SAID_NOTHING = "not said in its metadata"
LONGEST = 60
"""Characters of a licence's name; some packages put the whole text there."""
HEAD = """# Licences of dependencies

<!-- written by `python -m bench.docs.licences`, a part of `make docs` -->

lowtide is under Apache-2.0. What `pip install lowtide` brings on Linux, at the versions that the tests run with, and
what each of the extras adds:

"""
TAIL = """
The wheel of torch that PyPI has also brings NVIDIA's CUDA libraries (`nvidia-*`), under NVIDIA's own licence, and
Triton (MIT). The builds for CPUs bring neither.
"""


class Licence(NamedTuple):
    """A line of the page."""

    name: str
    version: str
    licence: str
    extra: str
    """With which it comes; empty where it always does."""


def main() -> int:
    no_options(__doc__)
    write_page()
    return 0


def write_page() -> None:
    """Writes the page of what is installed here. Of an extra that is not whole here, the rows that the page has stay;
    which these are is printed."""
    recorded = written() if PAGE.exists() else {}
    found = licences(EXTRAS)
    kept, missing = kept_rows(found, recorded, {extra: missing_of(extra) for extra in EXTRAS})
    for extra, names in missing.items():
        rows = ", ".join(each.name for each in kept if each.extra == extra) or "none"
        print(f"lowtide[{extra}]: {', '.join(names)} not installed here; rows kept as they were recorded: {rows}")
    order = ("", *EXTRAS)
    rows = sorted([*found, *kept], key=lambda each: (order.index(each.extra), each.name))
    PAGE.write_text(page(rows), encoding="utf-8")


def kept_rows(
    found: Iterable[Licence], recorded: Mapping[str, Licence], missing: Mapping[str, Sequence[str]]
) -> tuple[list[Licence], dict[str, Sequence[str]]]:
    """The recorded rows of extras that are not whole here, and what each of these extras lacks."""
    names, lacking = {each.name for each in found}, {extra: each for extra, each in missing.items() if each}
    return [row for name, row in recorded.items() if name not in names and row.extra in lacking], lacking


def missing_of(extra: str) -> list[str]:
    """The packages that an extra names and that are not installed."""
    absent = []
    for requirement in map(Requirement, distribution("lowtide").requires or ()):
        marker = requirement.marker
        if marker is not None and marker.evaluate({"extra": extra}) and not marker.evaluate({"extra": ""}):
            try:
                distribution(requirement.name)
            except PackageNotFoundError:
                absent.append(canonical(requirement.name))
    return absent


EXTRAS = ("bnb", "ao", "low-rank", "gguf")
"""Those that are looked at, where their packages are installed."""


def licences(extras: Iterable[str] = ()) -> list[Licence]:
    """All that lowtide needs, and what needs those, by name; then what each extra adds."""
    found: dict[str, Licence] = {}
    for extra in ("", *extras):
        reached = _reached("lowtide", {extra} if extra else set())
        new = {name: each for name, each in reached.items() if name not in found and name != "lowtide"}
        found |= {name: Licence(name, each.version, licence_of(each), extra) for name, each in sorted(new.items())}
    return list(found.values())


def _reached(name: str, extras: set[str]) -> dict[str, Distribution]:
    """The installed packages that one needs, itself among them."""
    found: dict[str, Distribution] = {}
    waiting = [(name, extras)]
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        name, asked = waiting.pop()
        key = canonical(name), frozenset(asked)
        if key in seen:
            continue
        seen.add(key)
        try:
            there = distribution(name)
        except PackageNotFoundError:
            continue  # of an extra that is not installed
        found[key[0]] = there
        for requirement in map(Requirement, there.requires or ()):
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in asked or {""}):
                waiting.append((requirement.name, requirement.extras))
    return found


def canonical(name: str) -> str:
    """A package's name as all spellings of it are."""
    return re.sub(r"[-_.]+", "-", name).lower()


def licence_of(package: Distribution) -> str:
    """What a package says of its licence: an SPDX expression, a short name, or its classifiers."""
    said: Any = package.metadata
    if expression := said.get("License-Expression"):
        return expression
    text = " ".join((said.get("License") or "").split())
    if text and len(text) <= LONGEST and text.lower() != "unknown":
        return text
    classified = [each for each in said.get_all("Classifier") or () if each.startswith("License :: ")]
    names = [each.rsplit(" :: ", 1)[1] for each in classified]
    return ", ".join(names) or (IN_A_FILE if said.get("License-File") else SAID_NOTHING)


def page(found: Iterable[Licence]) -> str:
    """The text of the page."""
    lines = ["| package | version | licence | with |", "|---|---|---|---|"]
    lines += [f"| {each.name} | {each.version} | {each.licence} | {_with(each)} |" for each in found]
    return HEAD + "\n".join(lines) + "\n" + TAIL


def _with(each: Licence) -> str:
    return f"`lowtide[{each.extra}]`" if each.extra else ""


def written() -> Mapping[str, Licence]:
    """What the page says, by name."""
    rows = re.findall(r"^\| ([^ |]+) \| ([^|]+) \| ([^|]+) \| (.*) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return {
        name: Licence(name, version, licence, with_.removeprefix("`lowtide[").removesuffix("]`"))
        for name, version, licence, with_ in rows
        if name != "package"
    }


if __name__ == "__main__":
    sys.exit(main())
