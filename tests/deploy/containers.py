"""Builds images with buildah and runs them as an engine would, with what a Debian machine has.

buildah's own `run` under chroot isolation gives neither a process 1 nor a read-only root, so a container here is a
chroot in namespaces of its own (``unshare``): the image's entry point is process 1, the root file system is mounted
read-only, capabilities are gone, and only the state folder, ``/tmp`` and what is mounted can be written.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from replay.processes import Child, Children
from tests.integration.helpers import eventually

STATE = "/var/lib/wadiloco"
BUILD_DEADLINE_S = 300
EXEC_DEADLINE_S = 30

# $1 is the root file system; pairs of host folder and mount point follow until `--`, then the command.
_START = """
root=$1; shift
mount --bind "$root" "$root"
while [ "$1" != -- ]; do mkdir -p "$root$2"; mount --bind "$1" "$root$2"; shift 2; done; shift
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mount -t tmpfs -o mode=1777,size=16m tmpfs "$root/tmp"
mount -o remount,bind,ro "$root"
exec chroot "$root" "$@"
"""


@dataclass(frozen=True)
class Storage:
    """Images and containers in one folder, apart from those of the machine."""

    folder: Path
    driver: str
    """``overlay`` where the file system allows it; ``vfs``, a whole copy for every layer, works everywhere."""

    def buildah(self, command: str, *arguments: str, deadline_s: float = BUILD_DEADLINE_S) -> str:
        """What one buildah command printed.

        Raises:
            AssertionError: it failed; the message has its last lines.
        """
        places = ("--root", str(self.folder / "root"), "--runroot", str(self.folder / "run"))
        done = subprocess.run(
            ["buildah", *places, "--storage-driver", self.driver, command, *arguments],
            capture_output=True,
            text=True,
            timeout=deadline_s,
            check=False,
            env={**os.environ, "BUILDAH_ISOLATION": "chroot"},
        )
        lines = (done.stdout + done.stderr).splitlines()
        assert done.returncode == 0, f"buildah {command}:\n" + "\n".join(lines[-20:])
        return done.stdout.strip()

    def build(self, name: str, dockerfile: Path, context: Path, *options: str) -> Image:
        places = ("--file", str(dockerfile), "--tag", name)
        # Docker's format, since OCI's knows no health check. Layers let the second target take the first one's stages.
        layers = f"--layers={str(self.driver != 'vfs').lower()}"
        self.buildah("build", "--format", "docker", layers, "--pull-never", *places, *options, str(context))
        return self.image(name)

    def import_base(self, name: str, archive: Path) -> None:
        """An image of one layer from a tar archive of a root file system."""
        container = self.buildah("from", "--pull-never", "scratch")
        self.buildah("add", "--quiet", container, str(archive), "/")
        self.buildah("commit", "--quiet", "--rm", container, name)

    def image(self, name: str) -> Image:
        inspected = json.loads(self.buildah("inspect", "--type", "image", name))
        container = self.buildah("from", "--pull-never", name)
        return Image(inspected["Docker"]["config"], Path(self.buildah("mount", container)))

    def remove(self) -> None:
        self.buildah("umount", "--all")
        self.buildah("rm", "--all")
        # What a driver mounts on its own folder would keep it from being removed.
        subprocess.run(["umount", "--quiet", str(self.folder / "root" / self.driver)], check=False)
        shutil.rmtree(self.folder.parent)


def open_storage(folder: Path) -> Storage:
    """Images in ``folder``, by ``STORAGE_DRIVER`` or the fastest driver that works there."""
    chosen = os.environ.get("STORAGE_DRIVER")
    if chosen is None:
        try:
            Storage(folder / "probe", "overlay").buildah("info")
        except AssertionError:
            chosen = "vfs"
    return Storage(folder / "images", chosen or "overlay")


@dataclass(frozen=True)
class Image:
    """What an engine reads of an image, and a root file system that was made from it."""

    config: Mapping[str, Any]
    root: Path

    @property
    def environment(self) -> dict[str, str]:
        return dict(pair.split("=", 1) for pair in self.config["Env"])

    @property
    def user(self) -> tuple[str, str]:
        user, _, group = self.config["User"].partition(":")
        return user, group

    def state_folder(self, path: Path) -> Path:
        """``path`` as a new named volume at the image's state folder would be: same owner, same mode."""
        seen = (self.root / STATE.lstrip("/")).stat()
        path.mkdir()
        os.chown(path, seen.st_uid, seen.st_gid)
        path.chmod(seen.st_mode & 0o7777)
        return path

    def as_user(self, command: Sequence[str], environment: Mapping[str, str]) -> list[str]:
        """``command`` as the image's user, without any capability, in its folder and in this environment alone."""
        user, group = self.user
        identity = (f"--reuid={user}", f"--regid={group}", "--clear-groups")
        return [
            *("setpriv", *identity, "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"),
            *("env", "-i", f"--chdir={self.config['WorkingDir'] or '/'}"),
            *(f"{name}={value}" for name, value in environment.items()),
            *command,
        ]

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run one command in the root file system as the image has it, writable by whom its owners and modes allow."""
        inside = self.as_user(command, self.environment)
        return subprocess.run(
            ["chroot", str(self.root), *inside], capture_output=True, text=True, timeout=EXEC_DEADLINE_S, check=False
        )


@dataclass(frozen=True)
class Container:
    """A running container."""

    image: Image
    child: Child
    environment: Mapping[str, str]
    pid: int
    """Of its process 1, as this machine counts."""

    def execute(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command inside, as the image's user."""
        inside = self.image.as_user(command, self.environment)
        return subprocess.run(
            ["nsenter", "--target", str(self.pid), "--mount", "--pid", "--root", *inside],
            capture_output=True,
            text=True,
            timeout=EXEC_DEADLINE_S,
            check=False,
        )


def start(
    children: Children,
    image: Image,
    *,
    name: str,
    logs: Path,
    mounts: Mapping[Path, str],
    environment: Mapping[str, str],
    arguments: Sequence[str] = (),
) -> Container:
    """Start the image's entry point on this machine's network; ``mounts`` maps host folders to places inside."""
    settings = {**image.environment, **environment}
    entry = image.as_user([*image.config["Entrypoint"], *arguments], settings)
    pairs = [part for source, place in mounts.items() for part in (str(source), place)]
    command = ["unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child"]
    child = children.start(
        name, [*command, "sh", "-euc", _START, "sh", str(image.root), *pairs, "--", *entry], log=logs / f"{name}.log"
    )
    # Its shell's own children come and go until it becomes the entry point, under the same id.
    offspring = Path(f"/proc/{child.process.pid}/task/{child.process.pid}/children")
    (pid,) = eventually(lambda: offspring.read_text().split(), what=f"process 1 of {name}")
    return Container(image, child, settings, int(pid))
