"""How the ranks of an island find each other to carry chunks together, see `diloco.helpers`."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager

from torch.distributed import DistStoreError

from diloco.helpers import Helpers, help_at
from diloco.http_store import HttpStore
from diloco.protocol import GroupPlace, WorkerConfig
from diloco.rendezvous import open_store_client
from diloco.scheduling import become_idle
from diloco.worker_shards import open_shards
from service.errors import WadilocoError

logger = logging.getLogger(__name__)

KEY = "chunks"


@contextmanager
def open_helpers(config: WorkerConfig) -> Iterator[Helpers | None]:
    """On rank 0: the other ranks, as they come; None where there are none."""
    if config.num_ranks == 1 or config.group is None:
        yield None
        return
    with closing(Helpers()) as helpers:
        with _opened_store(config.group) as store:
            store.set(KEY, helpers.address)
        yield helpers


def start_helping(config: WorkerConfig) -> None:
    """On another rank: carry chunks for rank 0 from now on, on a thread that ends with the process."""
    assert config.group is not None, "the ranks meet somewhere"
    arguments = (config, config.group)
    threading.Thread(target=_help, args=arguments, name="carry chunks", daemon=True).start()


def _help(config: WorkerConfig, place: GroupPlace) -> None:
    if config.sync_priority == "idle":
        become_idle()
    try:
        with _opened_store(place) as store:
            address = store.get(KEY).decode()
        with open_shards(config) as shards:
            help_at(address, shards)
    except (WadilocoError, DistStoreError, OSError) as exc:
        # Rank 0 does without it, or is gone: then the agent ends this one too.
        logger.warning("cannot carry chunks for rank 0 rank=%d error=%s", config.rank, exc)


@contextmanager
def _opened_store(place: GroupPlace) -> Iterator[HttpStore]:
    with open_store_client(place) as http:
        yield HttpStore(http, group=place.name, epoch=place.epoch, timeout_s=place.timeout_s)
