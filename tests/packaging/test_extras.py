"""The extras go together: one set of versions satisfies all of them, with torch as it is pinned."""

import json
import shutil
import sys

import pytest

from tests.support.packaging import ROOT, run

EXTRAS = ("bnb", "ao", "liger", "deepspeed")
UNREACHABLE = ("(from versions: none)", "timed out")
"""What pip says of the package pip, which every index has, where no index can be reached. A pin that an index cannot
satisfy is a failure, since nothing is skipped once pip was there."""


@pytest.mark.slow
def test_extras_resolve_together(tmp_path):
    for name in ("pyproject.toml", "README.md", "LICENSE", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    package = tmp_path / "src" / "lowtide"
    package.mkdir(parents=True)
    shutil.copy(ROOT / "src" / "lowtide" / "__init__.py", package)
    run(sys.executable, "-m", "venv", "env", folder=tmp_path)
    pip = ("env/bin/python", "-m", "pip", "--disable-pip-version-check")
    try:
        run(*pip, "download", "--quiet", "--no-deps", "--dest", "wheels", "pip>=25", folder=tmp_path)
    except AssertionError as error:
        if any(words in str(error) for words in UNREACHABLE):
            pytest.skip("needs a package index, which cannot be reached")
        raise
    # Before pip 25 a dry run fetched whole wheels of torch.
    run(*pip, "install", "--quiet", "--upgrade", "--no-index", "--find-links", "wheels", "pip", folder=tmp_path)
    asked = ("install", "--dry-run", "--ignore-installed", "--quiet", "--report", "report.json")
    run(*pip, *asked, "-c", "constraints.txt", f".[{','.join(EXTRAS)}]", folder=tmp_path)
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    found = {each["metadata"]["name"].lower(): each["metadata"]["version"] for each in report["install"]}
    assert found["torch"].split("+")[0] == "2.13.0"
    assert {"bitsandbytes", "torchao", "liger-kernel", "deepspeed"} <= {name.replace("_", "-") for name in found}
