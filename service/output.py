"""Standard output that may fail: its reader leaves, its disk is full, its encoding lacks a character, it is closed.

None of these is a traceback. A reader that leaves, as ``head`` does, is no error to speak of: the command ends with the
code that a shell gives to one which SIGPIPE ended. What cannot be encoded is replaced.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from service.errors import UnavailableError

READER_LEFT = 128 + 13
"""As if SIGPIPE had ended the process."""
REFUSING = frozenset({"strict", "surrogateescape"})
"""Error handlers that raise for a character which the encoding lacks; others were chosen by the user."""


class GuardedOutput:
    """A text stream that remembers why it could not be written; everything else is the stream's own."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.failure: OSError | None = None

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as exc:
            self.failure = exc
            raise

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as exc:
            self.failure = exc
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @property
    def exit_code(self) -> int | None:
        """What a failure makes of the command; None without one."""
        if self.failure is None:
            return None
        return READER_LEFT if isinstance(self.failure, BrokenPipeError) else UnavailableError.exit_code

    @property
    def complaint(self) -> str | None:
        """The failure in words; None where there is nothing to tell."""
        if self.failure is None or isinstance(self.failure, BrokenPipeError):
            return None
        return f"cannot write to standard output: {self.failure.strerror or self.failure}"

    def abandon(self) -> None:
        """Lead what is still in the buffer nowhere: the interpreter would complain about it at its end."""
        with contextlib.suppress(OSError, ValueError), open(os.devnull, "w") as nowhere:  # noqa: PTH123
            os.dup2(nowhere.fileno(), self._stream.fileno())


@contextlib.contextmanager
def guarded_output() -> Iterator[GuardedOutput]:
    """Standard output for one command; the block ends without an exception when the output failed."""
    before: Any = sys.stdout
    with contextlib.ExitStack() as stack:
        # A process that was started without standard output has None.
        stream = stack.enter_context(open(os.devnull, "w")) if before is None else before  # noqa: PTH123
        if isinstance(stream, io.TextIOWrapper) and stream.errors in REFUSING:
            stream.reconfigure(errors="replace")
        output = GuardedOutput(stream)
        stack.enter_context(contextlib.redirect_stdout(output))
        try:
            try:
                yield output
            except SystemExit:
                output.flush()
                raise
            output.flush()
        except BaseException:
            if output.failure is None:
                raise
        if output.failure is not None:  # also where the command took it for nothing, as argparse does
            output.abandon()
