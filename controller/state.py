"""The state of the fleet: what the journal restores at start, and what every request and tick works on."""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Callable
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from controller.buddy_book import BuddyBook
from controller.budget import check_budget, new_period, with_sync_spent, with_sync_started
from controller.clock import not_ahead
from controller.config import ControllerSettings
from controller.costs import CostBook
from controller.directives import Box, Mailboxes
from controller.island_views import IslandViews
from controller.journal import Journal
from controller.journal_reader import unreadable_row
from controller.journal_tables import recovery_row
from controller.live_slots import LiveSlots
from controller.policy import make_policy
from controller.records import AgentRecord, Configured, RoundEntry
from controller.recoveries import RecoveryBook
from controller.registry import LeaseTerms, Registry
from controller.rounds import KEPT_ROUNDS, RoundBook
from controller.samples import FUTURE_TOLERANCE_S, SampleBook, SampleLog
from controller.schema import BudgetSpec, BudgetStatus, PolicySpec, Recovery
from service.errors import ConfigError, InputError
from sidecar.schema import LoadSample

logger = logging.getLogger(__name__)

M = TypeVar("M", bound=BaseModel)

# A crash may have handed out numbers that never reached the disk; an agent that saw one must not miss the next.
SEQ_STEP_AT_START = 1000


class FleetState:
    """Everything that changes, restored from the journal. Setters queue what must survive; callers await the commit."""

    def __init__(self, settings: ControllerSettings, journal: Journal, *, now_s: float) -> None:
        reader = journal.reader()
        meta = reader.meta()
        self.settings = settings
        self.journal = journal
        self.reader = reader
        self.run_id = restore_run_id(settings, meta)
        keep_num_fragments(settings, meta)
        self.run_started_s = min(read_number(meta, "run_started_s", now_s), now_s)
        self.paused = meta.get("paused") == "1"
        self.last_decision_id = reader.last_id("decisions")
        agents = reader.values("agents", AgentRecord)
        self.recoveries = RecoveryBook(last_number=read_whole(meta, "recovery_number", 0), agents=agents)
        self.registry = Registry(
            journal,
            LeaseTerms(
                num_slots=settings.num_slots,
                lease_timeout_s=settings.lease_timeout_s,
                takeover_after_s=settings.takeover_after_s,
            ),
            # A fresh journal must outrank what earlier ones gave out, which the synchronizer still knows.
            epoch=read_whole(meta, "epoch", int(now_s)),
            agents=agents,
        )
        self.registry.grace(now_s)
        self.buddies = BuddyBook(
            journal,
            meta,
            factor=settings.replication_factor,
            allow_same_node=settings.allow_same_node_buddies,
        )
        seen_s = max((agent.last_beat_s for agent in agents), default=None)
        self.restart = (
            self.recoveries.restarted(lost_s=seen_s, epoch=self.registry.epoch, now_s=now_s) if meta else None
        )
        """What to note of this very start; None at the first one of a run."""
        self.samples = SampleBook(
            # A clock that ran ahead has been set right: what it stamped would shadow all that comes.
            (one for one in reader.values("servers", LoadSample) if one.t_s <= now_s + FUTURE_TOLERANCE_S),
            stale_after_s=settings.stale_after_s,
        )
        self.island_views = IslandViews()
        self.sample_log = SampleLog(settings.journal_samples_every_s)
        self.costs = CostBook(stale_after_s=settings.stale_after_s)
        self.rounds = RoundBook(
            journal,
            (
                not_ahead(entry, now_s, "directed_s", "opened_s", "closed_s", with_them="deadline_s")
                for entry in reader.values("rounds", RoundEntry, newest=KEPT_ROUNDS)
            ),
            num_applied=read_whole(meta, "rounds_applied", 0),
            report_grace_s=settings.report_grace_s,
            counted_to=read_whole(meta, "rounds_counted_to", 0) if "rounds_counted_to" in meta else None,
        )
        if self.rounds.counted_to is None:
            # Journals from before versions were counted: what happened until now was counted by reports.
            self.rounds.counted_to = self.version or None
        seq = read_whole(meta, "directive_seq", 0) + (SEQ_STEP_AT_START if meta else 0)
        self.mailboxes = Mailboxes(journal, reader.values("directives", Box), seq=seq)
        self._restore_orders(meta, now_s)
        journal.put("meta", "run_id", self.run_id)
        journal.put("meta", "num_fragments", str(settings.num_fragments))
        journal.put("meta", "run_started_s", repr(self.run_started_s))
        journal.put("meta", "directive_seq", str(seq))

    def _restore_orders(self, meta: dict[str, str], now_s: float) -> None:
        """Policy and budget: as they were set last over HTTP, unless the settings changed since."""
        wanted = Configured(policy=self.settings.policy_spec, budget=self.settings.budget_spec)
        before = _read_configured(meta)
        budgets = [
            not_ahead(budget, now_s, "started_s", "last_sync_s")
            for budget in self._read_orders("budget", BudgetStatus, lambda budget: check_budget(budget.spec))
        ]
        policies = self._read_orders("policy", PolicySpec)
        self.policy_was_changed = before is not None and before.policy != wanted.policy
        """The settings name another policy than at the last start."""
        kept = before is not None and not self.policy_was_changed and policies
        try:
            self.set_policy(policies[0] if kept else wanted.policy)
        except InputError as exc:
            logger.warning("the policy of the journal does not fit the settings any more, using theirs: %s", exc)
            self.set_policy(wanted.policy)
        if before is not None and before.budget == wanted.budget and budgets:
            self.budget = budgets[0]
        else:
            self.budget = new_period(
                wanted.budget, now_s=now_s, last_sync_s=budgets[0].last_sync_s if budgets else None
            )
            self.journal.put("budget", "current", self.budget)
        if before is not None and before != wanted:
            # News to whoever started a standby: what was ordered over HTTP is replaced by its own settings.
            logger.warning(
                "policy or budget of the settings differ from those of the last leader and replace its orders policy=%s"
                " budget=%s",
                self.policy_spec.label,
                self.budget.spec.model_dump(exclude_none=True),
            )
        self.journal.put("meta", "configured", wanted)

    def _read_orders(self, table: str, model: type[M], check: Callable[[M], None] = lambda _: None) -> list[M]:
        """The orders in a table of the journal; impossible ones are dropped, since the settings hold better ones."""
        try:
            found = self.reader.values(table, model)
            for order in found:
                check(order)
        except (ConfigError, InputError) as exc:
            logger.error("the %s of the journal is impossible, using that of the settings: %s", table, exc)  # noqa: TRY400
            return []
        return found

    def keep_recovery(self, recovery: Recovery) -> None:
        self.journal.append("recoveries", recovery_row(recovery))
        self.journal.put("meta", "recovery_number", str(self.recoveries.last_number))

    def set_policy(self, spec: PolicySpec) -> None:
        """Raises `InputError` when there is no such policy."""
        self.policy = make_policy(spec, self.settings.policy_context)
        self.policy_spec = spec
        self.journal.put("policy", "current", spec)

    def set_budget(self, spec: BudgetSpec, *, now_s: float) -> None:
        self._keep_budget(new_period(spec, now_s=now_s, last_sync_s=self.budget.last_sync_s))

    def resume_budget(self, budget: BudgetStatus) -> None:
        """Go on with an earlier period as it was left; the gap to the last sync holds."""
        self._keep_budget(budget.model_copy(update={"last_sync_s": self.budget.last_sync_s}))

    def set_paused(self, paused: bool) -> None:
        self.paused = paused
        self.journal.put("meta", "paused", "1" if paused else "0")

    def keep_newest_samples(self) -> None:
        """At a clean stop: thinned out, the journal may have older ones."""
        for sample in self.samples.latest:
            self.journal.put("servers", sample.server_id, sample)

    def forget(self, now_s: float) -> None:
        """Drop servers and agents that are gone for long, from the journal too: names nobody uses must not add up."""
        self.registry.forget(now_s)
        self.mailboxes.forget(self.registry.take_forgotten())
        for server_id in self.samples.forget(now_s):
            self.sample_log.forget(server_id)
            self.journal.forget("servers", server_id)
        self.costs.forget(now_s)

    def count_syncs(self, now_s: float) -> None:
        """Count the outer steps that have become known."""
        told = self.version if self.registry.version is not None or self.rounds.version > 0 else None
        applied_s = self._applied_s(told) if told != self.rounds.counted_to else None
        for entry in self.rounds.collect_spent(told, policy=self.policy.name, now_s=now_s, applied_s=applied_s):
            started_s = entry.began_s
            budget = with_sync_started(self.budget, started_s)
            # A round that began before the period was set belongs to the one before.
            self._keep_budget(with_sync_spent(budget) if started_s >= budget.started_s else budget)

    def _applied_s(self, version: int | None) -> float | None:
        """When the outer step to a version was applied, as its islands tell."""
        told = [agent.progress for agent in self.registry.records.values() if agent.progress is not None]
        times_s = [p.last_sync_at_s for p in told if p.round == version and p.last_sync_at_s is not None]
        return min(times_s, default=None)

    def _keep_budget(self, budget: BudgetStatus) -> None:
        self.budget = budget
        self.journal.put("budget", "current", budget)

    @property
    def version(self) -> int:
        """Outer steps taken so far, as far as anybody has told."""
        return max(self.rounds.version, self.registry.version or 0)

    @property
    def live_slots(self) -> LiveSlots:
        """Slots of live islands, and the version that each trains from (None while it has not said)."""
        return self.registry.live_slots


def _read_configured(meta: dict[str, str]) -> Configured | None:
    """Policy and budget of the settings of the last start; None when there was none, or it cannot be any more."""
    if "configured" not in meta:
        return None
    try:
        return Configured.model_validate_json(meta["configured"])
    except ValidationError as exc:
        logger.error("the last settings in the journal are impossible: %s", exc.errors()[0]["msg"])  # noqa: TRY400
        return None


MAX_WHOLE = 2**62
"""Beyond any count of a run, and within what the databases and the wire hold."""


def read_number(meta: dict[str, str], key: str, default: float) -> float:
    """A number of the table ``meta``.

    Raises:
        ConfigError: it is none.
    """
    try:
        value = float(meta.get(key, default))
    except ValueError as exc:
        raise unreadable_row(f"meta ({key})", exc) from exc
    if not math.isfinite(value):
        raise unreadable_row(f"meta ({key})", ValueError(f"{value} is not finite"))
    return value


def read_whole(meta: dict[str, str], key: str, default: int) -> int:
    """As `read_number`, of a count."""
    try:
        value = int(meta.get(key, default))
    except ValueError as exc:
        raise unreadable_row(f"meta ({key})", exc) from exc
    if not 0 <= value <= MAX_WHOLE:
        raise unreadable_row(f"meta ({key})", ValueError("it is no count"))
    return value


def restore_run_id(settings: ControllerSettings, meta: dict[str, str]) -> str:
    """Raises `ConfigError` when the journal is another run's."""
    kept = meta.get("run_id")
    if kept is not None and settings.run_id is not None and kept != settings.run_id:
        raise ConfigError(
            f"the journal {settings.journal} belongs to run {kept}",
            field="run_id",
            remedy="drop --run-id, or name another --journal",
        )
    return kept or settings.run_id or f"run-{secrets.token_hex(4)}"


def keep_num_fragments(settings: ControllerSettings, meta: dict[str, str]) -> None:
    """Raises `ConfigError` when the run of the journal has begun with other fragments, by which its rounds count."""
    before = read_whole(meta, "num_fragments", 1)
    has_begun = any(read_whole(meta, key, 0) > 0 for key in ("rounds_counted_to", "rounds_applied"))
    if has_begun and before != settings.num_fragments:
        raise ConfigError(
            f"the run in the journal {settings.journal} has {before}, not {settings.num_fragments}",
            field="num_fragments",
            remedy=f"give --num-fragments {before}, or begin another run with another --journal",
        )
