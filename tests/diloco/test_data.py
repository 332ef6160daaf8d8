from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from diloco.byte_text import ByteText
from diloco.data import ShardOrder, TokenStream, load_corpus
from diloco.model import ModelSize
from diloco.workload import Shard
from service.errors import InputError

LENGTH = 7
CORPUS = torch.arange(64 * (LENGTH + 1), dtype=torch.int64).remainder(251).to(torch.uint8)


def stream(
    *, slot: int = 0, num_shards: int = 4, seed: int = 0, position: int = 0, corpus: Tensor = CORPUS
) -> TokenStream:
    return TokenStream(
        corpus, slot=slot, num_shards=num_shards, seed=seed, batch_size=2, length=LENGTH, position=position
    )


def windows_of(source: TokenStream, num_batches: int) -> list[tuple[int, ...]]:
    return [tuple(row.tolist()) for _ in range(num_batches) for row in source.next_batch()]


def test_shards_are_disjoint_and_cover_the_corpus() -> None:
    epoch = 64 // 4 // 2
    corpus = torch.arange(64, dtype=torch.uint8).repeat_interleave(LENGTH + 1)
    seen = [{row[0] for row in windows_of(stream(slot=slot, corpus=corpus), epoch)} for slot in range(4)]
    assert sorted(value for shard in seen for value in shard) == list(range(64))


def test_an_epoch_shows_each_window_once_and_the_next_in_another_order() -> None:
    source = stream()
    first, second = windows_of(source, 8), windows_of(source, 8)
    assert len(set(first)) == 16
    assert set(first) == set(second)
    assert first != second


@pytest.mark.parametrize("position", [0, 1, 7, 8, 21])
def test_resuming_at_a_position_continues_exactly(position: int) -> None:
    straight, resumed = stream(), stream(position=position)
    for _ in range(position):
        straight.next_batch()
    for _ in range(10):
        assert torch.equal(straight.next_batch(), resumed.next_batch())
    assert straight.position == resumed.position == position + 10


def test_order_depends_on_seed_and_slot() -> None:
    base = windows_of(stream(), 8)
    assert windows_of(stream(), 8) == base
    assert windows_of(stream(seed=1), 8) != base


def test_files_and_folders_are_read_in_a_fixed_order(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.py").write_text("first")
    (tmp_path / "image.png").write_bytes(b"\x00")
    (tmp_path / "odd.bin").write_bytes(b"named")
    assert bytes(load_corpus([tmp_path]).tolist()) == b"first\n\nsecond\n\n"
    assert bytes(load_corpus([tmp_path / "odd.bin"]).tolist()) == b"named\n\n"


def test_default_corpus_is_the_library_of_this_python() -> None:
    assert load_corpus([]).numel() > 1_000_000


def test_missing_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"data: .*nowhere does not exist"):
        load_corpus([tmp_path / "nowhere"])


def test_folder_without_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="data: no text file"):
        load_corpus([tmp_path])


@pytest.mark.parametrize("num_bytes", [0, 5, 4 * 2 * (LENGTH + 1) - 1])
def test_too_short_text_is_refused_with_the_size_it_needs(num_bytes: int) -> None:
    with pytest.raises(InputError, match=f"data: {num_bytes} bytes are too few.* 64 "):
        stream(corpus=CORPUS[:num_bytes], slot=3)


def test_a_shard_with_fewer_sequences_than_slots_names_the_file_and_the_remedy(tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("x" * 50)
    workload = ByteText(ModelSize(context=7), data=[short], batch_size=1)
    with pytest.raises(InputError) as caught:
        workload.batches(Shard(slot=12, num_shards=16, seed=0), position=0)
    assert str(caught.value) == (
        f"data: 52 bytes are too few in {short}: 16 shards need 128 for one batch each, and these make 6 sequences"
        " (give more text, or lower data_shards, batch_size or context)"
    )


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = tmp_path / "growing.txt"
    text.write_text("whole")

    def cut_then_read(path: Path) -> bytes:
        path.write_text("wh")
        return path.read_bytes()

    monkeypatch.setattr("diloco.data.read_regular", cut_then_read)
    with pytest.raises(InputError, match=r"growing\.txt changed while it was read: 2 bytes came, and it had 5 \(start"):
        load_corpus([text])


def test_the_third_epoch_is_another_order_of_the_same_samples_from_any_position() -> None:
    epochs = [windows_of(stream(position=8 * epoch), 8) for epoch in range(3)]
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert len({frozenset(epoch) for epoch in epochs}) == 1
    assert windows_of(stream(position=15), 2) == epochs[1][-2:] + epochs[2][:2]


def test_slot_without_shard_is_refused() -> None:
    with pytest.raises(InputError, match="data_shards: slot 4"):
        stream(slot=4)


@pytest.mark.parametrize("position", [0, 1, 4, 5, 13])
def test_the_order_of_any_samples_is_that_of_their_shard_from_any_position(position: int) -> None:
    def order(position: int) -> ShardOrder:
        return ShardOrder(23, slot=1, num_shards=2, seed=0, batch_size=2, position=position)

    whole = [next(batch) for batch in [order(0)] for _ in range(20)]
    resumed = order(position)
    assert all(torch.equal(next(resumed), expected) for expected in whole[position:])
    assert {int(number) for batch in whole for number in batch} == set(range(1, 23, 2))
    assert len({int(number) for batch in whole[:5] for number in batch}) == 10  # an epoch; one of 11 fills no batch


@pytest.mark.parametrize(("slot", "num_samples", "field"), [(2, 100, "data_shards"), (1, 3, "data")])
def test_a_shard_without_samples_is_refused(slot: int, num_samples: int, field: str) -> None:
    with pytest.raises(InputError) as caught:
        ShardOrder(num_samples, slot=slot, num_shards=2, seed=0, batch_size=2)
    assert caught.value.field == field
