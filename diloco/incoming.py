"""Global parameters on their way to an island: as they are, or as the encoded way from those that it has."""

from __future__ import annotations

from dataclasses import dataclass

import httpx
import torch
from torch import Tensor

from diloco.applied import parse_applied
from diloco.delta import apply_chain
from diloco.digest import parse_content_range, parse_digest, sha256, verify_digest
from diloco.errors import StateMismatchError
from diloco.fragment import wire_bytes
from diloco.schema import APPLIED_HEADER, RESULT_HEADER, RUN_HEADER, Applied, CodecName
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

    def take(self, data: bytes, headers: httpx.Headers, *, start: int) -> None:
        """Take the chunk that begins at ``start``."""
        part = parse_content_range(headers.get("Content-Range"), length=len(data))
        if (part.start, part.total) != (start, len(self.buffer)) or not data:
            raise InputError(
                f"global parameters have {part.total} bytes, this model's have {len(self.buffer)}",
                field="manifest",
                remedy="run every island with the same model",
            )
        verify_digest(data, headers.get("Content-Digest"))
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
            verify_digest(self.buffer, self._digest, field="Repr-Digest")
            return
        if held is None:
            raise InputError("answers with deltas that nobody asked for", field="synchronizer")
        apply_chain(torch.frombuffer(self.buffer, dtype=torch.uint8), self.codecs, out.copy_(held.parameters))
        if sha256(wire_bytes(out)) != parse_digest(self._digest, field=RESULT_HEADER):
            raise StateMismatchError(
                f"deltas from version {held.version} do not lead to the parameters that the synchronizer has",
                field=RESULT_HEADER,
            )
