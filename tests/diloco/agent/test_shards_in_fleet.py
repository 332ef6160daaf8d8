"""Two islands, a real controller and two real synchronizers that share the run's fragments."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from diloco.schema import OuterState
from diloco.turns import next_round
from tests.diloco.agent.test_island_in_fleet import controller_options, islands_of, rounds_of

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

Run = Callable[..., Any]


def versions_at(url: str) -> dict[int, int]:
    state = OuterState.model_validate_json(httpx.get(f"{url}/v1/state", timeout=10, trust_env=False).content)
    return {one.fragment: one.version for one in state.fragments}


def test_a_fleet_trains_on_while_one_synchronizer_is_dead(
    spawn: Run, run_service: Run, run_island: Run, tmp_path: Path
) -> None:
    shards = [spawn(tmp_path / f"s{index}", "--shard", f"{index}/2", "--quorum", "2") for index in range(2)]
    urls = ",".join(shard.url for shard in shards)
    fragments = ("--num-fragments", "4", "--sync-timeout-s", "12", "--policy-params", '{"h": 10}')
    controller = run_service("controller", *controller_options(tmp_path, urls, *fragments))
    islands = islands_of(run_island, controller.url)
    for island in islands:
        island.until_progress(lambda p: p.round >= 4)
        assert island.status().num_fragments == 4
    shards[1].kill()
    before = versions_at(shards[0].url)
    controller.until(lambda: all(version > before[f] for f, version in versions_at(shards[0].url).items()))
    held = max(island.progress().round for island in islands)
    assert all("synchronizer is away, its fragments do not sync shard=1" in island.log() for island in islands)
    assert held % 4 in (1, 3), "the run waits for a fragment of the dead one"
    told = [r for r in rounds_of(controller) if r["slots_applied"]][-1]
    assert told["slots_failed"] == []
    shards[1].start()
    controller.until(lambda: min(versions_at(shards[1].url).values()) >= min(versions_at(shards[0].url).values()) > 0)
    for island in islands:
        island.until_progress(lambda p: p.round > held + 4)
        assert "synchronizer is back shard=1" in island.log()

    def in_step() -> bool:
        versions = {f: version for shard in shards for f, version in versions_at(shard.url).items()}
        return next_round(versions[f] for f in range(4)) == sum(versions.values())

    controller.until(in_step)
    httpx.put(f"{controller.url}/v1/policy", json={"name": "no_sync"}, timeout=10, trust_env=False).raise_for_status()
    controller.until(lambda: all(r["closed"] for r in rounds_of(controller)))
    taken = sum(version for shard in shards for version in versions_at(shard.url).values())
    # Each outer step counts once, also one that was passed over and made up for.
    controller.until(lambda: controller.get("/v1/budget").json()["spent"] == taken)
    for island in islands:
        assert island.terminate() == 0


def test_fewer_fragments_than_synchronizers_are_refused_where_they_are_given(run_service: Run, run_island: Run) -> None:
    urls = "http://127.0.0.1:1,http://127.0.0.1:2"
    for service in (
        run_service("controller", "--synchronizer-url", urls),
        run_island("--slot", "0", "--synchronizer", urls, "--num-fragments", "1"),
    ):
        assert service.finish(60) == 2
        assert "num_fragments 1 is below the 2 synchronizers" in service.log()
