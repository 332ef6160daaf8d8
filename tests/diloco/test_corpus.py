from __future__ import annotations

from pathlib import Path

import pytest

from diloco.corpus import check_corpus
from service.errors import InputError


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nowhere", "nowhere does not exist, only .* does"),
        ("pictures", "no text file in .*pictures"),
        ("empty.txt", "all files are empty in .*empty.txt"),
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
