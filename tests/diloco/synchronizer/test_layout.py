"""Where fragments lie on disk: all of them or none, whatever ends the process."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from diloco.digest import format_digest, sha256
from diloco.partition import cut
from diloco.schema import Manifest, TensorSpec
from diloco.synchronizer.generation import Outcome, newest_generation, path_of
from diloco.synchronizer.layout import UNFINISHED, begin_fragments, count_fragments, folder_of
from diloco.synchronizer.storage import FRAGMENTS, PART_SUFFIX, Disk, owned
from diloco.tensorfile import header_bytes, layout, parse_offer
from diloco.transport import SynchronizerClient
from service.errors import ConfigError, InputError, UnavailableError

MANIFEST = Manifest(
    tensors=tuple(
        TensorSpec(name=name, shape=(size,), dtype="float32") for name, size in (("a", 4), ("b", 5), ("c", 6))
    )
)
SIZE = 15
OUTCOME = Outcome(outer_lr=0.7, outer_momentum=0.9)

Serve = Callable[..., str]
Connect = Callable[[str], SynchronizerClient]


def digest(data: bytes) -> str:
    return format_digest(sha256(data))


def soon() -> float:
    return time.time() + 20


def begin(directory: Path, num_fragments: int = 3) -> None:
    begin_fragments(directory, cut(MANIFEST, num_fragments), torch.arange(SIZE, dtype=torch.float32), outcome=OUTCOME)


def test_fragments_are_found_where_they_were_put(tmp_path: Path) -> None:
    begin(tmp_path)
    assert count_fragments(tmp_path) == 3
    parts = [newest_generation(folder_of(tmp_path, index, 3)) for index in range(3)]
    values = torch.cat([part[1] for part in parts if part is not None])
    assert torch.equal(values, torch.arange(SIZE, dtype=torch.float32))


def test_what_begins_says_where_its_generations_are(tmp_path: Path) -> None:
    begun = begin_fragments(tmp_path, cut(MANIFEST, 3), torch.zeros(SIZE), outcome=OUTCOME)
    assert [fragment.generation.path for fragment in begun] == [path_of(folder_of(tmp_path, i, 3), 0) for i in range(3)]
    assert all(fragment.generation.path.exists() for fragment in begun)


def test_one_fragment_lies_in_the_directory_itself(tmp_path: Path) -> None:
    begin(tmp_path, 1)
    assert [path.name for path in tmp_path.iterdir()] == [path_of(tmp_path, 0).name]
    assert count_fragments(tmp_path) == 1


def test_a_beginning_that_was_not_finished_is_no_run_and_gives_way(tmp_path: Path) -> None:
    (tmp_path / UNFINISHED / "0000-of-0002").mkdir(parents=True)
    (tmp_path / UNFINISHED / "0000-of-0002" / "generation-000000000000.safetensors").write_bytes(b"half")
    assert count_fragments(tmp_path) == 1
    begin(tmp_path)
    assert count_fragments(tmp_path) == 3
    assert not (tmp_path / UNFINISHED).exists()


def test_a_fragment_that_is_missing_is_named(tmp_path: Path) -> None:
    begin(tmp_path)
    shutil.rmtree(folder_of(tmp_path, 1, 3))
    with pytest.raises(ConfigError, match="0001-of-0003"):
        count_fragments(tmp_path)


def test_a_folder_of_fragments_without_any_is_no_run_to_begin_over(tmp_path: Path) -> None:
    (tmp_path / FRAGMENTS).mkdir()
    with pytest.raises(ConfigError, match="lacks"):
        count_fragments(tmp_path)


def test_two_runs_in_one_directory_are_refused(tmp_path: Path) -> None:
    begin(tmp_path, 1)
    begin(tmp_path, 3)
    with pytest.raises(ConfigError, match="one fragment and one of 3"):
        count_fragments(tmp_path)


def test_a_fragment_without_a_generation_keeps_the_synchronizer_from_starting(serve: Serve, tmp_path: Path) -> None:
    begin(tmp_path)
    path_of(folder_of(tmp_path, 2, 3), 0).unlink()
    with pytest.raises(ConfigError, match="0002-of-0003 has no generation"):
        serve(tmp_path)


def test_an_owner_removes_what_was_half_written_of_every_fragment(tmp_path: Path) -> None:
    begin(tmp_path)
    leftover = folder_of(tmp_path, 1, 3) / f"upload-slot-0-1{PART_SUFFIX}"
    leftover.write_bytes(b"half")
    with owned(tmp_path):
        assert not leftover.exists()


def test_a_folder_fails_and_is_well_together_with_the_directory(tmp_path: Path) -> None:
    whole = Disk(tmp_path)
    first, second = (Disk(tmp_path / name, whole=whole) for name in "ab")
    with pytest.raises(UnavailableError), first.writing():
        raise OSError(28, "No space left on device")
    assert first.problem == second.problem == whole.problem
    assert whole.problem is not None
    with second.writing():
        pass
    assert first.problem is None


def test_a_run_of_one_fragment_goes_on_as_it_was(serve: Serve, connect: Connect, tmp_path: Path) -> None:
    begin(tmp_path, 1)
    client = connect(serve(tmp_path))
    state = client.state(deadline_s=soon())
    assert state.manifest == MANIFEST
    assert [(f.fragment, f.num_tensors, f.num_bytes) for f in state.fragments] == [(0, 3, 4 * SIZE)]
    assert not (tmp_path / FRAGMENTS).exists()


def test_offers_uploads_and_contributions_of_all_fragments_share_one_limit(
    serve: Serve, connect: Connect, tmp_path: Path
) -> None:
    client = connect(serve(tmp_path, quorum=1, grace_max_s=0.0))
    assert client.init(MANIFEST, torch.zeros(SIZE), deadline_s=soon(), num_fragments=3).accepted
    # Many slots begin an upload and never end it.
    for slot in range(30):
        response = client._http.put(
            f"/v1/rounds/0/fragments/{slot % 3}/contributions/{slot}",
            params={"epoch": 1, "tokens": 1},
            headers={"Content-Range": f"bytes 0-3/{4 * (4 + slot % 3)}", "Content-Digest": digest(b"\0" * 4)}
            | {"Repr-Digest": digest(b"whole"), "Content-Type": "application/octet-stream"},
            content=b"\0" * 4,
        )
        assert response.status_code == 200, response.text
    assert len(list(tmp_path.rglob(f"*{PART_SUFFIX}"))) == 9


@pytest.mark.parametrize("text", ["0", "-1", "many", "1025", "9" * 400, ""])
def test_an_offer_of_an_impossible_number_of_fragments_is_refused(text: str) -> None:
    header = header_bytes(layout(MANIFEST.tensors), {"manifest": MANIFEST.model_dump_json(), "num_fragments": text})
    with pytest.raises(InputError) as caught:
        parse_offer(header)
    assert caught.value.field == "num_fragments"


def test_a_state_lists_the_fragments_and_refuses_those_that_there_are_not(
    serve: Serve, connect: Connect, tmp_path: Path
) -> None:
    client = connect(serve(tmp_path))
    client.init(MANIFEST, torch.zeros(SIZE), deadline_s=soon(), num_fragments=2)
    state = client.state(deadline_s=soon())
    assert state.manifest == MANIFEST
    assert [fragment.num_tensors for fragment in state.fragments] == [2, 1]
    answer = client._http.get("/v1/fragments/2")
    assert answer.status_code == 422
    assert "the run has 2" in answer.json()["message"]
    metrics = client._http.get("/metrics").text
    assert all(f'wadiloco_synchronizer_version{{fragment="{index}"}} 0.0' in metrics for index in range(2))


def test_who_waits_for_parameters_gets_them_when_a_run_of_several_fragments_begins(
    serve: Serve, connect: Connect, tmp_path: Path
) -> None:
    client = connect(serve(tmp_path))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client._http.head, "/v1/fragments/0", params={"wait_s": 30}, timeout=40)
        client.init(MANIFEST, torch.zeros(SIZE), deadline_s=soon(), num_fragments=3)
        assert waiting.result(40).headers["X-Wadiloco-Version"] == "0"
