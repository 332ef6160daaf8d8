"""The connections of a rank worker to the synchronizers of its run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

from diloco.helpers import Helpers
from diloco.lull import Lulls
from diloco.protocol import WorkerConfig
from diloco.safepoint import open_gate
from diloco.shards import Shards, connect
from service.settings import ServiceSettings


@contextmanager
def open_shards(config: WorkerConfig, *, helpers: Helpers | None = None) -> Iterator[Shards]:
    """Clients of all synchronizers, as long as the block runs; transfers go in the lulls of the gate's server.

    ``helpers`` carry chunks of them.
    """
    peer = ServiceSettings(token=config.token, tls_ca=config.tls_ca, tls_cert=config.tls_cert, tls_key=config.tls_key)
    # A reader of its own: the transfer thread asks while the inner loop does.
    lulls = Lulls(open_gate(config.gate), clock=time.monotonic) if config.gate is not None else None
    shards = connect(peer, config.synchronizer_url, timeout_s=config.timeout_s, lulls=lulls, helpers=helpers)
    with closing(shards):
        yield shards
