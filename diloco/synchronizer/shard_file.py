"""What a synchronizer that shares a run with others keeps of the whole, as a file beside its own fragments.

The file is JSON with a digest of itself, written once, when the run begins here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from diloco.schema import Manifest, ShardState
from diloco.sharding import SynchronizerShard
from diloco.synchronizer.storage import FRAGMENTS, write_durably
from diloco.tensorfile import sealed, unsealed
from service.errors import ConfigError, InputError

SHARD_FILE = "shard.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRecord:
    """The run of which this synchronizer holds a shard."""

    shard: SynchronizerShard
    num_fragments: int
    """Of the whole run."""
    manifest: Manifest
    """Likewise."""
    origin: str

    @property
    def state(self) -> ShardState:
        index, count = self.shard.index, self.shard.count
        return ShardState(index=index, num_shards=count, num_fragments=self.num_fragments, origin=self.origin)


def write_shard(folder: Path, record: ShardRecord) -> None:
    text = {
        "shard": str(record.shard),
        "num_fragments": str(record.num_fragments),
        "origin": record.origin,
        "manifest": record.manifest.model_dump_json(),
    }
    write_durably(folder / SHARD_FILE, [json.dumps(sealed(text)).encode()])


def read_shard(directory: Path, shard: SynchronizerShard) -> ShardRecord | None:
    """The run in the directory of a synchronizer that is that shard; None where none has begun.

    Raises:
        ConfigError: it holds another shard, or a whole run, or what is known of the run is damaged.
    """
    path = directory / FRAGMENTS / SHARD_FILE
    if not path.exists():
        if path.parent.exists() or any(directory.glob("generation-*")):
            raise ConfigError(
                f"{directory} holds a run that is not shared",
                field="shard",
                remedy="leave out --shard, or choose another --directory",
            )
        return None
    try:
        text = unsealed(json.loads(path.read_bytes()))
        record = ShardRecord(
            shard=SynchronizerShard.parse(text["shard"]),
            num_fragments=int(text["num_fragments"]),
            manifest=Manifest.model_validate_json(text["manifest"]),
            origin=text["origin"],
        )
    except (InputError, ValidationError, ValueError, KeyError, AttributeError) as exc:
        raise ConfigError(
            f"{path} is damaged: {exc}", field="directory", remedy="restore it from a backup, or choose another one"
        ) from exc
    if record.shard != shard:
        raise ConfigError(
            f"{directory} holds shard {record.shard} of a run, not {shard}",
            field="shard",
            remedy=f"give --shard {record.shard}, or choose another --directory",
        )
    return record
