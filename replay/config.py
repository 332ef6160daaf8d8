"""Settings of ``wadiloco replay`` and ``wadiloco demo``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, SecretStr, model_validator

from controller.policy import BUILDERS
from controller.policy.plugins import installed
from controller.schema import PolicySpec
from service.errors import WadilocoError
from service.settings import CommaSeparated, Settings, is_loopback
from service.urls import check_url
from sidecar.slo import parse_slo

BUNDLED_TRACE = Path(__file__).parent / "data" / "bursty.jsonl"
POLICIES = tuple(BUILDERS)
DRAWING_POLICY = "random_deferral"
"""Its outcome depends on luck, so that it runs ``draws`` times per seed; the others run once."""


def is_policy(name: str) -> bool:
    """Whether the controller knows it: one of its own, or one that an installed package brings along."""
    return name in POLICIES or name in installed()


def policy_spec(name: str, params: Mapping[str, float], *, seed: int, draw: int) -> PolicySpec:
    """A policy with its share of the POLICY.PARAM overrides; one that draws, with its luck."""
    mine: dict[str, float | int] = {
        key.partition(".")[2]: value for key, value in params.items() if key.partition(".")[0] == name
    }
    luck = {"seed": seed, "draw": draw} if name == DRAWING_POLICY else {}
    return PolicySpec(name=name, params={**luck, **mine})


def check_policies(policies: Sequence[str], params: Mapping[str, float], *, beside: Sequence[str] = ()) -> None:
    """Raises `ValueError` for a policy that is neither known nor one of ``beside``, or for parameters of none."""
    unknown = [policy for policy in policies if policy not in beside and not is_policy(policy)]
    if unknown:
        raise ValueError(f"policies: {unknown[0]!r} is not one of {', '.join((*POLICIES, *beside))}")
    if not policies:
        raise ValueError("policies: name at least one")
    if len(set(policies)) < len(policies):
        raise ValueError("policies: one is named twice")
    for key in params:
        if not is_policy(key.partition(".")[0]) or "." not in key:
            raise ValueError(f"policy_params: {key!r} is not POLICY.PARAM with a policy of {', '.join(POLICIES)}")


def check_h(min_h: int, max_h: int) -> None:
    if min_h > max_h:
        raise ValueError(f"min_h {min_h} is above max_h {max_h}: lower one or raise the other")


def check_slo(value: Any) -> Any:
    try:
        parse_slo(str(value))
    except WadilocoError as exc:
        raise ValueError(f"{exc.message}: {exc.remedy}") from exc
    return value


class ReplaySettings(Settings):
    """Replay one slice of a trace against real vLLM servers, once per policy, and compare."""

    service: ClassVar[str] = "replay"

    trace: Path = BUNDLED_TRACE
    """Trace file: Azure CSV, Mooncake JSONL, BurstGPT CSV, or JSONL of arrival_s, input_tokens, output_tokens."""
    trace_format: str = Field(default="auto", pattern="^(auto|azure|mooncake|burstgpt|jsonl)$")
    """auto, azure, mooncake, burstgpt or jsonl."""
    rate_scale: float = Field(default=1.0, gt=0)
    """Divide the trace's time axis by this: 2 doubles the request rate and keeps the shape of bursts."""
    start_s: float = Field(default=0.0, ge=0)
    """Where the slice of seed 0 begins, in replay seconds; seed k begins k durations later."""
    duration_s: float = Field(default=60.0, gt=0)
    """Length of the slice, in replay seconds."""
    policies: CommaSeparated = ("no_sync", "random_deferral", "wa_diloco")
    """Policies to compare, comma-separated: no_sync, fixed_h, adaptive_tokens, pressure_gate, random_deferral,
    wa_diloco, wa_calibrated, wa_forecast."""
    policy_params: dict[str, float] = Field(default_factory=dict)
    """POLICY.PARAM=VALUE overrides, such as wa_diloco.threshold=0.1 (repeat the option for more)."""
    seeds: int = Field(default=1, ge=1)
    """Repetitions, each on its own slice of the trace and with its own prompts and training seed."""
    draws: int = Field(default=1, ge=1)
    """Draws of random_deferral per seed (5 or more before you claim a difference)."""
    slo: Annotated[str, BeforeValidator(check_slo)] = "e2e:300ms"
    """What a request must meet: ttft, itl, tpot, e2e, each with a threshold in ms or s, such as ttft:200ms,e2e:2s."""
    out: Path = Path("out/replay")
    """Directory for summary.json, report.md, timeline.png and the logs of every run."""

    server: tuple[str, ...] = ()
    """URL of a running vLLM server (repeat for more). Without one, CPU servers are started on this machine."""
    local_servers: int = Field(default=2, ge=1, le=64)
    """How many CPU servers to start when no --server is given; one core each."""
    model: str | None = None
    """Served model name; found by itself when a server serves only one."""
    api_key: SecretStr | None = None
    """API key of the servers."""
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    """Prompts of the trace are scaled down to this (default: half of the context; 128 on servers started here)."""
    max_output_tokens: int | None = Field(default=None, ge=1)
    """Answers of the trace are scaled down to this (default: a quarter of the context; 32 on servers started here)."""
    request_timeout_s: float = Field(default=30.0, gt=0)
    """A request that has not ended by then has failed."""

    no_train: bool = False
    """Replay the traffic alone: no islands, no controller (the reference for the cost of training itself)."""
    islands: int | None = Field(default=None, ge=1, le=64)
    """Training islands; default one per server. Island k trains beside server k (round robin)."""
    island_cores: tuple[int, ...] = ()
    """Core of each island; default the core of its server when that was started here, else no pinning."""
    outer_syncs: int = Field(default=6, ge=0)
    """Sync budget: outer syncs that a policy may spend during the slice (no_sync spends none)."""
    min_gap_s: float = Field(default=3.0, ge=0)
    """Least time between two outer syncs."""
    min_h: int = Field(default=8, ge=1)
    """Least inner steps between two outer syncs."""
    max_h: int = Field(default=512, ge=1)
    """Inner steps after which a sync is forced while the budget lasts."""
    train_options: dict[str, str] = Field(default_factory=dict)
    """Options of wadiloco island, such as batch_size=4 (repeat for more)."""
    scrape_interval_s: float = Field(default=0.5, ge=0.1)
    """How often each sidecar scrapes its server."""
    gate: Literal["off", "scrape", "engine", "ingress"] = "off"
    """What inner steps yield to: nothing (off), requests in flight (ingress), engine steps (engine), or what a scrape
    saw last (scrape). Servers given by --server must be of this machine, with plugin and middleware loaded."""
    busy_requests: int = Field(default=4, ge=1)
    """Requests in a server at which its sidecar calls it fully loaded."""

    vllm_venv: Path = Path(".venv-vllm")
    """Environment with a CPU build of vLLM (made by deploy/local/install_vllm.sh)."""
    vllm_model: Path = Path(".local/tiny-llama")
    """Model that the started servers serve."""
    ports: Annotated[str, Field(pattern=r"^\d{1,5}-\d{1,5}$")] = "18400-18499"
    """FIRST-LAST: ports for the processes that are started here."""

    @property
    def api_key_text(self) -> str | None:
        """The key itself, for the requests."""
        return self.api_key.get_secret_value() if self.api_key else None

    @property
    def port_range(self) -> range:
        first, last = (int(part) for part in self.ports.split("-"))
        return range(first, last + 1)

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_policies(self.policies, self.policy_params)
        check_h(self.min_h, self.max_h)
        if not 0 < self.port_range.start < self.port_range.stop <= 65536:
            raise ValueError(f"ports: {self.ports} is not a range FIRST-LAST within 1-65535")
        for url in self.server:
            try:
                check_url(url)
            except ValueError as exc:
                raise ValueError(f"server: {url!r} is {exc}") from exc
            if self.gate != "off" and not is_loopback(urlsplit(url).hostname or ""):
                raise ValueError(
                    f"gate {self.gate} reaches no further than this machine, and server {url} is not on it"
                )
        spends = not self.no_train and any(policy != "no_sync" for policy in self.policies)
        if spends and self.outer_syncs > 1 and (self.outer_syncs - 1) * self.min_gap_s >= self.duration_s:
            raise ValueError(
                f"outer_syncs {self.outer_syncs} with min_gap_s {self.min_gap_s:g} do not fit into duration_s "
                f"{self.duration_s:g}: lower one of the first two or raise the last"
            )
        return self


class DemoSettings(ReplaySettings):
    """The whole loop on this machine: two vLLM servers under bursty traffic, two islands training beside them."""

    service: ClassVar[str] = "demo"

    duration_s: float = Field(default=60.0, gt=0)
    """Length of the slice, in replay seconds."""
    out: Path = Path("out/demo")
    """Directory for summary.json, report.md, timeline.png and the logs of every run."""
