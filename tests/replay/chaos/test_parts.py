"""Files, processes and networks that are broken, each by itself; the report."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from replay.chaos.corrupt import files_of, flip_bytes
from replay.chaos.disk import FILL, fill_disk, free_disk, mount_disk, unmount_disk
from replay.chaos.members import GivenFleet
from replay.chaos.network import Network, Plan, check_network
from replay.chaos.procfs import descendants, is_below, parent_of, resident_mb, send
from replay.chaos.record import ChaosSummary, FaultRecord, Outcome, render_report
from replay.summarize import this_machine
from service.errors import ConfigError, UnavailableError

DEADLINE_S = 20.0
CHILD = "import time\nwhile True: time.sleep(3600)"
FAMILY = f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {CHILD!r}])\n{CHILD}"
ROOT = os.geteuid() == 0


@contextmanager
def running(program: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", program], start_new_session=True)
    try:
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(DEADLINE_S)


def test_bytes_are_flipped_in_place_and_the_same_seed_flips_the_same(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    for name in ("a", "deep/b"):
        (tmp_path / name).write_bytes(bytes(1000))
    (tmp_path / "tiny").write_bytes(b"x")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    files = files_of(tmp_path, "**/*")
    assert [path.name for path in files] == ["a", "b", "tiny"]
    path, offsets = flip_bytes(files, num_bytes=5, seed=3)
    assert (len(offsets), path.stat().st_size) == (5, 1000)
    assert [at for at, value in enumerate(path.read_bytes()) if value] == offsets
    assert {path.read_bytes()[at] for at in offsets} == {0xFF}
    assert flip_bytes(files, num_bytes=5, seed=3) == (path, offsets)
    assert not any(path.read_bytes())
    assert files_of(tmp_path / "deep", str(tmp_path / "a*")) == [tmp_path / "a"]
    with pytest.raises(UnavailableError, match="no file to corrupt"):
        flip_bytes([tmp_path / "tiny"], num_bytes=1, seed=0)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_processes_are_known_by_their_ancestors() -> None:
    with running(FAMILY) as process:
        deadline_s = time.monotonic() + DEADLINE_S
        while not (below := descendants(process.pid)):
            assert time.monotonic() < deadline_s
        (child,) = below
        assert is_below(child, process.pid)
        assert is_below(child, os.getpid())
        assert not is_below(process.pid, child)
        assert parent_of(process.pid) == os.getpid()
        assert (resident_mb(process.pid) or 0.0) > 1.0
    assert parent_of(process.pid) is None
    assert not send(process.pid, signal.SIGCONT)
    assert resident_mb(process.pid) is None


def test_names_of_a_network_fit_linux_and_differ_between_fleets() -> None:
    plans = [Plan(number) for number in (0, 255, 256, 128 * 256 - 1)]
    for plan in plans:
        assert all(len(name) <= 15 for name in (plan.bridge, plan.link(199)))
        assert all(0 <= int(part) <= 255 for part in plan.address_of(199).split("."))
        assert plan.pull(3)[:3] == ["link", "set", plan.link(3)]
    assert len({plan.host.rpartition(".")[0] for plan in plans}) == len(plans)


def can_have_network() -> bool:
    try:
        check_network()
    except UnavailableError:
        return False
    return True


def pings(network: Network, plug: int) -> bool:
    """Whether a process at a plug reaches a listener at another."""
    program = (
        f"import socket,sys\ntry: socket.create_connection(('{network.address_of(0)}', 9), 0.5)\n"
        "except ConnectionRefusedError: sys.exit(0)\nexcept OSError: sys.exit(1)\n"
    )
    command = network.command(plug, [sys.executable, "-c", program])
    return subprocess.run(command, timeout=60, check=False).returncode == 0


@pytest.mark.skipif(not (sys.platform == "linux" and can_have_network()), reason="needs network namespaces")
def test_a_plug_that_is_pulled_cuts_its_process_off_and_nobody_else() -> None:
    with Network(3) as network:
        assert pings(network, 1)
        network.pull(1)
        assert not pings(network, 1)
        assert pings(network, 2)
        network.put_back(1)
        deadline_s = time.monotonic() + DEADLINE_S
        while not pings(network, 1):
            assert time.monotonic() < deadline_s
        names = [network.plan.namespace(plug) for plug in range(3)]
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert not [name for name in names if name in left.split()]


def test_without_rights_a_partition_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(shutil, "which", lambda _: "/usr/sbin/ip")
    with pytest.raises(UnavailableError, match="network namespaces, which are root's") as caught:
        check_network()
    assert (caught.value.field, caught.value.remedy) == (
        "kinds",
        "run as root with iproute2 installed, or leave partition out of kinds",
    )


def test_only_a_disk_of_its_own_is_filled(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="no disk of its own"):
        fill_disk(tmp_path)
    assert not (tmp_path / FILL).exists()


@pytest.mark.skipif(not ROOT or sys.platform != "linux", reason="mounts a tmpfs")
def test_a_small_disk_is_filled_to_the_brim_and_freed(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    try:
        mount_disk(disk, 8)
    except UnavailableError:
        pytest.skip("no tmpfs may be mounted here")
    try:
        assert 6 << 20 <= fill_disk(disk) <= 8 << 20
        with pytest.raises(OSError, match="No space left"):
            (disk / "more").write_bytes(bytes(1 << 20))
        free_disk(disk)
        (disk / "more").write_bytes(bytes(1 << 20))
    finally:
        unmount_disk(disk)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "Expecting"),
        ("{}", "Field required"),
        ('{"controller": {"url": "nothing", "pid": 5}}', "Value error"),
    ],
    ids=["no JSON", "no controller", "no URL"],
)
def test_a_file_that_names_no_fleet_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "fleet.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said) as caught:
        GivenFleet.read(path)
    assert caught.value.field == "fleet"


def summary(*outcomes: Outcome, **changes: object) -> ChaosSummary:
    faults = tuple(
        FaultRecord(kind="kill", target="worker 1/0", outcome=outcome, injected_s=1.0, detail="a|b")
        for outcome in outcomes
    )
    base: dict[str, object] = {
        "wadiloco_version": "1",
        "command": "wadiloco chaos",
        "settings": {},
        "machine": this_machine(),
        "generated_at": "now",
        "planned": len(outcomes),
        "interrupted": False,
        "faults": faults,
        "num_injected": sum(outcome is not Outcome.MISSED for outcome in outcomes),
        "num_recovered": outcomes.count(Outcome.RECOVERED),
        "num_hangs": outcomes.count(Outcome.HANG),
        "num_missed": outcomes.count(Outcome.MISSED),
        "restarts": {"controller": 1},
        "wall_s": 10.0,
        "goodput_frac": 0.5,
        "steps": {0: 5},
        "steps_lost": 0,
        "rounds_closed": None,
        "first_loss": None,
        "final_loss": None,
        "memory": (),
    }
    return ChaosSummary.model_validate({**base, **changes})


@pytest.mark.parametrize(
    ("outcomes", "interrupted", "passed"),
    [
        ((Outcome.RECOVERED,), False, True),
        ((Outcome.RECOVERED, Outcome.MISSED), False, True),
        ((Outcome.RECOVERED, Outcome.HANG), False, False),
        ((Outcome.RECOVERED,), True, False),
        ((Outcome.MISSED,), False, False),
    ],
    ids=["all", "one missed", "a hang", "interrupted", "nothing injected"],
)
def test_a_run_passes_when_all_that_was_injected_is_over(
    outcomes: tuple[Outcome, ...], interrupted: bool, passed: bool
) -> None:
    assert summary(*outcomes, interrupted=interrupted).passed is passed


def test_the_report_has_a_row_for_each_fault_and_no_broken_table() -> None:
    lines = render_report(summary(Outcome.RECOVERED, Outcome.HANG)).splitlines()
    rows = [line for line in lines if line.startswith("| kill |")]
    assert [row.count("|") for row in rows] == [10, 10]
    assert "2 of 2 faults injected: 1 recovered, 1 hangs, 0 missed" in "\n".join(lines)
    assert "controller 1" in "\n".join(lines)
