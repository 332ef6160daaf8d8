"""What a synchronizer's answers stand for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from diloco.errors import (
    AnotherRunError,
    FencedError,
    ManifestError,
    NotInitializedError,
    RoundClosedError,
    VersionError,
    VersionGoneError,
)
from diloco.schema import VERSION_HEADER
from service.client import explain_response
from service.errors import ConfigError, ConflictError, InputError

VERSION_ERRORS: Mapping[str, type[VersionError]] = {
    kind.__name__: kind for kind in (RoundClosedError, VersionGoneError)
}
CONFLICT_ERRORS: Mapping[str, type[ConflictError]] = {
    kind.__name__: kind for kind in (NotInitializedError, AnotherRunError, FencedError, ManifestError)
}

M = TypeVar("M", bound=BaseModel)


def version_of(response: httpx.Response) -> int | None:
    value = response.headers.get(VERSION_HEADER, "")
    return int(value) if value.isdigit() else None


def parse_answer(model: type[M], response: httpx.Response) -> M:
    try:
        return model.model_validate_json(response.content)
    except ValidationError as exc:
        raise InputError(
            f"{response.url} does not answer as a synchronizer does: {exc.errors()[0]['msg']}",
            field="synchronizer",
            remedy="check the URL and that both ends run the same version",
        ) from exc


def raise_refusal(response: httpx.Response) -> NoReturn:
    """The error that a 4xx answer stands for."""
    message = explain_response(response)
    kind = _error_kind(response)
    version = version_of(response)
    if response.status_code == httpx.codes.UNAUTHORIZED:
        raise ConfigError(message, field="token", remedy="give this process the synchronizer's token")
    if kind in VERSION_ERRORS and version is not None:
        raise VERSION_ERRORS[kind](message, version=version)
    if kind in CONFLICT_ERRORS:
        raise CONFLICT_ERRORS[kind](message)
    if response.status_code == httpx.codes.CONFLICT:
        raise ConflictError(message)
    raise InputError(message, field="synchronizer")


def _error_kind(response: httpx.Response) -> str:
    try:
        body = response.json()
    except ValueError:
        return ""
    return str(body.get("error")) if isinstance(body, dict) else ""
