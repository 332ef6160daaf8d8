"""What the registry's changes mean: lost, back, taken over, restarted, left."""

from __future__ import annotations

from controller.dashboard.recovery_log import RecoveryLog
from controller.registry import LeaseTerms, Registry
from controller.schema import Heartbeat
from tests.controller.helpers import MemoryStore, progress, registration

TERMS = LeaseTerms(num_slots=1, lease_timeout_s=10, takeover_after_s=3)


class Fleet:
    """A real registry, and the log that looks at it."""

    def __init__(self) -> None:
        self.registry = Registry(MemoryStore(), TERMS, epoch=1, agents=())
        self.log = RecoveryLog()

    def register(self, agent_id: str, now_s: float, instance: str = "first") -> None:
        self.registry.register(registration(agent_id, instance), now_s=now_s)

    def beat(self, agent_id: str, now_s: float, *, instance: str = "first", restarts: int = 0) -> None:
        agent = self.registry.check(agent_id, instance)
        beat = Heartbeat(
            instance=instance, epoch=self.registry.epoch, t_s=now_s, progress=progress(5, restarts=restarts)
        )
        self.registry.beat(agent, beat, now_s=now_s)

    def look(self, now_s: float) -> list[tuple[str, str, int | None]]:
        """What is new in the log."""
        seen = len(self.log.rows())
        self.registry.expire(now_s)
        self.log.look(self.registry.agents, now_s)
        return [(row.kind.value, row.agent_id, row.slot) for row in self.log.rows()[seen:]]


def test_a_lease_that_is_lost_and_found_again_is_told_once_each() -> None:
    fleet = Fleet()
    fleet.register("a", 0)
    assert fleet.look(1) == []
    assert fleet.look(12) == [("lease_lost", "a", 0)]
    assert fleet.look(13) == []
    fleet.register("a", 14, "second")
    assert fleet.look(15) == [("came_back", "a", 0)]
    assert fleet.look(16) == []


def test_a_spare_that_takes_the_slot_is_told_with_whom_it_had() -> None:
    fleet = Fleet()
    fleet.register("a", 0)
    fleet.register("spare", 1)
    fleet.look(1)
    fleet.beat("spare", 11)
    assert ("lease_lost", "a", 0) in fleet.look(12)
    fleet.beat("spare", 20)
    assert fleet.look(25) == [("slot_taken", "spare", 0)]
    assert fleet.log.rows()[-1].detail == "from a"


def test_restarts_of_the_worker_are_told_as_they_are_counted() -> None:
    fleet = Fleet()
    fleet.register("a", 0)
    fleet.beat("a", 1)
    fleet.look(1)
    fleet.beat("a", 2, restarts=2)
    assert fleet.look(2) == [("worker_restarted", "a", 0)]
    fleet.beat("a", 3, restarts=2)
    assert fleet.look(3) == []


def test_who_leaves_is_told_and_so_is_who_was_lost_before_the_first_look() -> None:
    fleet = Fleet()
    fleet.register("a", 0)
    fleet.look(1)
    fleet.registry.leave("a", "first")
    assert fleet.look(2) == [("left", "a", 0)]
    late = Fleet()
    late.register("b", 0)
    assert late.look(12) == [("lease_lost", "b", 0)]
