"""A long poll wakes for its own directives, once they are announced, and for nobody else's."""

from __future__ import annotations

import asyncio

from controller.directives import Box, Mailboxes
from controller.schema import DirectiveKind
from tests.controller.helpers import ManualClock, MemoryStore


def test_only_those_with_news_are_woken() -> None:
    async def main() -> None:
        boxes, clock = Mailboxes(MemoryStore(), [], seq=0), ManualClock()
        polls = {
            name: asyncio.create_task(boxes.wait_for_news(name, after=0, wait_s=30, clock=clock))
            for name in ("a0", "a1", "a2")
        }
        await asyncio.sleep(0)
        for name in ("a0", "a1"):
            boxes.write(name, DirectiveKind.STOP, epoch=1, t_s=0.0)
        assert set(boxes._news) == set(polls)
        boxes.announce(1)
        await polls["a0"]
        assert set(boxes._news) == {"a1", "a2"}
        boxes.announce(2)
        await polls["a1"]
        assert not polls["a2"].done()
        assert set(boxes._news) == {"a2"}
        boxes.close()
        await polls["a2"]

    asyncio.run(main())


def test_news_that_were_announced_before_the_question_are_answered_at_once() -> None:
    async def main() -> None:
        boxes = Mailboxes(MemoryStore(), [], seq=0)
        boxes.write("a0", DirectiveKind.STOP, epoch=1, t_s=0.0)
        boxes.announce(1)
        await asyncio.wait_for(boxes.wait_for_news("a0", after=0, wait_s=30, clock=ManualClock()), 5)
        assert [directive.seq for directive in boxes.read("a0", after=0, now_s=0.0)] == [1]

    asyncio.run(main())


def test_an_agent_that_is_forgotten_leaves_nothing_behind() -> None:
    store = MemoryStore()
    boxes = Mailboxes(store, [], seq=0)
    for agent in ("a", "b"):
        boxes.write(agent, DirectiveKind.PAUSE, epoch=1, t_s=1.0)
    boxes.announce(boxes.seq)
    boxes.forget(["a", "nobody"])
    assert boxes.read("a", after=0, now_s=1.0) == []
    assert len(boxes.read("b", after=0, now_s=1.0)) == 1
    assert [key for table, key in store.rows if table == "directives"] == ["b"]


def test_a_directive_whose_deadline_has_passed_wakes_nobody() -> None:
    """An agent that asks again at once would do so for ever."""

    async def main() -> None:
        boxes, clock = Mailboxes(MemoryStore(), [], seq=0), ManualClock()
        boxes.write("a0", DirectiveKind.SYNC, epoch=1, t_s=clock(), round=0, deadline_s=clock() + 3)
        boxes.announce(1)
        await asyncio.wait_for(boxes.wait_for_news("a0", after=0, wait_s=30, clock=clock), 5)
        clock.advance(4)
        poll = asyncio.create_task(boxes.wait_for_news("a0", after=0, wait_s=30, clock=clock))
        await asyncio.sleep(0)
        assert set(boxes._news) == {"a0"}
        boxes.write("a0", DirectiveKind.STOP, epoch=1, t_s=clock())
        boxes.announce(2)
        await asyncio.wait_for(poll, 5)
        assert [directive.kind for directive in boxes.read("a0", after=0, now_s=clock())] == [DirectiveKind.STOP]

    asyncio.run(main())


def test_directives_that_are_over_are_not_written_to_disk_again() -> None:
    store, clock = MemoryStore(), ManualClock()
    boxes = Mailboxes(store, [], seq=0)
    for round_ in range(3):
        sync = {"epoch": 1, "round": round_, "deadline_s": clock() + 3}
        boxes.write_all(["a0", "a1"], DirectiveKind.SYNC, t_s=clock(), **sync)
        clock.advance(2)
    boxes.write("a1", DirectiveKind.STOP, epoch=1, t_s=clock())
    kept = {key: [one.seq for one in box.directives] for (_, key), box in store.rows.items() if isinstance(box, Box)}
    assert kept == {"a0": [3, 5], "a1": [6, 7]}
