"""The text files that a corpus is made of; needs no numerics, so that an agent can look before it starts a worker."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
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


def file_sizes(paths: Sequence[Path]) -> dict[Path, int]:
    """The files of a corpus and their bytes, in order.

    Raises:
        InputError: as `corpus_files`.
    """
    files = corpus_files(paths)
    try:
        return {file: file.stat().st_size for file in files}
    except OSError as exc:
        raise InputError(f"cannot read {exc.filename}: {exc.strerror or exc}", field="data", remedy=_remedy()) from exc


def first_change(before: Mapping[Path, int], now: Mapping[Path, int]) -> str | None:
    """The first file of a corpus that is another than it was, in words; None where all are the same."""
    for file, num_bytes in before.items():
        if file not in now:
            return f"{file} is gone"
        if now[file] != num_bytes:
            return f"{file} has {now[file]} bytes and had {num_bytes}"
    new = next((file for file in now if file not in before), None)
    return None if new is None else f"{new} is new"


class CorpusWatch:
    """Sees that every worker of an agent finds the files that the first one found: a position in other text is none."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """No path: Python's own library, which is not watched."""
        self._paths = paths
        self._sizes: dict[Path, int] | None = None

    def check(self) -> None:
        """Compare with the first call.

        Raises:
            InputError: a file is missing, new, or of another size.
        """
        if not self._paths:
            return
        sizes = file_sizes(self._paths)
        change = first_change(self._sizes, sizes) if self._sizes is not None else None
        if change is not None:
            raise InputError(
                f"{change}, so the slot's position in the data would mean other text",
                field="data",
                remedy="put it back as it was, or start the islands anew on the data as they are",
            )
        self._sizes = sizes


def _text_files(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_dir():
            yield from sorted(file for file in path.rglob("*") if file.suffix in TEXT_SUFFIXES and file.is_file())
        elif path.exists():
            if path.is_file() and not path.stat().st_size:
                raise InputError(f"{path} is empty", field="data", remedy="fetch it anew, or leave it out")
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
