"""Who gives way waits for a tick to end, and not for one that hangs."""

from __future__ import annotations

import asyncio

import pytest

from controller.right_of_way import RightOfWay


def test_what_became_ready_under_it_comes_before_those_who_gave_way() -> None:
    async def main() -> list[str]:
        way, order, news = RightOfWay(), list[str](), asyncio.Event()

        async def poll() -> None:
            await news.wait()
            order.append("poll")

        async def batch() -> None:
            await way.give()
            order.append("batch")

        async with asyncio.TaskGroup() as tasks:
            with way.taken():
                tasks.create_task(batch())
                tasks.create_task(poll())
                for _ in range(5):
                    await asyncio.sleep(0)
                order.append("tick")
                news.set()
        return order

    assert asyncio.run(main()) == ["tick", "poll", "batch"]


def test_one_that_hangs_lets_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controller.right_of_way.LONGEST_S", 0.01)

    async def main() -> None:
        way = RightOfWay()
        with way.taken():
            await asyncio.wait_for(way.give(), 10)

    asyncio.run(main())


def test_a_tick_that_fails_gives_it_back() -> None:
    async def main() -> None:
        way = RightOfWay()
        with pytest.raises(ValueError, match="failed"), way.taken():
            raise ValueError("failed")
        await asyncio.wait_for(way.give(), 10)

    asyncio.run(main())
