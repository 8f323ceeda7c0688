"""`python -m docs_site`: builds the website of the documentation with Zensical, whose first fault ends it."""

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from docs_site.llms_text import llms_text, pages_of
from docs_site.moved import write_redirects
from docs_site.sources import Sources, write_sources

ROOT = Path(__file__).parents[1]
CONFIG = Path(__file__).parent / "zensical.yml"
SITE = ROOT / "build" / "site"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m docs_site", description=__doc__)
    parser.add_argument("--to", type=Path, default=SITE, help="the folder of the site, which is replaced")
    site = parser.parse_args(argv).to.resolve()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
        sources = write_sources(folder / "docs", config.get("repo_url"))
        status = build(folder, config | {"nav": sources.navigation})
        if status:
            return status
        shutil.rmtree(site, ignore_errors=True)
        shutil.move(folder / "site", site)
    finish(site, config, sources)
    return 0


def build(folder: Path, config: dict[str, Any]) -> int:
    """Runs Zensical over `docs` of a folder, into its `site`; returns its exit status, having shown what it says."""
    path = folder / "zensical.yml"
    path.write_text(yaml.safe_dump(config | {"docs_dir": "docs", "site_dir": "site"}), encoding="utf-8")
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--config-file", str(path)]
    built = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if built.returncode:
        print(built.stdout, file=sys.stderr)
    return built.returncode


def finish(site: Path, config: dict[str, Any], sources: Sources) -> None:
    """Adds the addresses that pages had before; `llms.txt`, and the Markdown of each page beside it."""
    write_redirects(site)
    for path, text in sources.markdown.items():
        (site / path).write_text(text, encoding="utf-8")
    sections = {
        title: pages_of(value)
        for entry in sources.navigation
        for title, value in entry.items()
        if not isinstance(value, str)
    }
    text = llms_text(config["site_name"], config["site_description"], sections, sources.markdown)
    (site / "llms.txt").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
