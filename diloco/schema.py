"""Wire contract of training: what an island reports, and what it exchanges with the synchronizer.

Parameters travel as raw little-endian fp32 bytes in the order of the `Manifest`, cut into chunks. A contribution is
encoded (``codec=``, see `CodecName` and `diloco.codec`): as fp32 it carries the island's local parameters l, not the
pseudo-gradient g - l, for fp32 cannot hold g - l exactly, and the synchronizer has g anyway. With every other codec it
carries g - l. Sizes, ranges and digests are those of the encoded bytes.
Each chunk carries ``Content-Range``, the whole carries ``Repr-Digest`` (RFC 9530, sha-256), which every chunk repeats.
Chunks carry a ``Content-Digest`` of their own but where the other side says ``Want-Content-Digest: sha-256=0``: the
synchronizer in its answers to an upload, of all chunks but the first; an island when it pulls whole parameters.
Uploads continue at ``received_bytes`` of the last answer, which may lie before or behind the chunk just sent.

| ``PUT /v1/fragments/0`` | initial offer of the parameters of all fragments, see `InitReply` |
| ``PUT /v1/rounds/{round}/fragments/{f}/contributions/{slot}?epoch=&tokens=&codec=`` | see `ChunkReply` |
| ``HEAD /v1/fragments/{f}?after_version=&wait_s=`` | long poll: 200 and `VERSION_HEADER`, or 204 |
| ``GET /v1/fragments/{f}?version=&base_version=&slot=`` with ``Range`` | bytes of the global parameters |
| ``GET /v1/state?slot=&round=&fragment=`` | `OuterState`; with slot and round from an island that comes to contribute |

A run has an identity, made with it and kept with each of its generations. `RUN_HEADER` of a download and the state of
a fragment say it; a contribution may say which run it is for (``run=``), and is refused by another one. What a slot
contributed last of all that is in a generation, `Applied`, is kept with it for ever: one record per slot. A download
with ``slot=`` says that slot's in `APPLIED_HEADER`. So an island knows, and not from the version alone, whether its
contribution was applied; and one that is sent again is known again, however long ago it was applied.

A round here is a fragment's own: the version of the fragment when it opens. Everywhere else rounds are numbered through
the run, of which each syncs one of F fragments in turn: round R of the run is round R div F of the fragment R mod F
(see `diloco.turns`). With one fragment, which is the whole model, both are the same.

An island that holds version ``base_version`` of the global parameters says so when it pulls. The answer may then be
the encoded way from there: if it has `CODECS_HEADER`, its bytes are that many deltas, one per version, each encoded as
named there, and `RESULT_HEADER` is the sha-256 of the parameters at their end (see `diloco.delta`). Without the header
it is the parameters themselves, as fp32, and has ``Repr-Digest``.

A contribution may also say what its round was directed to: ``quorum=`` contributions that it must have, ``expected=``
islands that were told to come, ``closes_in_s=`` that it has left. Lower ones than the synchronizer's settings count.

Security: whoever may speak to the synchronizer is trusted with the run, which is what its token is for. A contribution
may state the quorum that its round was directed to, so one with ``quorum=1`` closes the round early, for any of the
`MAX_SLOTS` slots; a complete contribution moves the parameters by up to its weight, and fences lower epochs of its
slot for good. What is refused is what no healthy island sends: see the bounds here and on the fields.

Beside a server a trainer also says what it does at this moment, in a file of its own in the gate's folder: see
`diloco.trainer_schema`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from service.wire import Wire

CHUNK_BYTES = 4 << 20
MAX_DETAIL = 2000
"""Bytes per chunk: long enough to fill a link, short enough to resume cheaply and to keep memory flat."""

VERSION_HEADER = "X-Wadiloco-Version"
"""Version of a fragment's global parameters: the number of outer steps taken on it."""

CODECS_HEADER = "X-Wadiloco-Codecs"
"""Codecs of the deltas in an answer, in the order in which they apply; absent where it is the parameters themselves."""
RUN_HEADER = "X-Wadiloco-Run"
"""Identity of the run that the global parameters belong to."""
APPLIED_HEADER = "X-Wadiloco-Applied"
"""The slot's `Applied` in them, as ``round,into,digest``; empty where there is none, absent where no slot asked."""
RESULT_HEADER = "X-Wadiloco-Result-Digest"
"""sha-256 of the parameters after the deltas of an answer, in the form of ``Repr-Digest``."""

MAX_FRAGMENTS = 1024
MAX_SLOTS = 4096
MAX_STALENESS = 64
"""Versions that a contribution may be behind: the synchronizer keeps the parameters of all of them on disk."""
STALENESS_BUCKETS = (0, 1, 2, 4, 8, 16, 32, MAX_STALENESS)
"""Of histograms."""

MAX_POLL_S = 20.0
MIN_REQUEST_S = 1.0
"""A busy host may take so long for an answer without being away."""
DEFAULT_SYNC_TIMEOUT_S = 60.0

Slot = Annotated[int, Field(ge=0, lt=MAX_SLOTS)]
Count = Annotated[int, Field(ge=0, lt=1 << 62)]
CodecName = Literal["fp32", "bf16", "int8", "int4"]
"""How a contribution is encoded."""


class SyncTimes(Wire):
    """The deadlines of one outer round. All follow from one setting, so that no two of them can contradict each other.

    With T = ``sync_timeout_s`` and 0 the moment at which a round is directed:

    | T/2   | `join_s`: islands that choose their own moment are told to come now |
    | 4/5 T | `close_s`: the synchronizer closes the round with those who came |
    | T     | islands give up on it and train on |
    | T/6   | `pull_grace_s`: longest download after that of a round that closed just before |
    | T/3   | `poll_s`, at most `MAX_POLL_S`: longest wait of one question for directives |
    | T/6   | `request_s`, at least `MIN_REQUEST_S`: longest wait for one answer |

    so that what an island pushed until T/2 has 3/10 T to arrive, and T/5 to come back before anybody gives up.
    """

    sync_timeout_s: float = Field(gt=0)

    @property
    def join_s(self) -> float:
        return self.sync_timeout_s / 2

    @property
    def close_s(self) -> float:
        return self.sync_timeout_s * 4 / 5

    @property
    def pull_grace_s(self) -> float:
        return self.sync_timeout_s / 6

    @property
    def poll_s(self) -> float:
        return min(self.sync_timeout_s / 3, MAX_POLL_S)

    @property
    def request_s(self) -> float:
        return max(self.sync_timeout_s / 6, MIN_REQUEST_S)


class Phase(StrEnum):
    """What the rank of an island is doing."""

    STARTING = "starting"
    INNER = "inner"
    SYNC = "sync"
    PAUSED = "paused"
    STOPPED = "stopped"


class Progress(Wire):
    """How far an island is. Sent by its agent with every heartbeat."""

    step: Count
    """Inner steps since the run began."""
    inner_steps_since_sync: Count
    """Since the last sync, whichever fragment it moved."""
    tokens: Count
    tokens_since_sync: Count
    loss: float | None = None
    """Smoothed training loss, in its own unit: nats per token for the built-in workload; None before the first step."""
    loss_at_sync: float | None = None
    """Smoothed loss when the last outer step was applied."""
    update_norm: float | None = Field(default=None, ge=0)
    """L2 norm of the pseudo-gradient so far (global minus local)."""
    residual_norm: float | None = Field(default=None, ge=0)
    """L2 norm of what the codec left out of contributions and owes to the next; None where it leaves nothing out."""
    step_time_s: float | None = Field(default=None, ge=0)
    """Median wall time of the recent inner steps."""
    round: Count = 0
    """Outer steps applied so far, on all fragments together: the round that is next."""
    phase: Phase = Phase.STARTING
    last_sync_at_s: float | None = Field(default=None, ge=0)
    """Unix time when the last outer step was applied; None before the first."""
    skipped_steps: Count = 0
    """Steps whose loss or gradients were not finite: not applied, only counted."""
    restarts: Count = 0
    """Times that the agent had to restart the rank worker."""
    yielded_s: float | None = Field(default=None, ge=0)
    """Time that the worker waited at safepoints; None without a gate."""
    yield_reason: str | None = Field(default=None, max_length=200)
    """Why it waits now; None while it does not."""
    abandoned_steps: Count = 0
    """Steps given up for an order that came while the worker waited; their batches were taken again."""


class SyncOutcome(StrEnum):
    APPLIED = "applied"
    """The contribution was in the round and the new global parameters were adopted."""
    LATE = "late"
    """The round had closed: new global parameters adopted, local progress kept for the next round."""
    STALE = "stale"
    """The round had closed, and the contribution was taken into the next one with less weight: current global
    parameters adopted, without waiting for that round's end."""
    FAILED = "failed"
    """No synchronizer within the deadline, or a refusal: training went on from the local parameters."""


class SyncReport(Wire):
    """One outer sync as an island saw it. Reported once per (slot, round); repeats are ignored."""

    round: Count
    """Round of the run that the contribution was for: 0 for the first outer step. With one fragment, the version of the
    global parameters that it was computed against."""
    outcome: SyncOutcome
    started_s: float = Field(ge=0)
    """Unix time when the rank left the inner loop."""
    pushed_s: float | None = Field(default=None, ge=0)
    """Unix time when the whole contribution was accepted."""
    finished_s: float = Field(ge=0)
    """Unix time when inner steps went on."""
    bytes_pushed: Count
    bytes_pulled: Count
    inner_steps: Count
    """Inner steps that the contribution stands for."""
    tokens: Count
    update_norm: float | None = Field(default=None, ge=0)
    autonomous: bool = False
    """True when the island started it by itself at ``max_h``, without a directive."""
    staleness: int = Field(default=0, ge=0, le=MAX_STALENESS)
    """Versions that the contribution was behind when it was taken in."""
    staleness_weight: float | None = Field(default=None, ge=0, le=1)
    """What it weighs against a fresh one of as many tokens; None when it was not taken in."""
    blocked_s: float | None = Field(default=None, ge=0)
    """Time that the sync kept the rank from inner steps, where they went on while the round was open; None: all."""
    state_mismatches: Count = 0
    """Times that global parameters made from a delta were not those of the synchronizer, and were pulled whole."""
    detail: str = Field(default="", max_length=MAX_DETAIL)

    @property
    def kept_from_steps_s(self) -> float:
        """Time that the sync kept the rank from inner steps."""
        return max(0.0, self.finished_s - self.started_s if self.blocked_s is None else self.blocked_s)


class TensorSpec(Wire):
    """One parameter of the model."""

    name: str
    shape: tuple[int, ...]
    dtype: str


class Manifest(Wire):
    """The parameters of the model in wire order. Islands whose manifests differ cannot be in one run."""

    tensors: tuple[TensorSpec, ...] = Field(min_length=1)


class Applied(Wire):
    """A contribution that is in the global parameters."""

    round: Count
    """Version that it was against."""
    into: Count
    """Round that took it: the version after that is the first which it is in."""
    digest: str = Field(pattern="^[0-9a-f]{64}$")
    """sha-256 of its encoded bytes."""


class InitReply(Wire):
    """Answer to the offer of initial parameters (``PUT /v1/fragments/0``) or to one chunk of it.

    The offer is a safetensors file whose metadata holds the `Manifest` of the whole model and, if they are more than
    one, the number of fragments; the first one to be complete wins. The run then begins with all fragments at once.
    """

    accepted: bool
    """True when these parameters start the run. False when others do: pull those instead."""
    version: Count
    received_bytes: Count = 0
    complete: bool = True
    """False while chunks of the offer are missing."""
    run: str | None = None
    """Identity of the run, once there is one; None of an older version."""


class ChunkReply(Wire):
    """Answer to one chunk of a contribution."""

    received_bytes: Count
    complete: bool
    """True once the whole contribution is verified and on disk."""
    version: Count
    """Current version of the fragment."""
    round: Count | None = None
    """Round that the complete contribution is in, or was in; None while it is in none."""
    staleness: int = Field(default=0, ge=0, le=MAX_STALENESS)
    """How many versions after its own that round is."""
    staleness_weight: float | None = Field(default=None, ge=0, le=1)
    digest: str | None = None
    """sha-256 of the complete contribution, hex, as `Applied` names it; None of an older version."""


class ContributionState(Wire):
    """A complete contribution to the open round."""

    slot: Slot
    round: Count
    """Version that it is against."""
    tokens: Count
    staleness: int
    staleness_weight: float
    """What it weighs against a fresh one of as many tokens."""
    codec: CodecName = "fp32"


class RoundState(Wire):
    """The open round of a fragment."""

    round: Count
    opened_s: float | None
    """Unix time of the first contribution against this version; None while there is none."""
    slots: tuple[Slot, ...]
    """Slots whose contribution is complete."""
    quorum: int
    closes_at_s: float | None
    """Unix time when the round closes with those who came; None while nobody came."""
    expected: int | None = None
    """To how many islands it was directed; None when nobody said."""
    grace_until_s: float | None = None
    """Unix time until which it waits for stragglers; None while the quorum is not in."""
    contributions: tuple[ContributionState, ...] = ()
    """Those of ``slots``, with what they weigh."""


class FragmentState(Wire):
    fragment: int
    num_tensors: Count | None = None
    """How many parameters of the manifest it has, which follow those of the fragment before; None of an older version,
    which has one fragment."""
    version: Count
    num_bytes: Count
    digest: str
    """sha-256 of the global parameters as published, hex: equal on all islands after they adopted this version."""
    open_round: RoundState
    run: str | None = None
    """Identity of the run; None of an older version."""
    applied: Applied | None = None
    """What the slot that asked contributed last of all that is in this version; None also where nobody asked."""


class OuterState(Wire):
    """``GET /v1/state``."""

    initialized: bool
    quorum: int
    outer_lr: float
    outer_momentum: float
    outer_delay: int = 1
    """Outer steps for one of the momentum."""
    max_staleness: int = 0
    """Versions that a contribution may be behind."""
    pull_codec: CodecName = "fp32"
    """How new global parameters travel to islands that have the ones before."""
    round_timeout_s: float | None = None
    """Time after which a round closes with those who came, by the synchronizer's own settings."""
    manifest: Manifest | None
    """Of the whole model."""
    fragments: tuple[FragmentState, ...]
    """In order; none before the run has begun."""


class Rung(StrEnum):
    """What the next worker of a slot goes on from; the first that can be used."""

    VAULT = "vault"
    """The own vault: the same weights."""
    REPLICA = "replica"
    """A copy in another agent's vault."""
    GLOBAL = "global"
    """The global parameters, with a fresh inner optimizer."""
    DISK = "disk"
    """A generation on disk."""
    FRESH = "fresh"
    """There was nothing to go on from."""


class Restart(Wire):
    """How one worker, or all ranks of an island, came back. Unix times; None of what has not been, or is unknown."""

    cause: str = Field(default="", max_length=MAX_DETAIL)
    """Exit code, signal, or what the watchdog found."""
    rank: int = 0
    """The one that failed first."""
    last_sign_s: float | None = None
    """Its last sign of life."""
    detected_s: float
    fenced_s: float | None = None
    """The run let the next worker have the slot; None where the slot changed no hands."""
    fetched_s: float | None = None
    """The snapshot was found and whole."""
    loaded_s: float | None = None
    """Parameters, optimizer and the rest were in place."""
    first_step_s: float | None = None
    """The first inner step had ended."""
    rung: Rung | None = None
    generation: Count | None = None
    from_step: Count = 0
    """Inner step at which it goes on."""
    steps_repeated: Count = 0
    """Inner steps computed again, to the same result."""
    steps_lost: Count = 0
    """Inner steps whose progress is gone."""
    lost: str = Field(default="", max_length=MAX_DETAIL)
    """What is lost for good, in words; empty: nothing."""
    refused: tuple[str, ...] = Field(default=(), max_length=32)
    """Why not from a higher rung."""


class Protection(Wire):
    """What a death would cost now."""

    path: str = ""
    num_bytes: Count = 0
    """Of the vaults of all ranks."""
    steps_at_risk: Count | None = None
    """Inner steps between two snapshots: so many are computed again at most. None: all since the last sync are lost."""
    overhead: float | None = None
    """Share of the time that snapshots take."""
    generation: Count | None = None
    step: Count | None = None
    """Of the newest snapshot."""
    reason: str = ""
    """Why protection is degraded; empty while it is not."""


class AgentStatus(Wire):
    """``GET /v1/status`` of an island agent."""

    agent_id: str
    instance: str
    node: str
    slot: int | None
    """None while the agent is a spare."""
    epoch: int | None
    """None before the first registration."""
    run_id: str | None
    controller_reachable: bool | None
    """None when the agent was started without a controller."""
    synchronizer_url: str | None
    worker_pid: int | None
    """Of the first rank."""
    worker_pids: tuple[int, ...] = ()
    """Of all ranks, in their order."""
    worker_ready: bool
    """The worker has joined the run: it holds global parameters."""
    num_parameters: int | None
    num_fragments: int | None = None
    """Parts of the parameters that sync in turn; None before the worker has joined the run."""
    codec: CodecName = "fp32"
    """How its contributions are encoded."""
    restarts: Count
    protection: Protection | None = None
    """None without a vault."""
    last_restart: Restart | None = None
    """None while no worker has died."""
    standby_pids: tuple[int, ...] = ()
    """Workers that wait for a death."""
    unacknowledged_syncs: Count
    """Sync reports that the controller has not confirmed yet."""
