"""Client of the synchronizer, for the sync thread of a rank: synchronous, resumable, every wait ends at its deadline.

Deadlines are Unix times. Until its deadline an operation survives refused connections, restarts of the synchronizer and
5xx answers; an upload goes on at the byte that the synchronizer has. Beside a server, chunks go in its lulls where the
time allows (`diloco.lull`).
"""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from math import ceil
from typing import Any, Self, TypeVar

import httpx
from torch import Tensor

from diloco.answers import parse_answer, raise_refusal, version_of
from diloco.applied import Pulled
from diloco.attempts import Backoff, bounded
from diloco.codec import new_bytes
from diloco.delta import chain_bytes, parse_chain
from diloco.digest import (
    NOT_WANTED,
    WANT_CONTENT_DIGEST,
    ByteRange,
    format_content_range,
    format_digest,
    sha256,
    sha256_of_start,
)
from diloco.errors import StateMismatchError, VersionGoneError
from diloco.fragment import wire_bytes
from diloco.helpers import Helper, Helpers
from diloco.incoming import Held, Incoming
from diloco.lull import Lulls, longest_wait_s
from diloco.partition import cut
from diloco.same_run import check_cut, check_model, check_place
from diloco.schema import (
    CHUNK_BYTES,
    CODECS_HEADER,
    ChunkReply,
    CodecName,
    InitReply,
    Manifest,
    OuterState,
)
from diloco.spread import fetch_side_by_side, send_side_by_side
from diloco.stages import STAGES, Stage
from diloco.tensorfile import OfferedShard, offer_header
from service.client import explain_response
from service.errors import UnavailableError

logger = logging.getLogger(__name__)

LONG_POLL_S = 5.0
"""Short enough that a half-open connection is noticed soon, long enough to cost nothing."""
RETRIED_STATUS = 500
"""This status and all above it are tried again; so are 408 and 429."""

R = TypeVar("R", InitReply, ChunkReply)


class SynchronizerClient:
    """One fragment's synchronizer.

    ``http`` has the base URL, token and TLS of the peer (see `service.client.client_options`); its timeout bounds each
    request.
    """

    def __init__(
        self,
        http: httpx.Client,
        *,
        fragment: int = 0,
        lulls: Lulls | None = None,
        helpers: Helpers | None = None,
    ) -> None:
        """``helpers`` are other ranks, which carry chunks beside this one."""
        self._http = http
        self._lulls = lulls
        self._helpers = helpers
        self._counting = threading.Lock()
        self._chunk_s: float | None = None
        """What the last chunk took."""
        self._cancelled = threading.Event()
        self.problem: str | None = None
        """Why nobody answered the last request; None when somebody did, or may still have been about to."""
        self._payload = new_bytes(0)
        """Memory for deltas, as much as the longest chain so far took."""
        self.bytes_pulled = 0
        """Of parameters and deltas, all that came, whatever became of it."""
        self.mismatches = 0
        """Times that deltas did not lead to the synchronizer's parameters."""
        self._aim_at(fragment)

    def _aim_at(self, fragment: int) -> None:
        self._index = fragment
        self._fragment = f"/v1/fragments/{fragment}"
        self._contributions = f"fragments/{fragment}/contributions"

    def of(self, fragment: int) -> Self:
        """A client of another fragment, which ends together with this one."""
        other = copy.copy(self)
        other._aim_at(fragment)
        return other

    def close(self) -> None:
        self.cancel()
        self._http.close()

    def cancel(self) -> None:
        """End every wait, from any thread: the operation under way raises `UnavailableError` at its next request."""
        self._cancelled.set()

    @property
    def url(self) -> str:
        return str(self._http.base_url).rstrip("/")

    def state(
        self, *, deadline_s: float, slot: int | None = None, coming_to: int | None = None, once: bool = False
    ) -> OuterState:
        """What the synchronizer says of itself, and to a slot of what it contributed last.

        An island that comes to contribute to a round says so: if the round has closed, that tells how late it is.
        ``once``: ask, and do not ask again when nobody answers.
        """
        known = {"slot": slot, "round": coming_to}
        params = {"fragment": self._index} | {name: value for name, value in known.items() if value is not None}
        response = self._request("GET", "/v1/state", deadline_s=deadline_s, once=once, params=params)
        return parse_answer(OuterState, response)

    def init(self, manifest: Manifest, flat: Tensor, *, deadline_s: float, num_fragments: int = 1) -> InitReply:
        """Offer initial parameters; the first offer starts the run, the others learn that it has started.

        Raises:
            ManifestError: the run has another model, or other fragments; the message names the first difference.
            InputError: the synchronizer has only a part of the run.
        """
        state = self.state(deadline_s=deadline_s)
        check_place(state, url=self.url)
        if state.manifest is None:
            return self.offer(manifest, flat, deadline_s=deadline_s, num_fragments=num_fragments)
        check_model(state, manifest)
        check_cut(state, cut(manifest, num_fragments))
        return InitReply(accepted=False, version=state.fragments[self._index].version)

    def offer(
        self,
        manifest: Manifest,
        flat: Tensor,
        *,
        deadline_s: float,
        num_fragments: int = 1,
        part: OfferedShard | None = None,
    ) -> InitReply:
        """As `init`, to a synchronizer that is known to have no run: ``flat`` is the whole model in wire order.

        Where several share the run, it is what lives on the ``part``'s shard.
        """
        pieces = (memoryview(offer_header(manifest, num_fragments=num_fragments, part=part)), wire_bytes(flat))
        first = 0 if part is None else part.shard.index
        return self._upload(f"/v1/fragments/{first}", pieces, {}, InitReply, deadline_s=deadline_s)

    def push(
        self,
        payload: Tensor,
        *,
        round: int,  # noqa: A002  (the wire's word: the global version that they were trained from)
        slot: int,
        epoch: int,
        tokens: int,
        deadline_s: float,
        quorum: int | None = None,
        expected: int | None = None,
        close_by_s: float | None = None,
        codec: CodecName = "fp32",
        run: str | None = None,
    ) -> ChunkReply:
        """Contribute to a round; returns once the contribution is verified and on the synchronizer's disk.

        ``payload`` is what ``codec`` made of it (see `diloco.codec`): of local parameters or of their pseudo-gradient.

        With ``quorum`` the round closes when so many contributions are in, if the settings ask for no fewer, and no
        more than ``expected`` islands are waited for. It closes at the Unix time ``close_by_s`` at the latest: each
        chunk says how long that is away, and the last one counts, so that a long upload does not put it off.
        With ``run`` no other run takes it.

        Raises:
            AnotherRunError: the synchronizer holds another run.
            RoundClosedError: the round is not open (any more); carries the current version. A synchronizer that takes
                stale contributions raises it only for one that is too stale, or whose slot's progress it has.
            FencedError: a newer epoch holds the slot.
            UnavailableError: the deadline passed.
        """
        path = f"/v1/rounds/{round}/{self._contributions}/{slot}"
        stated = {"quorum": quorum, "expected": expected, "run": run}
        known = {name: value for name, value in stated.items() if value is not None}
        params: dict[str, float | str] = {"epoch": epoch, "tokens": tokens, "codec": codec, **known}
        return self._upload(
            path, (wire_bytes(payload),), params, ChunkReply, deadline_s=deadline_s, close_by_s=close_by_s
        )

    def wait_version(self, after: int, *, deadline_s: float) -> int | None:
        """The first version seen that is newer than ``after``; None when the deadline passes before."""
        while (remaining_s := deadline_s - time.time()) > 0 and not self._cancelled.is_set():
            wait_s = min(LONG_POLL_S, remaining_s)
            params = {"after_version": after, "wait_s": wait_s}
            try:
                response = self._request(
                    "HEAD", self._fragment, deadline_s=deadline_s, params=params, extra_wait_s=wait_s
                )
            except UnavailableError:
                return None
            version = version_of(response)
            if version is not None and version > after:
                return version
        return None

    def pull(self, version: int, out: Tensor, *, deadline_s: float, held: Held | None = None) -> int:
        """Read the global parameters into ``out``; returns their version: ``version``, or a newer one if that is gone.

        With ``held`` they may come as the encoded way from there. If that does not lead to the very parameters that the
        synchronizer has, which counts as one of `mismatches`, they are read whole.

        ``out`` may hold a mixture while this runs and after an error.
        """
        return self.fetch(version, out, deadline_s=deadline_s, held=held).version

    def fetch(
        self, version: int, out: Tensor, *, deadline_s: float, held: Held | None = None, slot: int | None = None
    ) -> Pulled:
        """As `pull`; also tells of which run they are, and what of a slot's contributions is in them."""
        while True:
            try:
                incoming = self._pull_generation(version, out, held, slot, deadline_s=deadline_s)
            except VersionGoneError as gone:
                if gone.version == version:
                    raise
                version = gone.version
            except StateMismatchError as exc:
                self.mismatches += 1
                held = None
                logger.error("%s, reading them whole version=%d", exc, version)  # noqa: TRY400
            else:
                return Pulled(version, incoming.run, incoming.applied)

    def _pull_generation(
        self, version: int, out: Tensor, held: Held | None, slot: int | None, *, deadline_s: float
    ) -> Incoming:
        said = {"version": version, "base_version": None if held is None else held.version, "slot": slot}
        params = {name: value for name, value in said.items() if value is not None}
        incoming: Incoming | None = None
        num_bytes = len(wire_bytes(out))

        def get(start: int, helper: Helper | None = None) -> int:
            """Where the next chunk begins."""
            nonlocal incoming, num_bytes
            began_s = self._await_lull(left_bytes=num_bytes - start, in_time_s=deadline_s)
            headers = {"Range": f"bytes={start}-{start + CHUNK_BYTES - 1}", WANT_CONTENT_DIGEST: NOT_WANTED}
            with STAGES.of(Stage.RECEIVE):
                response = self._ask(helper, "GET", self._fragment, deadline_s, params=params, headers=headers)
            self._chunk_s = time.monotonic() - began_s
            data = response.content
            codecs = parse_chain(response.headers.get(CODECS_HEADER, ""))
            if incoming is None:
                incoming = self._make_room(codecs, out)
                num_bytes = len(incoming.buffer)
            elif codecs != incoming.codecs:
                raise StateMismatchError("the synchronizer answers with other deltas than it began with")
            incoming.take(data, response.headers, start=start)
            with self._counting:
                self.bytes_pulled += len(data)
            return start + len(data)

        start = get(0)
        if start == CHUNK_BYTES and (helpers := self._helpers_for(num_bytes)):
            fetchers = [partial(get, helper=one) for one in (None, *helpers)]
            fetch_side_by_side(fetchers, range(start, num_bytes, CHUNK_BYTES))
            start = num_bytes
        while start < num_bytes:
            start = get(start)
        assert incoming is not None, "the first chunk made it"
        incoming.complete(out, held)
        return incoming

    def _make_room(self, codecs: tuple[CodecName, ...], out: Tensor) -> Incoming:
        """Where an answer of that kind goes: the parameters into ``out``, deltas into memory that is kept for them."""
        if not codecs:
            return Incoming(codecs=(), buffer=wire_bytes(out))
        num_bytes = chain_bytes(codecs, out.numel())
        if num_bytes > self._payload.numel():
            self._payload = new_bytes(num_bytes)
        return Incoming(codecs=codecs, buffer=wire_bytes(self._payload[:num_bytes]))

    def _upload(
        self,
        path: str,
        pieces: Sequence[memoryview],
        params: Mapping[str, float | str],
        reply_model: type[R],
        *,
        deadline_s: float,
        close_by_s: float | None = None,
    ) -> R:
        """Send what the synchronizer lacks, chunk by chunk, until it says that the whole is complete."""
        total = sum(len(piece) for piece in pieces)
        with STAGES.of(Stage.DIGEST):
            start_digest, whole_digest = (format_digest(each) for each in sha256_of_start(pieces, CHUNK_BYTES))
        start = 0
        is_wanted = True  # the first one, by those who do not say
        backoff = Backoff()
        now_s = time.time()
        # What comes after an upload needs its time too.
        in_time_s = min(close_by_s, deadline_s) if close_by_s is not None else now_s + (deadline_s - now_s) / 2

        def put(part: ByteRange, helper: Helper | None = None) -> R:
            nonlocal is_wanted
            chunk = _cut(pieces, part)
            headers = {
                "Content-Type": "application/octet-stream",
                "Content-Range": format_content_range(part),
                "Repr-Digest": whole_digest,
            }
            if part.start == 0:
                headers["Content-Digest"] = start_digest
            elif is_wanted:
                with STAGES.of(Stage.DIGEST):
                    headers["Content-Digest"] = format_digest(sha256(chunk))
            began_s = self._await_lull(left_bytes=total - part.start, in_time_s=in_time_s)
            left = {} if close_by_s is None else {"closes_in_s": max(close_by_s - time.time(), 0.0)}
            told = {**params, **left}
            with STAGES.of(Stage.SEND):
                response = self._ask(helper, "PUT", path, deadline_s, params=told, headers=headers, content=chunk)
            self._chunk_s = time.monotonic() - began_s
            is_wanted = response.headers.get(WANT_CONTENT_DIGEST) != NOT_WANTED
            return parse_answer(reply_model, response)

        helpers: list[Helper] = self._helpers_for(total) if reply_model is ChunkReply else []
        while True:
            if start >= total:
                # All bytes are there but could not be completed, as on a full disk: the last chunk asks again.
                start = max(total - CHUNK_BYTES, 0)
            reply = put(ByteRange(start, min(start + CHUNK_BYTES, total), total))
            if helpers and not reply.complete and reply.received_bytes > start:
                # It has begun. What is left when this ends early is for one again.
                senders, helpers = [partial(put, helper=one) for one in (None, *helpers)], []
                reply = send_side_by_side(senders, start=reply.received_bytes, total=total) or reply
            if reply.complete:
                return reply
            if reply.received_bytes > start:
                backoff = Backoff()
            else:
                self._pause(backoff.next_s(), deadline_s, "the upload does not advance")
            start = reply.received_bytes

    def _helpers_for(self, num_bytes: int) -> list[Helper]:
        """The other ranks that carry chunks of a transfer of that size: none where there are not enough for two."""
        num_left = ceil(num_bytes / CHUNK_BYTES) - 1
        return self._helpers.ready()[: num_left - 1] if self._helpers is not None and num_left > 1 else []

    def _ask(
        self,
        helper: Helper | None,
        method: str,
        path: str,
        deadline_s: float,
        *,
        params: Mapping[str, Any],
        headers: Mapping[str, str],
        content: bytes | None = None,
    ) -> httpx.Response:
        """One request by this rank, or by another one for it."""
        said: dict[str, Any] = {"params": params, "headers": headers}
        if helper is None:
            return self._request(method, path, deadline_s=deadline_s, content=content, **said)
        response = helper.answer_to(
            method, path, deadline_s=deadline_s, fragment=self._index, content=content or b"", **said
        )
        if response.is_error:
            raise_refusal(response)
        return response

    def _await_lull(self, *, left_bytes: int, in_time_s: float) -> float:
        """Wait for a lull, if the time until ``in_time_s`` allows, before a chunk of the ``left_bytes`` that are left.

        Returns when the chunk begins, on the clock of `_chunk_s`.
        """
        if self._lulls is not None:
            longest_s = longest_wait_s(
                in_time_s - time.time(), num_chunks=ceil(left_bytes / CHUNK_BYTES), chunk_s=self._chunk_s
            )
            self._lulls.wait(longest_s, pause=self._cancelled.wait)
        return time.monotonic()

    def _request(self, method: str, path: str, *, deadline_s: float, **arguments: Any) -> httpx.Response:
        """As `answer_to`, without the refusals, which are raised as the errors that they stand for."""
        response = self.answer_to(method, path, deadline_s=deadline_s, **arguments)
        if response.is_error:
            raise_refusal(response)
        return response

    def answer_to(
        self,
        method: str,
        path: str,
        *,
        deadline_s: float,
        extra_wait_s: float = 0.0,
        once: bool = False,
        **arguments: Any,
    ) -> httpx.Response:
        """One request, repeated unless ``once`` until it is answered with less than 500 or the deadline passes."""
        backoff = Backoff()
        problem = "no time was left to ask"
        while True:
            timeout_s = self._time_left(deadline_s, problem)
            timeout = bounded(self._http.timeout, timeout_s, extra_wait_s)
            try:
                response = self._http.request(method, path, timeout=timeout, **arguments)
            except httpx.TransportError as exc:
                problem = f"{type(exc).__name__}: {exc}"
                self.problem = None if isinstance(exc, httpx.TimeoutException) else f"{self.url}: {problem}"
            else:
                self.problem = None
                if response.status_code < RETRIED_STATUS and response.status_code not in {408, 429}:
                    return response
                problem = explain_response(response)
            if once:
                raise UnavailableError(f"{self.url}: {problem}", field="synchronizer")
            self._pause(backoff.next_s(), deadline_s, problem)

    def _time_left(self, deadline_s: float, problem: str) -> float:
        left_s = deadline_s - time.time()
        if left_s <= 0 or self._cancelled.is_set():
            why = "cancelled" if self._cancelled.is_set() else "deadline passed"
            raise UnavailableError(f"{self._http.base_url}: {why}: {problem}", field="synchronizer")
        return left_s

    def _pause(self, pause_s: float, deadline_s: float, problem: str) -> None:
        self._cancelled.wait(min(pause_s, self._time_left(deadline_s, problem)))


def _cut(pieces: Sequence[memoryview], part: ByteRange) -> bytes:
    """The bytes of a part of the pieces put together, without putting them together."""
    cut: list[memoryview] = []
    offset = 0
    for piece in pieces:
        cut.append(piece[max(part.start - offset, 0) : max(part.stop - offset, 0)])
        offset += len(piece)
    return b"".join(cut)
