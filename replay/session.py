"""A whole replay: servers up, every run, results written after each."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import shlex
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from replay.config import ReplaySettings
from replay.experiment import RUNS, RunOutcome, RunSpec, Workload, plan_runs, run_once
from replay.fleet import Server, check_train_options
from replay.loadgen import PlannedRequest, ServerInfo, discover, run_load
from replay.processes import Children, answers, free_ports, wait_for
from replay.progress import ProgressView
from replay.report import render_markdown
from replay.scaling import LengthScaling, length_limits, plan_requests
from replay.stats import gap_closed
from replay.summarize import compare_all, slo_spec, this_machine
from replay.summary import Budget, Experiment, Scaling, ServerSummary, Summary, TraceSlice, write_json
from replay.timeline import draw_timeline
from replay.traces import Trace, burstiness, read_trace, slice_trace
from replay.vllm_server import START_DEADLINE_S, LocalVllm, cores_for, start_vllm
from service.app import package_version
from service.errors import ConfigError, ConflictError, InputError, UnavailableError
from service.files import replace_file
from sidecar.slo import parse_slo
from sidecar.vllm_plugin.identity import default_directory

SUMMARY = "summary.json"
REPORT = "report.md"
TIMELINE = "timeline.png"
WARMUP_REQUESTS = 6
LOCAL_MAX_PROMPT_TOKENS = 128
LOCAL_MAX_OUTPUT_TOKENS = 32
"""A CPU server answers 32 tokens in 60 to 100 ms; longer answers would make every burst overlap the next."""
VERSION_TIMEOUT_S = 5.0
SETUP_S = 12.0
"""Typical time per run to start and stop its training fleet, for the announcement of the whole length."""


async def run_session(settings: ReplaySettings, view: ProgressView) -> Summary:
    """Run the whole experiment; `settings.out` then holds the summary, the report, the picture and all logs.

    Raises:
        WadilocoError: bad input, a server that does not answer, a process that failed.
    """
    if not settings.no_train:
        check_train_options(tuple(settings.train_options.items()))
    # On a thread: a large file takes seconds, in which a signal should still end the replay.
    trace = await asyncio.to_thread(read_trace, settings.trace, settings.trace_format)
    slices = [_slice(trace, settings, seed) for seed in range(settings.seeds)]
    prepare_output(settings.out)
    children = Children()
    try:
        async with _servers(settings, children, view) as servers:
            infos = tuple([await _discover(server, settings) for server in servers])
            check_same_model(infos)
            view.stage("warming the servers up")
            await _warm_up(infos, settings)
            return await _all_runs(settings, slices, servers, infos, children, view)
    finally:
        children.stop()


def prepare_output(out: Path) -> None:
    """Make the directory and prove that it can be written.

    Raises:
        ConfigError: it cannot.
        ConflictError: it holds something that is not a former replay.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=out):
            pass
    except OSError as exc:
        raise ConfigError(
            f"cannot write into {out}: {exc.strerror or exc}", field="out", remedy="choose another directory with --out"
        ) from exc
    if (out / RUNS).exists() or (out / SUMMARY).exists():
        raise ConflictError(
            f"{out} already holds a replay", field="out", remedy="choose another --out, or move the old one away"
        )


def check_same_model(infos: tuple[ServerInfo, ...]) -> None:
    """Requests go to the servers in turn, so all must serve the same model under the same name."""
    names = sorted({info.model for info in infos})
    if len(names) > 1:
        raise InputError(
            f"the servers serve different models: {', '.join(names)}", field="server", remedy="name one with --model"
        )


def _slice(trace: Trace, settings: ReplaySettings, seed: int) -> Trace:
    return slice_trace(
        trace,
        rate_scale=settings.rate_scale,
        start_s=settings.start_s + seed * settings.duration_s,
        duration_s=settings.duration_s,
    )


@contextlib.asynccontextmanager
async def _servers(
    settings: ReplaySettings, children: Children, view: ProgressView
) -> AsyncIterator[tuple[Server, ...]]:
    if settings.server:
        yield tuple(Server(url.rstrip("/"), None, gate_of(url, settings)) for url in settings.server)
        return
    vllm = LocalVllm(settings.vllm_venv, settings.vllm_model)
    vllm.check()
    ports = free_ports(settings.local_servers, settings.port_range)
    cores = cores_for(settings.local_servers)
    view.stage(f"starting {settings.local_servers} vLLM servers, half a minute or so")
    started = []
    for index, (port, core) in enumerate(zip(ports, cores, strict=True)):
        server = Server(f"http://127.0.0.1:{port}", core, gate_of(f"http://127.0.0.1:{port}", settings))
        start_vllm(
            children,
            vllm,
            name=f"vllm-{index}",
            port=port,
            core=core,
            logs=settings.out / "servers",
            # In the server's own process nobody writes a gate that is to follow the scrape.
            gate=server.gate if settings.gate != "scrape" else None,
            with_middleware=settings.gate == "ingress",
        )
        started.append(server)
    try:
        for server in started:
            healthy = functools.partial(answers, f"{server.url}/health")
            await wait_for(server.url, healthy, children=children, deadline_s=START_DEADLINE_S, period_s=0.5)
        yield tuple(started)
    finally:
        children.stop()
        for server in started:
            if server.gate is not None:
                shutil.rmtree(server.gate, ignore_errors=True)


def gate_of(url: str, settings: ReplaySettings) -> Path | None:
    """Where the plugin of a server on this machine keeps its gate by default."""
    if settings.gate == "off":
        return None
    address = urlsplit(url)
    return default_directory(address.port or (443 if address.scheme == "https" else 80))


async def _discover(server: Server, settings: ReplaySettings) -> ServerInfo:
    return await discover(server.url, model=settings.model, api_key=settings.api_key_text)


async def _warm_up(infos: tuple[ServerInfo, ...], settings: ReplaySettings) -> None:
    """A server's first requests pay for its lazy initialisation, which no policy should answer for."""
    prompt = tuple(range(10, 10 + 32))
    requests = [
        PlannedRequest(0.2 * number, server, prompt[number:], 16)
        for number in range(WARMUP_REQUESTS)
        for server in range(len(infos))
    ]
    urls = [info.url for info in infos]
    results = await run_load(
        requests, urls, model=infos[0].model, timeout_s=settings.request_timeout_s, api_key=settings.api_key_text
    )
    failed = next((result for result in results if not result.ok), None)
    if failed is not None:
        raise InputError(
            f"{urls[failed.server_index]} failed a first request: {failed.status} {failed.detail}",
            field="server",
            remedy="check --model, --api-key and the server's log",
        )


async def _all_runs(
    settings: ReplaySettings,
    slices: list[Trace],
    servers: tuple[Server, ...],
    infos: tuple[ServerInfo, ...],
    children: Children,
    view: ProgressView,
) -> Summary:
    outcomes: list[RunOutcome] = []
    requests: Counter[int] = Counter()
    versions = [await vllm_version(info.url) for info in infos]
    summary: Summary | None = None
    try:
        for number, spec in enumerate(plan_runs(settings)):
            workload, scaling = _workload(settings, slices[spec.seed], infos, seed=_prompt_seed(spec, number))
            requests.update(request.server_index for request in workload.requests)
            outcomes.append(
                await run_once(
                    spec,
                    workload,
                    settings=settings,
                    servers=servers,
                    infos=infos,
                    children=children,
                    on_progress=view.show,
                )
            )
            summary = summarize(settings, slices[0], scaling, outcomes).model_copy(
                update={
                    "experiment": describe(settings, infos, versions=versions, requests=requests, islands=len(servers))
                }
            )
            write_json(summary, settings.out / SUMMARY)
    finally:
        # Also after an interrupt or a failure: the runs that were completed are worth their report.
        if summary is not None:
            view.stage("writing the report")
            write_report(summary, outcomes, settings)
    assert summary is not None
    return summary


def _prompt_seed(spec: RunSpec, number: int) -> int:
    """Other prompts in every run: equal ones would hit the prefix cache of the run before."""
    return 1_000_003 * spec.seed + number


def default_limit(settings: ReplaySettings, of_context: int, on_own_servers: int) -> int:
    return max(1, of_context if settings.server else min(of_context, on_own_servers))


def announce(settings: ReplaySettings) -> str:
    """How many runs there will be, and how long they take."""
    runs = len(plan_runs(settings))
    setup_s = 0.0 if settings.no_train else SETUP_S
    minutes = runs * (settings.duration_s + setup_s) / 60
    return f"{runs} runs of {settings.duration_s:g} s, about {max(1, round(minutes))} min"


def _workload(
    settings: ReplaySettings, trace: Trace, infos: tuple[ServerInfo, ...], *, seed: int
) -> tuple[Workload, LengthScaling]:
    context = min(info.max_model_len for info in infos)
    limits = length_limits(
        context,
        max_prompt_tokens=settings.max_prompt_tokens or default_limit(settings, context // 2, LOCAL_MAX_PROMPT_TOKENS),
        max_output_tokens=settings.max_output_tokens or default_limit(settings, context // 4, LOCAL_MAX_OUTPUT_TOKENS),
    )
    requests, scaling = plan_requests(trace, limits=limits, num_servers=len(infos), seed=seed)
    return Workload(tuple(requests), settings.duration_s), scaling


def summarize(settings: ReplaySettings, trace: Trace, scaling: LengthScaling, outcomes: list[RunOutcome]) -> Summary:
    """What is known after these runs."""
    slo = parse_slo(settings.slo)
    runs = [outcome.run for outcome in outcomes]
    shape = burstiness(trace)
    return Summary(
        trace=trace.name,
        slo=slo_spec(slo),
        budget=Budget(outer_syncs=settings.outer_syncs, min_gap_s=settings.min_gap_s),
        runs=runs,
        comparisons=compare_all(runs),
        gap_closed=gap_closed(runs),
        slice=TraceSlice(
            format=trace.format,
            rate_scale=settings.rate_scale,
            start_s=settings.start_s,
            duration_s=settings.duration_s,
            **dataclasses.asdict(shape),
        ),
        scaling=Scaling(
            max_prompt_tokens=scaling.limits.max_prompt_tokens,
            max_output_tokens=scaling.limits.max_output_tokens,
            **{key: value for key, value in dataclasses.asdict(scaling).items() if key != "limits"},
        ),
        machine=this_machine(),
        generated_at=datetime.now(UTC).isoformat(timespec="seconds"),
        timeline=TIMELINE,
    )


def describe(
    settings: ReplaySettings,
    infos: tuple[ServerInfo, ...],
    *,
    versions: Sequence[str | None],
    requests: Mapping[int, int],
    islands: int,
) -> Experiment:
    """What ran, for whoever wants to run it again."""
    return Experiment(
        wadiloco_version=package_version(),
        command=shlex.join(["wadiloco", *sys.argv[1:]]),
        settings=settings.model_dump(mode="json", exclude={"api_key"}),
        servers=[
            ServerSummary(
                url=info.url,
                model=info.model,
                max_model_len=info.max_model_len,
                vllm_version=version,
                requests=requests.get(index, 0),
            )
            for index, (info, version) in enumerate(zip(infos, versions, strict=True))
        ],
        islands=0 if settings.no_train else settings.islands or islands,
    )


async def vllm_version(url: str) -> str | None:
    """What ``GET /version`` says; None when the server does not tell."""
    try:
        async with httpx.AsyncClient(timeout=VERSION_TIMEOUT_S, trust_env=False) as client:
            return str((await client.get(f"{url}/version")).json()["version"])
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return None


def write_report(summary: Summary, outcomes: list[RunOutcome], settings: ReplaySettings) -> None:
    """The report first: it is small, and a disk that fills up should cost the picture."""
    try:
        replace_file(settings.out / REPORT, [render_markdown(summary).encode()])
        draw_timeline(
            [outcome.timeline for outcome in outcomes],
            settings.out / TIMELINE,
            slo=settings.slo,
            threshold_ms=summary.slo.threshold_ms,
            title=f"{summary.trace}, {settings.duration_s:g} s",
        )
    except OSError as exc:
        raise UnavailableError(
            f"cannot write into {settings.out}: {exc.strerror or exc}",
            field="out",
            remedy=f"free some space; {SUMMARY} has the results",
        ) from exc
