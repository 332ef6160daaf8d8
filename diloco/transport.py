"""Client of the synchronizer, for the sync thread of a rank: synchronous, resumable, every wait ends at its deadline.

Deadlines are Unix times. Until its deadline an operation survives refused connections, restarts of the synchronizer and
5xx answers; an upload goes on at the byte that the synchronizer has. Beside a server, chunks go in its lulls where the
time allows (`diloco.lull`).
"""

from __future__ import annotations

import copy
import logging
import random
import threading
import time
from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any, NoReturn, Self, TypeVar

import httpx
from pydantic import BaseModel, ValidationError
from torch import Tensor

from diloco.applied import Pulled
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
from diloco.errors import (
    AnotherRunError,
    FencedError,
    ManifestError,
    NotInitializedError,
    RoundClosedError,
    StateMismatchError,
    VersionError,
    VersionGoneError,
)
from diloco.fragment import first_difference, wire_bytes
from diloco.incoming import Held, Incoming
from diloco.lull import Lulls, longest_wait_s
from diloco.partition import check_fragments, cut
from diloco.schema import (
    CHUNK_BYTES,
    CODECS_HEADER,
    VERSION_HEADER,
    ChunkReply,
    CodecName,
    InitReply,
    Manifest,
    OuterState,
)
from diloco.stages import STAGES, Stage
from diloco.tensorfile import offer_header
from service.client import explain_response
from service.errors import ConfigError, ConflictError, InputError, UnavailableError

logger = logging.getLogger(__name__)

LONG_POLL_S = 5.0
"""Short enough that a half-open connection is noticed soon, long enough to cost nothing."""
BACKOFF_FIRST_S = 0.05
BACKOFF_MAX_S = 2.0
RETRIED_STATUS = 500
"""This status and all above it are tried again; so are 408 and 429."""

VERSION_ERRORS: Mapping[str, type[VersionError]] = {
    kind.__name__: kind for kind in (RoundClosedError, VersionGoneError)
}
CONFLICT_ERRORS: Mapping[str, type[ConflictError]] = {
    kind.__name__: kind for kind in (NotInitializedError, AnotherRunError, FencedError, ManifestError)
}

M = TypeVar("M", bound=BaseModel)
R = TypeVar("R", InitReply, ChunkReply)


class SynchronizerClient:
    """One fragment's synchronizer.

    ``http`` has the base URL, token and TLS of the peer (see `service.client.client_options`); its timeout bounds each
    request.
    """

    def __init__(self, http: httpx.Client, *, fragment: int = 0, lulls: Lulls | None = None) -> None:
        self._http = http
        self._lulls = lulls
        self._chunk_s: float | None = None
        """What the last chunk took."""
        self._cancelled = threading.Event()
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

    def state(self, *, deadline_s: float, slot: int | None = None, coming_to: int | None = None) -> OuterState:
        """What the synchronizer says of itself, and to a slot of what it contributed last.

        An island that comes to contribute to a round says so: if the round has closed, that tells how late it is.
        """
        known = {"slot": slot, "round": coming_to}
        params = {"fragment": self._index} | {name: value for name, value in known.items() if value is not None}
        response = self._request("GET", "/v1/state", deadline_s=deadline_s, params=params)
        return _parse(OuterState, response)

    def init(self, manifest: Manifest, flat: Tensor, *, deadline_s: float, num_fragments: int = 1) -> InitReply:
        """Offer initial parameters; the first offer starts the run, the others learn that it has started.

        Raises:
            ManifestError: the run has another model, or other fragments; the message names the first difference.
        """
        state = self.state(deadline_s=deadline_s)
        if state.manifest is None:
            return self.offer(manifest, flat, deadline_s=deadline_s, num_fragments=num_fragments)
        check_model(state, manifest)
        check_cut(state, cut(manifest, num_fragments))
        return InitReply(accepted=False, version=state.fragments[self._index].version)

    def offer(self, manifest: Manifest, flat: Tensor, *, deadline_s: float, num_fragments: int = 1) -> InitReply:
        """As `init`, to a synchronizer that is known to have no run: ``flat`` is the whole model in wire order."""
        pieces = (memoryview(offer_header(manifest, num_fragments=num_fragments)), wire_bytes(flat))
        return self._upload("/v1/fragments/0", pieces, {}, InitReply, deadline_s=deadline_s)

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
            version = _version_of(response)
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
        num_bytes_at_most = len(wire_bytes(out))
        start = 0
        while incoming is None or start < len(incoming.buffer):
            num_bytes = len(incoming.buffer) if incoming is not None else num_bytes_at_most
            began_s = self._await_lull(left_bytes=num_bytes - start, in_time_s=deadline_s)
            with STAGES.of(Stage.RECEIVE):
                response = self._request(
                    "GET",
                    self._fragment,
                    deadline_s=deadline_s,
                    params=params,
                    headers={
                        "Range": f"bytes={start}-{start + CHUNK_BYTES - 1}",
                        WANT_CONTENT_DIGEST: NOT_WANTED,
                    },
                )
            self._chunk_s = time.monotonic() - began_s
            data = response.content
            self.bytes_pulled += len(data)
            codecs = parse_chain(response.headers.get(CODECS_HEADER, ""))
            if incoming is None:
                incoming = self._make_room(codecs, out)
            elif codecs != incoming.codecs:
                raise StateMismatchError("the synchronizer answers with other deltas than it began with")
            incoming.take(data, response.headers, start=start)
            start += len(data)
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
        while True:
            if start >= total:
                # All bytes are there but could not be completed, as on a full disk: the last chunk asks again.
                start = max(total - CHUNK_BYTES, 0)
            part = ByteRange(start, min(start + CHUNK_BYTES, total), total)
            chunk = _cut(pieces, part)
            headers = {
                "Content-Type": "application/octet-stream",
                "Content-Range": format_content_range(part),
                "Repr-Digest": whole_digest,
            }
            if start == 0:
                headers["Content-Digest"] = start_digest
            elif is_wanted:
                with STAGES.of(Stage.DIGEST):
                    headers["Content-Digest"] = format_digest(sha256(chunk))
            began_s = self._await_lull(left_bytes=total - start, in_time_s=in_time_s)
            left = {} if close_by_s is None else {"closes_in_s": max(close_by_s - time.time(), 0.0)}
            with STAGES.of(Stage.SEND):
                response = self._request(
                    "PUT", path, deadline_s=deadline_s, params={**params, **left}, headers=headers, content=chunk
                )
            self._chunk_s = time.monotonic() - began_s
            is_wanted = response.headers.get(WANT_CONTENT_DIGEST) != NOT_WANTED
            reply = _parse(reply_model, response)
            if reply.complete:
                return reply
            if reply.received_bytes > start:
                backoff = Backoff()
            else:
                self._pause(backoff.next_s(), deadline_s, "the upload does not advance")
            start = reply.received_bytes

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

    def _request(
        self, method: str, path: str, *, deadline_s: float, extra_wait_s: float = 0.0, **arguments: Any
    ) -> httpx.Response:
        """One request, repeated until it is answered with less than 500 or the deadline passes."""
        backoff = Backoff()
        problem = "no time was left to ask"
        while True:
            timeout_s = self._time_left(deadline_s, problem)
            timeout = _bounded(self._http.timeout, timeout_s, extra_wait_s)
            try:
                response = self._http.request(method, path, timeout=timeout, **arguments)
            except httpx.TransportError as exc:
                problem = f"{type(exc).__name__}: {exc}"
            else:
                if response.status_code < RETRIED_STATUS and response.status_code not in {408, 429}:
                    if response.is_error:
                        _raise_refusal(response)
                    return response
                problem = explain_response(response)
            self._pause(backoff.next_s(), deadline_s, problem)

    def _time_left(self, deadline_s: float, problem: str) -> float:
        left_s = deadline_s - time.time()
        if left_s <= 0 or self._cancelled.is_set():
            why = "cancelled" if self._cancelled.is_set() else "deadline passed"
            raise UnavailableError(f"{self._http.base_url}: {why}: {problem}", field="synchronizer")
        return left_s

    def _pause(self, pause_s: float, deadline_s: float, problem: str) -> None:
        self._cancelled.wait(min(pause_s, self._time_left(deadline_s, problem)))


def check_model(state: OuterState, manifest: Manifest) -> None:
    """Raises `ManifestError`, which names the first difference, when the run has another model."""
    difference = first_difference(state.manifest, manifest) if state.manifest is not None else None
    if difference is not None:
        raise ManifestError(f"differs from the run's: {difference}", field="manifest", remedy=ManifestError.REMEDY)


def check_cut(state: OuterState, fragments: Sequence[Manifest]) -> None:
    """Raises `ManifestError`, which names the first difference, when the run cuts the same model in another way."""
    num_tensors = [fragment.num_tensors for fragment in state.fragments]
    if None in num_tensors:  # by a version that has one fragment, which is all
        num_tensors = [len(state.manifest.tensors) if state.manifest is not None else 0]
    check_fragments(fragments, [number for number in num_tensors if number is not None])


class Backoff:
    """Exponential pauses, each drawn from its upper half so that islands do not retry in step."""

    def __init__(self) -> None:
        self._ceiling_s = BACKOFF_FIRST_S

    def next_s(self) -> float:
        ceiling_s, self._ceiling_s = self._ceiling_s, min(2 * self._ceiling_s, BACKOFF_MAX_S)
        return random.uniform(0.5, 1.0) * ceiling_s


def _cut(pieces: Sequence[memoryview], part: ByteRange) -> bytes:
    """The bytes of a part of the pieces put together, without putting them together."""
    cut: list[memoryview] = []
    offset = 0
    for piece in pieces:
        cut.append(piece[max(part.start - offset, 0) : max(part.stop - offset, 0)])
        offset += len(piece)
    return b"".join(cut)


def _bounded(timeout: httpx.Timeout, left_s: float, extra_wait_s: float) -> httpx.Timeout:
    """The client's timeout, longer by what the peer was asked to wait, and never beyond the deadline."""

    def bound(value_s: float | None, extra_s: float = 0.0) -> float:
        return left_s if value_s is None else min(value_s + extra_s, left_s)

    return httpx.Timeout(
        connect=bound(timeout.connect),
        read=bound(timeout.read, extra_wait_s),
        write=bound(timeout.write),
        pool=bound(timeout.pool),
    )


def _version_of(response: httpx.Response) -> int | None:
    value = response.headers.get(VERSION_HEADER, "")
    return int(value) if value.isdigit() else None


def _parse(model: type[M], response: httpx.Response) -> M:
    try:
        return model.model_validate_json(response.content)
    except ValidationError as exc:
        raise InputError(
            f"{response.url} does not answer as a synchronizer does: {exc.errors()[0]['msg']}",
            field="synchronizer",
            remedy="check the URL and that both ends run the same version",
        ) from exc


def _raise_refusal(response: httpx.Response) -> NoReturn:
    """The error that a 4xx answer stands for."""
    message = explain_response(response)
    kind = _error_kind(response)
    version = _version_of(response)
    if response.status_code == httpx.codes.UNAUTHORIZED:
        raise ConfigError(message, field="token", remedy="give this process the synchronizer's token")
    if kind in VERSION_ERRORS and version is not None:
        raise VERSION_ERRORS[kind](message, version=version)
    if kind in CONFLICT_ERRORS:
        raise CONFLICT_ERRORS[kind](message)
    if response.status_code == httpx.codes.CONFLICT:
        raise ConflictError(message)
    raise InputError(message, field="synchronizer")


def _error_kind(response: httpx.Response) -> str:
    try:
        body = response.json()
    except ValueError:
        return ""
    return str(body.get("error")) if isinstance(body, dict) else ""
