"""An answer leaves in one write, and the head of a stream does not wait for its first event."""

from __future__ import annotations

import asyncio

from service.one_write import JoiningTransport


class Written:
    """A transport that keeps what it is given."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.closed = False

    def write(self, data: bytes) -> None:
        self.writes.append(data)

    def close(self) -> None:
        self.closed = True


HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n"


def test_head_and_body_go_together() -> None:
    async def main() -> list[bytes]:
        below = Written()
        transport = JoiningTransport(below, asyncio.get_running_loop())
        for _ in range(2):
            transport.write(HEAD)
            transport.write(b"ok")
        await asyncio.sleep(0)
        return below.writes

    assert asyncio.run(main()) == [HEAD + b"ok"] * 2


def test_a_head_without_a_body_leaves_before_anything_else_happens() -> None:
    async def main() -> tuple[list[bytes], list[bytes]]:
        below = Written()
        transport = JoiningTransport(below, asyncio.get_running_loop())
        transport.write(HEAD)
        await asyncio.sleep(0)
        streamed = list(below.writes)
        transport.write(HEAD)
        transport.close()
        assert below.closed
        return streamed, below.writes

    assert asyncio.run(main()) == ([HEAD], [HEAD, HEAD])
