"""A whole chaos run: fleet up, one fault after the other, fleet down, results written."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shlex
import statistics
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from replay.chaos.config import ChaosSettings
from replay.chaos.disk import check_disks
from replay.chaos.faults import Fault, FaultKind, Shape
from replay.chaos.inject import Applied, Injector, MissedError, lasts
from replay.chaos.judge import AFTER_S, Course, begin, is_trained
from replay.chaos.local_fleet import LocalFleet
from replay.chaos.measure import advances, furthest, goodput_frac, growth_mb_per_min
from replay.chaos.members import Fleet, GivenFleet, agents
from replay.chaos.network import check_network
from replay.chaos.record import ChaosSummary, FaultRecord, Outcome, ProcessMemory, render_report, write_text
from replay.chaos.watch import Watch
from replay.fleet import check_train_options
from replay.processes import Children
from replay.summarize import this_machine
from service.app import package_version
from service.errors import ConflictError, UnavailableError

logger = logging.getLogger(__name__)

RESULT = "chaos.json"
REPORT = "chaos.md"
TEND_EVERY_S = 0.2
TRAINS_DEADLINE_S = 180.0
MISSED_TRIES_S = 10.0
"""For a target that is just being replaced."""
KEPT_MEMORY = 200
"""Processes of the report: each worker is one more whenever it was started again."""

Tell = Callable[[str], None]


@dataclass(slots=True)
class Run:
    """What a run works on, and what it has found."""

    settings: ChaosSettings
    plan: list[Fault]
    fleet: Fleet
    watch: Watch
    injector: Injector
    tell: Tell
    records: list[FaultRecord] = field(default_factory=list)
    trained_from_s: float = 0.0
    quiet_from_s: float = 0.0
    """Since then nothing has disturbed it."""
    complete: bool = False
    background: list[asyncio.Task[None]] = field(default_factory=list)

    async def pause(self, wait_s: float | None = None) -> None:
        """Wait for the next look, or so long; what looks and tends must not have failed meanwhile."""
        done, _ = await asyncio.wait(
            self.background,
            timeout=self.settings.poll_s if wait_s is None else wait_s,
            return_when=asyncio.FIRST_COMPLETED,
        )
        for task in done:
            task.result()


async def run_chaos(settings: ChaosSettings, tell: Tell) -> ChaosSummary:
    """Carry the plan out; ``settings.out`` then holds the results, whatever ended the run.

    Raises:
        WadilocoError: bad settings, a fault that cannot be injected here, a fleet that does not train.
    """
    given = GivenFleet.read(settings.fleet) if settings.fleet is not None else None
    shape = await _shape_of(settings, given)
    plan = settings.plan(shape)
    _check(settings, plan, given)
    _prepare(settings)
    children = Children()
    try:
        async with _fleet(settings, plan, given, children, tell) as run:
            try:
                await _carry_out(run)
            finally:
                run.injector.take_all_back()
                summary = summarize(run)
                write_text(settings.out / RESULT, summary.model_dump_json(indent=2) + "\n")
                write_text(settings.out / REPORT, render_report(summary))
            return summary
    finally:
        children.stop()


def _check(settings: ChaosSettings, plan: list[Fault], given: GivenFleet | None) -> None:
    kinds = {fault.kind for fault in plan}
    if given is None:
        check_train_options(tuple(settings.train_options.items()))
    for kind, check in ((FaultKind.PARTITION, check_network), (FaultKind.DISK, check_disks)):
        if kind not in kinds:
            continue
        if given is not None:
            raise UnavailableError(
                f"{kind} is only for a fleet that is started here", field="kinds", remedy="leave it, or fleet, out"
            )
        check()


def _prepare(settings: ChaosSettings) -> None:
    out = settings.out
    try:
        out.mkdir(parents=True, exist_ok=True)
        if (out / "fleet").exists() or (out / RESULT).exists():
            raise ConflictError(
                f"{out} already holds a chaos run", field="out", remedy="choose another --out, or move the old one away"
            )
        (out / "fleet").mkdir()
    except OSError as exc:
        raise UnavailableError(f"cannot write into {out}: {exc.strerror or exc}", field="out") from exc


async def _shape_of(settings: ChaosSettings, given: GivenFleet | None) -> Shape:
    if given is None:
        return Shape(num_slots=settings.islands, num_ranks=settings.ranks)
    watch = Watch(given, token=settings.token_text)
    watching = asyncio.create_task(watch.run(settings.poll_s))
    try:
        async with asyncio.timeout(TRAINS_DEADLINE_S):
            while not watch.slots or watch.controller is None or any(a.name not in watch.seen for a in agents(given)):
                async with watch.changed:
                    await watch.changed.wait()
        ranks = [len(samples[-1].pids) for samples in watch.slots.values()]
        return Shape(num_slots=max(watch.slots) + 1, num_ranks=min(ranks))
    except TimeoutError as exc:
        raise UnavailableError("no island of the given fleet trains", field="fleet") from exc
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


@contextlib.asynccontextmanager
async def _fleet(
    settings: ChaosSettings, plan: list[Fault], given: GivenFleet | None, children: Children, tell: Tell
) -> AsyncIterator[Run]:
    kinds = {fault.kind for fault in plan}
    disks = frozenset(fault.role for fault in plan if fault.kind is FaultKind.DISK)
    with contextlib.ExitStack() as stack:
        local = None
        if given is None:
            local = stack.enter_context(
                LocalFleet(settings, with_network=FaultKind.PARTITION in kinds, with_disks=disks, children=children)
            )
            tell(f"starting {settings.islands} islands and {settings.spares} spares")
            await local.start()
        fleet: Fleet = local if local is not None else given or GivenFleet()
        watch = Watch(fleet, token=local.token if local is not None else settings.token_text)
        if local is not None:
            watch.on_workers = local.note_workers
        network = local.network if local is not None and FaultKind.PARTITION in kinds else None
        run = Run(settings, plan, fleet, watch, Injector(settings, fleet, watch, children, network), tell)
        run.background = [asyncio.create_task(watch.run(settings.poll_s)), asyncio.create_task(_tend(run))]
        try:
            yield run
        finally:
            for task in run.background:
                task.cancel()
            await asyncio.gather(*run.background, return_exceptions=True)


async def _tend(run: Run) -> None:
    while True:
        silent_s = {n: s for n, s in run.watch.silent_s.items() if n not in run.injector.unplugged}
        await run.fleet.tend(silent_s)
        await asyncio.sleep(TEND_EVERY_S)


async def _carry_out(run: Run) -> None:
    await _until_all_train(run)
    run.trained_from_s = run.quiet_from_s = run.watch.now_s
    await run.pause(run.settings.settle_s)
    begin_s = run.watch.now_s
    for number, fault in enumerate(run.plan, 1):
        if not await _until_due(run, fault, begin_s):
            run.tell(f"{number}/{len(run.plan)} {fault.kind} {fault.target}: its step never came")
            run.records.append(_hang_before(run, fault))
            return
        record = await _one(run, fault)
        run.records.append(record)
        run.tell(f"{number}/{len(run.plan)} {_describe(record)}")
        if record.outcome is Outcome.HANG:
            return  # the fleet is not what it was: what came now would say nothing of itself
        run.quiet_from_s = run.watch.now_s + AFTER_S
        await run.pause(run.settings.settle_s)
    run.complete = True


async def _until_all_train(run: Run) -> None:
    slots = range(run.settings.islands) if run.settings.fleet is None else range(0)
    deadline_s = run.watch.now_s + TRAINS_DEADLINE_S
    while not run.watch.slots or not all(
        is_trained(run.watch.slots.get(slot, [])) for slot in {*slots, *run.watch.slots}
    ):
        if run.watch.now_s > deadline_s:
            raise UnavailableError(
                f"not every slot trained within {TRAINS_DEADLINE_S:g} s", remedy=f"see the logs in {run.settings.out}"
            )
        await run.pause()


async def _until_due(run: Run, fault: Fault, begin_s: float) -> bool:
    """Wait for a fault's time, or for the step of its slot; False when that comes no further."""
    if fault.at_s is not None:
        await run.pause(max(0.0, begin_s + fault.at_s - run.watch.now_s))
        return True
    assert fault.slot is not None
    assert fault.at_step is not None
    while True:
        samples = run.watch.slots.get(fault.slot, [])
        if furthest(samples, until_s=run.watch.now_s) >= fault.at_step:
            return True
        if run.watch.now_s - max(advances(samples), default=0.0) > run.settings.recover_within_s:
            return False
        await run.pause()


async def _one(run: Run, fault: Fault) -> FaultRecord:
    try:
        applied = await _apply(run, fault)
    except UnavailableError as exc:
        return FaultRecord(kind=fault.kind, target=fault.target, outcome=Outcome.MISSED, detail=str(exc))
    run.tell(f"  {fault.kind} {fault.target} pid {applied.pid or '-'} {applied.detail}".rstrip())
    course = begin(applied, run.watch)
    outcome = await _follow(run, course)
    run.injector.take_back(applied)
    await run.pause()
    return course.record(outcome, quiet_from_s=run.quiet_from_s)


async def _apply(run: Run, fault: Fault) -> Applied:
    """Inject it; a target that is being replaced is waited for."""
    deadline_s = run.watch.now_s + MISSED_TRIES_S
    while True:
        try:
            return await run.injector.apply(fault)
        except MissedError:
            if run.watch.now_s > deadline_s:
                raise
            await run.pause()


async def _follow(run: Run, course: Course) -> Outcome:
    """Until it is over, or should be."""
    applied = course.applied
    hold_s = applied.fault.hold_s if lasts(applied.fault) else 0.0
    deadline_s = applied.t_s + hold_s + run.settings.recover_within_s
    while run.watch.now_s < deadline_s:
        if lasts(applied.fault) and applied.undone_s is None and run.watch.now_s >= applied.t_s + hold_s:
            run.injector.take_back(applied)
        held = lasts(applied.fault) and applied.undone_s is None
        if course.look() and not held:
            return Outcome.RECOVERED
        await run.pause()
    return Outcome.HANG


def _hang_before(run: Run, fault: Fault) -> FaultRecord:
    return FaultRecord(
        kind=fault.kind,
        target=fault.target,
        outcome=Outcome.HANG,
        detail=f"slot {fault.slot} came no further for {run.settings.recover_within_s:g} s, without this fault",
    )


def _describe(record: FaultRecord) -> str:
    after = "-" if record.recover_after_s is None else f"{record.recover_after_s:.2f} s"
    return f"{record.kind} {record.target}: {record.outcome}, trains again after {after}, lost {record.steps_lost}"


def summarize(run: Run) -> ChaosSummary:
    """What is known now."""
    watch, records = run.watch, run.records
    until_s = watch.now_s
    slots = sorted(watch.slots)
    lost = {slot: sum(record.steps_lost for record in records if record.slot == slot) for slot in slots}
    trained = run.trained_from_s > 0
    return ChaosSummary(
        wadiloco_version=package_version(),
        command=shlex.join(["wadiloco", *sys.argv[1:]]),
        settings=run.settings.model_dump(mode="json", exclude={"token"}),
        machine=this_machine(),
        generated_at=datetime.now(UTC).isoformat(timespec="seconds"),
        planned=len(run.plan),
        interrupted=not run.complete,
        faults=tuple(records),
        num_injected=sum(record.injected_s is not None for record in records),
        num_recovered=sum(record.outcome is Outcome.RECOVERED for record in records),
        num_hangs=sum(record.outcome is Outcome.HANG for record in records),
        num_missed=sum(record.outcome is Outcome.MISSED for record in records),
        restarts={member.name: member.num_starts - 1 for member in run.fleet.members},
        wall_s=until_s - run.trained_from_s if trained else 0.0,
        goodput_frac=goodput_frac(
            [watch.slots[slot] for slot in slots],
            since_s=run.trained_from_s,
            until_s=until_s,
            lost=[lost[slot] for slot in slots],
        )
        if trained
        else 0.0,
        steps={slot: furthest(watch.slots[slot], until_s=until_s) for slot in slots},
        steps_lost=sum(lost.values()),
        rounds_closed=None if watch.controller is None else watch.controller.rounds_closed,
        first_loss=_mean_loss(run, last=False),
        final_loss=_mean_loss(run, last=True),
        memory=_memory(watch),
    )


def _mean_loss(run: Run, *, last: bool) -> float | None:
    losses = [[s.loss for s in samples if s.loss is not None] for samples in run.watch.slots.values()]
    known = [of_slot[-1 if last else 0] for of_slot in losses if of_slot]
    return statistics.fmean(known) if known else None


def _memory(watch: Watch) -> tuple[ProcessMemory, ...]:
    found = [
        ProcessMemory(
            name=name,
            first_mb=sizes[0][1],
            last_mb=sizes[-1][1],
            max_mb=max(size for _, size in sizes),
            growth_mb_per_min=growth_mb_per_min(sizes),
        )
        for name, sizes in sorted(watch.memory.items())
    ]
    return tuple(found[:KEPT_MEMORY])
