"""A blocking call beside the loop: its result, its error, and nothing that holds anybody back."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest

from service.threads import detached


def fail() -> int:
    raise KeyError("why")


def test_the_result_and_the_error_are_those_of_the_call() -> None:
    async def main() -> None:
        assert await detached(lambda: 6 * 7, name="work") == 42
        with pytest.raises(KeyError, match="why"):
            await detached(fail, name="work")

    asyncio.run(main())


def test_who_gives_up_waiting_leaves_the_call_alone() -> None:
    go_on = threading.Event()

    async def main() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await detached(go_on.wait, name="work")

    asyncio.run(main())
    go_on.set()


def test_a_call_that_hangs_does_not_keep_the_process() -> None:
    code = (
        "import asyncio, threading\n"
        "from service.threads import detached\n"
        "async def main():\n"
        "    asyncio.create_task(detached(threading.Event().wait, name='hang'))\n"
        "    await asyncio.sleep(0)\n"
        "asyncio.run(main())\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=30, check=False).returncode == 0
