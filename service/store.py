"""The values over which the ranks of a group find each other: a key-value store, fenced by epochs, in memory alone.

Each group of processes has a name of its own (a run and a slot, for example) and an epoch that grows whenever its
members change. The newest epoch that anybody has used is the one that is kept: a newer one forgets the values of the
one before, and whoever still comes with an older one is refused. After a restart the store is empty, and groups are
made anew under a new epoch: nothing here is worth more than the rendezvous that it serves.

Bounded are the values, the keys and bytes of a group, the groups and the bytes of all, so that one group can fill its
own share and no more. Groups that nobody asks for are forgotten, the longest-unused first and their epochs with them:
after `EXPIRE_S` in any case, after `IDLE_S` when there is too much.

What a `torch.distributed.Store` promises holds here: a counter (`Values.add`) is kept as decimal text, and
`Values.compare_set` against nothing sets what is not there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from service.errors import ConflictError, InputError, OverloadedError
from service.store_schema import MAX_COUNTER

MAX_VALUE_BYTES = 1 << 20
MAX_KEY_CHARS = 512
MAX_TOTAL_BYTES = 64 << 20
"""Of all groups. A rendezvous of a hundred ranks takes some hundred kilobytes."""
MAX_GROUPS = 4096
MAX_GROUP_BYTES = 16 << 20
"""A quarter of it all."""
MAX_GROUP_KEYS = 32_768
"""Some two hundred ranks of which each leaves a value for every other."""
IDLE_S = 3600.0
"""A group that nobody asked for so long is forgotten when there is too much: its ranks have met long ago."""
EXPIRE_S = 86_400.0
"""A group that nobody asked for so long is forgotten."""
VALUE_OVERHEAD_BYTES = 200
"""What a key takes in memory beside its text and its value, so that many empty ones are bounded too."""


@dataclass(slots=True)
class Group:
    """The values of one group in its newest epoch."""

    epoch: int
    used_s: float
    values: dict[str, bytes] = field(default_factory=dict)
    num_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a store holds at most; bytes with `VALUE_OVERHEAD_BYTES` for each key."""

    total_bytes: int = MAX_TOTAL_BYTES
    groups: int = MAX_GROUPS
    group_bytes: int = MAX_GROUP_BYTES
    group_keys: int = MAX_GROUP_KEYS


class Values:
    """All groups of one process. Pure: the time is passed in."""

    def __init__(self, limits: Limits | None = None) -> None:
        self._groups: dict[str, Group] = {}
        """The longest-unused first."""
        self._limits = limits or Limits()
        self.num_bytes = 0
        self.on_new_epoch: Callable[[], None] = lambda: None
        """Called when a group has a newer epoch: whoever waits for a value of the one before waits in vain."""

    def get(self, group: str, epoch: int, key: str, *, now_s: float) -> bytes | None:
        """The value; None while there is none.

        Raises:
            ConflictError: the group has a newer epoch. So do all methods that take an epoch.
        """
        return self._enter(group, epoch, now_s).values.get(key)

    def set(self, group: str, epoch: int, key: str, value: bytes, *, now_s: float) -> None:
        """Set or replace a value.

        Raises:
            InputError: key or value is too long.
            OverloadedError: the group or the store is full; the message says which, and of what.
        """
        self._put(self._enter(group, epoch, now_s), key, value, now_s=now_s)

    def add(self, group: str, epoch: int, key: str, amount: int, *, now_s: float) -> int:
        """Add to a counter, which begins at 0; returns the sum.

        Raises:
            InputError: the value there is no number.
        """
        entered = self._enter(group, epoch, now_s)
        before = entered.values.get(key, b"0")
        try:
            total = int(before) + amount
        except ValueError as exc:
            raise InputError(f"the value of {key} is no number", field="key", remedy="add to counters only") from exc
        if abs(total) > MAX_COUNTER:
            raise InputError(f"the counter {key} would leave 64 bits", field="add")
        self._put(entered, key, str(total).encode(), now_s=now_s)
        return total

    def compare_set(self, group: str, epoch: int, key: str, expected: bytes, desired: bytes, *, now_s: float) -> bytes:
        """Set the value if it is the expected one; returns the value that then is.

        Where there is none, an empty expectation sets it, and any other is returned as it came.
        """
        entered = self._enter(group, epoch, now_s)
        found = entered.values.get(key)
        if found is None and expected:
            return expected
        if found is not None and found != expected:
            return found
        self._put(entered, key, desired, now_s=now_s)
        return desired

    def delete(self, group: str, epoch: int, key: str, *, now_s: float) -> bool:
        """Forget a value; says whether there was one."""
        entered = self._enter(group, epoch, now_s)
        value = entered.values.pop(key, None)
        if value is not None:
            self._account(entered, -_size(key, value))
        return value is not None

    def num_keys(self, group: str, epoch: int, *, now_s: float) -> int:
        return len(self._enter(group, epoch, now_s).values)

    @property
    def num_groups(self) -> int:
        return len(self._groups)

    def _enter(self, name: str, epoch: int, now_s: float) -> Group:
        self._forget_unused(now_s, EXPIRE_S)
        group = self._groups.get(name)
        if group is None:
            self._make_room(now_s)
            group = Group(epoch, now_s)
        if epoch < group.epoch:
            raise ConflictError(
                f"epoch {epoch} of {name or 'the group'} is over, {group.epoch} is the newest",
                field="epoch",
                remedy="make the group anew",
            )
        if epoch > group.epoch:
            self._account(group, -group.num_bytes)
            group.epoch, group.values = epoch, {}
            self.on_new_epoch()
        group.used_s = now_s
        self._groups.pop(name, None)
        self._groups[name] = group
        return group

    def _put(self, group: Group, key: str, value: bytes, *, now_s: float) -> None:
        if not 0 < len(key) <= MAX_KEY_CHARS:
            raise InputError(f"has {len(key)} characters, not 1 to {MAX_KEY_CHARS}", field="key")
        if len(value) > MAX_VALUE_BYTES:
            raise InputError(f"has {len(value)} bytes, over {MAX_VALUE_BYTES}", field="value")
        before = group.values.get(key)
        more = _size(key, value) - (_size(key, before) if before is not None else 0)
        self._check_group(group, more, num_more=int(before is None))
        if self.num_bytes + more > self._limits.total_bytes:
            self._forget_unused(now_s, IDLE_S)
        if self.num_bytes + more > self._limits.total_bytes:
            raise OverloadedError(
                f"all groups together hold {self.num_bytes} of {self._limits.total_bytes} bytes",
                field="value",
                remedy=f"delete values, or wait: groups unused for {IDLE_S:g} s make room",
            )
        group.values[key] = value
        self._account(group, more)

    def _check_group(self, group: Group, more: int, *, num_more: int) -> None:
        """Raises `OverloadedError` when the group may not have so many more bytes and keys."""
        if num_more and len(group.values) >= self._limits.group_keys:
            raise OverloadedError(
                f"the group has {len(group.values)} keys, and may have no more",
                field="key",
                remedy="delete some, or use a new epoch",
            )
        if more > 0 and group.num_bytes + more > self._limits.group_bytes:
            raise OverloadedError(
                f"the group holds {group.num_bytes} of {self._limits.group_bytes} bytes",
                field="value",
                remedy="delete values, or use a new epoch",
            )

    def _make_room(self, now_s: float) -> None:
        if len(self._groups) >= self._limits.groups:
            self._forget_unused(now_s, IDLE_S)
        if len(self._groups) >= self._limits.groups:
            raise OverloadedError(
                f"the store has {len(self._groups)} groups, and may have no more",
                field="group",
                remedy=f"use the name of one, or wait: groups unused for {IDLE_S:g} s make room",
            )

    def _forget_unused(self, now_s: float, unused_s: float) -> None:
        while self._groups:
            name, group = next(iter(self._groups.items()))
            if now_s - group.used_s <= unused_s:
                return
            self._account(group, -group.num_bytes)
            del self._groups[name]

    def _account(self, group: Group, num_bytes: int) -> None:
        group.num_bytes += num_bytes
        self.num_bytes += num_bytes


def _size(key: str, value: bytes) -> int:
    return len(key) + len(value) + VALUE_OVERHEAD_BYTES
