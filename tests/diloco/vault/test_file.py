"""The vault's file: whole generations come back, everything else is refused."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from diloco.vault.errors import CorruptError, VaultError, VaultFullError
from diloco.vault.file import VaultFile, copy_into
from diloco.vault.layout import NUM_RECORDS, PAGE, Generation, Layout, Part, ReadRecord, RegionNeed

NEEDS = (RegionNeed(6000, 2), RegionNeed(100, 3))
RECORD_BYTES = 4000


def generation(number: int, parts: tuple[Part, ...]) -> Generation:
    return Generation(
        number=number,
        slot=1,
        rank=0,
        num_ranks=1,
        step=number,
        tokens=64 * number,
        model="m",
        parts=parts,
        state={"a": 1},
    )


def write(vault: VaultFile, number: int, *, hot: bytes, base: Part | bytes, keep: int | None = None) -> Generation:
    vault.begin(keep=keep if keep is not None else vault.newest_number() or None)
    kept = [base] if isinstance(base, Part) else []
    new = {"hot": hot} if isinstance(base, Part) else {"hot": hot, "global/0": base}
    parts = list(kept)
    for (name, data), region in zip(new.items(), vault.reserve([len(d) for d in new.values()], kept=kept), strict=True):
        made = copy_into(vault.region(region), [data])
        parts.append(made.model_copy(update={"name": name, "region": region}))
    made_generation = generation(number, tuple(parts))
    vault.commit(made_generation)
    return made_generation


@pytest.fixture
def vault(tmp_path: Path) -> Iterator[VaultFile]:
    with VaultFile.create(tmp_path / "a.vault", NEEDS, record_bytes=RECORD_BYTES) as made:
        yield made


def test_what_was_committed_is_read_by_another_process_of_the_file(vault: VaultFile) -> None:
    written = write(vault, 1, hot=b"h" * 5000, base=b"g" * 80)
    with VaultFile.open(vault.path) as reader:
        (found,) = reader.generations()
        assert found == written
        assert bytes(reader.view(found.part("hot"))) == b"h" * 5000
        assert bytes(reader.view(found.part("global/0"))) == b"g" * 80
        reader.verify(found)
        assert reader.newest_number() == 1


def test_an_unchanged_part_is_named_again_and_two_generations_are_kept(vault: VaultFile) -> None:
    first = write(vault, 1, hot=b"1" * 10, base=b"g" * 80)
    base = first.part("global/0")
    second = write(vault, 2, hot=b"2" * 20, base=base)
    third = write(vault, 3, hot=b"3" * 30, base=base)
    assert [g.number for g in vault.generations()] == [3, 2]
    assert {g.part("global/0").region for g in vault.generations()} == {base.region}
    assert third.part("hot").region != second.part("hot").region
    for each in vault.generations():
        vault.verify(each)
    assert not vault.holds(first)
    assert vault.holds(second)


def test_a_writer_that_is_killed_at_any_moment_leaves_the_generation_before(vault: VaultFile) -> None:
    write(vault, 1, hot=b"1" * 10, base=b"g" * 80)
    second = write(vault, 2, hot=b"2" * 20, base=b"h" * 80)
    vault.begin(keep=2)
    (region,) = vault.reserve([6000], kept=[])
    copy_into(vault.region(region), [b"x" * 3000])
    assert vault.generations() == (second,)
    vault.verify(second)


def test_a_part_larger_than_any_free_region_is_refused_and_nothing_else_is_lost(vault: VaultFile) -> None:
    kept = write(vault, 1, hot=b"1" * 10, base=b"g" * 80)
    vault.begin(keep=1)
    with pytest.raises(VaultFullError, match="grown"):
        vault.reserve([9000], kept=[])
    with pytest.raises(VaultFullError):
        vault.reserve([10, 10, 10, 10], kept=[])
    with pytest.raises(VaultFullError, match="record"):
        vault.commit(generation(2, ()).model_copy(update={"state": {"a": "x" * 8000}}))
    assert vault.generations() == (kept,)


def test_a_lock_keeps_others_from_a_living_agents_vault(vault: VaultFile) -> None:
    with pytest.raises(VaultError, match="lives"):
        VaultFile.adopt(vault.path)
    with pytest.raises(VaultError, match="lives"):
        VaultFile.create(vault.path, NEEDS, record_bytes=RECORD_BYTES)
    written = write(vault, 1, hot=b"1", base=b"g")
    vault.close()
    with VaultFile.adopt(vault.path) as adopted:
        assert adopted.generations() == (written,)
        assert adopted.layout.fits(NEEDS, record_bytes=RECORD_BYTES)
        adopted.close(remove=True)
    assert not vault.path.exists()


def test_unsure_is_said_of_what_was_committed_before_and_not_of_the_next(vault: VaultFile) -> None:
    write(vault, 1, hot=b"1", base=b"g")
    vault.mark_unsure()
    assert [r.is_sure for r in vault.records() if isinstance(r, ReadRecord)] == [False]
    write(vault, 2, hot=b"2", base=b"g")
    sure = {r.generation.number: r.is_sure for r in vault.records() if isinstance(r, ReadRecord)}
    assert sure == {1: False, 2: True}


def test_the_folder_of_a_vault_is_made_and_what_stands_in_its_way_is_told(tmp_path: Path) -> None:
    with VaultFile.create(tmp_path / "not" / "there" / "a.vault", NEEDS, record_bytes=RECORD_BYTES) as made:
        assert made.path.exists()
    (tmp_path / "file").touch()
    with pytest.raises(VaultError, match="vault_dir"):
        VaultFile.create(tmp_path / "file" / "a.vault", NEEDS, record_bytes=RECORD_BYTES)


def test_a_file_system_without_room_is_told_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(VaultFullError, match="shm-size"):
        VaultFile.create(tmp_path / "huge.vault", (RegionNeed(1 << 44, 8),), record_bytes=RECORD_BYTES)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("whole") / "w.vault"
    with VaultFile.create(path, NEEDS, record_bytes=RECORD_BYTES) as made:
        write(made, 6, hot=b"h" * 5000, base=b"g" * 80)
        write(made, 7, hot=b"i" * 5000, base=b"f" * 80)
    return path.read_bytes()


def meaningful(data: bytes, layout: Layout) -> list[range]:
    """Where each byte means something: of the header, of the newest record, and of its parts."""
    path_free = Layout.decode(data[: 1 << 16], file_bytes=len(data))
    ranges = [range(len(path_free.encode()))]
    for index in range(NUM_RECORDS):
        offset = layout.record_offset(index)
        length = int.from_bytes(data[offset + 24 : offset + 32], "little")
        if int.from_bytes(data[offset + 8 : offset + 16], "little") == 7:
            ranges.append(range(offset, offset + 48 + length))
    return ranges


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(choice=st.data())
def test_one_flipped_bit_anywhere_and_the_newest_generation_is_refused(
    whole: bytes, tmp_path: Path, choice: st.DataObject
) -> None:
    layout = Layout.decode(whole[: 1 << 16], file_bytes=len(whole))
    newest = open_copy(whole, tmp_path).generations()[0]
    places = meaningful(whole, layout) + [
        range(layout.regions[p.region].offset, layout.regions[p.region].offset + p.length) for p in newest.parts
    ]
    at = choice.draw(st.sampled_from(places).flatmap(st.sampled_from))
    bit = choice.draw(st.integers(0, 7))
    broken = bytearray(whole)
    broken[at] ^= 1 << bit
    try:
        vault = open_copy(bytes(broken), tmp_path)
    except CorruptError:
        return
    found = vault.generations()
    if found and found[0].number == 7:
        with pytest.raises(CorruptError, match="digest"):
            vault.verify(found[0])
    # The one before is there in any case, whole.
    before = next(g for g in found if g.number == 6)
    vault.verify(before)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0, 1, exclude_max=True))
def test_a_truncated_file_is_refused(whole: bytes, tmp_path: Path, share: float) -> None:
    with pytest.raises(VaultError):
        open_copy(whole[: int(share * len(whole))], tmp_path)


def open_copy(data: bytes, directory: Path) -> VaultFile:
    path = directory / f"{os.getpid()}.copy"
    path.write_bytes(data)
    return VaultFile.open(path)


def test_regions_begin_on_pages_so_that_mapped_numbers_are_aligned(vault: VaultFile) -> None:
    assert all(region.offset % PAGE == 0 for region in vault.layout.regions)
    assert vault.layout.num_bytes == vault.path.stat().st_size
    assert shutil.disk_usage(vault.path.parent).free > 0
