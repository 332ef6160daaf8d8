"""The plain long poll and heartbeat answer as the framework's routes do, which take whatever else is asked."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from starlette.routing import Match
from starlette.types import Scope

from controller.api import MAX_WAIT_S
from controller.app import build_controller_app
from controller.plain_routes import PlainRoute, read_poll
from controller.schema import Heartbeat
from tests.controller.helpers import EPOCH_0, START_S, Client, ManualClock, make_settings, play, progress

POLL = "/v1/agents/island-0/directives"
BEAT = "/v1/agents/island-0/heartbeat"
JSON = {"content-type": "application/json"}

PLAIN_POLLS = ["instance=first&after=0&wait_s=0", "wait_s=0.0&instance=first&after=12", "instance=f&after=0&wait_s=0.0"]
OTHER_POLLS = [
    "",
    "instance=first",
    "instance=first&after=0",
    "instance=first&after=-1&wait_s=0",
    "instance=first&after=x&wait_s=0",
    "instance=first&after=0&wait_s=30.1",
    "instance=first&after=0&wait_s=nan",
    "instance=first&after=0&wait_s=1e-3",
    "instance=&after=0&wait_s=0",
    "instance=f%69rst&after=0&wait_s=0",
    "instance=first&after=9223372036854775808&wait_s=0",
    "instance=first&after=0&wait_s=0&after=1",
    "instance=first&after=0&wait_s=0&more=1",
]


def beat(**fields: object) -> str:
    base = {"instance": "first", "epoch": EPOCH_0 + 1, "t_s": START_S, "progress": progress(3).model_dump(mode="json")}
    return json.dumps({**base, **fields})


BEATS = [
    beat(),
    beat(later=1),
    beat(instance="second"),
    beat(epoch=1),
    beat(t_s=-1),
    beat(t_s=float("nan")),
    beat(instance="\ud800"),
    beat(progress=progress(3).model_dump(mode="json") | {"tokens": 10**30}),
    beat(progress=progress(3).model_dump(mode="json") | {"loss": 1e9}),
    beat(syncs=[{"round": 0}]),
    '{"instance": "first"',
    "[]",
    "",
]


def framework_alone(client: Client) -> list[PlainRoute]:
    """Takes the plain routes away."""
    routes = client.app.router.routes
    plain = [route for route in routes if isinstance(route, PlainRoute)]
    routes[:] = [route for route in routes if not isinstance(route, PlainRoute)]
    return plain


def seen(answer: httpx.Response) -> tuple[int, list[tuple[str, str]], bytes]:
    return answer.status_code, answer.headers.multi_items(), answer.content


def test_polls_are_answered_as_by_the_framework(tmp_path: Path) -> None:
    async def body(client: Client) -> None:
        await client.register()
        urls = [
            f"/v1/agents/{agent_id}/directives?{query}"
            for agent_id in ("island-0", "nobody", "a/b", "", "a" * 129)
            for query in (*PLAIN_POLLS, *OTHER_POLLS)
        ]
        answers = [await client.http.request(method, url) for url in urls for method in ("GET", "HEAD")]
        assert len(framework_alone(client)) == 2
        theirs = [await client.http.request(method, url) for url in urls for method in ("GET", "HEAD")]
        for answer, other in zip(answers, theirs, strict=True):
            assert seen(answer) == seen(other), answer.url

    play(make_settings(tmp_path), ManualClock(), body)


@pytest.mark.parametrize("kind", ["application/json", "text/plain"], ids=["json", "text"])
def test_heartbeats_are_answered_and_counted_as_by_the_framework(tmp_path: Path, kind: str) -> None:
    async def body(client: Client) -> None:
        await client.register()
        headers = {"content-type": kind}
        answers = [await client.http.post(BEAT, content=beat.encode(), headers=headers) for beat in BEATS]
        counts = await count_reports(client)
        framework_alone(client)
        for beat, answer in zip(BEATS, answers, strict=True):
            assert seen(answer) == seen(await client.http.post(BEAT, content=beat.encode(), headers=headers)), beat
        assert await count_reports(client) == {outcome: 2 * count for outcome, count in counts.items()}
        assert sum(counts.values()) == len(BEATS)

    play(make_settings(tmp_path), ManualClock(), body)


async def count_reports(client: Client) -> dict[str, float]:
    name = "wadiloco_controller_reports_total"
    outcomes = ("accepted", "refused", "nonsense", "invalid")
    return {outcome: await client.metric(f'{name}{{outcome="{outcome}"}}') or 0.0 for outcome in outcomes}


def test_what_agents_send_is_taken_here(tmp_path: Path) -> None:
    app = build_controller_app(make_settings(tmp_path), clock=ManualClock())
    headers = [(name.encode(), value.encode()) for name, value in JSON.items()]
    for method, path, query in (("GET", POLL, PLAIN_POLLS[0]), ("POST", BEAT, "")):
        scope: Scope = {
            "type": "http",
            "method": method,
            "path": path,
            "query_string": query.encode(),
            "headers": headers,
        }
        first = next(route for route in app.router.routes if route.matches(scope)[0] is Match.FULL)
        assert isinstance(first, PlainRoute)
    app.state.controller.state.journal.close()


def test_a_query_is_read_only_where_it_is_plain() -> None:
    assert read_poll(b"instance=a-1&after=7&wait_s=20.0") == {"instance": "a-1", "after": 7, "wait_s": 20.0}
    assert read_poll(f"instance=a&after=0&wait_s={MAX_WAIT_S:g}".encode()) is not None
    assert [read_poll(query.encode()) for query in OTHER_POLLS] == [None] * len(OTHER_POLLS)


def test_a_body_in_parts_is_put_together(tmp_path: Path) -> None:
    async def body(client: Client) -> None:
        epoch = (await client.register()).epoch
        content = Heartbeat(instance="first", epoch=epoch, t_s=START_S, progress=progress(3)).model_dump_json()

        async def parts() -> AsyncIterator[bytes]:
            for at in range(0, len(content), 10):
                yield content[at : at + 10].encode()

        answer = await client.http.post(BEAT, content=parts(), headers=JSON)
        assert answer.status_code == 200
        assert answer.json()["epoch"] == epoch

    play(make_settings(tmp_path), ManualClock(), body)
