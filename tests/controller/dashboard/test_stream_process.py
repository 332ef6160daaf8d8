"""The event stream of a real process: over HTTP, and when the process ends."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from tests.controller.dashboard.live import DEADLINE_S, LiveController, live_controller, live_sample
from tests.controller.processes import eventually

pytestmark = pytest.mark.integration


class Follower(threading.Thread):
    """Reads the stream until the server ends it."""

    def __init__(self, controller: LiveController) -> None:
        super().__init__(daemon=True)
        self._controller = controller
        self.names: list[str] = []
        self.running: list[float] = []
        self.has_begun = threading.Event()
        self.failure: Exception | None = None

    def run(self) -> None:
        try:
            with self._controller.client() as http, http.stream("GET", "/v1/events") as answer:
                answer.raise_for_status()
                for line in answer.iter_lines():
                    self._take(line)
        except Exception as exc:  # noqa: BLE001 - judged by the test
            self.failure = exc

    def _take(self, line: str) -> None:
        field, _, value = line.partition(": ")
        if field == "event":
            self.names.append(value)
        elif field == "data":
            self.running += [row["running"] for row in json.loads(value)["servers"]]
            self.has_begun.set()


def test_a_term_signal_ends_the_streams_whole_and_at_once(tmp_path: Path) -> None:
    with live_controller(tmp_path) as controller:
        followers = [Follower(controller) for _ in range(3)]
        for follower in followers:
            follower.start()
            assert follower.has_begun.wait(DEADLINE_S)
        log = controller.terminate()
        for follower in followers:
            follower.join(DEADLINE_S)
            # A stream that is cut off raises: this one was ended by its server.
            assert (follower.failure, follower.names[0]) == (None, "snapshot")
        assert "graceful shutdown exceeded" not in log
        assert "Traceback" not in log


def test_samples_reach_the_stream_within_a_tick_or_two(tmp_path: Path) -> None:
    with live_controller(tmp_path) as controller, controller.client() as http:
        follower = Follower(controller)
        follower.start()
        assert follower.has_begun.wait(DEADLINE_S)
        t_s = http.get("/v1/fleet").json()["t_s"]
        body = {"samples": [live_sample("vllm-0", t_s, running=4711)]}
        http.post("/v1/samples", json=body).raise_for_status()
        eventually(lambda: 4711 in follower.running, "the sample")
        assert set(follower.names[1:]) == {"tick"}
        controller.terminate()
        follower.join(DEADLINE_S)


def test_a_client_that_goes_away_is_no_longer_counted(tmp_path: Path) -> None:
    with live_controller(tmp_path) as controller, controller.client() as http:
        with controller.client() as other, other.stream("GET", "/v1/events") as answer:
            lines = answer.iter_lines()  # kept: the stream closes with its iterator
            assert next(lines).startswith("retry: ")
            assert "wadiloco_controller_events_clients 1.0" in http.get("/metrics").text
        eventually(lambda: "wadiloco_controller_events_clients 0.0" in http.get("/metrics").text, "no client")
