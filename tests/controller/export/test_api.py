"""``GET /v1/export``: what a BI tool meets."""

from __future__ import annotations

import asyncio
import csv
import io
import sys
from pathlib import Path

import pytest

from controller.export import api as export_api
from controller.export.columns import Table, names_of
from controller.export.stream import Format, Request
from service.errors import OverloadedError
from tests.controller.helpers import Client, ManualClock, make_settings, play, progress, sample, until


async def table(client: Client, name: str, **query: int) -> tuple[list[dict[str, str]], int]:
    answer = await client.http.get(f"/v1/export/{name}.csv", params=query)
    assert answer.status_code == 200, answer.text
    rows = list(csv.DictReader(io.StringIO(answer.text, newline="")))
    return rows, int(answer.headers["X-Next-Since"])


def test_every_table_is_served_with_its_header_and_where_to_go_on(tmp_path: Path) -> None:
    async def body(client: Client) -> None:
        await client.http.post("/v1/samples", json={"samples": [sample(), sample("vllm-1", running=4)]})
        rows, next_since = await table(client, "samples")
        assert ([row["server_id"] for row in rows], next_since) == (["vllm-0", "vllm-1"], 2)
        assert await table(client, "samples", since=next_since) == ([], 2)
        assert [row["server_id"] for row in (await table(client, "samples", since=1))[0]] == ["vllm-1"]
        for name in Table:
            answer = await client.http.get(f"/v1/export/{name}.csv")
            assert answer.headers["content-type"] == "text/csv; charset=utf-8; header=present"
            assert answer.headers["content-disposition"] == f'attachment; filename="wadiloco-{name}-0.csv"'
            assert answer.text.split("\r\n")[0] == ",".join(names_of(name))
        series = 'wadiloco_controller_export_rows_total{format="csv",table="samples"}'
        assert await client.metric(series) == 5

    play(make_settings(tmp_path), ManualClock(), body)


def test_decisions_are_exported_once_they_are_on_disk(tmp_path: Path) -> None:
    async def body(client: Client) -> None:
        await client.register()
        await client.beat(epoch=1, progress=progress(5))

        async def decided() -> bool:
            return any(row["reason"] == "below_fixed_h" for row in (await table(client, "decisions"))[0])

        await until(decided, "a decision about H")
        rows, next_since = await table(client, "decisions", limit=1)
        assert (rows[0]["id"], next_since) == ("1", 1)

    play(make_settings(tmp_path), ManualClock(), body)


@pytest.mark.parametrize(
    "path",
    [
        "decisions.xlsx",
        "nothing.csv",
        "samples.csv?since=-1",
        "samples.csv?limit=0",
        "samples.csv?since=1e9",
        "meta.csv",
    ],
)
def test_what_does_not_exist_is_refused(tmp_path: Path, path: str) -> None:
    async def body(client: Client) -> None:
        answer = await client.http.get(f"/v1/export/{path}")
        assert (answer.status_code, answer.json()["error"]) == (422, "InputError")

    play(make_settings(tmp_path), ManualClock(), body)


def test_without_the_package_parquet_is_not_implemented_and_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setattr("service.extras.find_spec", lambda _: None)

    async def body(client: Client) -> None:
        answer = await client.http.get("/v1/export/samples.parquet")
        assert (answer.status_code, answer.json()["field"]) == (501, "format")
        assert "pip install 'wadiloco[export]'" in answer.json()["remedy"]
        assert (await client.http.get("/v1/export/samples.csv")).status_code == 200

    play(make_settings(tmp_path), ManualClock(), body)


def test_parquet_is_served_where_the_package_is_installed(tmp_path: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet", reason="the extra `export` is not installed")

    async def body(client: Client) -> None:
        await client.http.post("/v1/samples", json={"samples": [sample()]})
        answer = await client.http.get("/v1/export/samples.parquet")
        assert answer.headers["content-type"] == "application/vnd.apache.parquet"
        assert pq.read_table(io.BytesIO(answer.content)).num_rows == 1

    play(make_settings(tmp_path), ManualClock(), body)


def test_exports_need_the_token(tmp_path: Path) -> None:
    async def body(client: Client) -> None:
        assert (await client.http.get("/v1/export/samples.csv")).status_code == 401
        authorized = {"Authorization": "Bearer secret"}
        assert (await client.http.get("/v1/export/samples.csv", headers=authorized)).status_code == 200

    play(make_settings(tmp_path, token="secret"), ManualClock(), body)  # noqa: S106


def test_only_a_few_exports_run_at_once_and_an_abandoned_one_makes_room(tmp_path: Path) -> None:
    async def body(client: Client) -> None:
        exporter = export_api.Exporter(client.controller)
        request = Request(table=Table.SAMPLES, format=Format.CSV)
        running = []
        for _ in range(export_api.MAX_EXPORTS):
            running.append(exporter.stream(await exporter.open(request)))
            await anext(running[-1])
        with pytest.raises(OverloadedError, match="exports run already"):
            await exporter.open(request)
        await running[0].aclose()  # type: ignore[attr-defined]
        assert b"".join([piece async for piece in exporter.stream(await exporter.open(request))])

    play(make_settings(tmp_path), ManualClock(), body)


def test_the_controller_answers_while_an_export_is_written(tmp_path: Path) -> None:
    async def body(client: Client) -> None:
        batch = {"samples": [sample(f"vllm-{index}") for index in range(12_000)]}
        await client.http.post("/v1/samples", json=batch)
        export = asyncio.create_task(client.http.get("/v1/export/samples.csv"))
        answered = 0
        while not export.done():
            assert (await client.http.get("/healthz")).status_code == 200
            answered += 1
            await asyncio.sleep(0)  # The transport of these tests never waits by itself.
        assert (await export).text.count("\r\n") == 12_001
        assert answered > 1

    play(make_settings(tmp_path), ManualClock(), body)
