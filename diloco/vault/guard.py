"""One rank's protection, as its worker uses it: asks for a vault, takes snapshots when they are due, restores."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from functools import partial

from torch import nn
from torch.optim import Optimizer

from diloco.inbox import Inbox
from diloco.island import Contribution
from diloco.protocol import Event, ProtectionEvent, RegionSize, VaultNeedEvent, VaultPlace, WorkerConfig
from diloco.team import Action, Team
from diloco.vault.contents import HotState, restore_random
from diloco.vault.errors import VaultError
from diloco.vault.members import local_key
from diloco.vault.part import PartReader
from diloco.vault.restore import Choice, Chosen, choose
from diloco.vault.snapshots import Contents, Identity, Need, Snapshots

logger = logging.getLogger(__name__)

VAULT_WAIT_S = 10.0
"""For the agent to make the vault, after the first step: until then that step would be lost."""
COMMIT_WAIT_S = 30.0
"""For the snapshot that a push waits for."""


class Guard:
    """The snapshots of one rank."""

    def __init__(
        self,
        config: WorkerConfig,
        module: nn.Module,
        optimizer: Optimizer,
        *,
        team: Team,
        inbox: Inbox,
        emit: Callable[[Event], None],
        collect: Callable[[HotState], Contents],
        per_fragment: int = 0,
    ) -> None:
        """``collect`` says what a snapshot is of; ``per_fragment`` is how many vectors a fragment may have in one."""
        self._place = config.vault or VaultPlace()
        self._is_on = config.vault is not None
        self._team = team
        self._inbox = inbox
        self._emit = emit
        self._per_fragment = per_fragment
        self._shards = config.shard_optimizer
        self._hot = HotState(module, optimizer)
        self._collect = partial(collect, self._hot)
        self.identity = Identity(
            run_id=self._place.run_id,
            instance=self._place.instance,
            slot=config.slot,
            rank=config.rank,
            num_ranks=config.num_ranks,
            model=f"{self._hot.model}/{config.codec}/{config.accumulation_steps}",
        )
        self._snapshots = Snapshots(
            self.identity,
            self._collect,
            team=team,
            first_number=self._place.first_number,
            threads=config.threads,
            tell=self._tell,
        )
        self._asked = False
        self._need: Need | None = None
        self._restored_keys: set[tuple[object, ...]] = set()

    # Restoring

    def choose(self) -> Choice:
        """What this rank, and all others, can go on from."""
        if not (self._is_on and self._place.restore):
            return Choice(None, [])
        self._team.meet()
        return choose(
            self._place.path,
            self.identity,
            epoch=self._place.epoch,
            newest_of_all=self._team.newest_of_all,
            verified=self._place.verified,
        )

    def load(self, chosen: Chosen) -> None:
        """Parameters, buffers, optimizer. Raises `VaultError`."""
        self._hot.restore(PartReader(chosen.vault.view(chosen.generation.part("hot"))))

    def load_random(self, chosen: Chosen) -> None:
        """Last of all, when nothing draws numbers any more until the next step."""
        restore_random(PartReader(chosen.vault.view(chosen.generation.part("hot"))))

    def go_on_from(self, chosen: Chosen, *, contributions: Iterable[tuple[object, ...]] = ()) -> None:
        """It is what was restored; ``contributions`` are named by `local_key`."""
        self._restored_keys = set(contributions)
        self._snapshots.go_on_from(chosen.vault, chosen.generation)

    # Snapshots

    def after_step(self, step: int, step_s: float, *, force: bool = False) -> None:
        """Rank 0, at the boundary after a step that took so long: let all ranks take a snapshot if one is due."""
        if not self._is_on:
            return
        self._find_vault()
        if self._snapshots.take_step(step_s):
            self._tell(self._snapshots.failure)
        if force or self._snapshots.is_due(step):
            self._team.tell(Action.SNAPSHOT)
            self._snapshots.take()

    def take_now(self) -> None:
        """Rank 0, at a boundary at which all ranks are to wait: let them take a snapshot, whatever the interval."""
        if self._is_on and self._snapshots.has_vault:
            self._team.tell(Action.SNAPSHOT)
            self._snapshots.take()

    def follow_step(self) -> None:
        """Another rank, after a step."""
        if self._is_on:
            self._find_vault()

    def take(self) -> None:
        """Another rank, told to."""
        self._snapshots.take()

    def keep(self) -> int:
        """Take a snapshot, and wait until all ranks have it; returns the newest that all have."""
        self._snapshots.take()
        self._snapshots.settle()
        return self._team.newest_of_all(self._snapshots.committed)

    def before_sync(self) -> None:
        """Rank 0: what is about to be contributed is captured, and must be known to a snapshot before it travels."""
        if not self._is_on:
            return
        if self._team.num_ranks == 1:
            self._snapshots.take()  # `before_push` waits for it
            return
        self._team.tell(Action.KEEP)
        if self.keep() < self._snapshots.committed or self._snapshots.failure:
            self._snapshots.mark_unsure()

    def before_push(self, fragment: int, contribution: Contribution) -> None:
        """From the thread of the sync: see that a snapshot knows this contribution, or that none is trusted."""
        key = local_key(fragment, contribution.stamp)
        if not self._is_on or key in self._restored_keys:
            return
        # What is not in the newest may be in the one under way.
        if not self._snapshots.knows(key):
            self._snapshots.wait_copied(timeout_s=COMMIT_WAIT_S)
        if not self._snapshots.knows(key):
            self._snapshots.mark_unsure()

    def after_sync(self) -> None:
        """Rank 0: new global parameters were adopted."""
        if self._is_on and self._snapshots.has_vault:
            self._team.tell(Action.SNAPSHOT)
            self._snapshots.take()

    @property
    def interval(self) -> int:
        """Steps from one snapshot to the next."""
        return self._snapshots.interval

    def settle(self) -> None:
        """Before anything changes that a snapshot may be copying."""
        self._snapshots.settle()

    def close(self) -> None:
        self._snapshots.close()

    def _find_vault(self) -> None:
        """After the first step, when the optimizer has its state: see that there is a vault with room for it."""
        if not self._asked:
            self._asked = True
            self._need = self._measure()
            if self._need is not None and not self._fits(self._need):
                self._ask(self._need)
        command = self._inbox.take_vault()
        if command is not None and command.path is not None and self._snapshots.open(command.path, self._need):
            self._tell("")

    def _measure(self) -> Need | None:
        try:
            contents = self._collect()
            more = 0 if self._shards else self._hot.room_for_more()
            return self._snapshots.need(contents, room_for_more=more, per_fragment=self._per_fragment)
        except (VaultError, ValueError) as exc:
            self._tell(str(exc))
            return None

    def _fits(self, need: Need) -> bool:
        """Whether the vault that there is does."""
        path = self._place.path
        if path is None:
            return False
        if not self._snapshots.reopen(path, need):
            return False
        self._tell("")
        return True

    def _ask(self, need: Need) -> None:
        regions = tuple(RegionSize(num_bytes=each.num_bytes, count=each.count) for each in need.regions)
        self._emit(VaultNeedEvent(regions=regions, record_bytes=need.record_bytes))
        deadline_s = time.monotonic() + VAULT_WAIT_S
        while not self._inbox.has_vault and not self._inbox.stop.is_set() and time.monotonic() < deadline_s:
            self._inbox.wait(0.2)

    def _tell(self, reason: str) -> None:
        snapshots = self._snapshots
        at_risk = snapshots.interval if snapshots.has_vault and not reason else None
        if reason:
            shown = "all steps since the last sync" if at_risk is None else f"{at_risk} steps"
            logger.warning("protection degraded, at most %s at risk reason=%s", shown, reason)
        else:
            logger.info("snapshots every_steps=%d overhead=%s", snapshots.interval, snapshots.overhead)
        self._emit(ProtectionEvent(steps_at_risk=at_risk, overhead=snapshots.overhead, reason=reason))
