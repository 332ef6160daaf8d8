"""How new global parameters travel in fewer bytes than their own: as the encoded way from those before.

With g the exact global parameters, which the synchronizer alone holds, p the published ones, which all islands hold,
and C encoding and decoding (`diloco.codec`):

    p' = p + C(g' - p)

What the encoding leaves out, g' - p', is a part of the next difference g" - p': nothing is lost for good, it is late by
a round. That is the error feedback of `diloco.feedback`, with g - p as what is owed. Both ends do the same additions in
fp32, of values that decode exactly: their p' is the same to the last bit, which its sha-256 proves.

Islands train from p and know nothing of g. Their pseudo-gradients are p - l, and the outer step applies to g.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from diloco.codec import Codec, codec_named, new_vector
from diloco.schema import CodecName


def encode_delta(codec: Codec, exact: Tensor, published: Tensor) -> tuple[Tensor, Tensor]:
    """The encoded way from ``published`` towards ``exact`` (bytes,), and the parameters at its end (parameters,).

    Raises:
        InputError: the way holds NaN or infinity, or is beyond what codecs take.
    """
    moved = torch.sub(exact, published, out=new_vector(exact.numel()))
    payload = codec.encode(moved)
    return payload, codec.accumulate(payload, moved.copy_(published))


def chain_bytes(codecs: Sequence[CodecName], num_values: int) -> int:
    """Size of the deltas of so many values, one after another."""
    return sum(codec_named(name).num_bytes(num_values) for name in codecs)


def apply_chain(payload: Tensor, codecs: Sequence[CodecName], parameters: Tensor) -> None:
    """Move parameters, in place, along encoded deltas that follow one another.

    Raises:
        InputError: the payload has another size than these deltas.
    """
    start = 0
    for name in codecs:
        codec = codec_named(name)
        stop = start + codec.num_bytes(parameters.numel())
        # Scales have two bytes, and no view of them can begin at an odd place.
        link = payload[start:stop].clone() if start % 2 else payload[start:stop]
        codec.accumulate(link, parameters)
        start = stop


def parse_chain(value: str) -> tuple[CodecName, ...]:
    """The codecs of the deltas that an answer consists of; none of a whole generation's bytes.

    Raises:
        InputError: it names a codec that is not known.
    """
    return tuple(codec_named(name.strip()).name for name in value.split(",")) if value else ()
