from __future__ import annotations

from pathlib import Path

import pytest

from diloco.corpus import CorpusWatch, check_corpus, first_change
from service.errors import InputError


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nowhere", "nowhere does not exist, only .* does"),
        ("pictures", "no text file in .*pictures"),
        ("empty.txt", "empty.txt is empty"),
        ("", "all files are empty"),
    ],
)
def test_paths_without_text_are_refused_by_name(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.png").write_bytes(b"png")
    (tmp_path / "empty.txt").touch()
    with pytest.raises(InputError, match=said) as caught:
        check_corpus([tmp_path / name])
    assert caught.value.field == "data"
    assert caught.value.remedy


def test_text_anywhere_in_a_folder_will_do(tmp_path: Path) -> None:
    (tmp_path / "a.txt").touch()
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "b.md").write_text("b")
    check_corpus([tmp_path])


def test_an_empty_file_that_was_named_is_refused_even_beside_others(tmp_path: Path) -> None:
    (tmp_path / "whole.txt").write_text("text")
    (tmp_path / "cut.txt").touch()
    with pytest.raises(InputError, match=r"data: .*cut\.txt is empty \(fetch it anew"):
        check_corpus([tmp_path / "whole.txt", tmp_path / "cut.txt"])


@pytest.mark.parametrize(
    ("now", "said"),
    [
        ({"a": 1, "b": 2}, None),
        ({"a": 1}, "b is gone"),
        ({"a": 1, "b": 1}, "b has 1 bytes and had 2"),
        ({"a": 1, "b": 2, "c": 0}, "c is new"),
    ],
)
def test_the_first_file_that_changed_is_named(now: dict[str, int], said: str | None) -> None:
    before = {Path("a"): 1, Path("b"): 2}
    assert first_change(before, {Path(name): size for name, size in now.items()}) == said


def test_files_are_compared_with_those_of_the_first_look(tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("0123456789")
    watch = CorpusWatch([tmp_path])
    watch.check()
    watch.check()
    text.write_text("01234")
    for _ in range(2):
        with pytest.raises(InputError, match=r"data: .*a\.txt has 5 bytes and had 10.*\(put it back"):
            watch.check()
    text.write_text("0123456789")
    watch.check()
    CorpusWatch([]).check()
