"""Errors of training that a caller handles one by one.

ConflictError
├── VersionError            carries the current version of the global parameters
│   ├── RoundClosedError    the contribution is against another version: adopt the current one
│   └── VersionGoneError    the version asked for is no longer kept: pull the current one
├── NotInitializedError     nobody has offered initial parameters yet
├── AnotherRunError         the contribution is for a run that is not this one: go over to this one
├── FencedError             somebody with a newer epoch holds the slot
├── ManifestError           another model
└── StateMismatchError      deltas led to other global parameters than the synchronizer's: pull those whole
"""

from __future__ import annotations

from typing import ClassVar

from service.errors import ConflictError


class VersionError(ConflictError):
    """The global parameters are at another version."""

    def __init__(self, message: str, *, version: int, field: str | None = None, remedy: str | None = None) -> None:
        super().__init__(message, field=field, remedy=remedy)
        self.version = version


class RoundClosedError(VersionError):
    """The contribution belongs to a round that is not open; ``version`` names the one that is."""


class VersionGoneError(VersionError):
    """The generation that was asked for is no longer (or not yet) kept."""


class NotInitializedError(ConflictError):
    """The synchronizer holds no parameters yet: offer the initial ones."""


class AnotherRunError(ConflictError):
    """The synchronizer holds another run than the one that was meant: its versions are of another history."""


class FencedError(ConflictError):
    """A newer epoch of the same slot has contributed: this process must stop."""


class StateMismatchError(ConflictError):
    """Global parameters that were made from deltas are not those that all islands hold."""


class ManifestError(ConflictError):
    """The model's parameters differ from those of the run."""

    REMEDY: ClassVar[str] = (
        "start with the --workload and --workload-options, or the --num-layers, --num-heads, --width and --context, "
        "of the other islands, or a synchronizer with a new --directory"
    )
