"""What the journal keeps of experiments: a row for each, and a row for each of its blocks (among ``meta``)."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterable

from controller.lab_schema import Arm, Block, ExperimentSpec, ExperimentState, ExperimentStatus
from controller.schema import BudgetStatus, PolicySpec
from controller.switchback import block_order, has_equal_syncs, policy_of, result_of
from service.wire import Wire

logger = logging.getLogger(__name__)

META_PREFIX = "experiment:"
MAX_ABSENCE_FRAC = 0.1
TICKS_OF_ABSENCE = 4
"""Ticks that come late on a busy machine are no absence."""
SEEN_EVERY_S = 1.0
"""How often the journal is told that the block is looked after."""


class ExperimentRecord(Wire):
    """What the journal keeps of one experiment besides its blocks."""

    id: int
    spec: ExperimentSpec
    state: ExperimentState
    started_s: float
    ended_s: float | None = None
    before_policy: PolicySpec
    before_budget: BudgetStatus
    put_back: bool = False
    """Whether policy and budget from before are in force again."""
    detail: str = ""


class Experiment:
    """One experiment: its record, and the blocks that have begun."""

    def __init__(self, record: ExperimentRecord, blocks: Iterable[Block] = ()) -> None:
        self.record = record
        self.order = block_order(record.spec.blocks, record.spec.seed)
        self.blocks = list(blocks)
        self.told_s = -math.inf
        """When the journal was told last that the running block is looked after."""

    @property
    def is_running(self) -> bool:
        return self.record.state is ExperimentState.RUNNING

    @property
    def current(self) -> Block:
        return self.blocks[-1]

    @property
    def latest_blocks(self) -> list[tuple[int, Block]]:
        """With their places: the running one, and the one before it, whose last samples may still come."""
        first = max(0, len(self.blocks) - 2)
        return list(enumerate(self.blocks[first:], first))

    def max_absence_s(self, tick_s: float) -> float:
        counts_s = self.record.spec.block_s - self.record.spec.washout_s
        return max(MAX_ABSENCE_FRAC * counts_s, TICKS_OF_ABSENCE * tick_s + SEEN_EVERY_S)

    def policy(self, index: int) -> PolicySpec:
        return policy_of(self.record.spec, self.order[index], pair=index // 2)


def status_of(
    record: ExperimentRecord, order: tuple[Arm, ...], blocks: tuple[Block, ...], *, now_s: float
) -> ExperimentStatus:
    """How an experiment stands; the statistics of hundreds of blocks take a tenth of a second."""
    over = sum(now_s >= block.ends_s for block in blocks)
    to_come_s = (record.spec.blocks - len(blocks)) * record.spec.block_s
    return ExperimentStatus(
        id=record.id,
        t_s=now_s,
        spec=record.spec,
        state=record.state,
        order=order,
        started_s=record.started_s,
        ended_s=record.ended_s,
        ends_s=record.ended_s or (blocks[-1].ends_s if blocks else now_s) + to_come_s,
        policy_after=record.before_policy,
        detail=record.detail,
        blocks=blocks,
        result=result_of(blocks, num_over=over, equal_syncs=has_equal_syncs(record.spec)),
    )


def restore_experiments(meta: dict[str, str]) -> dict[int, Experiment]:
    """The experiments of the journal by id; one that cannot be read is left out, and its run goes on without it."""
    records: list[ExperimentRecord] = []
    blocks: dict[int, list[Block]] = {}
    for key, body in meta.items():
        if not key.startswith(META_PREFIX):
            continue
        number, _, index = key.removeprefix(META_PREFIX).partition(":")
        try:
            if index:
                blocks.setdefault(int(number), []).append(Block.model_validate_json(body))
            else:
                records.append(ExperimentRecord.model_validate_json(body))
        except ValueError as exc:
            logger.error("the journal's %s cannot be read: %s", key, exc)  # noqa: TRY400
    records.sort(key=lambda record: record.id)
    return {record.id: Experiment(record, _unbroken(blocks.get(record.id, []))) for record in records}


def _unbroken(blocks: list[Block]) -> list[Block]:
    """The blocks up to the first that is missing."""
    by_index = {block.index: block for block in blocks}
    return [by_index[index] for index in itertools.takewhile(by_index.__contains__, itertools.count())]
