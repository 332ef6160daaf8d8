"""Live vLLM servers with middleware and plugin, and sidecars beside them, that a test may stop, kill, start again."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from replay.processes import Child, Children, answers, free_ports, wait_for
from replay.vllm_server import SERVED_NAME, START_DEADLINE_S, LocalVllm, start_vllm
from sidecar.schema import EngineState, Forecast, Load
from sidecar.slo import parse_slo
from sidecar.source.ring import RingSource
from sidecar.vllm_plugin.gate_reader import GateReader, GateReason, GateState
from sidecar.vllm_plugin.records import GATE_FILE, NUM_SLOTS, SLOT_BYTES, Slot, decode_slot, slot_offset
from tests.conftest import VLLM
from tests.integration.helpers import DEADLINE_S, WADILOCO, descendants_of, eventually

PORTS = range(18700, 18800)
LONG_ANSWER_TOKENS = 30_000
"""Most of a minute: what looks at a request in flight must not race with its end."""
LONG_CONTEXT = ("--max-model-len", "32768")
ALLOW_LONG_CONTEXT = {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}
ANSWER_DEADLINE_S = 180.0
NO_ENV: Mapping[str, str] = {}
_given: set[int] = set()


def new_port() -> int:
    """A port that nobody listens on, and that nobody was given: servers listen long after their start."""
    port = next(port for port in free_ports(len(_given) + 1, PORTS) if port not in _given)
    _given.add(port)
    return port


def new_gate() -> Path:
    """A folder that no other server writes into, in memory where the platform has such a place."""
    shared_memory = Path("/dev/shm")  # noqa: S108 (mkdtemp makes it nobody else's)
    return Path(tempfile.mkdtemp(prefix="wadiloco-test-", dir=shared_memory if shared_memory.is_dir() else None))


class LiveServer:
    """A vLLM server with a gate; `start` it first."""

    def __init__(
        self,
        children: Children,
        logs: Path,
        *,
        core: int | None,
        options: tuple[str, ...] = (),
        env: Mapping[str, str] = NO_ENV,
        vllm: LocalVllm = VLLM,
    ) -> None:
        self._children = children
        self._logs = logs
        self._core = core
        self._options = options
        self._env = env
        self._vllm = vllm
        self._process: Child | None = None
        self.port = new_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.gate = new_gate()
        self.reader = GateReader(self.gate)

    @property
    def pid(self) -> int:
        assert self._process is not None, "the server is not running"
        return self._process.process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.exit_code is None

    def begin(self) -> None:
        """Start the process, and wait for nothing."""
        self._process = start_vllm(
            self._children,
            self._vllm,
            name=f"vllm-{self.port}",
            port=self.port,
            core=self._core,
            logs=self._logs,
            gate=self.gate,
            with_middleware=True,
            options=(*LONG_CONTEXT, *self._options),
            env={**ALLOW_LONG_CONTEXT, **self._env},
        )

    def wait(self, *, deadline_s: float = START_DEADLINE_S) -> None:
        """Until it serves."""
        healthy = functools.partial(answers, f"{self.url}/health")
        asyncio.run(wait_for(self.url, healthy, children=self._children, deadline_s=deadline_s, period_s=0.5))

    def start(self, *, deadline_s: float = START_DEADLINE_S) -> None:
        self.begin()
        self.wait(deadline_s=deadline_s)

    def kill(self) -> None:
        """SIGKILL to all of its processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.forget()

    def forget(self) -> None:
        """Its main process ends, or has ended."""
        if self._process is not None:
            self._process.process.wait(DEADLINE_S)
            self._children.running.remove(self._process)
            self._process = None

    def end(self) -> None:
        """Its main process ends by itself; what lingers of it (an orphan that holds its socket) is killed."""
        group = self.pid
        self.forget()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)

    def close(self) -> None:
        self.reader.close()
        shutil.rmtree(self.gate, ignore_errors=True)

    def processes(self, title: str) -> list[int]:
        """Process ids of this server whose title begins so, such as ``VLLM::EngineCore``."""
        return [pid for pid in sorted(descendants_of(self.pid)) if command_line(pid).startswith(title)]

    def state(self) -> GateState:
        return self.reader.read(time.monotonic())

    def becomes(self, reason: GateReason, *, deadline_s: float = DEADLINE_S) -> GateState:
        return eventually(
            lambda: state if (state := self.state()).reason is reason else None,
            deadline_s=deadline_s,
            what=f"state {reason}",
            seen=self.state,
        )

    def rests(self) -> GateState:
        """Idle by the gate and by the last step of every engine.

        A client that hung up no longer counts in flight while its abort is on the way and the engine goes on.
        """
        with contextlib.closing(RingSource(self.gate, parse_slo("ttft:1000s,tpot:1000s,e2e:1000s"))) as rings:

            def rest() -> GateState | None:
                engines = rings.read(t_s=0.0, monotonic_s=time.monotonic())
                is_at_rest = engines is not None and (engines.running, engines.waiting) == (0, 0)
                state = self.state()
                return state if is_at_rest and state.reason is GateReason.IDLE else None

            return eventually(rest, what="an engine at rest")

    def slots(self) -> list[Slot]:
        """The slots that are taken, whoever wrote them."""
        raw = (self.gate / GATE_FILE).read_bytes()
        starts = [slot_offset(index) for index in range(NUM_SLOTS)]
        decoded = [decode_slot(raw[start : start + SLOT_BYTES]) for start in starts]
        return [slot for slot in decoded if slot is not None and slot.pid]

    def ask(self, **body: Any) -> httpx.Response:
        return httpx.post(
            f"{self.url}/v1/completions", json=request(**body), timeout=ANSWER_DEADLINE_S, trust_env=False
        )

    def post(self, path: str) -> None:
        httpx.post(f"{self.url}{path}", timeout=30, trust_env=False).raise_for_status()

    def metrics(self) -> httpx.Response:
        return httpx.get(f"{self.url}/metrics", timeout=30, trust_env=False).raise_for_status()

    @contextlib.contextmanager
    def asking(self, **body: Any) -> Iterator[Future[httpx.Response]]:
        """A request whose answer is awaited when the block ends."""
        with ThreadPoolExecutor(1) as pool:
            yield pool.submit(self.ask, **body)

    @contextlib.contextmanager
    def unfinished(self, *, count: int = 1, **body: Any) -> Iterator[None]:
        """Requests that the engines run; their clients hang up when the block ends."""
        content = json.dumps(request(**{"max_tokens": LONG_ANSWER_TOKENS, **body})).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n"
        with contextlib.ExitStack() as connections:
            for _ in range(count):
                connection = socket.create_connection(("127.0.0.1", self.port), timeout=30)
                connections.enter_context(connection)
                connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + content)
            eventually(lambda: self.state().running == count, what=f"{count} running requests", seen=self.slots)
            yield


class LiveSidecar:
    """``wadiloco sidecar`` beside a server; without ``gate`` it knows the metrics page alone."""

    def __init__(
        self, children: Children, server_url: str, logs: Path, *options: str, gate: Path | None = None
    ) -> None:
        port = new_port()
        self.url = f"http://127.0.0.1:{port}"
        told = ("--vllm", server_url, "--port", str(port), "--scrape-interval-s", "0.2")
        gated = () if gate is None else ("--gate", str(gate))
        children.start(
            f"sidecar-{port}", [*WADILOCO, "sidecar", *told, *gated, *options], log=logs / f"sidecar-{port}.log"
        )

    def load(self, *, window_s: float = 0.0) -> Load:
        answer = httpx.get(f"{self.url}/v1/load", params={"window_s": window_s}, timeout=10, trust_env=False)
        return Load.model_validate_json(answer.text)

    def forecast(self) -> Forecast:
        return Forecast.model_validate_json(httpx.get(f"{self.url}/v1/forecast", timeout=10, trust_env=False).text)

    def metric(self, name: str) -> float:
        """The series of its own metrics that has no labels."""
        text = httpx.get(f"{self.url}/metrics", timeout=10, trust_env=False).text
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        (value,) = [sample.value for sample in samples if sample.name == name]
        return value

    def becomes(self, state: EngineState, *, deadline_s: float = DEADLINE_S) -> Load:
        return eventually(
            lambda: load if (load := self.load()).state is state else None,
            deadline_s=deadline_s,
            what=f"state {state}",
            seen=self.load,
        )

    def sees(self, running: float) -> Load:
        """The load with so many running requests."""
        return eventually(
            lambda: load if (load := self.load()).sample and load.sample.running == running else None,
            what=f"{running} running",
            seen=self.load,
        )


def request(**body: Any) -> dict[str, Any]:
    return {"model": SERVED_NAME, "prompt": "A gate", "max_tokens": 16, "ignore_eos": True, **body}


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """The process stands still (SIGSTOP) while the block lasts."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
