"""The event stream of one completion, as it arrives: when each token came, the usage at its end, an error inside it.

Events are told apart by their first bytes; only the one that carries the usage is parsed as JSON. With a byte-level
tokenizer the text of a token is often empty, so a token event is one with a choice in it, whatever its text.
"""

from __future__ import annotations

import json
import re
from typing import Any

MAX_EVENT_BYTES = 4 << 20
MAX_ERROR_BYTES = 4 << 10

_CHOICE = re.compile(rb'"choices":\s*\[\s*\{')
_USAGE = re.compile(rb'"usage":\s*\{')
_ERROR = re.compile(rb'\{\s*"error":')


class CompletionStream:
    """Feed it the body of the answer with the time of each read."""

    __slots__ = (
        "_buffer",
        "completion_tokens",
        "done",
        "error",
        "first_token_at_s",
        "itl_s",
        "last_token_at_s",
        "prompt_tokens",
    )

    def __init__(self) -> None:
        self.first_token_at_s: float | None = None
        self.last_token_at_s: float | None = None
        self.itl_s: list[float] = []
        """Gaps between token events; 0 when two came with one read."""
        self.prompt_tokens: int | None = None
        self.completion_tokens: int | None = None
        self.done = False
        """``[DONE]`` has arrived."""
        self.error: str | None = None
        self._buffer = b""

    def feed(self, body: bytes, at_s: float) -> None:
        """Take body bytes that were read at ``at_s`` (any monotonic clock)."""
        *events, self._buffer = (self._buffer + body.replace(b"\r", b"")).split(b"\n\n")
        for event in events:
            self._take(event.partition(b"data:")[2].lstrip(), at_s)
        if len(self._buffer) > MAX_EVENT_BYTES:
            self.error = f"an event of over {MAX_EVENT_BYTES} bytes"
            self._buffer = b""

    def _take(self, payload: bytes, at_s: float) -> None:
        if _CHOICE.search(payload):
            self._take_token(at_s)
        elif payload.startswith(b"[DONE]"):
            self.done = True
        elif _ERROR.match(payload):
            self.error = explain_error(payload)
        if _USAGE.search(payload):
            self._take_usage(payload)

    def _take_token(self, at_s: float) -> None:
        if self.last_token_at_s is None:
            self.first_token_at_s = at_s
        else:
            self.itl_s.append(at_s - self.last_token_at_s)
        self.last_token_at_s = at_s

    def _take_usage(self, payload: bytes) -> None:
        try:
            usage: Any = json.loads(payload)["usage"]
            self.prompt_tokens, self.completion_tokens = int(usage["prompt_tokens"]), int(usage["completion_tokens"])
        except (ValueError, KeyError, TypeError):
            # Then the number of tokens stays unknown; the latencies do not depend on it.
            return


def explain_error(body: bytes) -> str:
    """The message in an error answer of an OpenAI-compatible server, whatever its shape."""
    text = body[:MAX_ERROR_BYTES].decode(errors="replace").strip()
    try:
        error: Any = json.loads(body)
    except ValueError:
        return text[:200]
    for key in ("error", "message"):
        if isinstance(error, dict) and key in error:
            error = error[key]
    return (error if isinstance(error, str) else text)[:200]
