"""What an island agent and its rank worker say to each other: JSON lines through the worker's stdin and stdout.

The first line is the `WorkerConfig`; then come commands. The end of stdin means that the agent is gone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, SecretStr, TypeAdapter, field_serializer

from diloco.lr_schedule import ScheduleName
from diloco.schema import CodecName, Count, Progress, Rung, Slot, SyncReport
from service.wire import Wire

SyncPriority = Literal["normal", "idle"]
"""How urgently a sync's transfers run. Usually normal: in a synchronous round every island waits for the slowest."""


PULL_GRACE_S = 10.0


class GroupPlace(Wire):
    """Where the ranks of an island meet, and for how long they wait for each other."""

    store_url: str
    store_token: SecretStr
    name: str
    epoch: int
    timeout_s: float
    """Deadline of every wait of one rank for another: longer than an inner step takes, and than a start does."""

    @field_serializer("store_token", when_used="json")
    def _reveal(self, token: SecretStr) -> str:
        return token.get_secret_value()


class VaultPlace(Wire):
    """The vault of one rank, as its agent sees it."""

    path: Path | None = None
    """None before there is one: the worker says how large it must be."""
    restore: bool = True
    """Go on from what is in it."""
    rung: Rung = Rung.VAULT
    """Where the agent has it from."""
    is_own: bool = True
    """The agent that wrote it is this one; False where it was adopted, and others may have held the slot meanwhile."""
    run_id: str = ""
    instance: str = ""
    epoch: Count = 0
    first_number: Count = 0
    """Generations are numbered from there on: above all that there were."""
    verified: Count = 0
    """Number of the generation whose digests the agent has just found to be right; 0: none."""


class StandbyNeeds(Wire):
    """What a worker in reserve prepares beside its own modules."""

    modules: tuple[str, ...] = ()
    corpus: tuple[Path, ...] | None = None
    """Text files to read; none named: Python's own library. None: nothing."""


class WorkerConfig(Wire):
    """Everything that a rank worker needs to start, or to go on after a restart."""

    slot: Slot
    seed: int
    workload: str | None = None
    """``MODULE:FACTORY``; None trains the byte GPT, which the next fields are for."""
    workload_options: dict[str, str] = Field(default_factory=dict)
    hf_model: Path | None = None
    """Directory of a causal LM to train in its place."""
    num_layers: int
    num_heads: int
    width: int
    context: int
    data: tuple[Path, ...]
    data_shards: int
    batch_size: int
    lr: float
    warmup_steps: int
    weight_decay: float
    clip_norm: float
    lr_schedule: ScheduleName = "constant"
    decay_steps: int | None = None
    min_lr: float = 0.0
    accumulation_steps: int = 1
    """Batches per inner step."""
    precision: Literal["fp32", "bf16"] = "fp32"
    activation_checkpointing: bool = False
    device: str = "cpu"
    """``auto``, ``cpu``, ``cuda`` or ``cuda:N``, of the first rank; the others' follow."""
    mps_thread_percentage: int | None = None
    """Share of the GPU's threads under MPS, in percent; None leaves it to the environment."""
    cores: tuple[int, ...]
    threads: int
    idle_priority: bool
    sync_priority: SyncPriority
    codec: CodecName = "fp32"
    num_fragments: int | None = None
    """Parts of the model that sync in turn; None leaves it to the run, and a new one has one."""
    gate: Path | None = None
    gate_patience_s: float = 60.0
    gate_trickle_s: float = 10.0
    rank: int = 0
    """Which of the island's ranks this is; the first speaks for all."""
    num_ranks: int = 1
    group: GroupPlace | None = None
    """Where several ranks meet."""
    shard_optimizer: bool = False
    synchronizer_url: str
    timeout_s: float
    """Deadline of one request to the synchronizer."""
    token: SecretStr | None = None
    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    log_level: str = "info"
    tensorboard: Path | None = None
    vault: VaultPlace | None = None
    """Where snapshots go, and may come from; None: there are none."""
    failure_timeout_s: float = 10.0
    """The worker says so often that it lives that a silence of this length means the opposite."""
    start_step: Count = 0
    """Inner steps that the slot took before: the data goes on from there."""
    start_tokens: Count = 0
    start_skipped: Count = 0

    @field_serializer("token", when_used="json")
    def _reveal(self, token: SecretStr | None) -> str | None:
        # The pipe to the own child is the one place where the secret itself has to travel.
        return token.get_secret_value() if token is not None else None


class SyncCommand(Wire):
    command: Literal["sync"] = "sync"
    serial: Count = 0
    """Which of the agent's syncs this is; the word of its end has the same. 0: the agent did not begin it."""
    round: Count | None = None
    """Round of the run that the contribution must be for; None takes whatever is next."""
    quorum: int | None = Field(default=None, ge=1)
    """How many contributions the round must have; None leaves it to the synchronizer."""
    expected: int | None = Field(default=None, ge=1)
    """How many islands were told to come."""
    epoch: int
    not_before_s: float | None = None
    deadline_s: float
    """Unix time at which the rank gives up waiting and trains on."""
    close_by_s: float | None = None
    """Unix time by which the round closes with those who came, so that they see its end before they give up."""
    pull_grace_s: float = PULL_GRACE_S
    """A round that closed just before the deadline is worth reading so long after it: without that the island would be
    behind all others."""
    at_step: Count | None = None
    """Inner step at whose boundary it begins, if it is known before; None: the next. A command without it takes the
    place of the one before; those with it follow one another."""
    overlap_steps: Count | None = None
    """Inner steps from the capture to the adoption, of a sync with overlap: the worker waits for the result then. None
    adopts it when it has come."""
    overlap: bool = False
    """Take inner steps while the round is open, instead of waiting for its end."""
    autonomous: bool = False


class PauseCommand(Wire):
    command: Literal["pause"] = "pause"
    snapshot: bool = False
    """Put the state at this step boundary into the vault, whatever the interval."""


class ResumeCommand(Wire):
    command: Literal["resume"] = "resume"


class StopCommand(Wire):
    command: Literal["stop"] = "stop"


class VaultCommand(Wire):
    """The answer to `VaultNeedEvent`."""

    command: Literal["vault"] = "vault"
    path: Path | None
    """None: there is no room for it."""


Command = Annotated[
    SyncCommand | PauseCommand | ResumeCommand | StopCommand | VaultCommand, Field(discriminator="command")
]


class ReadyEvent(Wire):
    """The model is built and trains from global parameters."""

    event: Literal["ready"] = "ready"
    num_parameters: int
    version: int
    """The next round of the run."""
    num_fragments: int = 1
    resumes_sync: bool = False
    """A sync that an earlier worker began goes on: it need not be ordered again."""


class ProgressEvent(Wire):
    event: Literal["progress"] = "progress"
    progress: Progress
    step_times_s: tuple[float, ...] = ()
    """Wall times of the inner steps since the last such event."""


class SyncedEvent(Wire):
    event: Literal["synced"] = "synced"
    report: SyncReport
    serial: Count = 0
    """Of the command."""


class SkippedEvent(Wire):
    """A sync that there is nothing to report of: the island had gone beyond its round already."""

    event: Literal["skipped"] = "skipped"
    serial: Count = 0
    """Of the command."""


class FailedEvent(Wire):
    """The worker cannot go on and exits."""

    event: Literal["failed"] = "failed"
    message: str
    exit_code: int


class RegionSize(Wire):
    num_bytes: Count
    count: Count


class VaultNeedEvent(Wire):
    """The optimizer has its state: so much room must a vault have."""

    event: Literal["vault_need"] = "vault_need"
    regions: tuple[RegionSize, ...]
    record_bytes: Count


class ProtectionEvent(Wire):
    """How much a death would cost now; said when it changes."""

    event: Literal["protection"] = "protection"
    steps_at_risk: Count | None
    """Inner steps between two snapshots; None: all since the last sync."""
    overhead: float | None = None
    """Share of the time that snapshots take."""
    reason: str = ""
    """Why there are none."""


class RestoredEvent(Wire):
    """Where the worker goes on."""

    event: Literal["restored"] = "restored"
    rung: Rung
    generation: Count | None = None
    step: Count
    refused: tuple[str, ...] = ()
    """Why not from a higher rung."""
    lost: str = ""
    """What is lost for good; empty: nothing."""
    begun_s: float
    fetched_s: float
    loaded_s: float
    """Unix times."""


class ParkedEvent(Wire):
    """A worker without a slot has its model built, and holds global parameters of these versions; none: of no run."""

    event: Literal["parked"] = "parked"
    versions: tuple[Count, ...] = ()


class AliveEvent(Wire):
    """Said several times per `WorkerConfig.failure_timeout_s`, by a thread of its own."""

    event: Literal["alive"] = "alive"
    step: Count
    still_s: float
    """Time since the inner loop last got anywhere."""
    waits: bool
    """It waits for a gate, a sync, an order or another rank, and has no reason to get anywhere."""
    step_time_s: float | None = None
    """Median of the recent steps."""


class StandbyEvent(Wire):
    """A worker without a configuration has all imports done."""

    event: Literal["standby"] = "standby"


Event = Annotated[
    ReadyEvent
    | ProgressEvent
    | SyncedEvent
    | SkippedEvent
    | FailedEvent
    | VaultNeedEvent
    | ProtectionEvent
    | RestoredEvent
    | AliveEvent
    | ParkedEvent
    | StandbyEvent,
    Field(discriminator="event"),
]

COMMANDS: TypeAdapter[Command] = TypeAdapter(Command)
EVENTS: TypeAdapter[Event] = TypeAdapter(Event)
