"""How a generation of one rank's state travels from agent to agent (see `diloco.vault.layout` for what it is).

| ``PUT /v1/replicas/{slot}/{rank}/{generation}?epoch=`` | `ReplicaOffer` → `ReplicaReply`: what is there already |
| ``PUT /v1/replicas/{slot}/{rank}/{generation}/{part}?epoch=`` | one chunk of a part → `ReplicaReply` |
| ``GET /v1/replicas/{slot}/{rank}/{generation}`` | `ReplicaOffer` of a complete one |
| ``GET /v1/replicas/{slot}/{rank}/{generation}/{part}`` with ``Range`` | bytes of a part |
| ``GET /v1/replicas`` | `diloco.recovery_schema.ReplicaList` |

``part`` is the number of a part in the offer. Chunks carry ``Content-Range`` and `CHUNK_DIGEST_HEADER`, and come in
their order: an answer says how many bytes of each part there are, from where the sender goes on. A part whose digest
the keeper's last generation has, too, is not sent. When all parts are there and match their digests, the generation is
committed, and takes the place of the one before the last.

``epoch`` is that of the sender's lease. A lower one than that of an earlier sender of the slot is refused (409): its
sender has lost the slot.
"""

from __future__ import annotations

from pydantic import Field

from diloco.schema import Count
from diloco.vault.layout import Generation
from service.wire import Wire

CHUNK_BYTES = 2 << 20
"""Long enough to cost little per byte, short enough not to hold up whoever shares the connection or the event loop."""
MAX_CHUNK_BYTES = 8 << 20
CHUNK_DIGEST_HEADER = "X-Wadiloco-Chunk-Digest"
"""xxh3-128 of the chunk, hex."""
MAX_PARTS = 1 << 13


class ReplicaOffer(Wire):
    """What a generation is made of; said before its bytes are sent."""

    layout: str = Field(max_length=4 << 20)
    """Of the vault that it is in (`Layout.encode`), base64: the keeper's has the same."""
    generation: Generation

    @property
    def num_parts(self) -> int:
        return len(self.generation.parts)


class ReplicaReply(Wire):
    """Answer to an offer or a chunk."""

    received_bytes: tuple[Count, ...]
    """Of each part of the offer."""
    complete: bool
    """Verified as a whole, and committed."""
