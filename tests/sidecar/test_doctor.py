"""``wadiloco doctor`` against real servers on loopback: good ones, broken ones, and ones that mean harm."""

from __future__ import annotations

import asyncio
import email.utils
import functools
import json
import socket
import threading
import time
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from pydantic import SecretStr

import wadiloco
from diloco.phase import PhaseTeller
from sidecar import doctor_probe
from sidecar.app import create_app
from sidecar.config import SidecarSettings
from sidecar.doctor_probe import is_own_address, parse_date, resolve, skew, watch
from sidecar.source.scrape import Scraper
from sidecar.source.snapshot import ScrapeResult
from sidecar.vllm_plugin.gate_writer import GateWriter
from sidecar.vllm_plugin.records import SlotFlag
from sidecar.vllm_plugin.step_ring import StepRing
from tests.sidecar.conftest import FAST, Doctor
from tests.sidecar.helpers import DEADLINE_S, Upstream, capture, edited, good, parse, serving, without

pytestmark = pytest.mark.usefixtures("root_logging")


@pytest.fixture
def upstream() -> Iterator[Upstream]:
    upstream = Upstream(capture("busy"))
    with serving(upstream):
        yield upstream


@contextmanager
def turning_to(upstream: Upstream, page: str) -> Iterator[None]:
    """The first scrape gets the page as it is, the third another."""
    stop = threading.Event()

    def turn() -> None:
        while upstream.num_requests < 2 and not stop.wait(0.005):
            pass
        upstream.page = page

    thread = threading.Thread(target=turn)
    thread.start()
    yield
    stop.set()
    thread.join()


@contextmanager
def raw_server(answer: Callable[[socket.socket], None]) -> Iterator[int]:
    """A TCP server that does ``answer`` with each connection; the port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        stop = threading.Event()

        def serve_one(connection: socket.socket) -> None:
            try:
                connection.settimeout(DEADLINE_S)
                with connection:
                    answer(connection)
            except OSError:
                connection.close()

        def accept() -> None:
            while not stop.is_set():
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                threading.Thread(target=serve_one, args=(connection,), daemon=True).start()

        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            stop.set()
            with socket.create_connection(listener.getsockname()):
                pass
            thread.join(DEADLINE_S)


def page_answer(page: str, *headers: str) -> Callable[[socket.socket], None]:
    def answer(connection: socket.socket) -> None:
        connection.recv(65536)
        lines = ["HTTP/1.1 200 OK", f"Content-Length: {len(page.encode())}", "Connection: close", *headers]
        connection.sendall("\r\n".join([*lines, "", page]).encode())

    return answer


def test_a_good_server_needs_nothing_but_the_plugin(doctor: Doctor, upstream: Upstream) -> None:
    found = doctor(upstream.url, "--slo", "e2e:300ms", "--gate", Path(upstream.url).parent / "nowhere")
    assert {name for name in found if name not in {"code", "status"} and found[name]["status"] == "ok"} == {
        *("reachable", "signals", "slo", "scrape", "processes", "host", "clock"),
    }
    assert found["slo"]["message"] == "e2e:300ms is on a bucket edge: violations are exact"
    # It was asked for a gate, and there is none.
    assert (found["gate folder"]["status"], found["code"]) == ("fail", 1)
    assert "WADILOCO_GATE_DIR=" in found["gate folder"]["remedy"]


def test_warnings_are_no_failure(doctor: Doctor, upstream: Upstream, tmp_path: Path) -> None:
    (tmp_path / "gate").mkdir()
    found = doctor(upstream.url, "--slo", "e2e:400ms")
    assert (found["code"], found["status"]) == (0, "warn")
    assert "e2e:300ms and e2e:500ms" in found["slo"]["message"]
    # The page stands still with requests in it.
    assert found["engine"]["status"] == "warn"
    assert "no step in" in found["engine"]["message"]
    assert (found["middleware"]["status"], found["plugin"]["status"]) == ("warn", "warn")


def test_movement_is_seen(doctor: Doctor, upstream: Upstream) -> None:
    with turning_to(upstream, capture("busy-1s-later")):
        found = doctor(upstream.url, "--watch-s", "1")
    assert found["engine"]["status"] == "ok"
    assert found["engine"]["message"].startswith("works: ")


def test_a_server_that_forgets_is_a_restart_or_several(doctor: Doctor, upstream: Upstream) -> None:
    with turning_to(upstream, capture("idle")):
        found = doctor(upstream.url, "--watch-s", "1")
    assert "load balancer" in found["engine"]["remedy"]


def test_an_idle_server_and_one_of_two_engines(doctor: Doctor, upstream: Upstream) -> None:
    upstream.page = edited(capture("idle"), {"vllm:num_requests_running": 0})
    assert doctor(upstream.url)["engine"]["message"].startswith("idle")
    upstream.page = capture("dp2")
    assert doctor(upstream.url)["processes"]["details"]["engines"] == 2


def test_gate_plugin_and_trainers_are_found(doctor: Doctor, upstream: Upstream, tmp_path: Path) -> None:
    directory = tmp_path / "gate"
    gate, ring = GateWriter(directory, SlotFlag.INGRESS), StepRing(directory, engine=0, max_num_seqs=32)
    gate.update(in_flight=2)
    trainer = PhaseTeller(directory)
    stop = threading.Event()

    def live() -> None:
        while not stop.wait(0.1):
            for writer in (gate, ring, trainer):
                writer.beat()

    thread = threading.Thread(target=live)
    thread.start()
    try:
        found = doctor(upstream.url, "--slo", "e2e:400ms")
    finally:
        stop.set()
        thread.join()
        for writer in (gate, ring, trainer):
            writer.close()
    assert found["middleware"]["message"] == "alive in 1 API-server process; 2 requests in flight"
    assert "1 engine, at most 32 requests" in found["plugin"]["message"]
    assert found["trainers"]["message"].startswith("1 trainer ")
    assert "exact" in found["slo"]["message"]
    assert found["slo"]["status"] == "ok"


def make_disabled(upstream: Upstream) -> None:
    upstream.page = without(upstream.page, "vllm:")


def make_blind(upstream: Upstream) -> None:
    upstream.page = without(upstream.page, "vllm:num_requests_running")


def make_e2e_missing(upstream: Upstream) -> None:
    upstream.page = without(upstream.page, "vllm:e2e_request_latency_seconds")


def make_ttft_missing(upstream: Upstream) -> None:
    upstream.page = without(upstream.page, "vllm:time_to_first_token_seconds")


def make_old(upstream: Upstream) -> None:
    upstream.page = upstream.page.replace("kv_cache_usage_perc", "gpu_cache_usage_perc")


def make_error(upstream: Upstream) -> None:
    upstream.status = 503


def make_redirect(upstream: Upstream) -> None:
    upstream.status = 302


def make_garbage(upstream: Upstream) -> None:
    upstream.page = "vllm:num_requests_running{ \x00\n"


def make_cut(upstream: Upstream) -> None:
    upstream.cut = True


@pytest.mark.parametrize(
    ("change", "check", "status", "said"),
    [
        (make_disabled, "metrics", "fail", "--disable-log-stats"),
        (make_blind, "signals", "fail", "blind to load"),
        (make_e2e_missing, "signals", "fail", "blind to request latency"),
        (make_e2e_missing, "slo", "fail", "cannot be judged"),
        (make_ttft_missing, "signals", "warn", "blind to arrivals and TTFT"),
        (make_old, "signals", "ok", "kv_usage as vllm:gpu_cache_usage_perc"),
        (make_error, "reachable", "fail", "HTTP 503"),
        (make_redirect, "reachable", "fail", "give the final base URL to --vllm"),
        (make_garbage, "reachable", "fail", "no vLLM"),
        (make_cut, "reachable", "fail", "broken"),
    ],
)
def test_what_is_wrong_is_named_with_what_to_do(
    doctor: Doctor, upstream: Upstream, change: Callable[[Upstream], None], check: str, status: str, said: str
) -> None:
    change(upstream)
    found = doctor(upstream.url)
    assert found[check]["status"] == status
    assert said in f"{found[check]['message']} {found[check]['remedy']}"
    if status == "fail":
        assert found["code"] == 1
        assert found[check]["remedy"]


def test_a_closed_port_is_refused(doctor: Doctor) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        found = doctor(f"http://127.0.0.1:{probe.getsockname()[1]}")
    assert found["reachable"]["message"].startswith("refused")
    assert "start vLLM" in found["reachable"]["remedy"]


def test_a_server_that_does_not_answer_names_the_option_of_the_doctor(doctor: Doctor, upstream: Upstream) -> None:
    upstream.hang.set()
    found = doctor(upstream.url, "--timeout-s", "0.2")
    upstream.released.set()
    assert found["reachable"]["message"].startswith("timeout")
    assert found["reachable"]["remedy"].endswith("a longer --timeout-s")


def test_a_host_without_an_address_is_named(doctor: Doctor) -> None:
    found = doctor("http://no-such-host.invalid:8000")
    assert "no-such-host.invalid" in found["reachable"]["message"]
    assert "DNS" in found["reachable"]["remedy"]


def test_a_resolver_that_hangs_holds_nothing() -> None:
    released = threading.Event()

    def hang(*_: Any, **__: Any) -> list[Any]:
        released.wait(DEADLINE_S)
        return []

    assert resolve("http://slow:1", timeout_s=0.05, lookup=hang) == "slow: no address within 0.05 s"
    released.set()


def silent(connection: socket.socket) -> None:
    connection.recv(1 << 20)
    connection.recv(1)


def dripping(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n")
    while True:
        connection.sendall(b"#")
        threading.Event().wait(0.02)


def dripping_headers(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\n")
    while True:
        connection.sendall(b"X: y\r\n")
        threading.Event().wait(0.02)


def endless(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        connection.sendall(b"vllm:x 1\n" * 100_000)


def nonsense(connection: socket.socket) -> None:
    connection.sendall(b"\x00\xff\x1b[2J SSH-2.0-OpenSSH\r\n\r\n")


def steering(connection: socket.socket) -> None:
    page_answer('vllm:num_requests_running{x="\x1b[2J[bold red]" \x1b]0;t\x07 z\n')(connection)


@functools.cache
def packed() -> bytes:
    packer = zlib.compressobj(wbits=31)
    return packer.compress(b"#" * (64 << 20)) + packer.flush()


def bomb(connection: socket.socket) -> None:
    body = packed()
    connection.recv(65536)
    head = f"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)


def bad_gzip(connection: socket.socket) -> None:
    page_answer("not gzip", "Content-Encoding: gzip")(connection)


def huge_numbers(connection: socket.socket) -> None:
    page = edited(capture("busy"), {"vllm:num_requests_running": 1e308, "vllm:num_requests_waiting": 1e308})
    page = edited(page, {"vllm:iteration_tokens_total_count": float("nan")})
    page_answer(page.replace('le="0.3"', 'le="nan"'), "Date: Mon, 99 Foo 99999 99:99:99 GMT")(connection)


@pytest.mark.parametrize(
    "harm", [silent, dripping, dripping_headers, endless, nonsense, steering, bomb, bad_gzip, huge_numbers]
)
@pytest.mark.timeout(60)
def test_a_hostile_server_gets_a_finding_and_no_more(
    harm: Callable[[socket.socket], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with raw_server(harm) as port:
        for form in ((), ("--json",)):
            argv = ["doctor", "--vllm", f"http://127.0.0.1:{port}", "--gate", str(tmp_path), *form]
            assert wadiloco.main([*argv, "--timeout-s", "0.5", "--watch-s", "0.5"]) in (0, 1)
            printed = capsys.readouterr()
            assert "Traceback" not in printed.out + printed.err
            assert "\x1b" not in printed.out
            assert "\x07" not in printed.out
    assert json.loads(printed.out)["findings"]


def bomb_beside_a_good_page(connection: socket.socket) -> None:
    if b"GET /metrics " in connection.recv(65536, socket.MSG_PEEK):
        page_answer(capture("busy"))(connection)
    else:
        bomb(connection)


def test_no_answer_is_unpacked(doctor: Doctor) -> None:
    packed()  # within this process too, and before its memory is watched
    with raw_server(bomb_beside_a_good_page) as port:
        url = f"http://127.0.0.1:{port}"
        tracemalloc.start()
        try:
            found = doctor(url, "--sidecar", url)
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert (found["reachable"]["status"], "version" in found) == ("ok", False)
    assert "encoded as 'gzip', which was not asked for" in found["sidecar"]["message"]
    assert peak_bytes < 16 << 20


class SlowScraper(Scraper):
    """Takes longer than the whole time of watching."""

    def __init__(self) -> None:
        self.num_scrapes = 0

    async def scrape(self) -> ScrapeResult:
        self.num_scrapes += 1
        await asyncio.sleep(2 * WATCH_S)
        return good(parse(capture("busy")))


WATCH_S = 0.05


def test_watching_ends_after_seconds_and_not_after_scrapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_probe, "SCRAPE_PERIOD_S", WATCH_S / 10)
    scraper = SlowScraper()
    results = asyncio.run(watch(scraper, watch_s=WATCH_S))
    assert (len(results), scraper.num_scrapes) == (2, 2)


@pytest.mark.parametrize("ahead_s", [-600.0, 600.0])
def test_a_clock_that_is_off_is_said(doctor: Doctor, ahead_s: float) -> None:
    date = email.utils.formatdate(time.time() + ahead_s, usegmt=True)
    with raw_server(page_answer(capture("busy"), f"Date: {date}")) as port:
        found = doctor(f"http://127.0.0.1:{port}")
    assert found["clock"]["status"] == "warn"
    assert found["clock"]["details"]["skew_s"] == pytest.approx(ahead_s, abs=2)
    assert ("ahead of" in found["clock"]["message"]) == (ahead_s > 0)


@pytest.mark.parametrize(
    ("text", "unix_s"), [("Thu, 01 Jan 1970 00:00:10 GMT", 10.0), ("soon", None), (None, None), ("1", None)]
)
def test_dates(text: str | None, unix_s: float | None) -> None:
    assert parse_date(text) == unix_s


def test_the_middle_of_several_dates_counts() -> None:
    assert skew([-0.9, -0.5, 100.0]) == 0.0
    assert skew([]) is None


@pytest.mark.parametrize(("address", "own"), [("127.0.0.1", True), ("192.0.2.1", False), ("nonsense", False)])
def test_own_addresses(address: str, own: bool) -> None:
    assert is_own_address(address) is own


def test_a_sidecar_is_looked_at_with_its_token(doctor: Doctor, upstream: Upstream, tmp_path: Path) -> None:
    settings = SidecarSettings(vllm=upstream.url, token=SecretStr("secret"))
    server = uvicorn.Server(uvicorn.Config(create_app(settings), host="127.0.0.1", port=0, log_level="error"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        try:
            assert doctor(upstream.url, "--sidecar", url, "--token", "secret")["sidecar"]["status"] == "ok"
            refused = doctor(upstream.url, "--sidecar", url)["sidecar"]
            wrong = doctor(upstream.url, "--controller", upstream.url)["controller"]
        finally:
            server.should_exit = True
            thread.join(DEADLINE_S)
    assert "--token" in refused["remedy"]
    assert (wrong["status"], wrong["remedy"]) == ("fail", "correct --controller")
    assert "Authorization" not in upstream.headers


def test_a_peer_that_is_away_is_named(doctor: Doctor, upstream: Upstream) -> None:
    found = doctor(upstream.url, "--controller", "http://127.0.0.1:9")
    assert found["controller"]["status"] == "fail"
    assert "start the controller" in found["controller"]["remedy"]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (("--slo", "fast"), "slo"),
        (("--vllm", "ftp://x"), "vllm"),
        (("--vllm", "http://127.0.0.1:8000/metrics"), "vllm"),
        (("--timeout-s", "0"), "timeout_s"),
        (("--tls-cert", __file__), "tls_cert and tls_key"),
        (("--vllm", "https://127.0.0.1:9", "--tls-ca", __file__), "tls_ca"),
        (("--vllm", "https://127.0.0.1:9", "--vllm-ca", __file__), "vllm_ca"),
        (("--vllm", "unix:vllm.sock"), "vllm"),
        (("--vllm", "http://256.1.1.1"), "vllm"),
        (("--vllm-ca", __file__), "vllm_ca and vllm_cert"),
        (("--vllm-cert", __file__), "vllm_cert and vllm_key"),
        (("--vllm-token", "a", "--vllm-token-file", __file__), "vllm_token and vllm_token_file"),
        (("--token", " "), "token is empty"),
        (("--token", "g\u00fcnther"), "token has signs that no HTTP header can carry"),
        (("--controller", "http://127.0.0.1:9", "--tls-ca", __file__), "tls_ca"),
    ],
)
def test_options_that_cannot_work_end_with_2(
    options: tuple[str, ...], field: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert wadiloco.main(["doctor", "--vllm", "http://127.0.0.1:9", *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"wadiloco doctor: {field}")
    assert error.count("\n") == 1


def test_the_table_has_a_row_per_check_and_the_remedy(upstream: Upstream, capsys: pytest.CaptureFixture[str]) -> None:
    upstream.page = without(upstream.page, "vllm:time_to_first_token_seconds")
    wadiloco.main(["doctor", "--vllm", upstream.url, *FAST, "--slo", "e2e:300ms"])
    printed = " ".join(capsys.readouterr().out.split())
    assert "ok reachable" in printed
    assert "warn signals" in printed
    assert "→ use a vLLM that exports them" in printed
    assert "0 to fix" in printed
