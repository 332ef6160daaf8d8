"""Who decides: the one controller that leads. The others know its name and send everybody there."""

from __future__ import annotations

from typing import Protocol

from service.errors import UnavailableError

RETRY_AFTER_S = 1
"""What a standby tells its clients: takeover is a matter of seconds, and the next controller may lead already."""


class StandbyError(UnavailableError):
    """This controller does not lead."""

    def __init__(self, why: str, *, leader_url: str | None) -> None:
        remedy = f"ask {leader_url}" if leader_url else "ask the other controller, or try again"
        super().__init__(why, remedy=remedy)
        self.leader_url = leader_url


class Leadership(Protocol):
    """What a controller knows about its own lead."""

    @property
    def leads(self) -> bool:
        """Whether it may decide at this moment."""

    @property
    def term(self) -> int | None:
        """Number of its lead; None while it has none, or needs none."""

    @property
    def refusal(self) -> StandbyError:
        """What to say to those who want something of the leader."""

    async def confirm(self) -> None:
        """Ask whether it still leads.

        Raises:
            StandbyError: it does not, or nobody can tell.
        """


class SoleLeader:
    """Of a journal that only one controller can open."""

    leads = True
    term = None
    refusal = StandbyError("not leading", leader_url=None)

    async def confirm(self) -> None:
        return
