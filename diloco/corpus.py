"""The text files that a corpus is made of; needs no numerics, so that an agent can look before it starts a worker."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from service.errors import InputError

TEXT_SUFFIXES = frozenset({".py", ".txt", ".rst", ".md", ".pyi"})
INSTALLED_PACKAGES = frozenset({"site-packages", "dist-packages"})


def corpus_files(paths: Sequence[Path]) -> list[Path]:
    """The files (of directories: the text files in them, sorted); no path: the sources of Python's own library.

    Raises:
        InputError: a path does not exist or may not be read, or there is no text file at all.
    """
    try:
        files = list(_text_files(paths)) if paths else list(_library_files())
    except OSError as exc:
        raise InputError(f"cannot read {exc.filename}: {exc.strerror or exc}", field="data", remedy=_remedy()) from exc
    if not files:
        shown = ", ".join(map(str, paths)) or sysconfig.get_path("stdlib")
        raise InputError(f"no text file in {shown}", field="data", remedy=_remedy())
    return files


def check_corpus(paths: Sequence[Path]) -> None:
    """See that the paths exist and hold text, without reading it.

    Raises:
        InputError: they do not.
    """
    for file in corpus_files(paths):
        try:
            if file.stat().st_size:
                return
        except OSError as exc:
            raise InputError(f"cannot read {file}: {exc.strerror or exc}", field="data", remedy=_remedy()) from exc
    raise InputError(f"all files are empty in {', '.join(map(str, paths))}", field="data", remedy=_remedy())


def _text_files(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_dir():
            yield from sorted(file for file in path.rglob("*") if file.suffix in TEXT_SUFFIXES and file.is_file())
        elif path.exists():
            yield path
        else:
            nearest = next(parent for parent in path.absolute().parents if parent.exists())
            raise InputError(
                f"{path} does not exist, only {nearest} does",
                field="data",
                remedy="give existing text files or folders",
            )


def _library_files() -> Iterator[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    for file in _text_files([root]):
        if INSTALLED_PACKAGES.isdisjoint(file.relative_to(root).parts):
            yield file


def _remedy() -> str:
    return f"give files with text, or a folder with {', '.join(sorted(TEXT_SUFFIXES))}"
