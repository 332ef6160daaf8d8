"""The optional packages: which extra brings which, and what to say when one is missing."""

from __future__ import annotations

from importlib.util import find_spec

from service.errors import UnavailableError

EXTRAS = {
    "train": ("torch", "numpy", "safetensors", "xxhash"),
    "hf": ("transformers",),
    "tensorboard": ("tensorboard",),
    "replay": ("numpy", "matplotlib"),
    "export": ("pyarrow",),
    "postgres": ("sqlalchemy", "psycopg"),
}


def require_extra(extra: str) -> None:
    """Look for the packages of an extra without importing them.

    Raises:
        UnavailableError: naming the first that is not installed.
    """
    for package in EXTRAS[extra]:
        if find_spec(package) is None:
            raise missing_package(package, extra)


def missing_package(package: str, extra: str) -> UnavailableError:
    return UnavailableError(f"Python package {package} is not installed", remedy=f"pip install 'wadiloco[{extra}]'")
