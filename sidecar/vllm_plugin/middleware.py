"""Counts the requests in flight of one API-server process: ``--middleware wadiloco_vllm_plugin.InFlightMiddleware``.

A request is in flight from its arrival to the last byte of its answer, however it ends: so the gate closes before the
engine's first step for it, which the stat logger cannot see. Pure ASGI: nothing is buffered, awaited or answered here,
and an exception of the application passes through as it came.

Every POST counts but those to endpoints that generate nothing, so that an endpoint which a later vLLM adds closes the
gate too.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from .gate_writer import GateWriter, open_slot
from .identity import gate_directory
from .log import plugin_logger
from .records import SlotFlag

logger = plugin_logger(__name__)

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

CONTROL_ENDINGS = (
    *("/tokenize", "/detokenize", "/render", "/derender", "/count_tokens", "/cancel"),
    *("/sleep", "/wake_up", "/pause", "/resume", "/abort_requests", "/collective_rpc"),
    *("/load_lora_adapter", "/unload_lora_adapter", "/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache"),
    *("/start_profile", "/stop_profile", "/ping"),
)


class InFlightMiddleware:
    """ASGI middleware; vLLM makes one per API-server process."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._in_flight = 0
        self._slot = open_slot_quietly(SlotFlag.INGRESS)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope.get("type") != "http" or not is_generation(scope):
            await self._app(scope, receive, send)
            return
        is_over = False

        async def watched_send(message: Message) -> None:
            nonlocal is_over
            await send(message)
            # Background tasks of the response may go on for long after its last byte.
            if message.get("type") == "http.response.body" and not message.get("more_body", False) and not is_over:
                is_over = True
                self._count(-1)

        self._count(1)
        try:
            await self._app(scope, receive, watched_send)
        finally:
            if not is_over:
                is_over = True
                self._count(-1)

    def _count(self, change: int) -> None:
        self._in_flight += change
        if self._slot is not None:
            self._slot.update(in_flight=self._in_flight)


def is_generation(scope: Message) -> bool:
    """Whether the engine has work with this request."""
    return scope.get("method") == "POST" and not str(scope.get("path", "")).rstrip("/").endswith(CONTROL_ENDINGS)


def open_slot_quietly(flags: int, *, engine: int = 0) -> GateWriter | None:
    """The slot of this process, or None with a line in the log: serving goes on without a gate."""
    try:
        return open_slot(gate_directory(sys.argv), flags, engine=engine)
    except Exception:
        logger.exception("gate is off, training beside this server will yield")
        return None
