"""The base of every wire model: immutable, finite numbers only, tolerant of fields that a newer peer adds."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Wire(BaseModel):
    """A message between processes. Unknown fields are ignored so that a fleet can be upgraded one process at a time."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False, use_attribute_docstrings=True)
