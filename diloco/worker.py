"""The rank process of an island: ``python -m diloco.worker``, started and fed by its agent (see `diloco.protocol`).

The main thread takes inner steps, under ``SCHED_IDLE`` where the platform has it; with a gate it waits at safepoints
(see `diloco.safepoint`) while the server beside it has work. At the next step boundary after a
sync command it hands over to the transfer thread, which by default keeps normal priority, and blocks until the round
has closed or the command's deadline has passed; with a command to overlap it only copies its parameters, takes inner
steps while the transfer thread does the sync, and adopts the result at the step boundary after it came. The end of
stdin means that the agent is gone: the worker stops.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from typing import TextIO

import torch
from pydantic import ValidationError

from diloco.device import catch_up_with, lowest_priority
from diloco.follower import Follower
from diloco.inbox import Inbox, TransferThread
from diloco.parked import Built, first_line, park
from diloco.parked_config import ParkedConfig
from diloco.protocol import Event, FailedEvent, StandbyEvent, WorkerConfig
from diloco.rendezvous import team_of
from diloco.safepoint import Safepoint, open_gate
from diloco.scheduling import pin_to
from diloco.team import RankTeam, Team
from diloco.worker_build import build, inner_config, patience_of, rank_device
from diloco.worker_events import emit, take_stdout
from diloco.worker_helpers import open_helpers, start_helping
from diloco.worker_lead import Worker
from diloco.worker_shards import open_shards
from service.errors import InputError, UnavailableError, WadilocoError
from service.log import configure_logging

# Run as a script, the module's own name is __main__.
logger = logging.getLogger("diloco.worker")


def lead(config: WorkerConfig, team: Team, inbox: Inbox, events: TextIO, built: Built | None = None) -> None:
    """Train as the first rank, which may be the only one."""
    transfers = TransferThread(idle=config.sync_priority == "idle")
    with open_helpers(config) as helpers, open_shards(config, helpers=helpers) as shards:
        Worker(config, inbox=inbox, transfers=transfers, events=events, shards=shards, team=team, built=built).run()


def follow(config: WorkerConfig, team: RankTeam, inbox: Inbox, events: TextIO, built: Built | None = None) -> None:
    """Train as one of the other ranks."""
    safepoint = None
    if config.gate is not None:
        safepoint = Safepoint(
            open_gate(config.gate),
            patience=patience_of(config),
            on_wait=team.wait_on,
            catch_up=catch_up_with(rank_device(config)),
        )
    built = built or build(config)
    workload, module = built.workload, built.module.to(rank_device(config))
    start_helping(config)

    def say(event: Event) -> None:
        emit(events, event, inbox)

    Follower(
        config, workload, module, inner_config(config), team=team, safepoint=safepoint, inbox=inbox, emit=say
    ).run()


def train(config: WorkerConfig, inbox: Inbox, events: TextIO, built: Built | None) -> None:
    """Train as the rank that the configuration says, until told to stop."""
    if config.num_ranks == 1:
        lead(config, Team(), inbox, events, built)
        return
    with team_of(config, rank_device(config), cancelled=inbox.stop) as team:
        if config.rank == 0:
            lead(config, team, inbox, events, built)
        else:
            follow(config, team, inbox, events, built)


def main(*, is_standby: bool = False) -> int:
    """Read the configuration from stdin, train until told to stop; returns the exit code."""
    events = take_stdout()
    inbox = Inbox()
    if is_standby:
        emit(events, StandbyEvent(), inbox)
    signal.signal(signal.SIGTERM, lambda *_: inbox.request_stop())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    line = sys.stdin.readline()
    if is_standby and not line:
        return 0  # the agent is gone, and had no use for it
    try:
        first = first_line(line)
    except ValidationError as exc:
        emit(events, FailedEvent(message=f"worker configuration: {exc}", exit_code=InputError.exit_code), inbox)
        return InputError.exit_code
    config, built = (first.config if isinstance(first, ParkedConfig) else first), None
    configure_logging(config.log_level)
    pin_to(config.cores)
    torch.set_num_threads(config.threads)
    try:
        if isinstance(first, ParkedConfig):

            def tell(event: Event) -> None:
                emit(events, event, inbox)

            ready = park(first, sys.stdin, build=build, connect=open_shards, tell=tell)
            if ready is None:
                return 0
            config, built = ready
        inbox.listen(sys.stdin)
        with lowest_priority(rank_device(config)):
            train(config, inbox, events, built)
    except WadilocoError as exc:
        if inbox.stop.is_set() and isinstance(exc, UnavailableError):
            logger.info("stopped while it waited error=%s", exc)
            return 0
        emit(events, FailedEvent(message=str(exc), exit_code=exc.exit_code), inbox)
        return exc.exit_code
    except Exception as exc:
        logger.exception("worker crashed")
        emit(events, FailedEvent(message=f"{type(exc).__name__}: {exc}", exit_code=1), inbox)
        return 1
    return 0


if __name__ == "__main__":
    # Taking down the interpreter under SCHED_IDLE can take seconds on a busy core, and there is nothing left to save.
    os._exit(main())
