"""A generation: the global parameters and outer momentum after so many outer steps, as one immutable file.

The file is safetensors with the tensors ``parameters.<name>`` and ``momentum.<name>``, each group in wire order and
without gaps, so that the bytes that islands pull lie in one piece in the file. Where momentum is delayed
(`diloco.delayed_nesterov`), what it has yet to take follows as ``buffer.<name>``.

Where the parameters travel encoded (`diloco.delta`), ``parameters.<name>`` are the published ones, which all islands
hold and train from. The exact ones, to which the next outer step applies, follow as ``exact.<name>``, and then `DELTA`:
the encoded way from the parameters published before. Files without these have one kind of parameters.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from pydantic import ValidationError
from torch import Tensor

from diloco.codec import codec_named
from diloco.delayed_nesterov import Delay
from diloco.digest import sha256
from diloco.fragment import num_bytes, num_elements, wire_bytes
from diloco.schema import Applied, CodecName, Manifest
from diloco.stages import STAGES, Stage
from diloco.synchronizer.branch import rename_run
from diloco.synchronizer.grace import Arrivals
from diloco.synchronizer.storage import SPARE_SUFFIX, open_kept, read_part, retire, write_durably
from diloco.tensorfile import LENGTH, entries, header_bytes, layout, parse_header, sealed, unsealed
from service.errors import InputError
from service.files import open_regular

logger = logging.getLogger(__name__)

PREFIX = "generation-"
SUFFIX = ".safetensors"
CORRUPT_SUFFIX = ".corrupt"
SPARE = f"pruned{SPARE_SUFFIX}"
"""The last one that was pruned: the next one takes its place on disk."""
NUM_KEPT = 2
"""The newest, and the one before it: for pulls that have begun, and in case the newest turns out to be damaged."""
MAX_HEADER_BYTES = 64 << 20
DELTA = "delta"
RUN_DIGITS = 32
"""Of the identity of a run, in hex: two runs never have the same one."""


def new_run() -> str:
    """The identity of a run that begins."""
    return secrets.token_hex(RUN_DIGITS // 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a generation remembers of the round that made it, and of the slots."""

    run: str = ""
    """Identity of the run."""
    applied: Mapping[int, str] = field(default_factory=dict)
    """Digest (hex) of each slot's contribution: a repeat of one is not late, it is in."""
    last: Mapping[int, Applied] = field(default_factory=dict)
    """Of each slot that ever contributed, the last contribution that is in the parameters."""
    epochs: Mapping[int, int] = field(default_factory=dict)
    """Newest epoch that contributed of each slot."""
    arrivals: tuple[Arrivals, ...] = ()
    """When the contributions of the last rounds came."""
    outer_lr: float
    outer_momentum: float
    delay: Delay | None = None
    """Where the delay of the momentum stands; None where it is taken at every step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """Published parameters that the exact ones are not, and how islands get there from those published before."""

    exact: Tensor  # (parameters,) fp32
    codec: CodecName
    payload: Tensor  # (bytes,) uint8


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """Where a generation's file holds the encoded way from the version before."""

    codec: CodecName
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """Where the parameters of one version lie on disk."""

    version: int
    manifest: Manifest
    path: Path
    data_offset: int
    digest: bytes
    """sha-256 of the parameters."""
    outcome: Outcome
    delta: Delta | None = None
    """None where the parameters are the exact ones, and travel whole."""

    @property
    def run(self) -> str:
        """Identity of the run."""
        return self.outcome.run

    @property
    def num_values(self) -> int:
        return num_elements(self.manifest.tensors)

    @property
    def num_bytes(self) -> int:
        return num_bytes(self.manifest)

    def read(self, start: int, stop: int) -> bytes:
        """Bytes of the parameters in wire order."""
        return read_part(self.path, offset=self.data_offset + start, length=stop - start)

    def read_delta(self, start: int, stop: int) -> bytes:
        """Bytes of the encoded way from the version before."""
        assert self.delta is not None, "asked for by those who know that there is one"
        return read_part(self.path, offset=self.delta.offset + start, length=stop - start)

    def open(self) -> BinaryIO:
        """The file, at the first byte of the parameters."""
        return self._open_at(self.data_offset)

    def open_delta(self) -> BinaryIO:
        """The file, at the first byte of the encoded way from the version before."""
        assert self.delta is not None, "asked for by those who know that there is one"
        return self._open_at(self.delta.offset)

    def _open_at(self, offset: int) -> BinaryIO:
        file = os.fdopen(open_kept(self.path), "rb")
        file.seek(offset)
        return file

    def parameters(self) -> Tensor:
        """The parameters in wire order, mapped from the file; writing to them changes nobody else's."""
        return self._mapped(self.data_offset)

    def buffer(self) -> Tensor | None:
        """What a delayed momentum has yet to take, likewise; None where it is not delayed."""
        return None if self.outcome.delay is None else self._mapped(self.data_offset + 2 * self.num_bytes)

    def _mapped(self, offset: int) -> Tensor:
        shape = (self.num_values,)
        return torch.from_numpy(np.memmap(self.path, dtype="<f4", mode="c", offset=offset, shape=shape))


def path_of(directory: Path, version: int) -> Path:
    return directory / f"{PREFIX}{version:012d}{SUFFIX}"


def write_generation(
    directory: Path,
    version: int,
    manifest: Manifest,
    parameters: Tensor,
    momentum: Tensor,
    *,
    outcome: Outcome,
    encoded: Encoded | None = None,
    buffer: Tensor | None = None,
) -> Generation:
    """Put a generation on disk; it is complete there when this returns. With a delay in its outcome it has a buffer."""
    pieces = {"parameters": wire_bytes(parameters), "momentum": wire_bytes(momentum)}
    if outcome.delay is not None:
        assert buffer is not None, "whoever delays momentum adds up what it has yet to take"
        pieces["buffer"] = wire_bytes(buffer)
    if encoded is not None:
        pieces |= {"exact": wire_bytes(encoded.exact), "delta": wire_bytes(encoded.payload)}
    with STAGES.of(Stage.SEAL):
        digests = {name: sha256(piece) for name, piece in pieces.items()}
    metadata = {
        "version": str(version),
        "manifest": manifest.model_dump_json(),
        **{f"{name}_sha256": digest.hex() for name, digest in digests.items()},
        "outer_lr": repr(outcome.outer_lr),
        "outer_momentum": repr(outcome.outer_momentum),
        "run": outcome.run,
        "applied": json.dumps(dict(outcome.applied)),
        "last": json.dumps({slot: [one.round, one.into, one.digest] for slot, one in outcome.last.items()}),
        "epochs": json.dumps(dict(outcome.epochs)),
        "arrivals": json.dumps([[known.round, _rounded(known.offsets_s)] for known in outcome.arrivals]),
    }
    if outcome.delay is not None:
        metadata["delay"] = json.dumps(asdict(outcome.delay))
    if encoded is not None:
        metadata["pull_codec"] = encoded.codec
    codec = encoded.codec if encoded is not None else None
    tensors = _layout(manifest, codec, is_delayed=outcome.delay is not None)
    header = header_bytes(tensors, sealed(metadata), encoded=_delta_layout(manifest, codec))
    path = path_of(directory, version)
    with STAGES.of(Stage.PERSIST):
        write_durably(path, (header, *pieces.values()), spare=directory / SPARE)
    return Generation(
        version=version,
        manifest=manifest,
        path=path,
        data_offset=len(header),
        digest=digests["parameters"],
        outcome=outcome,
        delta=_delta(len(header), manifest, codec, is_delayed=outcome.delay is not None),
    )


def read_generation(path: Path) -> tuple[Generation, Tensor, Tensor]:
    """A generation from disk with its exact parameters and its momentum.

    Raises:
        InputError: the file is damaged.
    """
    header_length = LENGTH.size + int.from_bytes(read_part(path, offset=0, length=LENGTH.size), "little")
    header = parse_header(read_part(path, offset=0, length=min(header_length, MAX_HEADER_BYTES)))
    metadata = unsealed(header.metadata)
    try:
        generation = _from_metadata(path, header.data_offset, metadata)
    except (KeyError, TypeError, ValueError, ValidationError) as exc:
        raise InputError(f"metadata is not that of a generation: {exc!r}", field=str(path)) from exc
    manifest, delta = generation.manifest, generation.delta
    codec = delta.codec if delta is not None else None
    is_delayed = generation.outcome.delay is not None
    tensors = _layout(manifest, codec, is_delayed=is_delayed)
    if header.tensors != entries(tensors, encoded=_delta_layout(manifest, codec)):
        raise InputError("tensors are not those of the manifest", field=str(path))
    parameters, momentum = torch.empty(generation.num_values), torch.empty(generation.num_values)
    with os.fdopen(open_regular(path), "rb") as file:
        file.seek(header.data_offset)
        intact = _read_into(file, parameters, metadata["parameters_sha256"])
        intact &= _read_into(file, momentum, metadata["momentum_sha256"])
        if is_delayed:
            intact &= _read_into(file, torch.empty(generation.num_values), metadata["buffer_sha256"])
        if delta is not None:
            # The exact ones take the place of the published ones, which are read from the file when they are needed.
            intact &= _read_into(file, parameters, metadata["exact_sha256"])
            intact &= _read_into(file, torch.empty(delta.num_bytes, dtype=torch.uint8), metadata["delta_sha256"])
    if not intact:
        raise InputError("data is truncated or does not match its digest", field=str(path))
    return generation, parameters, momentum


def _read_into(file: BinaryIO, flat: Tensor, digest: str) -> bool:
    """Read what comes next in the file; whether it is there, and what it was."""
    buffer = wire_bytes(flat)
    return file.readinto(buffer) == len(buffer) and sha256(buffer).hex() == digest  # type: ignore[attr-defined]


def newest_generation(directory: Path) -> tuple[Generation, Tensor, Tensor] | None:
    """The newest intact generation; None in a directory without any. Damaged newer ones are set aside, loudly, and the
    run goes on under another identity.

    Raises:
        InputError: there are generations, and all are damaged.
    """
    damaged: list[Path] = []
    for path in sorted(directory.glob(f"{PREFIX}*{SUFFIX}"), reverse=True):
        try:
            found = read_generation(path)
        except (InputError, OSError) as exc:
            logger.error("generation is damaged, going back to the one before path=%s reason=%s", path, exc)  # noqa: TRY400
            damaged.append(path)
        else:
            if damaged:
                # Before they are set aside: whatever happens, what goes on from here is known as another history.
                rename_run(path, new_run())
                found = read_generation(path)
            for bad in damaged:
                bad.replace(bad.with_name(bad.name + CORRUPT_SUFFIX))
            return found
    if damaged:
        raise InputError(
            f"all {len(damaged)} generations in {directory} are damaged",
            field="directory",
            remedy="restore one from a backup, or choose another --directory",
        )
    return None


def older_generations(directory: Path, newest: Generation, *, num_kept: int) -> list[Generation]:
    """The intact ones of the ``num_kept`` - 1 generations before the newest that are of the same model."""
    found = []
    for version in range(max(newest.version - num_kept + 1, 0), newest.version):
        try:
            generation = read_generation(path_of(directory, version))[0]
        except FileNotFoundError:
            continue
        except (InputError, OSError) as exc:
            logger.warning("older generation is damaged, not used version=%d reason=%s", version, exc)
        else:
            if generation.manifest == newest.manifest:
                found.append(generation)
    return found


def prune_generations(directory: Path, *, num_kept: int = NUM_KEPT) -> None:
    """Remove all but the newest ``num_kept``."""
    for path in sorted(directory.glob(f"{PREFIX}*{SUFFIX}"))[:-num_kept]:
        retire(path, directory / SPARE)


def _layout(manifest: Manifest, codec: CodecName | None, *, is_delayed: bool) -> list[tuple[str, tuple[int, ...]]]:
    more = (*(("buffer.",) if is_delayed else ()), *(("exact.",) if codec is not None else ()))
    prefixes = ("parameters.", "momentum.", *more)
    return [tensor for prefix in prefixes for tensor in layout(manifest.tensors, prefix=prefix)]


def _delta_layout(manifest: Manifest, codec: CodecName | None) -> list[tuple[str, tuple[int, ...]]]:
    if codec is None:
        return []
    return [(DELTA, (codec_named(codec).num_bytes(num_elements(manifest.tensors)),))]


def _delta(data_offset: int, manifest: Manifest, codec: CodecName | None, *, is_delayed: bool) -> Delta | None:
    """The place behind all that is fp32."""
    if codec is None:
        return None
    size = codec_named(codec).num_bytes(num_elements(manifest.tensors))
    return Delta(codec=codec, offset=data_offset + (4 if is_delayed else 3) * num_bytes(manifest), num_bytes=size)


def _rounded(offsets_s: Mapping[int, float]) -> dict[int, float]:
    return {slot: round(offset_s, 3) for slot, offset_s in offsets_s.items()}


def _read_arrivals(round_number: int, offsets_s: Mapping[str, float]) -> Arrivals:
    return Arrivals(
        round=int(round_number), offsets_s={int(slot): float(offset_s) for slot, offset_s in offsets_s.items()}
    )


def _read_last(metadata: Mapping[str, str], applied: Mapping[int, str], *, version: int) -> dict[int, Applied]:
    """As it was written; by an older version it was not, and then at least the last round is known."""
    if "last" not in metadata:
        return {slot: Applied(round=version - 1, into=version - 1, digest=digest) for slot, digest in applied.items()}
    last = json.loads(metadata["last"])
    return {int(slot): Applied(round=one[0], into=one[1], digest=one[2]) for slot, one in last.items()}


def _from_metadata(path: Path, data_offset: int, metadata: Mapping[str, str]) -> Generation:
    manifest = Manifest.model_validate_json(metadata["manifest"])
    codec = codec_named(metadata["pull_codec"]).name if "pull_codec" in metadata else None
    applied = {int(slot): str(digest) for slot, digest in json.loads(metadata["applied"]).items()}
    delay = Delay(**json.loads(metadata["delay"])) if "delay" in metadata else None
    return Generation(
        version=int(metadata["version"]),
        manifest=manifest,
        delta=_delta(data_offset, manifest, codec, is_delayed=delay is not None),
        path=path,
        data_offset=data_offset,
        digest=bytes.fromhex(metadata["parameters_sha256"]),
        outcome=Outcome(
            # A run from before they had identities has that of its newest parameters then.
            run=metadata.get("run", metadata["parameters_sha256"][:RUN_DIGITS]),
            applied=applied,
            last=_read_last(metadata, applied, version=int(metadata["version"])),
            epochs={int(slot): int(epoch) for slot, epoch in json.loads(metadata["epochs"]).items()},
            arrivals=tuple(_read_arrivals(*known) for known in json.loads(metadata.get("arrivals", "[]"))),
            outer_lr=float(metadata["outer_lr"]),
            outer_momentum=float(metadata["outer_momentum"]),
            delay=delay,
        ),
    )
