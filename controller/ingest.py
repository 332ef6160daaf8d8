"""From the body of ``POST /v1/samples`` to samples that are still to be judged.

A batch whose samples all have the form of one is read in one go, which is cheaper. Of any other, and of one so large
that others would wait for it, the body is only parsed here, and forms are checked sample by sample
(`controller.samples`): a bad one costs nobody else.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence

from pydantic import Field, ValidationError
from pydantic_core import from_json

from controller.schema import MAX_BATCH_SAMPLES, SampleBatch
from service.errors import InputError
from service.wire import Wire
from sidecar.schema import LoadSample

MAX_AT_ONCE_BYTES = 2 << 20


class _GoodBatch(Wire):
    """`SampleBatch` without a bad sample."""

    samples: list[LoadSample] = Field(max_length=MAX_BATCH_SAMPLES)


def read_batch(body: bytes) -> Sequence[object]:
    """The samples of a batch: `LoadSample` objects, or all as they came (where one is none, or they are many).

    Raises:
        InputError: it is no batch.
    """
    if len(body) <= MAX_AT_ONCE_BYTES:
        with contextlib.suppress(ValidationError):
            return _GoodBatch.model_validate_json(body).samples
    try:
        return SampleBatch.model_validate(_parse(body)).samples
    except ValidationError as exc:
        first = exc.errors()[0]
        where = ".".join(("body", *map(str, first["loc"])))
        raise InputError(str(first["msg"]), field=where, remedy="see /docs for the fields") from exc
    except (ValueError, RecursionError) as exc:
        raise InputError("is no JSON", field="body", remedy="see /docs for the fields") from exc


def _parse(body: bytes) -> object:
    try:
        return from_json(body)  # half the time of json
    except ValueError:
        return json.loads(body)  # takes half of a surrogate pair, which then costs one sample and not the batch
