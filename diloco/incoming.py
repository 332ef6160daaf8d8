"""Global parameters on their way to an island, as they are or as the encoded way from those that it has: the bytes as
they come, and whether they are what they have to be at the end.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import httpx
import torch
from torch import Tensor

from diloco.applied import parse_applied
from diloco.delta import apply_chain
from diloco.digest import Hash, parse_content_range, parse_digest, require_digest, sha256, verify_digest
from diloco.errors import StateMismatchError
from diloco.fragment import wire_bytes
from diloco.schema import APPLIED_HEADER, RESULT_HEADER, RUN_HEADER, Applied, CodecName
from diloco.stages import STAGES, Stage
from service.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Global parameters that an island has."""

    version: int
    parameters: Tensor  # (parameters,) fp32


@dataclass(slots=True, kw_only=True)
class Incoming:
    """A download: the parameters themselves, or deltas."""

    codecs: tuple[CodecName, ...]
    """Of the deltas; none where it is the parameters."""
    buffer: memoryview
    run: str | None = None
    """Identity of the run that it is of; None of an older synchronizer."""
    applied: tuple[Applied, ...] | None = None
    """What the slot that asked contributed last of all that is in it; None where nobody says."""
    _digest: str | None = None
    _hash: Hash = field(default_factory=hashlib.sha256)
    """Of the parameters so far."""

    def take(self, data: bytes, headers: httpx.Headers, *, start: int) -> None:
        """Take the chunk that begins at ``start``."""
        part = parse_content_range(headers.get("Content-Range"), length=len(data))
        if (part.start, part.total) != (start, len(self.buffer)) or not data:
            raise InputError(
                f"global parameters have {part.total} bytes, this model's have {len(self.buffer)}",
                field="manifest",
                remedy="run every island with the same model",
            )
        content_digest = headers.get("Content-Digest")
        with STAGES.of(Stage.DIGEST):
            # Deltas are checked chunk by chunk: what they lead to does not tell a bad copy from a bad base.
            if self.codecs or content_digest is not None:
                verify_digest(data, content_digest)
            if not self.codecs:
                self._hash.update(data)
        self.buffer[start : part.stop] = data
        self._digest = headers.get(RESULT_HEADER if self.codecs else "Repr-Digest")
        self.run = headers.get(RUN_HEADER)
        self.applied = parse_applied(headers.get(APPLIED_HEADER))

    def complete(self, out: Tensor, held: Held | None) -> None:
        """Check that ``out`` is what it has to be, after moving it there along the deltas.

        Raises:
            StateMismatchError: the deltas lead elsewhere.
        """
        if not self.codecs:
            require_digest(self._hash.digest(), self._digest, field="Repr-Digest")
            return
        if held is None:
            raise InputError("answers with deltas that nobody asked for", field="synchronizer")
        with STAGES.of(Stage.DECODE):
            apply_chain(torch.frombuffer(self.buffer, dtype=torch.uint8), self.codecs, out.copy_(held.parameters))
        with STAGES.of(Stage.DIGEST):
            digest = sha256(wire_bytes(out))
        if digest != parse_digest(self._digest, field=RESULT_HEADER):
            raise StateMismatchError(
                f"deltas from version {held.version} do not lead to the parameters that the synchronizer has",
                field=RESULT_HEADER,
            )
