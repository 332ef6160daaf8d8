"""Error feedback: what an encoding leaves out of one contribution is added to the next (Seide et al., 2014; Karimireddy
et al., 2019, arXiv 1901.09847).

With d the pseudo-gradient, e what is owed, C encoding and decoding:

    c = d + e,    the round gets C(c),    once it has: e <- c - C(c)

so that the sum of what rounds got, and e, is the sum of all d. A contribution that is replaced, refused or late was
not in a round: e stays as it was, and the progress that it stood for comes again with the next d.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from diloco.codec import Codec


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """A pseudo-gradient on its way into a round."""

    payload: Tensor  # (bytes,) uint8
    left_out: Tensor  # (parameters,) fp32
    """What will be owed once the payload has been merged."""
    norm: float
    """L2 norm of that."""


class ErrorFeedback:
    """What the encodings of one island owe to the run. A worker begins with nothing, or with what its vault has."""

    def __init__(self, codec: Codec, num_values: int) -> None:
        self._codec = codec
        self.residual = torch.zeros(num_values)
        self.norm = 0.0
        """L2 norm of the residual."""
        self.source: object = object()
        """Names the values of the residual: the `Encoded` that left it, or whatever else it came from."""

    def encode(self, pseudo_gradient: Tensor, *, out: Tensor | None = None) -> Encoded:
        """Encode it with what is owed, into ``out`` if that is given. What is owed changes only with `settle`.

        The vector is used up: it becomes what is left out.

        Raises:
            InputError: a value is NaN, infinite or beyond what codecs take.
        """
        wanted = pseudo_gradient.add_(self.residual)
        payload = self._codec.encode(wanted, out=out)
        left_out = self._codec.accumulate(payload, wanted, alpha=-1.0)
        return Encoded(payload=payload, left_out=left_out, norm=float(torch.linalg.vector_norm(left_out)))

    def settle(self, encoded: Encoded) -> Tensor:
        """A round has got it: what it left out is what is owed now. Returns the memory of what was owed before."""
        before, self.residual = self.residual, encoded.left_out
        self.norm = encoded.norm
        self.source = encoded
        return before

    def forget(self) -> None:
        """Owe nothing: the progress that the residual was a part of is given up."""
        self.residual.zero_()
        self.norm = 0.0
        self.source = object()
