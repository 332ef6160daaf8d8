"""Parquet through pyarrow, which the extra ``export`` brings: one row group per page, so that memory stays bounded."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from controller.export.columns import COLUMNS, Kind, Table
from controller.export.csv_text import MAX_TIME_S
from controller.export.rows import Value


class _Sink(io.RawIOBase):
    """What the writer has written since it was asked last."""

    def __init__(self) -> None:
        super().__init__()
        self._pieces: list[bytes] = []
        self._position = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def write(self, piece: Any) -> int:
        raw = bytes(piece)
        self._pieces.append(raw)
        self._position += len(raw)
        return len(raw)

    def take(self) -> bytes:
        pieces, self._pieces = self._pieces, []
        return b"".join(pieces)


def parquet_file(table: Table, pages: Iterable[Sequence[Sequence[Value]]]) -> Iterator[bytes]:
    """The file in pieces; each page of rows becomes a row group.

    The caller has seen to it that the extra is installed (`service.extras.require_extra`).
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = COLUMNS[table]
    types = {
        Kind.INTEGER: pa.int64(),
        Kind.NUMBER: pa.float64(),
        Kind.TEXT: pa.string(),
        Kind.BOOLEAN: pa.bool_(),
        Kind.TIME: pa.timestamp("ms", tz="UTC"),
        Kind.JSON: pa.string(),
    }
    fields = [
        pa.field(column.name, types[column.kind], metadata={"unit": column.unit, "description": column.text})
        for column in columns
    ]
    schema = pa.schema(fields)
    sink = _Sink()
    with pq.ParquetWriter(sink, schema, compression="snappy") as writer:
        for page in pages:
            if not page:
                continue
            arrays = [
                pa.array([_cell(value, column.kind) for value in values], type=types[column.kind])
                for column, values in zip(columns, zip(*page, strict=True), strict=True)
            ]
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema), row_group_size=len(page))
            yield sink.take()
    yield sink.take()


def _cell(value: Value, kind: Kind) -> Value:
    if value is None:
        return None
    if kind is Kind.TIME:
        return round(float(value) * 1000) if 0 <= float(value) <= MAX_TIME_S else None
    return float(value) if kind is Kind.NUMBER else value
