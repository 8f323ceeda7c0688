"""The documentation as a website: `make site` builds it into `build/site`, from `docs/` and the docstrings.

`mkdocs.yml` is its configuration, `hooks.py` what mkdocs calls, and each other file one thing that a page needs and
mkdocs does not do by itself. Nothing is fetched from elsewhere, neither by the build nor by a reader's browser.
"""
