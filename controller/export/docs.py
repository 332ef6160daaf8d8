"""``python -m controller.export.docs FILE``: write the dictionary of columns into a document, between its marks."""

from __future__ import annotations

import sys
from pathlib import Path

from controller.export.columns import Table, describe_columns
from service.files import replace_file

BEGIN, END = "<!-- columns: begin -->", "<!-- columns: end -->"


def with_columns(text: str) -> str:
    """The document with the tables as the code has them. Raises `ValueError` where a mark is missing."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the document has no {BEGIN} and {END}")
    sections = "\n\n".join("\n".join(describe_columns(table)) for table in Table)
    return f"{before}{BEGIN}\n{sections}\n{END}{after}"


def main(path: Path) -> None:
    replace_file(path, [with_columns(path.read_text()).encode()])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
