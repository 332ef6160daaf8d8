"""vLLM servers of this machine: a CPU build with a tiny random model, one core each.

On a machine without GPU a core plays the GPU: the server and the island that share it interfere, as they would there.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from replay.processes import Child, Children
from service.errors import UnavailableError

START_DEADLINE_S = 240.0
MAX_MODEL_LEN = 1024
MIDDLEWARE = "wadiloco_vllm_plugin.InFlightMiddleware"
AS_SHIPPED = {"VLLM_PLUGINS": "wadiloco"}
"""Environment of a server whose processes spin while they wait, as vLLM's do (without ``deploy/local/vllm_quiet``)."""
GATE_DIRECTORY_VARIABLE = "WADILOCO_GATE_DIR"
NO_GATE = "off"
SERVED_NAME = "tiny"


@dataclass(frozen=True, slots=True)
class LocalVllm:
    """Where the CPU build and its model are (made by ``deploy/local/install_vllm.sh``)."""

    environment: Path
    model: Path
    serve_script: Path | None = None
    """``deploy/local/vllm_serve.py``, for layouts that only ``vllm serve`` has: several API servers."""

    def check(self) -> None:
        """Raise `UnavailableError` naming what is missing."""
        for field, path in (
            ("vllm_venv", self.environment / "bin" / "python"),
            ("vllm_model", self.model / "config.json"),
        ):
            if not path.exists():
                raise UnavailableError(
                    f"{path} is missing",
                    field=field,
                    remedy="run deploy/local/install_vllm.sh, or use running servers with --server URL",
                )

    def command(self, port: int, *, with_middleware: bool = False) -> list[str]:
        """The ``vllm`` script of the CPU wheel looks itself up under another name and fails; the module does not."""
        module = ("-m", "vllm.entrypoints.openai.api_server")
        return [
            str(self.environment.absolute() / "bin" / "python"),
            *(module if self.serve_script is None else (str(self.serve_script.absolute()), "serve")),
            *("--model", str(self.model.absolute()), "--served-model-name", SERVED_NAME),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--max-model-len", str(MAX_MODEL_LEN), "--dtype", "bfloat16", "--enforce-eager"),
            *("--no-enable-prefix-caching", "--disable-uvicorn-access-log"),
            *(("--middleware", MIDDLEWARE) if with_middleware else ()),
        ]


def vllm_environment(core: int | None, *, gate: Path | None) -> dict[str, str]:
    binding = {} if core is None else {"VLLM_CPU_OMP_THREADS_BIND": str(core), "OMP_NUM_THREADS": "1"}
    return {
        **binding,
        "OMP_WAIT_POLICY": "PASSIVE",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        GATE_DIRECTORY_VARIABLE: NO_GATE if gate is None else str(gate),
    }


def start_vllm(
    children: Children,
    vllm: LocalVllm,
    *,
    name: str,
    port: int,
    core: int | None,
    logs: Path,
    gate: Path | None = None,
    with_middleware: bool = False,
    options: tuple[str, ...] = (),
    env: Mapping[str, str] | None = None,
) -> Child:
    """Start one server; it answers ``/health`` after half a minute or so.

    With ``gate``, its plugin writes engine steps into that folder; ``with_middleware``, its requests in flight too.
    ``options`` and ``env`` are vLLM's own, and win over what is set here.
    """
    return children.start(
        name,
        [*vllm.command(port, with_middleware=with_middleware), *options],
        log=logs / f"{name}.log",
        env={**vllm_environment(core, gate=gate), **(env or {})},
        core=core,
    )


def cores_for(count: int) -> list[int | None]:
    """A core for each of ``count`` servers, round robin over those this process may use."""
    if not hasattr(os, "sched_getaffinity"):
        return [None] * count
    usable = sorted(os.sched_getaffinity(0))
    return [usable[index % len(usable)] for index in range(count)]
