"""The base of every wire model: immutable, finite numbers only, tolerant of fields that a newer peer adds."""

from __future__ import annotations

from typing import Any, ClassVar, Self, get_args

from pydantic import BaseModel, ConfigDict, model_validator

PART = ConfigDict(extra="ignore", allow_inf_nan=False, use_attribute_docstrings=True)
"""Of the smallest parts of a message, which are slotted dataclasses: a large fleet sends a quarter of a million of them
per second, and as models each would have a dictionary and a set of its own."""


class Record(BaseModel):
    """A part of a message, without free text (bounded text is checked by its bounds)."""

    model_config = ConfigDict(frozen=True, **PART)


class Wire(Record):
    """A message between processes. Unknown fields are ignored so that a fleet can be upgraded one process at a time."""

    _texts: ClassVar[tuple[str, ...]] = ()
    """Fields that may hold text."""

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        cls._texts = tuple(name for name, field in cls.model_fields.items() if _may_be_text(field.annotation))

    @model_validator(mode="after")
    def _check_text(self) -> Self:
        """JSON can spell half of a surrogate pair; such a string could be neither stored nor answered."""
        values = self.__dict__
        for name in self._texts:
            value = values[name]
            if isinstance(value, str) and not value.isascii():
                try:
                    value.encode()
                except UnicodeEncodeError as exc:
                    raise ValueError(f"{name} is not valid Unicode text") from exc
        return self


class Order(Wire):
    """What an operator asks for. Unknown fields are refused: a slip of the keyboard must not mean the default."""

    model_config = ConfigDict(extra="forbid")


def _may_be_text(annotation: Any) -> bool:
    return annotation in (str, Any) or any(_may_be_text(part) for part in get_args(annotation))
