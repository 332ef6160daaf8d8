"""What would end every worker at its start: looked for before the agent registers, so that nobody counts on it."""

from __future__ import annotations

import os
from pathlib import Path

from diloco.agent.config import IslandSettings
from diloco.corpus import check_corpus
from diloco.hf_files import check_hf_model
from diloco.scheduling import usable_cores
from diloco.workload_source import check_workload
from service.errors import ConfigError
from service.extras import require_extra


def check_host(settings: IslandSettings) -> None:
    """See that this host has the packages, the data or the workload, and the cores.

    Raises:
        UnavailableError: a package of the extra ``train`` (or ``hf``, ``tensorboard``) is not installed.
        InputError: the data does not exist or holds no text; the workload's module or factory, or the model's
            directory, does not exist.
        ConfigError: the folder for TensorBoard cannot be made; a core does not exist, or is not this process's to use.
    """
    require_extra("train")
    if settings.tensorboard is not None:
        check_tensorboard(settings.tensorboard)
    if settings.data:
        check_corpus(settings.data)
    if settings.hf_model is not None:
        check_hf_model(settings.hf_model)
    if settings.workload is not None:
        check_workload(settings.workload)
    check_cores(settings.cores)
    check_ranks(settings.ranks, settings.cores)


def check_tensorboard(directory: Path) -> None:
    """See that scalars can be written there.

    Raises:
        UnavailableError: tensorboard is not installed.
        ConfigError: the folder cannot be made.
    """
    require_extra("tensorboard")
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise ConfigError(
            f"cannot make {directory}: {exc.strerror or exc}", field="tensorboard", remedy="give a folder"
        ) from exc


def check_cores(cores: tuple[int, ...]) -> None:
    usable = usable_cores()
    missing = sorted(set(cores) - usable) if usable is not None else []
    if missing and usable is not None:
        raise ConfigError(
            f"this process cannot run on {_shown(missing)}, only on {_shown(sorted(usable))}",
            field="cores",
            remedy="give --cores from these, or leave it out",
        )


def check_ranks(ranks: int, cores: tuple[int, ...]) -> None:
    """See that each rank can have a core: two on one would take turns, and each wait for the other's gradients.

    Raises:
        ConfigError: there are fewer cores.
    """
    usable = usable_cores()
    num_cores = len(set(cores)) if cores else len(usable) if usable is not None else os.cpu_count()
    if ranks > 1 and num_cores is not None and ranks > num_cores:
        whose = "--cores has" if cores else "this process may use"
        raise ConfigError(
            f"{ranks} ranks need as many cores, and {whose} {num_cores}", field="ranks", remedy="give fewer --ranks"
        )


def _shown(cores: list[int]) -> str:
    return ", ".join(map(str, cores))
