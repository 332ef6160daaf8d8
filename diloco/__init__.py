"""Training: islands that take inner steps, and the synchronizer that takes outer ones.

``island`` and ``inner`` are the arithmetic of one worker, ``worker`` its process, ``agent`` its keeper; ``outer`` and
``synchronizer`` the global side; ``fragment``, ``digest`` and ``transport`` what goes between them. `schema` is all
that others may know of it.

``from diloco import Island`` makes an island of a training loop of one's own (see ``library``).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from service.extras import require_extra

if TYPE_CHECKING:
    from diloco.library import Island

__all__ = ["Island"]


def __getattr__(name: str) -> Any:
    # Whoever imports the wire contract alone has no torch.
    if name == "Island":
        require_extra("train")
        return importlib.import_module("diloco.library").Island
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
