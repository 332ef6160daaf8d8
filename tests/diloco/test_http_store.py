"""The store over HTTP does what torch's own stores do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import httpx
import pytest
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed import DistStoreError

from diloco.http_store import HttpStore
from service.errors import ConflictError, UnavailableError

pytestmark = pytest.mark.integration

Open = Callable[..., HttpStore]


@pytest.fixture
def open_store(store_url: str) -> Iterator[Open]:
    with httpx.Client(base_url=store_url, trust_env=False) as http:

        def open_one(*, group: str = "g", epoch: int = 1, timeout_s: float = 20.0, **more: Any) -> HttpStore:
            return HttpStore(http, group=group, epoch=epoch, timeout_s=timeout_s, **more)

        yield open_one


@pytest.fixture(params=["http", "prefixed", "torch"])
def any_store(request: pytest.FixtureRequest, open_store: Open) -> Iterator[Store]:
    """One contract for ours, for ours as torch's C++ calls it, and for torch's own."""
    if request.param == "torch":
        yield HashStore()
        return
    # Held here: what C++ holds of a store that is written in Python does not keep it alive.
    store = open_store()
    yield store if request.param == "http" else PrefixStore("a prefix/", store)


def test_it_keeps_the_contract_of_a_store(any_store: Store) -> None:
    any_store.set("a", "text")
    assert any_store.get("a") == b"text"
    assert any_store.check(["a"])
    assert not any_store.check(["a", "b"])
    assert any_store.add("n", 3) == 3
    assert any_store.add("n", -1) == 2
    assert any_store.get("n") == b"2"
    assert any_store.compare_set("fresh", "", "x") == b"x"
    assert any_store.compare_set("absent", "y", "z") == b"y"
    assert not any_store.check(["absent"])
    assert any_store.compare_set("fresh", "n", "m") == b"x"
    assert any_store.compare_set("fresh", "x", "m") == b"m"
    assert any_store.num_keys() == 3
    assert any_store.delete_key("fresh")
    assert not any_store.delete_key("fresh")
    any_store.wait(["a", "n"])
    any_store.wait(["a"], timedelta(seconds=5))


def test_keys_may_hold_anything_and_values_too(open_store: Open) -> None:
    store = open_store()
    for key in ("a/b//c", "with space?&=#%", "ä"):
        store.set(key, bytes(range(256)))
        assert store.get(key) == bytes(range(256))
    assert store.num_keys() == 3


def test_a_get_waits_for_the_value(open_store: Open) -> None:
    waiting, setting = open_store(), open_store()
    got: list[bytes] = []
    thread = threading.Thread(target=lambda: got.append(waiting.get("later")))
    thread.start()
    setting.set("later", b"here")
    thread.join(20)
    assert got == [b"here"]


def test_every_wait_ends(open_store: Open) -> None:
    store = open_store(timeout_s=0.3)
    assert store.timeout == timedelta(seconds=0.3)
    with pytest.raises(DistStoreError, match="no value for never"):
        store.get("never")
    with pytest.raises(DistStoreError, match="no value for never"):
        store.wait(["never"], timedelta(seconds=0.1))
    cancelled = threading.Event()
    patient = open_store(timeout_s=600.0, cancelled=cancelled)
    threading.Timer(0.2, cancelled.set).start()
    with pytest.raises(UnavailableError, match="given up"):
        patient.get("never")


def test_groups_do_not_meet_and_old_epochs_are_over(open_store: Open) -> None:
    old = open_store(epoch=1)
    old.set("a", "x")
    assert not open_store(group="other").check(["a"])
    assert not open_store(epoch=2).check(["a"])
    with pytest.raises(ConflictError, match="epoch 1 of g is over"):
        old.get("a")


def test_without_a_server_it_tries_on_until_the_timeout() -> None:
    with httpx.Client(base_url="http://127.0.0.1:1", trust_env=False) as http:
        store = HttpStore(http, group="g", epoch=1, timeout_s=0.5)
        started_s = time.monotonic()
        with pytest.raises(UnavailableError, match="no answer for a"):
            store.set("a", "x")
        assert time.monotonic() - started_s >= 0.4
        with pytest.raises(UnavailableError, match="no answer for n"):
            store.add("n", 1)
