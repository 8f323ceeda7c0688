"""The documentation as a website: `make site` builds it into `build/site`, from `docs/` and the docstrings.

`zensical.yml` is its configuration, `sources.py` writes what Zensical reads, `__main__.py` builds it, and each other
file is one thing that a page needs and Zensical does not do by itself. Nothing is fetched from elsewhere, neither by
the build nor by a reader's browser.
"""
