"""From the body of ``POST /v1/samples`` to samples that are still to be judged.

A batch in which every sample has the right form is read in one go. Any other is taken apart, so that one bad sample
costs the others nothing: what has the wrong form is handed on as it came, and refused with its reason.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from pydantic import Field, ValidationError

from controller.schema import MAX_BATCH_SAMPLES, SampleBatch
from service.errors import InputError
from service.wire import Wire
from sidecar.schema import LoadSample


class GoodBatch(Wire):
    """A `SampleBatch` without a bad sample."""

    samples: list[LoadSample] = Field(max_length=MAX_BATCH_SAMPLES)


def read_batch(body: bytes) -> Sequence[object]:
    """The samples of a batch: `LoadSample` where all have that form, else what the JSON holds.

    Raises:
        InputError: it is no batch.
    """
    try:
        return GoodBatch.model_validate_json(body).samples
    except ValidationError:
        return _read_loosely(body)


def _read_loosely(body: bytes) -> Sequence[object]:
    try:
        return SampleBatch.model_validate(json.loads(body)).samples
    except (ValueError, RecursionError) as exc:
        field, message = "body", "is no JSON"
        if isinstance(exc, ValidationError):
            first = exc.errors()[0]
            field, message = ".".join(("body", *map(str, first["loc"]))), str(first["msg"])
        raise InputError(message, field=field, remedy="see /docs for the fields") from exc
