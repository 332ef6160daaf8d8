"""What a training loop says of the island that it is: checked as a whole, with errors that name the argument."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol, Self, runtime_checkable

import torch
from pydantic import Field, ValidationError, model_validator
from torch import nn

from diloco.agent.config import IslandSettings, default_node
from diloco.fragment import trainable
from diloco.schema import DEFAULT_SYNC_TIMEOUT_S, MAX_FRAGMENTS, CodecName, Slot
from service.errors import ConfigError, InputError
from service.settings import PeerSettings, Url, Urls
from sidecar.schema import Name

MAX_SHARDS = 1 << 16
"""A loop cuts its data by itself: any slot is fine."""


@runtime_checkable
class Stateful(Protocol):
    """A data source that can tell its position, such as torchdata's ``StatefulDataLoader``."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


class IslandOptions(PeerSettings):
    """The keyword arguments of `diloco.Island`."""

    service: ClassVar[str] = "island"

    synchronizer: Url | None = None
    controller: Urls | None = None
    slot: Slot | None = None
    sync_every: int | None = Field(default=None, ge=1)
    overlap_steps: int = Field(default=0, ge=0)
    fragments: int | None = Field(default=None, ge=1, le=MAX_FRAGMENTS)
    codec: CodecName = "fp32"
    timeout_s: float = Field(default=DEFAULT_SYNC_TIMEOUT_S, gt=0, le=86_400)
    name: Name = Field(default_factory=default_node)

    @model_validator(mode="after")
    def _check_who_decides(self) -> Self:
        if self.controller is not None:
            if self.sync_every is not None or self.overlap_steps:
                raise ValueError("the controller says when to sync and how: leave out sync_every and overlap_steps")
            if self.fragments is not None:
                raise ValueError("fragments is the controller's to say: give it there (--num-fragments)")
            return self
        for argument, value, example in (
            ("synchronizer", self.synchronizer, "its URL, such as http://127.0.0.1:9600"),
            ("slot", self.slot, "this island's place in the run, 0 for the first"),
            ("sync_every", self.sync_every, "the inner steps between syncs, such as 100"),
        ):
            if value is None:
                raise ValueError(f"{argument} is missing: give {example}, or the URL of a controller")
        if self.sync_every is not None and self.overlap_steps >= self.sync_every:
            raise ValueError(
                f"overlap_steps {self.overlap_steps} is not below sync_every {self.sync_every}: a sync has to end"
                " before the next begins"
            )
        return self

    def agent_settings(self) -> IslandSettings:
        """The same for the part that speaks with the controller."""
        return IslandSettings(
            port=0,
            agent_id=self.name,
            controller=self.controller,
            synchronizer=self.synchronizer,
            slot=self.slot,
            data_shards=MAX_SHARDS,
            codec=self.codec,
            autonomous_deadline_s=self.timeout_s,
            token=self.token,
            tls_ca=self.tls_ca,
            tls_cert=self.tls_cert,
            tls_key=self.tls_key,
        )


def checked_options(**arguments: Any) -> IslandOptions:
    """The options, with defaults for arguments that are None.

    Raises:
        ConfigError: they cannot work; the field is the argument.
    """
    try:
        return IslandOptions(**{name: value for name, value in arguments.items() if value is not None})
    except ValidationError as exc:
        first = exc.errors()[0]
        message = str(first["msg"]).removeprefix("Value error, ")
        if not first["loc"]:
            what, _, remedy = message.partition(": ")
            field = min((name for name in arguments if name in what), key=what.index, default=None)
            raise ConfigError(what, field=field, remedy=remedy) from exc
        field = str(first["loc"][0])
        shown = "" if field == "token" else f", got {arguments.get(field)!r}"
        raise ConfigError(f"{message}{shown}", field=field, remedy=f"give another {field} to diloco.Island") from exc


def checked_module(module: nn.Module) -> nn.Module:
    """A module whose parameters can travel.

    Raises:
        InputError: one that is trained is not float32, or has no shape yet, or nothing is trained.
    """
    for name, parameter in trainable(module).items():
        if nn.parameter.is_lazy(parameter):
            raise InputError(
                f"parameter {name} has no shape yet", field="module", remedy="run a batch through it first"
            )
        if parameter.dtype != torch.float32:
            raise InputError(
                f"parameter {name} is {str(parameter.dtype).removeprefix('torch.')}, and only float32 is synced",
                field="module",
                remedy="keep it in float32 and compute the loss under torch.autocast, or freeze it",
            )
    if not any(parameter.numel() for parameter in trainable(module).values()):
        raise InputError("has no parameters to train", field="module", remedy="set requires_grad on some")
    return module


def checked_data(data: Stateful | None) -> Stateful | None:
    """Data whose position can be saved.

    Raises:
        InputError: it cannot.
    """
    if data is not None and not isinstance(data, Stateful):
        raise InputError(
            f"a {type(data).__name__} has no state_dict and load_state_dict",
            field="data",
            remedy="use torchdata's StatefulDataLoader, or leave data out and save its position yourself",
        )
    return data
