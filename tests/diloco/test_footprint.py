"""The arithmetic of a dry run, against what an island really holds."""

from __future__ import annotations

from typing import get_args

import pytest
from torch import Tensor

from diloco.codec import codec_named
from diloco.footprint import fragment_syncs, sync_memory
from diloco.fragment import flatten_module
from diloco.island import Island
from diloco.model import ModelSize, build_model
from diloco.schema import CodecName


def num_bytes(*tensors: Tensor | None) -> int:
    """Of their distinct memory."""
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors if tensor is not None
    }
    return sum(storage.nbytes() for storage in storages.values())


@pytest.mark.parametrize("codec", get_args(CodecName))
def test_buffers_of_a_sync_are_those_of_an_island(codec: CodecName) -> None:
    island = Island(build_model(ModelSize(num_layers=1, num_heads=1, width=16, context=8), seed=0), codec_named(codec))
    count = island.global_flat.numel()
    owed = island.feedback.residual if island.feedback is not None else None
    held, more = sync_memory([count], codec_named(codec))
    assert held == num_bytes(island.global_flat, island._scratch, island.incoming, owed)
    given = island.contribution()
    left_out = given.encoded.left_out if given.encoded is not None else None
    assert more == num_bytes(given.local, given.payload, left_out)
    assert len(flatten_module(island.module)) == count


@pytest.mark.parametrize("codec", get_args(CodecName))
def test_bytes_and_times_of_fragments_add_up(codec: CodecName) -> None:
    push, pull = codec_named(codec), codec_named("fp32")
    fragments = fragment_syncs([640, 64], push=push, pull=pull, bytes_per_s=1000.0)
    assert [each.fragment for each in fragments] == [0, 1]
    assert sum(each.push_bytes for each in fragments) == push.num_bytes(704)
    assert [each.pull_bytes for each in fragments] == [2560, 256]
    assert [each.pull_s for each in fragments] == [2.56, 0.256]
    assert fragments[0].push_s == pytest.approx(push.num_bytes(640) / 1000)
