"""Versions of installed packages."""

from __future__ import annotations

import importlib.metadata


def version_of(package: str, missing: str = "") -> str:
    """The version of a package; what stands for it where it is missing, or run from its sources."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return missing
