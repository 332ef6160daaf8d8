"""The images, built once per session on a base that needs no registry."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.deploy.containers import Image, Storage, open_storage

DOCKER = ROOT / "deploy" / "docker"
CACHE = ROOT / ".local" / "docker"
STORE_BYTES = 4 << 30
TOOLS = ("buildah", "debootstrap")
BASE_IMAGE = "localhost/python-base"
CANNOT_MAKE = 3
"""Exit code of make_base.sh where this machine cannot make the archive."""


@pytest.fixture(scope="session")
def base_archive() -> Path:
    """A Debian with Python; made once and kept."""
    if sys.platform != "linux" or os.getuid() != 0:
        pytest.skip("images are built and run here by root on Linux alone")
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"{' and '.join(missing)} not installed: apt-get install {' '.join(TOOLS)}")
    made = subprocess.run([DOCKER / "make_base.sh"], capture_output=True, text=True, check=False)
    if made.returncode == CANNOT_MAKE:
        pytest.skip(made.stderr.strip())
    assert made.returncode == 0, made.stderr
    return ROOT / made.stdout.strip()


@pytest.fixture(scope="session")
def wheels(base_archive: Path) -> Path:
    """What the images install, fetched once by this machine's own pip with whatever index it is set up for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    wanted = [*project["build-system"]["requires"], *project["project"]["dependencies"], *extras["postgres"]]
    constraints = ROOT / "constraints-dev.txt"
    python = python_version(base_archive)
    key = hashlib.sha256(repr(wanted).encode() + constraints.read_bytes()).hexdigest()[:16]
    folder = CACHE / f"wheels-{python}-{key}"
    if not folder.exists():
        partial = CACHE / "wheels.partial"
        shutil.rmtree(partial, ignore_errors=True)
        options = ("--only-binary=:all:", "--python-version", python, "-q", "-c", str(constraints), "-d", str(partial))
        subprocess.run([sys.executable, "-m", "pip", "download", *options, *wanted], check=True, timeout=300)
        partial.replace(folder)
    return folder


def python_version(base_archive: Path) -> str:
    """Such as 3.11."""
    with tarfile.open(base_archive) as archive:
        return next(
            found[1] for name in archive.getnames() if (found := re.fullmatch(r"\./usr/bin/python(3\.\d+)", name))
        )


@pytest.fixture(scope="session")
def storage(base_archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Storage]:
    """An image store with the base in it; gone after the session."""
    folder = Path(tempfile.mkdtemp(prefix="wadiloco-images-", dir=roomy_memory() or tmp_path_factory.mktemp("images")))
    storage = open_storage(folder)
    try:
        storage.import_base(BASE_IMAGE, base_archive)
        yield storage
    finally:
        storage.remove()


def roomy_memory() -> Path | None:
    """Where files need no disk, if there is room: an image store writes thousands of small ones and syncs them all."""
    memory = Path("/dev/shm")  # noqa: S108
    return memory if memory.is_dir() and shutil.disk_usage(memory).free >= STORE_BYTES else None


@pytest.fixture(scope="session")
def build_options(wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """The base, and a package index as a secret: here a folder, so that a build needs no network."""
    config = tmp_path_factory.mktemp("pip") / "pip.conf"
    config.write_text(f"[global]\nno-index = true\nfind-links = {wheels}\n")
    return (
        *("--build-arg", f"PYTHON_IMAGE={BASE_IMAGE}"),
        *("--secret", f"id=pip.conf,src={config}"),
        *("--volume", f"{wheels}:{wheels}:ro"),
    )


@pytest.fixture(scope="session")
def images(storage: Storage, build_options: tuple[str, ...]) -> dict[str, Image]:
    """Sidecar and controller."""
    options = ("--ignorefile", str(DOCKER / "Dockerfile.dockerignore"), *build_options)
    return {
        target: storage.build(f"localhost/wadiloco-{target}", DOCKER / "Dockerfile", ROOT, "--target", target, *options)
        for target in ("sidecar", "controller")
    }
