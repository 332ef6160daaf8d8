"""The values over which the ranks of a group find each other: a key-value store, fenced by epochs, in memory alone.

Each group of processes has a name of its own (a run and a slot, for example) and an epoch that grows whenever its
members change. The newest epoch that anybody has used is the one that is kept: a newer one forgets the values of the
one before, and whoever still comes with an older one is refused. After a restart the store is empty, and groups are
made anew under a new epoch: nothing here is worth more than the rendezvous that it serves.

What a `torch.distributed.Store` promises holds here: a counter (`Values.add`) is kept as decimal text, and
`Values.compare_set` against nothing sets what is not there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from service.errors import ConflictError, InputError, OverloadedError
from service.store_schema import MAX_COUNTER

MAX_VALUE_BYTES = 1 << 20
MAX_KEY_CHARS = 512
MAX_TOTAL_BYTES = 64 << 20
"""Of all groups. A rendezvous of a hundred ranks takes some hundred kilobytes."""
MAX_GROUPS = 4096
IDLE_S = 3600.0
"""A group that nobody asked for so long is forgotten when there is too much: its ranks have met long ago."""
VALUE_OVERHEAD_BYTES = 200
"""What a key takes in memory beside its text and its value, so that many empty ones are bounded too."""


@dataclass(slots=True)
class Group:
    """The values of one group in its newest epoch."""

    epoch: int
    used_s: float
    values: dict[str, bytes] = field(default_factory=dict)
    num_bytes: int = 0


class Values:
    """All groups of one process. Pure: the time is passed in."""

    def __init__(self, *, max_total_bytes: int = MAX_TOTAL_BYTES, max_groups: int = MAX_GROUPS) -> None:
        self._groups: dict[str, Group] = {}
        self._max_total_bytes = max_total_bytes
        self._max_groups = max_groups
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
            OverloadedError: the store is full.
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

    def _enter(self, name: str, epoch: int, now_s: float) -> Group:
        group = self._groups.get(name)
        if group is None:
            self._make_room(now_s)
            group = self._groups[name] = Group(epoch, now_s)
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
        return group

    def _put(self, group: Group, key: str, value: bytes, *, now_s: float) -> None:
        if not 0 < len(key) <= MAX_KEY_CHARS:
            raise InputError(f"has {len(key)} characters, not 1 to {MAX_KEY_CHARS}", field="key")
        if len(value) > MAX_VALUE_BYTES:
            raise InputError(f"has {len(value)} bytes, over {MAX_VALUE_BYTES}", field="value")
        before = group.values.get(key)
        more = _size(key, value) - (_size(key, before) if before is not None else 0)
        if self.num_bytes + more > self._max_total_bytes:
            self._forget_idle(now_s)
        if self.num_bytes + more > self._max_total_bytes:
            raise OverloadedError(f"the store holds {self.num_bytes} bytes", field="value", remedy="store less in it")
        group.values[key] = value
        self._account(group, more)

    def _make_room(self, now_s: float) -> None:
        if len(self._groups) >= self._max_groups:
            self._forget_idle(now_s)
        if len(self._groups) >= self._max_groups:
            raise OverloadedError(f"the store has {len(self._groups)} groups", field="group", remedy="come back later")

    def _forget_idle(self, now_s: float) -> None:
        for name in list(self._idle(now_s)):
            self._account(self._groups[name], -self._groups[name].num_bytes)
            del self._groups[name]

    def _idle(self, now_s: float) -> Iterator[str]:
        return (name for name, group in self._groups.items() if now_s - group.used_s > IDLE_S)

    def _account(self, group: Group, num_bytes: int) -> None:
        group.num_bytes += num_bytes
        self.num_bytes += num_bytes


def _size(key: str, value: bytes) -> int:
    return len(key) + len(value) + VALUE_OVERHEAD_BYTES
