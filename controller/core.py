"""What the controller does when somebody asks: requests of sidecars, agents and operators on the fleet's state.

A request that changes registry, rounds, policy or budget is answered once the journal has it (503 when it cannot be
written: the change holds in memory, is retried, and repeating the request is harmless). Samples and progress are
accepted even then: they are worth more now than on disk.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from controller.budget import check_budget, is_over
from controller.clock import Clock, autonomy_at, correction_of, directive_at, own_beat, progress_at
from controller.commits import Commits
from controller.dashboard.recent import Recent, read_recent
from controller.headroom import CostSource
from controller.intake import Intake
from controller.lab import Lab
from controller.lab_metrics import LabCollector, LabMetrics
from controller.leadership import Leadership, SoleLeader
from controller.metrics import Gauges, Metrics
from controller.nonsense import check_heartbeat
from controller.orders import write_sync
from controller.policy.base import Binding, summarize
from controller.records import AgentRecord, Membership
from controller.recovery_desk import RecoveryDesk
from controller.right_of_way import RightOfWay
from controller.rounds import first_failure, outcome_of
from controller.schema import (
    AgentLease,
    AgentRegistration,
    Autonomy,
    BudgetSpec,
    BudgetStatus,
    DecisionPage,
    Directives,
    Fleet,
    Heartbeat,
    HeartbeatReply,
    IslandStatus,
    PolicySpec,
    Recovery,
    RecoveryPage,
    RecoveryRecord,
    RoundPage,
    SampleReceipt,
)
from controller.state import FleetState
from controller.view import build_view
from service.errors import ConflictError, InputError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenure:
    """What a controller has while it has the state."""

    state: FleetState
    lab: Lab
    recent: Recent


class Controller:
    """The operations behind the HTTP endpoints."""

    def __init__(
        self,
        state: FleetState | None,
        metrics: Metrics,
        clock: Clock,
        *,
        leadership: Leadership | None = None,
        costs: CostSource | None = None,
    ) -> None:
        self.metrics = metrics
        self.clock = clock
        self.leadership = leadership or SoleLeader()
        self._costs = costs
        self._lab_metrics = LabMetrics(metrics.registry)
        metrics.registry.register(
            LabCollector(
                lambda: self.lab.headroom.latest if self.has_state else None,
                lambda: self.lab.running_block if self.has_state else None,
            )
        )
        self._tenure: Tenure | None = None
        self.desk = RecoveryDesk(self)
        self.enter(self.prepare(state) if state is not None else None)
        self.right_of_way = RightOfWay()
        self._intake = Intake(self)
        self._commits = Commits(lambda: self.state.journal, self.leadership)

    def prepare(self, state: FleetState) -> Tenure:
        """All that is restored with a state; it reads the journal, and so may block."""
        recent = read_recent(state)
        costs = self._costs or state.costs
        lab = Lab(state, self._lab_metrics, self.clock, costs=costs, remember=recent.decisions.add)
        return Tenure(state=state, lab=lab, recent=recent)

    def enter(self, tenure: Tenure | None) -> None:
        """Work on this from now on; on nothing, while another controller leads."""
        self._tenure = tenure
        if tenure is not None and tenure.state.restart is not None:
            self.desk.note(tenure.state.restart)

    @property
    def has_state(self) -> bool:
        return self._tenure is not None

    @property
    def state(self) -> FleetState:
        """The state as of now; another one after the lead was lost and won again.

        Raises:
            StandbyError: another controller has it.
        """
        return self._held.state

    @property
    def lab(self) -> Lab:
        """As `state`."""
        return self._held.lab

    @property
    def recent(self) -> Recent:
        """As `state`."""
        return self._held.recent

    @property
    def _held(self) -> Tenure:
        if self._tenure is None:
            raise self.leadership.refusal
        return self._tenure

    def check_leads(self) -> None:
        """Raises `StandbyError` unless this controller may decide and promise."""
        if not self.leadership.leads:
            raise self.leadership.refusal

    @property
    def obstacle(self) -> str | None:
        """Why the service is not ready."""
        if not self.leadership.leads:
            return str(self.leadership.refusal)
        return self.state.journal.failure

    async def ingest(self, body: bytes) -> SampleReceipt:
        """Judge each sample of a batch alone; returns once the good ones are on disk, if it can be written.

        Raises:
            InputError: the body is no batch.
        """
        receipt = await self._intake.take(body)
        await self._commits.soon()
        return receipt

    async def register(self, request: AgentRegistration) -> AgentLease:
        self._check_fragments(request)
        epoch = self.state.registry.epoch
        agent = self.state.registry.register(request, now_s=self.clock())
        self.note_recoveries(self.clock())
        if self.state.registry.epoch != epoch:
            logger.info("member agent=%s slot=%s epoch=%d", agent.agent_id, agent.slot, self.state.registry.epoch)
        directive_seq = self.state.mailboxes.seq
        self._repeat_open_sync(agent)
        newest_seq = self.state.mailboxes.seq
        await self.state.journal.commit()
        self.state.mailboxes.announce(newest_seq)
        return self._lease(agent, directive_seq=directive_seq)

    def _check_fragments(self, request: AgentRegistration) -> None:
        """Raises `InputError` when the run cuts the parameters into more fragments than the agent can sync."""
        wanted = self.state.settings.num_fragments
        if request.num_fragments < wanted:
            raise InputError(
                f"{request.agent_id} syncs {request.num_fragments} at a time, this run has {wanted}",
                field="num_fragments",
                remedy=f"run the controller with --num-fragments {request.num_fragments}",
            )

    def _lease(self, agent: AgentRecord, *, directive_seq: int) -> AgentLease:
        settings = self.state.settings
        return AgentLease(
            agent_id=agent.agent_id,
            slot=agent.slot,
            epoch=self.state.registry.epoch,
            run_id=self.state.run_id,
            min_h=settings.min_h,
            max_h=settings.max_h,
            heartbeat_interval_s=settings.heartbeat_interval_s,
            lease_timeout_s=settings.lease_timeout_s,
            synchronizer_url=settings.synchronizer_url,
            directive_seq=directive_seq,
            resume=None if agent.resume is None else progress_at(agent.resume, correction_of(self.clock)),
            paused=self.state.paused,
            autonomy=self._autonomy(),
            sync_timeout_s=settings.sync_timeout_s,
            num_fragments=settings.num_fragments,
            **self.desk.lease_extras(agent),
        )

    def _repeat_open_sync(self, agent: AgentRecord) -> None:
        """Send the directive of a round that waits for this slot anew: under a new lease its old epoch is void."""
        awaiting = self.state.rounds.open
        if awaiting is None or awaiting.directed_s is None or agent.slot is None:
            return
        if agent.slot in awaiting.missing and agent.slot in awaiting.told:
            write_sync(self.state, [agent], awaiting, reason=awaiting.reason, now_s=self.clock())

    def _autonomy(self) -> Autonomy:
        budget = self.state.budget
        horizon_s = budget.spec.horizon_s
        autonomy = Autonomy(
            allowed=self.state.policy.syncs and not is_over(budget, self.clock()),
            max_syncs=budget.remaining,
            min_gap_s=max(budget.spec.min_gap_s, budget.spec.period_s or 0.0),
            until_s=None if horizon_s is None else budget.started_s + horizon_s,
        )
        return autonomy_at(autonomy, correction_of(self.clock))

    async def heartbeat(self, agent_id: str, beat: Heartbeat) -> HeartbeatReply:
        """Renew a lease, take over progress, and add sync reports to their rounds."""
        try:
            agent = self._accept_beat(agent_id, own_beat(beat, correction_of(self.clock)))
        except InputError as exc:
            self.metrics.reports.labels("nonsense").inc()
            logger.warning("nonsense reported agent=%s field=%s message=%s", agent_id, exc.field, exc.message)
            raise
        except ConflictError:
            self.metrics.reports.labels("refused").inc()
            raise
        self.metrics.reports.labels("accepted").inc()
        seq = self.state.mailboxes.seq
        if beat.restarts or beat.handed_over:
            durable = await self._commits.now()
        else:
            durable = await self._commits.soon() if beat.syncs else True
        if beat.handed_over is not None:
            self.state.mailboxes.announce(seq)
        return HeartbeatReply(
            epoch=max(agent.granted_epoch, self.state.registry.epoch),
            directive_seq=self.state.mailboxes.seq,
            syncs_acknowledged=len(beat.syncs) if durable else 0,
            paused=self.state.paused,
            autonomy=self._autonomy(),
            **self.desk.reply_extras(agent),
        )

    def _accept_beat(self, agent_id: str, beat: Heartbeat) -> AgentRecord:
        now_s = self.clock()
        registry = self.state.registry
        agent = registry.check(agent_id, beat.instance)
        registry.check_epoch(agent, beat.epoch)
        check_heartbeat(beat, registry.known(agent, version=self.state.version), now_s=now_s)
        told = registry.version
        before, agent = agent, registry.beat(agent, beat, now_s=now_s)
        if agent.slot is not None:
            for report in beat.syncs:
                self.state.rounds.absorb(
                    agent.slot,
                    report,
                    policy=self.state.policy.name,
                    live_slots=self.state.live_slots,
                    now_s=now_s,
                    timeout_s=self.state.settings.sync_timeout_s,
                )
        if beat.syncs or registry.version != told:
            self.close_rounds(now_s)
        self.desk.hear(before, agent, beat, now_s=now_s)
        return agent

    def note_recoveries(self, now_s: float) -> None:
        """Journal what the latest changes of membership mean."""
        self.desk.note_changes(now_s)

    def remember_recovery(self, record: Recovery) -> None:
        """For the dashboard."""
        self.recent.recoveries.append(record)

    def close_rounds(self, now_s: float) -> None:
        """Close the rounds that have everything, and count them."""
        for entry in self.state.rounds.settle(self.state.live_slots, now_s):
            outcome = outcome_of(entry)
            self.metrics.rounds.labels(outcome).inc()
            logger.info(
                "round closed round=%d outcome=%s reason=%s slots=%s%s",
                *(entry.round, outcome, entry.reason, entry.expected, first_failure(entry)),
            )
        self.state.count_syncs(now_s)

    async def directives(self, agent_id: str, *, instance: str, after: int, wait_s: float) -> Directives:
        self.state.registry.check(agent_id, instance)
        await self.state.mailboxes.wait_for_news(agent_id, after=after, wait_s=wait_s, clock=self.clock)
        # Another process may have taken over meanwhile: then these are not for this one.
        self.state.registry.check(agent_id, instance)
        found = self.state.mailboxes.read(agent_id, after=after, now_s=self.clock())
        correction_s = correction_of(self.clock)
        told = [directive_at(directive, correction_s) for directive in found]
        return Directives(directives=told, seq=max((directive.seq for directive in told), default=after))

    async def leave(self, agent_id: str, instance: str) -> None:
        self.state.registry.leave(agent_id, instance)
        self.note_recoveries(self.clock())
        self.close_rounds(self.clock())
        logger.info("left agent=%s epoch=%d", agent_id, self.state.registry.epoch)
        await self.state.journal.commit()

    def give_up(self, agent: AgentRecord) -> None:
        """Its process is gone for certain."""
        self.metrics.leases_lost.inc()
        self.state.registry.give_up(agent, now_s=self.clock())
        self.note_recoveries(self.clock())
        self.close_rounds(self.clock())

    async def set_policy(self, spec: PolicySpec) -> PolicySpec:
        self.lab.experiments.check_idle("policy")
        self.state.set_policy(spec)
        logger.info("policy set policy=%s params=%s", spec.name, spec.params)
        await self.state.journal.commit()
        return self.state.policy_spec

    async def set_budget(self, spec: BudgetSpec) -> BudgetStatus:
        check_budget(spec)
        self.lab.experiments.check_idle("budget")
        self.state.set_budget(spec, now_s=self.clock())
        logger.info("budget set syncs=%s horizon_s=%s gap_s=%g", spec.outer_syncs, spec.horizon_s, spec.min_gap_s)
        await self.state.journal.commit()
        return self.state.budget

    async def decisions(self, *, since: int | None, limit: int) -> DecisionPage:
        reader = self.state.reader
        if since is None:
            since = await asyncio.to_thread(reader.before_newest, "decisions", limit)
        found = await asyncio.to_thread(reader.decisions, since=since, limit=limit)
        return DecisionPage(decisions=found, next_since=found[-1].id if found else since)

    async def recoveries(self, *, since: int | None, limit: int) -> RecoveryPage:
        reader = self.state.reader
        if since is None:
            since = await asyncio.to_thread(reader.before_newest, "recoveries", limit)
        rows = await asyncio.to_thread(reader.page, "recoveries", since=since, limit=limit)
        found = [row for row in rows if isinstance(row, RecoveryRecord)]
        return RecoveryPage(recoveries=found, next_since=found[-1].id if found else since)

    def rounds(self, *, limit: int) -> RoundPage:
        return RoundPage(rounds=[entry.to_record() for entry in self.state.rounds.entries[-limit:]])

    def fleet(self) -> Fleet:
        now_s = self.clock()
        return Fleet(
            run_id=self.state.run_id,
            t_s=now_s,
            servers=self.state.samples.statuses(now_s),
            num_unknown=self.state.samples.num_known(now_s)[1],
            islands=self.islands(),
            paused=self.state.paused,
            epoch=self.state.registry.epoch,
            rounds_closed=self.state.rounds.num_applied,
        )

    def islands(self) -> list[IslandStatus]:
        now_s = self.clock()
        agents = self.state.registry.agents
        beside = self.state.samples.views_beside(((agent.node, agent.server_id) for agent in agents), now_s)
        binding = Binding(beside)
        return [
            IslandStatus(
                agent_id=agent.agent_id,
                slot=agent.slot,
                node=agent.node,
                server_id=agent.server_id,
                epoch=agent.granted_epoch,
                alive=agent.membership is Membership.ACTIVE,
                age_s=max(0.0, now_s - agent.last_beat_s),
                progress=agent.progress,
                servers=tuple(server.server_id for server in binding.of(agent.node, agent.server_id)),
                drained=agent.drained,
                leaving=None if agent.leaving is None else agent.leaving.action,
            )
            for agent in agents
        ]

    def gauges(self) -> Gauges | None:
        """None while another controller has the state."""
        if not self.has_state:
            return None
        now_s = self.clock()
        view = build_view(self.state, now_s, with_costs=False)
        known, unknown = self.state.samples.num_known(now_s)
        active = [agent for agent in self.state.registry.agents if agent.membership is Membership.ACTIVE]
        ready = any(island.ready for island in view.islands)
        binding = Binding(view.servers)
        return Gauges(
            servers_known=known,
            servers_unknown=unknown,
            islands_alive=len(view.islands),
            agents_waiting=sum(agent.slot is None and not agent.drained for agent in active),
            agents_drained=sum(agent.drained for agent in active),
            islands_without_server=sum(not binding.of(island.node, island.server_id) for island in view.islands),
            epoch=self.state.registry.epoch,
            round=view.round,
            paused=self.state.paused,
            sync_in_flight=view.sync_in_flight,
            budget_remaining=self.state.budget.remaining,
            budget_spent=self.state.budget.spent,
            h=summarize(view, now_s).h if ready else None,
            journal_ok=self.state.journal.failure is None,
            journal_queued_rows=self.state.journal.num_queued,
            journal_failures=self.state.journal.num_failures,
            journal_dropped_rows=self.state.journal.num_dropped,
            journal_pruned_rows=dict(self.state.journal.num_pruned),
            journal_size_bytes=self.state.journal.size_bytes,
        )
