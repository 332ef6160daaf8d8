"""Samples to the controller: bounded queue, batches, back-off. Scraping never waits for it.

A batch that was not answered is sent again, so the controller may see a sample twice; (server_id, t_s) tells. Of
several controllers one leads: a batch that one does not answer, or answers with a server error, goes to the next.

Two thirds of a sample are its forecast, which a controller shows and does not decide by: one sample in
`FORECAST_PERIOD_S` carries it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from enum import StrEnum

import httpx
from pydantic import ValidationError

from controller.schema import SampleBatch, SampleReceipt
from service.client import explain_response
from service.deadline import deadline
from service.peers import Peers
from service.tasks import wait_for_exit
from sidecar.schema import LoadSample

logger = logging.getLogger(__name__)

# About 1 MB of JSON with forecasts, within the controller's body limit.
MAX_BATCH_SAMPLES = 500
MAX_BACKOFF_S = 30.0
FORECAST_PERIOD_S = 5.0
# Answers that say "this very request is wrong": sending it again cannot help.
PERMANENT_STATUSES = frozenset({400, 413, 415, 422})


class PushOutcome(StrEnum):
    """How a push ended. Exported as a metric label."""

    OK = "ok"
    UNREACHABLE = "unreachable"
    TIMEOUT = "timeout"
    HTTP_ERROR = "http_error"
    """An answer that may change: the batch is kept."""
    REFUSED = "refused"
    """The controller will never take the batch: it is dropped, or cut when it was too large."""
    BAD_RECEIPT = "bad_receipt"


class DropReason(StrEnum):
    """Why a sample never reached the controller. Exported as a metric label."""

    QUEUE_FULL = "queue_full"
    REFUSED = "refused"


class Pusher:
    """The queue of samples on their way to the controller that leads, over a client that it does not own."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        *,
        interval_s: float,
        capacity: int,
        timeout_s: float,
        on_push: Callable[[PushOutcome], None],
        on_drop: Callable[[DropReason, int], None],
        max_backoff_s: float = MAX_BACKOFF_S,
        urls: Sequence[str] = ("",),
    ) -> None:
        """``urls`` are the controllers; left out, the one that the client is for."""
        self._client = client
        self._peers = Peers(urls)
        self._interval_s = interval_s
        self._capacity = capacity
        self._timeout_s = timeout_s
        self._on_push = on_push
        self._on_drop = on_drop
        self._max_backoff_s = max_backoff_s
        self._queue: deque[LoadSample] = deque()
        self._batch_size = MAX_BATCH_SAMPLES
        self._failures_in_a_row = 0
        self._forecast_t_s = -math.inf

    def __len__(self) -> int:
        return len(self._queue)

    def offer(self, sample: LoadSample) -> None:
        """Queue a sample; the oldest is dropped when the queue is full."""
        if 0 <= sample.t_s - self._forecast_t_s < FORECAST_PERIOD_S:
            sample = sample.model_copy(update={"forecast": ()})
        elif sample.forecast:
            self._forecast_t_s = sample.t_s
        self._queue.append(sample)
        self._trim()

    async def run(self, exit_event: asyncio.Event) -> None:
        """Push until ``exit_event``, then once more."""
        while not await wait_for_exit(exit_event, self._pause_s()):
            await self.push_all(exit_event)
        await self.push_once()

    async def push_all(self, exit_event: asyncio.Event) -> None:
        """Push batches until the queue is empty or a push fails."""
        while self._queue and not exit_event.is_set():
            if not await self.push_once():
                return

    async def push_once(self) -> bool:
        """Push one batch; whether another push makes sense at once."""
        if not self._queue:
            return True
        batch = [self._queue.popleft() for _ in range(min(len(self._queue), self._batch_size))]
        outcome, detail = await self._send(batch)
        self._on_push(outcome)
        if outcome in {PushOutcome.OK, PushOutcome.REFUSED}:
            self._failures_in_a_row = 0
            return True
        self._failures_in_a_row += 1
        if self._failures_in_a_row == 1:
            logger.warning("push failed outcome=%s queued=%d detail=%s", outcome, len(self) + len(batch), detail)
        self._queue.extendleft(reversed(batch))
        self._trim()
        return False

    async def _send(self, batch: list[LoadSample]) -> tuple[PushOutcome, str]:
        body = SampleBatch(samples=[sample.model_dump(mode="json") for sample in batch])
        url = self._peers.current
        try:
            with deadline(self._timeout_s):
                response = await self._client.post(f"{url}/v1/samples", json=body.model_dump())
        except (TimeoutError, httpx.TimeoutException):
            self._peers.leave(url)
            return PushOutcome.TIMEOUT, f"no answer within {self._timeout_s} s"
        except httpx.HTTPError as exc:
            self._peers.leave(url)
            return PushOutcome.UNREACHABLE, f"{type(exc).__name__}: {exc}"
        if response.is_success:
            return self._read_receipt(response)
        if response.is_server_error:  # it does not lead, or a proxy has no controller behind it
            self._peers.leave(url)
        if response.status_code not in PERMANENT_STATUSES:
            return PushOutcome.HTTP_ERROR, explain_response(response)
        self._give_up(batch, response)
        return PushOutcome.REFUSED, ""

    def _read_receipt(self, response: httpx.Response) -> tuple[PushOutcome, str]:
        try:
            receipt = SampleReceipt.model_validate_json(response.content)
        except ValidationError:
            return PushOutcome.BAD_RECEIPT, "the answer is not a receipt: is this the controller's URL?"
        if self._failures_in_a_row:
            logger.info("push works again queued=%d", len(self))
        if receipt.rejected:
            first = receipt.rejected[0]
            logger.warning("samples refused num=%d first=%s %s", len(receipt.rejected), first.reason, first.detail)
            self._on_drop(DropReason.REFUSED, len(receipt.rejected))
        self._batch_size = MAX_BATCH_SAMPLES
        return PushOutcome.OK, ""

    def _give_up(self, batch: list[LoadSample], response: httpx.Response) -> None:
        """Drop a batch that will never be taken; one that is too large goes on in halves."""
        if response.status_code == httpx.codes.REQUEST_ENTITY_TOO_LARGE and len(batch) > 1:
            self._batch_size = len(batch) // 2
            self._queue.extendleft(reversed(batch))
            self._trim()
            return
        logger.warning("batch refused num_samples=%d detail=%s", len(batch), explain_response(response))
        self._on_drop(DropReason.REFUSED, len(batch))

    def _trim(self) -> None:
        excess = len(self._queue) - self._capacity
        for _ in range(excess):
            self._queue.popleft()
        if excess > 0:
            self._on_drop(DropReason.QUEUE_FULL, excess)

    def _pause_s(self) -> float:
        """Time until the next push: the interval, doubled per failure in a row, with jitter against stampedes.

        Of several controllers each has failed before it doubles.
        """
        failures = self._failures_in_a_row // len(self._peers)
        if not failures:
            return self._interval_s
        longest_s = max(self._max_backoff_s, self._interval_s)
        pause_s = min(self._interval_s * 2.0 ** min(failures, 30), longest_s)
        return pause_s * random.uniform(0.5, 1.0)
