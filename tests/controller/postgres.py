"""A PostgreSQL server of the tests' own: made in a temporary folder, on a free port, ended with them."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import psycopg
import pytest

from replay.processes import free_ports
from tests.ports import share_of

OWNER = "postgres"
USER = "runner"
"""Who owns the databases of runs, and nothing else: a controller needs no more."""
DEADLINE_S = 30.0
# The one user who needs a password shows what happens without it.
ACCESS = "host all locked 127.0.0.1/32 scram-sha-256\nhost all all 127.0.0.1/32 trust\n"
# Processes die here, machines do not: what one wrote is there although nobody waited for a disk.
CONFIGURATION = """
listen_addresses = '127.0.0.1'
unix_socket_directories = ''
shared_buffers = 64MB
max_connections = 60
log_min_messages = fatal
fsync = off
full_page_writes = off
"""


@dataclass
class Server:
    """A cluster; its databases are gone with it."""

    bin: Path
    folder: Path
    port: int
    _names: Iterator[int] = field(default_factory=count)

    def url(self, database: str, *, user: str = USER, password: str | None = None) -> str:
        login = user if password is None else f"{user}:{password}"
        return f"postgresql://{login}@127.0.0.1:{self.port}/{database}"

    def make_database(self, *, encoding: str = "UTF8") -> str:
        """A new database, and its name."""
        name = f"run_{next(self._names)}"
        locale = "LC_COLLATE 'C' LC_CTYPE 'C'"
        self.execute(f"CREATE DATABASE {name} OWNER {USER} ENCODING '{encoding}' TEMPLATE template0 {locale}")
        return name

    def execute(self, statement: str, *, database: str = "postgres") -> None:
        """As the server's owner."""
        with psycopg.connect(self.url(database, user=OWNER), autocommit=True) as connection:
            connection.execute(statement.encode())

    @property
    def pid(self) -> int:
        return int((self.folder / "data" / "postmaster.pid").read_text().splitlines()[0])

    def start(self) -> None:
        """Start it; what is left of a killed one may take a moment to go."""
        deadline_s = time.monotonic() + DEADLINE_S
        while True:
            try:
                self._run("pg_ctl", "start", "-w", "-D", self._data, "-l", str(self.folder / "log"))
            except AssertionError:
                assert time.monotonic() < deadline_s, (self.folder / "log").read_text()
            else:
                return

    def stop(self) -> None:
        """At once, as a crash does: no session is waited for."""
        self._run("pg_ctl", "stop", "-m", "immediate", "-w", "-D", self._data)

    def kill(self) -> None:
        """Its sessions end when they notice, some milliseconds later."""
        os.kill(self.pid, signal.SIGKILL)

    def freeze(self) -> None:
        """As a machine that hangs: every process stops, no connection ends."""
        for pid in self._pids():
            os.kill(pid, signal.SIGSTOP)

    def thaw(self) -> None:
        for pid in self._pids():
            os.kill(pid, signal.SIGCONT)

    def _pids(self) -> list[int]:
        """The server and its children, of which it makes none while it stands still."""
        main = self.pid
        children = Path(f"/proc/{main}/task/{main}/children").read_text().split()
        return [main, *map(int, children)]

    def limit_files(self, pid: int, max_bytes: int | None) -> None:
        """What a full disk is to one of its processes, until it is lifted."""
        limit = "unlimited" if max_bytes is None else str(max_bytes)
        self._run("prlimit", "--pid", str(pid), f"--fsize={limit}:unlimited")

    @property
    def is_up(self) -> bool:
        try:
            self.execute("SELECT 1")
        except psycopg.OperationalError:
            return False
        return True

    @property
    def _data(self) -> str:
        return str(self.folder / "data")

    def make(self) -> None:
        self._run("initdb", "-D", self._data, "-U", OWNER, "--auth=trust", "--encoding=UTF8", "--locale=C", "-N")
        with (self.folder / "data" / "postgresql.conf").open("a") as configuration:
            configuration.write(f"{CONFIGURATION}port = {self.port}\n")
        (self.folder / "data" / "pg_hba.conf").write_text(ACCESS)

    def _run(self, program: str, *arguments: str) -> None:
        """As the user who owns the cluster: none of the programs runs as root."""
        as_owner = ["setpriv", f"--reuid={OWNER}", f"--regid={OWNER}", "--clear-groups"] if os.geteuid() == 0 else []
        command = [*as_owner, str(self._find(program)), *arguments]
        ended = subprocess.run(
            command,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        assert ended.returncode == 0, f"{program}: {ended.stdout}"

    def _find(self, program: str) -> Path:
        return self.bin / program if (self.bin / program).exists() else Path(shutil.which(program) or program)


def find_programs() -> Path | None:
    """The folder of the newest server that is installed."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    on_path = shutil.which("initdb")
    return found[-1].parent if found else Path(on_path).resolve().parent if on_path else None


@contextlib.contextmanager
def running_server() -> Iterator[Server]:
    """A new server; the tests that want one are skipped where none is installed."""
    programs = find_programs()
    if programs is None:
        pytest.skip("no PostgreSQL server is installed (Debian package postgresql)")
    folder = Path(tempfile.mkdtemp(prefix="wadiloco-pg-"))
    server = Server(programs, folder, free_ports(1, share_of(range(18700, 18800)))[0])
    try:
        if os.geteuid() == 0:
            owner = pwd.getpwnam(OWNER)
            os.chown(folder, owner.pw_uid, owner.pw_gid)
        server.make()
        server.start()
        server.execute(f"CREATE ROLE {USER} LOGIN")
        yield server
    finally:
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            server.stop()
        shutil.rmtree(folder, ignore_errors=True)
