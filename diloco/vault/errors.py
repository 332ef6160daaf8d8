"""What can be wrong with a vault, or with what it holds.

VaultError
├── CorruptError     torn, truncated or changed: its digest does not fit
├── ForeignError     of another run, slot, rank, model or optimizer, or of an epoch that is over
└── VaultFullError   no memory for it, or for what it would have to hold
"""

from __future__ import annotations

from service.errors import WadilocoError


class VaultError(WadilocoError):
    """A snapshot that cannot be taken, or cannot be used. Training goes on without it."""

    exit_code = 3
    http_status = 503


class CorruptError(VaultError):
    """Bytes that are not those that were written."""


class ForeignError(VaultError):
    """A whole snapshot, but of something else."""

    http_status = 409


class VaultFullError(VaultError):
    """Less memory than a snapshot needs."""
