"""Settings of the controller."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Self

from pydantic import Field, field_validator, model_validator

from controller.buddies import MAX_FACTOR
from controller.budget import check_budget
from controller.database_url import DatabaseUrl, read_journal
from controller.policy import PolicyContext, make_policy
from controller.policy_words import check_shadows, in_options, parse_policy
from controller.schema import MAX_BUDGET_S, MAX_BUDGET_SYNCS, BudgetSpec, Mode, PolicySpec
from diloco.schema import MAX_FRAGMENTS, SyncTimes
from service.errors import InputError
from service.peers import split_urls
from service.settings import CommaSeparated, ServiceSettings, Url, Urls

# Ten heartbeats per lease: one lost packet or one busy second says nothing, ten in a row do.
HEARTBEATS_PER_LEASE = 10
# Silence after which a new process may take over the same agent id without waiting for the lease to end.
HEARTBEATS_UNTIL_TAKEOVER = 3

# Connections that are open by default: ten thousand sidecars without a relay and those who look on, and for each slot
# an agent with its long poll and its heartbeats, and a spare with the same.
SIDECARS = 12_288
CONNECTIONS_PER_SLOT = 4


class ControllerSettings(ServiceSettings):
    """Decide when the islands of one fleet sync."""

    service: ClassVar[str] = "controller"

    port: int = Field(default=9500, ge=0, le=65535)
    """TCP port to listen on; 0 takes a free one and logs it."""
    journal: Path | DatabaseUrl = Path("wadiloco-controller.sqlite")
    """SQLite file with everything that must survive a restart, made when missing; or postgresql://USER@HOST/DATABASE,
    which several controllers can share: one leads, the others stand by. Others on the host can read a command line:
    keep a password in the environment or in ~/.pgpass."""
    run_id: str | None = Field(default=None, min_length=1, max_length=64)
    """Name of the training run; by default made once and kept in the journal."""
    num_slots: int = Field(default=2, ge=1, le=4096)
    """Places for islands; further agents wait as spares."""
    mode: Mode = Mode.SYNCHRONOUS
    """synchronous: one decision for all islands, which wait for the result. per_island: each island comes to the open
    round at its own best moment and trains on."""
    quorum: int | None = Field(default=None, ge=1, le=4096)
    """Contributions that a round must have; for the others it waits as long as stragglers were late lately, at most as
    long as the synchronizer's grace_max_s. By default all islands that are told to come."""
    num_fragments: int = Field(default=1, ge=1, le=MAX_FRAGMENTS)
    """Parts of the parameters that sync in turn, one in each round. It belongs to the run: islands take it over from
    here, and it cannot change once the run has begun."""
    policy: str = "wa_diloco"
    """no_sync, fixed_h, adaptive_tokens, pressure_gate, random_deferral, wa_diloco, wa_calibrated, wa_forecast, or one
    that another package brings along."""
    policy_params: dict[str, float | int] = Field(default_factory=dict)
    """Parameters of the policy, for example h=256."""
    shadow_policies: CommaSeparated = ()
    """Policies that run beside it, journalled and never enforced: NAME or NAME:PARAM=VALUE:..., comma-separated."""
    min_h: int = Field(default=128, ge=1)
    """Inner steps before which no policy syncs."""
    max_h: int = Field(default=512, ge=1)
    """Inner steps at which every policy but no_sync syncs."""
    budget_syncs: int | None = Field(default=None, ge=0, le=MAX_BUDGET_SYNCS)
    """Outer syncs that may be spent; unlimited by default."""
    budget_horizon_s: float | None = Field(default=None, gt=0, le=MAX_BUDGET_S)
    """Seconds from the start of the budget within which all of its syncs are spent, and after which none is."""
    budget_syncs_per_hour: float | None = Field(default=None, gt=1e-6, le=1e6)
    """Outer syncs per hour, in place of a number and a horizon; without end."""
    budget_max_defer_s: float | None = Field(default=None, gt=0, le=MAX_BUDGET_S)
    """Seconds since the last sync after which one is made whatever it costs; no bound by default."""
    min_gap_s: float = Field(default=0.0, ge=0, le=MAX_BUDGET_S)
    """Least seconds between the starts of two syncs."""
    tick_s: float = Field(default=0.5, ge=0.02, le=10)
    """Seconds between decisions."""
    lease_timeout_s: float = Field(default=10.0, ge=0.5, le=600)
    """Silence after which an agent has lost its lease; heartbeats come ten times as often."""
    sync_timeout_s: float = Field(default=60.0, gt=0, le=3600)
    """Seconds after which islands give up on a round that was directed; every other deadline of the round, at islands
    and synchronizer too, follows from it."""
    decision_journal_s: float = Field(default=60.0, ge=0, le=86400)
    """In per_island mode, seconds after which the decision to wait is journalled again with the same reason."""
    stale_after_s: float = Field(default=5.0, gt=0, le=300)
    """Age from which a sample says nothing: the server's load is unknown."""
    retention_s: float = Field(default=7 * 86400.0, ge=60)
    """Age from which decisions, recoveries and samples are dropped from the journal."""
    samples_retention_s: float = Field(default=86400.0, ge=60)
    """Age from which samples are dropped, where it is less: they are what fills a disk."""
    journal_samples_every_s: float = Field(default=0.0, ge=0, le=3600)
    """Seconds between two samples of one server in the journal; 0 keeps every sample. A clean stop keeps the newest."""
    failover_s: float = Field(default=5.0, ge=1, le=300)
    """Silence, towards a PostgreSQL journal, after which the leading controller has lost its lead to another."""
    advertise_url: Url | None = None
    """URL of this controller, told by a standby to those who look for the leader."""
    synchronizer_url: Urls | None = None
    """Where islands find the synchronizer, or all that share the run's fragments, in the order of their --shard and
    with commas between them; told to islands when they register."""
    replication_factor: int = Field(default=1, ge=0, le=MAX_FACTOR)
    """Other hosts that keep a replica of each island's newest state, so that a spare goes on where it was."""
    allow_same_node_buddies: bool = False
    """Let an agent keep the replica of an island on its own node, which dies with it: for tests on one machine."""
    seed: int = Field(default=0, ge=0)
    """Seed of what policies draw."""

    @property
    def default_connections(self) -> int:
        return SIDECARS + CONNECTIONS_PER_SLOT * self.num_slots

    @property
    def heartbeat_interval_s(self) -> float:
        return self.lease_timeout_s / HEARTBEATS_PER_LEASE

    @property
    def takeover_after_s(self) -> float:
        return self.heartbeat_interval_s * HEARTBEATS_UNTIL_TAKEOVER

    @property
    def watch_every_s(self) -> float:
        """Between two signs of life of the process: short beside the silence that tells that somebody is gone."""
        return min(self.tick_s, self.heartbeat_interval_s)

    def kept_since_s(self, now_s: float) -> dict[str, float]:
        """For each log of the journal, the time before which its rows are dropped."""
        long_ago_s = now_s - self.retention_s
        samples_s = now_s - min(self.retention_s, self.samples_retention_s)
        return {"samples": samples_s, "decisions": long_ago_s, "recoveries": long_ago_s}

    @field_validator("journal", mode="before")
    @classmethod
    def _read_journal(cls, value: object) -> object:
        return read_journal(value)

    @property
    def sync_times(self) -> SyncTimes:
        return SyncTimes(sync_timeout_s=self.sync_timeout_s)

    @property
    def report_grace_s(self) -> float:
        """How long after the deadline of a round its last report may come: a download, and three heartbeats."""
        return self.sync_times.pull_grace_s + self.takeover_after_s

    @property
    def policy_spec(self) -> PolicySpec:
        return PolicySpec(name=self.policy, params=self.policy_params)

    @property
    def shadow_specs(self) -> tuple[PolicySpec, ...]:
        return tuple(parse_policy(text, field="shadow_policies") for text in self.shadow_policies)

    @property
    def policy_context(self) -> PolicyContext:
        return PolicyContext(min_h=self.min_h, max_h=self.max_h, seed=self.seed)

    @property
    def budget_spec(self) -> BudgetSpec:
        return BudgetSpec(
            outer_syncs=self.budget_syncs,
            horizon_s=self.budget_horizon_s,
            min_gap_s=self.min_gap_s,
            syncs_per_hour=self.budget_syncs_per_hour,
            max_defer_s=self.budget_max_defer_s,
        )

    @model_validator(mode="after")
    def _check_agreement(self) -> Self:
        num_synchronizers = len(split_urls(self.synchronizer_url or ""))
        if self.num_fragments < num_synchronizers:
            raise ValueError(
                f"num_fragments {self.num_fragments} is below the {num_synchronizers} synchronizers, of which each"
                " holds fragments of its own: raise it, or give fewer"
            )
        if self.min_h > self.max_h:
            raise ValueError(f"min_h {self.min_h} is over max_h {self.max_h}: lower min_h or raise max_h")
        if self.stale_after_s <= self.tick_s:
            raise ValueError(f"stale_after_s {self.stale_after_s:g} is not over tick_s {self.tick_s:g}: raise it")
        if self.tick_s > self.lease_timeout_s:
            raise ValueError(f"tick_s {self.tick_s:g} is over lease_timeout_s {self.lease_timeout_s:g}: lower tick_s")
        if self.sync_timeout_s <= 2 * self.tick_s:
            raise ValueError(
                f"sync_timeout_s {self.sync_timeout_s:g} is not over two ticks of {self.tick_s:g} s: raise it"
            )
        if self.quorum is not None and self.quorum > self.num_slots:
            raise ValueError(f"quorum {self.quorum} is over num_slots {self.num_slots}: lower quorum")
        try:
            shadows = self.shadow_specs
        except InputError as exc:
            raise ValueError(str(exc)) from exc
        try:
            check_budget(self.budget_spec)
            make_policy(self.policy_spec, self.policy_context)
            check_shadows(shadows, self.policy_context)
        except InputError as exc:
            raise ValueError(str(in_options(exc))) from exc
        return self
