"""Nothing waits for a pipe, nothing reads without an end, and no device is renamed over."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from service.errors import InputError
from service.files import check_replaceable, open_regular, read_input, read_regular, replace_file


def pipe(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def folder(path: Path) -> None:
    path.mkdir()


def too_large(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def missing(_: Path) -> None:
    pass


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "file"


@pytest.mark.parametrize("make", [pipe, device, folder, too_large, missing])
def test_what_cannot_be_read_names_field_path_and_remedy(path: Path, make: Callable[[Path], None]) -> None:
    make(path)
    with pytest.raises(InputError) as caught:
        read_input(path, max_bytes=100, field="state_file", remedy="name another")
    assert str(caught.value).startswith(f"state_file: {path} cannot be read: ")
    assert str(caught.value).endswith(" (name another)")


def test_the_bound_itself_is_read(path: Path) -> None:
    path.write_bytes(b"x" * 100)
    assert read_regular(path, max_bytes=100) == read_regular(path) == b"x" * 100
    with pytest.raises(OSError, match="over 99 bytes"):
        read_regular(path, max_bytes=99)


@pytest.mark.parametrize("follow_links", [False, True])
@pytest.mark.parametrize("make", [pipe, folder])
def test_only_a_regular_file_is_replaced(path: Path, make: Callable[[Path], None], follow_links: bool) -> None:
    make(path)
    before = path.lstat()
    with pytest.raises(OSError, match=r"not a regular file|Is a directory"):
        replace_file(path, [b"x"], follow_links=follow_links)
    assert path.lstat().st_ino == before.st_ino
    assert list(path.parent.iterdir()) == [path]


def test_a_pipe_is_refused_for_writing_too(path: Path) -> None:
    pipe(path)
    with pytest.raises(OSError, match="not a regular file"):
        open_regular(path, os.O_RDWR | os.O_CREAT)


def test_a_link_that_a_user_named_is_followed_and_one_beside_ours_is_replaced(path: Path) -> None:
    target = path.with_name("target")
    target.write_bytes(b"old")
    path.symlink_to(target)
    replace_file(path, [b"new"], follow_links=True)
    assert path.is_symlink()
    assert target.read_bytes() == b"new"
    replace_file(path, [b"newer"])
    assert not path.is_symlink()
    assert (path.read_bytes(), target.read_bytes()) == (b"newer", b"new")


def test_a_link_to_a_device_is_not_followed(path: Path) -> None:
    device(path)
    with pytest.raises(OSError, match="not a regular file"):
        replace_file(path, [b"x"], follow_links=True)
    assert stat.S_ISCHR(Path("/dev/zero").stat().st_mode)
    assert path.is_symlink()


def test_nothing_planted_beside_the_target_is_in_the_way(path: Path) -> None:
    for name in (f"{path.name}.new", f"{path.name}.part", f".{path.name}.partial"):
        pipe(path.with_name(name))
    replace_file(path, [b"a", memoryview(b"b")])
    assert path.read_bytes() == b"ab"


def test_what_fails_half_way_leaves_the_old_file_alone(path: Path) -> None:
    path.write_bytes(b"old")

    def pieces() -> Iterator[bytes]:
        yield b"new"
        raise KeyError("broken source")

    with pytest.raises(KeyError):
        replace_file(path, pieces())
    assert path.read_bytes() == b"old"
    assert list(path.parent.iterdir()) == [path]


def test_a_long_name_leaves_room_for_the_unfinished_file(path: Path) -> None:
    longest = path.with_name("é" * 127)
    replace_file(longest, [b"x"])
    assert longest.read_bytes() == b"x"


@pytest.mark.parametrize("name", ["/dev/full", "/dev/null", "/"])
def test_a_device_or_folder_is_no_target(name: str) -> None:
    with pytest.raises(OSError, match=r"not a regular file|Is a directory"):
        check_replaceable(Path(name))
