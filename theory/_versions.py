"""Versions of packages, for what is written to disk."""

import importlib.metadata


def installed(package: str) -> str:
    """`1.2.3`, or that it is not installed (as is this package where it is used from its folder)."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
