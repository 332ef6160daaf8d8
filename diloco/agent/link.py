"""The agent's line to the controller: registration, heartbeats, directives.

The controller may be away at any time and for any length; training never waits for it once there is a slot. Of several
controllers one leads; one that does not answer, or answers 503, is left for the next, by heartbeats and directives
alike.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import Callable
from typing import Any, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from controller.schema import AgentLease, AgentRegistration, Directive, Directives, Heartbeat, HeartbeatReply
from diloco.agent.metrics import IslandMetrics
from diloco.agent.rules import (
    backoff_s,
    counts,
    longest_retry_s,
    request_timeout_s,
    times_of,
    unlike_fragments,
)
from diloco.agent.state import NO_SYNCHRONIZER, AgentState
from diloco.schema import MAX_FRAGMENTS
from service.client import explain_response
from service.deadline import deadline, unless
from service.errors import ConfigError, ConflictError, InputError, UnavailableError, WadilocoError
from service.peers import Peers
from service.tasks import wait_for_exit

logger = logging.getLogger(__name__)

M = TypeVar("M", bound=BaseModel)

RETRY_FIRST_S = 0.25
RETRY_LONGEST_S = 5.0
FAREWELL_S = 1.0
REPORT = re.compile(r"\b(syncs|restarts)\.(\d+)")
"""In the field that a refusal names."""


class ControllerLink:
    """Keeps the lease of one agent."""

    def __init__(
        self,
        state: AgentState,
        http: httpx.AsyncClient,
        metrics: IslandMetrics,
        *,
        peers: Peers,
        on_directive: Callable[[Directive], None],
        on_pause: Callable[[bool], None],
    ) -> None:
        self._state = state
        self._http = http
        self._metrics = metrics
        self._peers = peers
        self._on_directive = on_directive
        self._on_pause = on_pause
        self._registered = asyncio.Event()
        self._directive_seq = 0
        self._agent = f"/v1/agents/{state.settings.identity}"

    async def keep_lease(self, exit_event: asyncio.Event) -> None:
        """Register, then send heartbeats; register again whenever the controller does not know this lease."""
        failures = 0
        while not exit_event.is_set():
            lease = self._state.lease
            try:
                if lease is None or lease.slot is None:
                    await self._register()
                else:
                    await self._beat(lease)
            except WadilocoError as exc:
                failures += 1
                self._note_failure(exc, failures)
                self._draw_consequences(exc)
                # Each of several controllers has failed once before the pause grows.
                rounds = 1 + (failures - 1) // len(self._peers)
                pause_s = backoff_s(rounds, first_s=RETRY_FIRST_S, longest_s=self._longest_pause_s)
            else:
                if failures:
                    logger.info("controller is back failures=%d", failures)
                failures = 0
                assert self._state.lease is not None
                pause_s = self._state.lease.heartbeat_interval_s
            await self._pause(pause_s, exit_event)

    @property
    def _longest_pause_s(self) -> float:
        """A controller that comes back gives everybody a fresh lease: it must be heard of within that."""
        lease = self._state.limits_lease
        return RETRY_LONGEST_S if lease is None else longest_retry_s(lease.lease_timeout_s, at_most_s=RETRY_LONGEST_S)

    def _draw_consequences(self, refusal: WadilocoError) -> None:
        state = self._state
        if isinstance(refusal, ConflictError):
            state.lease = None
            self._registered.clear()
            if refusal.field == "slot" and state.assignment is not None:
                logger.warning("slot %d is another agent's now, stopping the worker", state.assignment.slot)
                state.assign(None, None)
        elif isinstance(refusal, InputError) and refusal.field == "slot" and state.assignment is not None:
            logger.warning("slot %d is no more, stopping the worker", state.assignment.slot)
            state.assign(None, None)
        elif isinstance(refusal, InputError) and (bad := REPORT.search(refusal.field or "")):
            # It would be refused for ever, and with it every later report.
            reports, index = (state.reports if bad[1] == "syncs" else state.restart_book.untold), int(bad[2])
            if index < len(reports):
                del reports[index]

    async def follow_directives(self, exit_event: asyncio.Event) -> None:
        """Long-poll for directives and pass on those of this lease, each once."""
        while not exit_event.is_set():
            await unless(exit_event, self._registered.wait())
            lease = self._state.lease
            if lease is None or exit_event.is_set():
                continue
            try:
                page = await unless(exit_event, self._poll())
            except WadilocoError as exc:
                # Registration and its log are the heartbeat's business.
                logger.debug("no directives error=%s", exc)
                await wait_for_exit(exit_event, RETRY_FIRST_S * 2)
                continue
            for directive in page.directives if page is not None else ():
                self._take(directive, lease)

    async def leave(self) -> None:
        """Last progress and reports, then the end of the registration; a controller that is away is not waited for."""
        lease = self._state.lease
        if lease is None:
            return
        with contextlib.suppress(WadilocoError, TimeoutError), deadline(FAREWELL_S):
            await self._beat(lease)
        with contextlib.suppress(httpx.HTTPError):
            url = f"{self._peers.current}{self._agent}"
            await self._http.delete(url, params={"instance": self._state.instance}, timeout=FAREWELL_S)

    async def _register(self) -> None:
        state, settings = self._state, self._state.settings
        held = state.assignment.slot if state.assignment else settings.slot
        registration = AgentRegistration(
            agent_id=settings.identity,
            instance=state.instance,
            node=settings.node,
            server_id=settings.server_id,
            slot=held,
            url=state.url,
            num_parameters=state.num_parameters,
            num_fragments=MAX_FRAGMENTS,
            keeps_replicas=state.replicas is not None,
            hands_over=state.hands_over,
            replicas=() if state.replicas is None else state.replicas(),
        )
        lease = await self._ask(AgentLease, "POST", "/v1/agents", json=registration.model_dump(mode="json"))
        is_news = state.limits_lease is None or (lease.slot, lease.epoch) != (
            state.limits_lease.slot,
            state.limits_lease.epoch,
        )
        if is_news:
            place = "waits as a spare" if lease.slot is None else f"slot={lease.slot}"
            logger.info("registered, %s epoch=%d run_id=%s", place, lease.epoch, lease.run_id)
            longest_s = times_of(lease).request_s
            if settings.request_timeout_s > longest_s:
                logger.info(
                    "request_timeout_s is cut to what the controller's sync_timeout_s allows request_timeout_s=%.1f",
                    longest_s,
                )
        self._directive_seq = lease.directive_seq
        state.take_lease(lease)
        unlike = unlike_fragments(lease, num_fragments=state.num_fragments)
        if is_news and unlike is not None:
            logger.error("no sync will be taken: %s", unlike)
        if is_news and lease.slot is not None and state.assignment is None:
            logger.warning("not training: %s", NO_SYNCHRONIZER)
        self._on_pause(lease.paused)
        self._registered.set()

    async def _beat(self, lease: AgentLease) -> None:
        state = self._state
        sent, restarts, handed_over = list(state.reports), list(state.restart_book.untold), state.handed_over
        heartbeat = Heartbeat(
            instance=state.instance,
            epoch=lease.epoch,
            t_s=time.time(),
            progress=state.progress,
            syncs=sent,
            replicas=None if state.replicas is None else state.replicas(),
            restarts=restarts,
            protection=state.newest_snapshot(),
            handed_over=handed_over,
        )
        reply = await self._ask(
            HeartbeatReply, "POST", f"{self._agent}/heartbeat", json=heartbeat.model_dump(mode="json")
        )
        for _ in range(min(reply.syncs_acknowledged, len(sent), len(state.reports))):
            state.reports.popleft()
        for _ in range(min(len(restarts), len(state.restart_book.untold))):
            state.restart_book.untold.popleft()
        if state.handed_over is handed_over:
            state.handed_over = None
        state.hear_buddies(reply.buddies, reply.keeps_slots)
        state.hear_epoch(reply.epoch)
        if reply.autonomy != lease.autonomy and state.lease is lease:
            state.lease = state.limits_lease = lease.model_copy(update={"autonomy": reply.autonomy})
        if reply.paused != state.paused:
            self._on_pause(reply.paused)

    async def _poll(self) -> Directives | None:
        """The next directives; None when the controller that was asked is left meanwhile."""
        wait_s = times_of(self._state.limits_lease).poll_s
        params = {"after": self._directive_seq, "wait_s": wait_s, "instance": self._state.instance}
        asking = self._ask(Directives, "GET", f"{self._agent}/directives", params=params, extra_wait_s=wait_s)
        return await unless(self._peers.moved, asking)

    def _take(self, directive: Directive, lease: AgentLease) -> None:
        is_for_us = counts(directive, lease_epoch=lease.epoch, last_seq=self._directive_seq)
        # One that is ignored is done with, too: the next poll would bring it again at once, and again.
        self._directive_seq = max(self._directive_seq, directive.seq)
        if not is_for_us:
            logger.info("directive ignored seq=%d epoch=%d kind=%s", directive.seq, directive.epoch, directive.kind)
            return
        self._state.hear_epoch(directive.epoch)
        self._on_directive(directive)

    async def _ask(self, model: type[M], method: str, path: str, *, extra_wait_s: float = 0.0, **arguments: Any) -> M:
        state = self._state
        timeout_s = request_timeout_s(state.settings.request_timeout_s, state.limits_lease) + extra_wait_s
        url = self._peers.current
        try:
            with deadline(timeout_s):
                response = await self._http.request(method, f"{url}{path}", timeout=timeout_s, **arguments)
        except (httpx.HTTPError, TimeoutError) as exc:
            self._peers.leave(url)
            self._state.missed_controller()
            raise UnavailableError(f"{type(exc).__name__}: {exc}", field="controller") from exc
        if response.is_server_error:
            # It lives and does not lead, or a proxy has none behind it: away, for an island that waits for decisions.
            self._peers.leave(url)
            self._state.missed_controller()
        self._raise_refusal(response)
        self._state.heard_controller()
        try:
            return model.model_validate_json(response.content)
        except ValidationError as exc:
            raise UnavailableError(f"answer of {path} is no {model.__name__}", field="controller") from exc

    def _raise_refusal(self, response: httpx.Response) -> None:
        if not response.is_error:
            return
        message = explain_response(response)
        if response.status_code in {httpx.codes.CONFLICT, httpx.codes.NOT_FOUND, httpx.codes.GONE}:
            self._state.heard_controller()
            raise ConflictError(message, field=_field_of(response))
        if response.status_code == httpx.codes.UNPROCESSABLE_ENTITY:
            self._state.heard_controller()
            raise InputError(message, field=_field_of(response))
        if response.status_code == httpx.codes.UNAUTHORIZED:
            raise ConfigError(message, field="token", remedy="give this agent the controller's token")
        raise UnavailableError(message, field="controller")

    def _note_failure(self, exc: Exception, failures: int) -> None:
        self._metrics.heartbeat_failures.inc()
        # The first says it, every 20th (about 100 s) reminds.
        level = logging.WARNING if failures % 20 == 1 else logging.DEBUG
        what = "is away" if isinstance(exc, UnavailableError) else "refuses"
        logger.log(level, "controller %s, trying on failures=%d error=%s", what, failures, exc)

    async def _pause(self, pause_s: float, exit_event: asyncio.Event) -> None:
        """Until the next heartbeat is due, or there is something to say at once."""
        self._state.changed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await unless(exit_event, self._state.changed.wait())


def _field_of(response: httpx.Response) -> str | None:
    """The field that a refusal names."""
    try:
        body = response.json()
    except ValueError:
        return None
    field = body.get("field") if isinstance(body, dict) else None
    return field if isinstance(field, str) else None
