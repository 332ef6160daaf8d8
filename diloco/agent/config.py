"""Settings of ``wadiloco island``."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator

from diloco.agent.dry_run_config import DryRunSettings
from diloco.agent.inner_config import InnerSettings
from diloco.protocol import SyncPriority
from diloco.scheduling import MAX_CORES
from diloco.schema import MAX_FRAGMENTS, CodecName, Slot
from service.peers import split_urls
from service.settings import Url, Urls
from sidecar.schema import Name

Core = Annotated[int, Field(ge=0, lt=MAX_CORES)]
DeviceName = Annotated[str, Field(pattern=r"^(auto|cpu|cuda|cuda:\d{1,3})$")]
WorkloadName = Annotated[str, Field(pattern=r"^[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*$")]

MAX_RANKS = 64
BYTE_TEXT_OPTIONS = ("num_layers", "num_heads", "width", "context", "data", "batch_size")
"""Those of the built-in workload."""
BYTE_GPT_OPTIONS = ("num_layers", "num_heads", "width")
"""Those of its model."""


def default_node() -> str:
    """This host's name, with characters that a `Name` may have."""
    return re.sub(r"[^A-Za-z0-9._:/-]", "-", socket.gethostname()).lstrip("-._:/") or "localhost"


class IslandSettings(InnerSettings, DryRunSettings):
    """An island of the run: its agent, and the rank workers that the agent supervises.

    All islands of a run need the same seed, workload or model, data and data_shards.
    """

    service: ClassVar[str] = "island"

    port: int = Field(default=9700, ge=0, le=65535)
    """TCP port of the agent; 0 takes a free one and logs it."""
    agent_id: Name | None = None
    """Name of this agent, unique in the fleet; by default that of the node."""
    node: Name = Field(default_factory=default_node)
    """Host on which the agent runs; binds it to the sidecar of the same node."""
    server_id: Name | None = None
    """Server whose load this island competes with; by default the one on its node."""
    slot: Slot | None = None
    """Place in the run; by default the controller gives a free one."""
    controller: Urls | None = None
    """URL of the controller, or several with commas between them, of which one leads. Without one, give slot and
    synchronizer: the island then syncs at a fixed H by itself."""
    synchronizer: Urls | None = None
    """URL of the synchronizer, or of all that share the run's fragments, in the order of their --shard and with commas
    between them; by default the controller says it."""
    advertise_url: Url | None = None
    """URL at which other agents and the controller reach this one; by default where it listens, which must then be an
    address that others know."""
    replica_limit_mb: float = Field(default=8192.0, ge=0, le=1e9)
    """Most memory for replicas of other islands' state; it is taken when the first one of an island comes."""
    request_timeout_s: float = Field(default=10.0, gt=0, le=300)
    """Deadline of one request to controller or synchronizer."""

    seed: int = Field(default=0, ge=0, lt=1 << 63)
    """Seed of the initial parameters and of the order of the data."""
    workload: WorkloadName | None = None
    """Model, data and loss of your own, as MODULE:FACTORY: a function of a Python module that returns a
    diloco.workload.Workload. By default the built-in byte GPT on local text, which num_layers, num_heads, width,
    context, data and batch_size are for."""
    workload_options: dict[str, str] = Field(default_factory=dict)
    """Keyword arguments of the workload's factory, as strings; for example width=64,depth=2."""
    hf_model: Path | None = None
    """Directory of a Hugging Face causal LM to train in place of the byte GPT, on the same kind of data: its
    config.json, and if they are there its weights (safetensors) and tokenizer. Nothing is downloaded."""
    num_layers: int = Field(default=4, ge=1, le=1024)
    """Transformer blocks."""
    num_heads: int = Field(default=4, ge=1, le=1024)
    """Attention heads per block."""
    width: int = Field(default=256, ge=1, le=1 << 16)
    """Size of the residual stream, a multiple of num_heads. The default model has 3.3 million parameters."""
    context: int = Field(default=128, ge=2, le=1 << 16)
    """Tokens (bytes) per training sequence."""
    data: tuple[Path, ...] = ()
    """Text files, or folders of them; by default the sources of this Python installation's own library."""
    data_shards: int = Field(default=16, ge=1, le=1 << 16)
    """Disjoint parts of the data, one per slot: at least as many as slots."""
    batch_size: int = Field(default=4, ge=1, le=1 << 16)
    """Sequences per inner step."""
    num_fragments: int | None = Field(default=None, ge=1, le=MAX_FRAGMENTS)
    """Without a controller, which decides it where there is one: parts of the model that sync in turn. By default those
    of the run that there is, and 1 in a new one."""
    ranks: int = Field(default=1, ge=1, le=MAX_RANKS)
    """Worker processes that take the island's inner steps together, each on its part of the data. They share out
    batch_size, which must be a multiple; of a workload of your own each has batches of its own."""
    shard_optimizer: bool = False
    """Let each rank keep the optimizer's state of a part of the parameters only."""
    group_timeout_s: float = Field(default=120.0, ge=1, le=3600)
    """Longest wait of one rank for another, after which all start again; longer than a start and than an inner step.
    A rank that dies is seen at once."""
    device: DeviceName = "auto"
    """Where the workers compute: cpu, cuda, cuda:N, or auto, which is cuda where torch sees a GPU. Several ranks take
    GPUs that follow one another, one each."""
    mps_thread_percentage: int | None = Field(default=None, ge=1, le=100)
    """Share of the GPU's threads that a worker may use beside a server, where an MPS daemon runs
    (CUDA_MPS_ACTIVE_THREAD_PERCENTAGE)."""
    cores: tuple[Core, ...] = ()
    """Numbers of the CPU cores that the workers are pinned to, such as 0,1; by default they may use all. Several ranks
    share them out."""
    threads: int = Field(default=1, ge=1, le=1024)
    """Threads of one inner step; several ranks share them out, and have at least one each."""
    idle_priority: bool = True
    """Let inner steps compete for the core; otherwise they run only when nobody else wants it (SCHED_IDLE on Linux, low
    priority elsewhere)."""
    sync_priority: SyncPriority = "normal"
    """Priority of a sync's transfers. In a synchronous round all islands wait for the slowest, hence normal."""
    codec: CodecName = "fp32"
    """How contributions are encoded on their way to the synchronizer: bf16 takes a half, int8 a quarter and int4 less
    than a seventh of fp32's bytes. What is left out is added to the next contribution. Islands may differ."""
    gate: Path | None = None
    """Folder of the gate of the vLLM server on the same hardware (its WADILOCO_GATE_DIR): inner steps wait while the
    server has work. Left out, they never wait."""
    gate_patience_s: float = Field(default=60.0, ge=0, le=86400)
    """Longest wait while nobody says whether the server is busy; then inner steps go on at a trickle."""
    gate_trickle_s: float = Field(default=10.0, gt=0, le=3600)
    """Seconds per inner step of that trickle."""

    vault: bool = True
    """Keep snapshots of the workers' training state in shared memory: a worker that dies is replaced, and the next one
    goes on from there with the same weights."""
    vault_dir: Path | None = None
    """Folder in memory for these snapshots, by default /dev/shm. They take about seven times the model's bytes with
    AdamW, ten with codec int8 or int4; the exact size is logged."""
    snapshot_dir: Path | None = None
    """Folder on a disk that outlives this host's memory: a snapshot is copied there now and then, beside the training,
    and at an orderly end. The last two are kept."""
    snapshot_every_s: float = Field(default=300.0, ge=1, le=86_400)
    """Time between two such copies."""
    resume: bool = False
    """Go on from what an earlier agent of this name and slot left: snapshots in memory, or else in snapshot_dir."""
    standby_workers: int | None = Field(default=None, ge=0, le=MAX_RANKS)
    """Workers in reserve, with all imports done: a dead one's successor trains again sooner. By default one per rank; 0
    keeps none. Each takes about 0.3 GB of memory."""
    park: bool = True
    """While the agent waits for a slot, keep its worker started, with the model built in the CPU's memory and the run's
    global parameters in it: it trains at once when it gets one. It takes no memory of a GPU."""
    park_refresh_s: float = Field(default=5.0, ge=0.1, le=3600)
    """Least seconds between two looks of such a worker for newer global parameters."""
    failure_timeout_s: float = Field(default=10.0, ge=1, le=600)
    """The one timeout of failure detection: a worker that is silent for so long, or whose steps get nowhere for twice
    as long without a reason, is killed and replaced. A dead one is seen at once."""

    tensorboard: Path | None = None
    """Folder for TensorBoard: the worker writes loss, learning rate, tokens and norms, and bytes, blocked time and
    staleness of each outer step, to a folder slot-N in it."""
    autonomous_deadline_s: float = Field(default=300.0, gt=0, le=86_400)
    """How long a sync that the island starts by itself, without a controller, waits for its round to close."""
    start_attempts: int = Field(default=3, ge=1, le=100)
    """Worker starts that may fail in a row before the agent gives up."""
    restart_backoff_s: float = Field(default=0.5, ge=0, le=60)
    """Pause before the first restart of a worker; doubles with each death in quick succession."""
    restart_backoff_max_s: float = Field(default=30.0, gt=0, le=3600)
    """Longest pause before a restart."""
    stop_timeout_s: float = Field(default=3.5, gt=0, le=4.5)
    """Time for the worker to end its step at a stop; then it is killed."""

    @model_validator(mode="after")
    def _check_island(self) -> Self:
        foreign = [name for name in BYTE_TEXT_OPTIONS if name in self.model_fields_set]
        if self.workload is not None and foreign:
            raise ValueError(
                f"{foreign[0]} is an option of the built-in workload, not of {self.workload}: leave it out, or give"
                " what the factory takes as workload_options"
            )
        if self.workload is not None and self.hf_model is not None:
            raise ValueError("workload and hf_model are two models: leave one of them out")
        shape = [name for name in BYTE_GPT_OPTIONS if name in self.model_fields_set]
        if self.hf_model is not None and shape:
            raise ValueError(f"{shape[0]} is that of hf_model's config.json: leave it out")
        if self.workload is None and self.workload_options:
            raise ValueError("workload_options need a workload: give --workload MODULE:FACTORY")
        if self.width % self.num_heads:
            raise ValueError(f"width {self.width} must be a multiple of num_heads {self.num_heads}")
        if self.workload is None and self.batch_size % self.ranks:
            raise ValueError(f"batch_size {self.batch_size} must be a multiple of ranks {self.ranks}")
        if self.shard_optimizer and self.ranks == 1:
            raise ValueError("shard_optimizer needs several ranks: give --ranks, or leave it out")
        if not self.dry_run and self.controller is None and (self.slot is None or self.synchronizer is None):
            raise ValueError("controller is not set: give its URL, or give both slot and synchronizer")
        if self.controller is not None and self.num_fragments is not None:
            raise ValueError("num_fragments is the controller's to say: give it there, or leave out the controller")
        num_synchronizers = len(split_urls(self.synchronizer or ""))
        if self.num_fragments is not None and self.num_fragments < num_synchronizers:
            raise ValueError(
                f"num_fragments {self.num_fragments} is below the {num_synchronizers} synchronizers, of which each"
                " holds fragments of its own: raise it, or give fewer"
            )
        if self.slot is not None and self.slot >= self.data_shards:
            raise ValueError(f"slot {self.slot} has no shard of the data: data_shards is {self.data_shards}")
        if self.snapshot_dir is not None and not self.vault:
            raise ValueError("snapshot_dir takes its copies from the vault: leave out no_vault, or snapshot_dir")
        if self.restart_backoff_max_s < self.restart_backoff_s:
            raise ValueError("restart_backoff_max_s must not be below restart_backoff_s")
        return self

    @property
    def controllers(self) -> tuple[str, ...]:
        return tuple(url.rstrip("/") for url in split_urls(self.controller or ""))

    @property
    def identity(self) -> str:
        return self.agent_id or self.node
