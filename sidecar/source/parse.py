"""Read the few series that matter out of a vLLM ``/metrics`` page, chunk by chunk.

A page has some 450 samples in 50 KB, and about a quarter of them matter: lines are filtered by name before anything
else is done with them, and what does not matter is forgotten as it comes. Memory is bounded by `MAX_SAMPLES` and
`MAX_LINE_BYTES`, whatever a page holds. Prometheus text and OpenMetrics write a sample alike (``name{labels} value …``,
what follows the value is a timestamp or an exemplar). Both say where they end, Prometheus text by a line feed after its
last line, OpenMetrics by ``# EOF``: a page without it was cut off. Samples are keyed by their own name, not by the
family's type, which the two formats state differently.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from sidecar.source.page import Page, PageError, Sample, assemble
from sidecar.source.signals import KNOWN_PREFIXES, Wanted, wanted_names
from sidecar.source.snapshot import EngineSnapshot, finite

MAX_LINE_BYTES = 8 << 10
"""vLLM's longest, ``cache_config_info``, has under 3 KB; longer lines that do not matter are passed over."""
MAX_SAMPLES = 20_000
"""Samples that matter; an engine has about 90, so that these are the pages of 200 engines."""

PROCESS_START = b"process_start_time_seconds"
NAME = re.compile(rb"[a-zA-Z_:][\w:]*")
QUOTED = r"\"((?:[^\"\\]|\\.)*+)\""
BEFORE_LABELS = re.compile(r"[a-zA-Z_:][\w:]*+(?:[ \t]*+(\{))?")
LABEL = re.compile(rf"[ \t,]*+(?:(\w++)|{QUOTED})[ \t]*+=[ \t]*+{QUOTED}[ \t]*+(?=[,}}])")
AFTER_LABELS = re.compile(r"[ \t,]*+\}")
VALUE = re.compile(r"[ \t]++(\S++)")
"""Each matches where the one before it ended, and takes nothing back: a line is read in time linear in its length."""
KEPT_LABELS = frozenset(
    {"engine", "le", "sleep_state", "reason", "ReplicaId", "kv_cache_size_tokens", "num_gpu_blocks", "block_size"}
)
_KNOWN_PREFIXES = tuple(prefix.encode() for prefix in KNOWN_PREFIXES)


class PageTooLargeError(PageError):
    """A page beyond what any vLLM server writes."""


class PageReader:
    """One page as it arrives: `feed` its bytes, then `finish`."""

    def __init__(self, wanted: Mapping[bytes, Wanted], *, prefix: str, replica: str | None, content_type: str) -> None:
        self._wanted = wanted
        self._prefix = prefix
        self._prefix_bytes = prefix.encode()
        self._replica = replica
        self._is_openmetrics = "openmetrics" in content_type.lower()
        self._page = Page()
        self._num_samples = 0
        self._has_series = False
        self._other_prefix: bytes | None = None
        self._rest = b""
        self._last_line = b""
        self._skipping = False

    def feed(self, chunk: bytes) -> None:
        """Take in the next bytes of the page.

        Raises:
            PageError: a line that matters cannot be read.
            PageTooLargeError: such a line, or their number, is beyond the bounds.
        """
        if self._skipping:
            _, line_feed, chunk = chunk.partition(b"\n")
            if not line_feed:
                return
            self._skipping = False
        *lines, rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            self._take(line)
        if len(rest) > MAX_LINE_BYTES:
            self._take(rest)
            self._skipping, rest = True, b""
        self._rest = rest

    def finish(self, *, t_s: float, monotonic_s: float) -> EngineSnapshot | None:
        """The snapshot of the whole page, or None when no series has the prefix (`lack` says why).

        Raises:
            PageError: the page is cut off, or a bucket has no edge.
        """
        if self._is_openmetrics and (self._rest or self._last_line).rstrip() != b"# EOF":
            raise PageError("OpenMetrics page without # EOF: cut off")
        if not self._has_series:
            return None
        if self._rest and not self._is_openmetrics:
            raise PageError("no line feed after the last line: cut off")
        return assemble(self._page, prefix=self._prefix, t_s=t_s, monotonic_s=monotonic_s)

    @property
    def lack(self) -> tuple[str, str]:
        """What is wrong with a page without a series, and what to do about it."""
        if self._other_prefix is not None:
            other = self._other_prefix.decode()
            return f"its series begin with {other}", f"set --metric-prefix {other}"
        whose = "" if self._replica is None else f" of the replica {self._replica}"
        remedy = "start vLLM without --disable-log-stats; if this is no vLLM server, correct --vllm"
        return f"no {self._prefix} series{whose}", remedy

    def _take(self, line: bytes) -> None:
        if line.startswith(self._prefix_bytes):
            match = NAME.match(line)
            wanted = self._wanted.get(match[0]) if match else None
            if wanted is None:
                self._has_series = self._has_series or self._replica is None
            else:
                self._take_sample(wanted, line)
        elif line.startswith(PROCESS_START):
            self._page.process_start_s = finite(parse_sample(line).value)
        elif not self._has_series and line.startswith(_KNOWN_PREFIXES):
            self._other_prefix = next(prefix for prefix in _KNOWN_PREFIXES if line.startswith(prefix))
        if line.strip():
            self._last_line = line[:16]

    def _take_sample(self, wanted: Wanted, line: bytes) -> None:
        sample = parse_sample(line)
        if self._replica is not None and sample.labels.get("ReplicaId") != self._replica:
            return
        self._has_series = True
        self._num_samples += 1
        if self._num_samples > MAX_SAMPLES:
            raise PageTooLargeError(
                f"over {MAX_SAMPLES} samples of {self._prefix} series: more engines than one server has"
            )
        self._page.samples[wanted].append(sample)


class PageParser:
    """Readers for the pages of one server.

    Its series begin with ``prefix`` (``vllm:``, or ``ray_vllm_`` under Ray Serve); with ``replica`` only those count
    whose ReplicaId it is.
    """

    def __init__(self, prefix: str, *, replica: str | None = None) -> None:
        self._prefix = prefix
        self._replica = replica
        self._wanted = {name.encode(): wanted for name, wanted in wanted_names(prefix)}

    def reader(self, content_type: str) -> PageReader:
        return PageReader(self._wanted, prefix=self._prefix, replica=self._replica, content_type=content_type)

    def parse(self, text: str, *, content_type: str, t_s: float, monotonic_s: float) -> EngineSnapshot | None:
        """The snapshot of a whole page; see `PageReader`."""
        reader = self.reader(content_type)
        reader.feed(text.encode())
        return reader.finish(t_s=t_s, monotonic_s=monotonic_s)


def parse_sample(line: bytes) -> Sample:
    """Labels (of `KEPT_LABELS`) and value of one sample line.

    Raises:
        PageError: the line is not a sample.
        PageTooLargeError: it is over `MAX_LINE_BYTES`.
    """
    if len(line) > MAX_LINE_BYTES:
        raise PageTooLargeError(f"a sample of over {MAX_LINE_BYTES} bytes: {line[:80]!r}")
    text = line.decode("utf-8", errors="replace")
    labels, end = _read_labels(text)
    match = VALUE.match(text, end)
    if match is None:
        raise PageError(f"not a sample: {text[:120]!r}")
    try:
        return Sample(labels, float(match[1]))
    except ValueError as exc:
        raise PageError(f"not a number: {text[:120]!r}") from exc


def _read_labels(text: str) -> tuple[dict[str, str], int]:
    """Labels of `KEPT_LABELS`, and where the value begins."""
    labels: dict[str, str] = {}
    begin = BEFORE_LABELS.match(text)
    if begin is None:
        raise PageError(f"not a sample: {text[:120]!r}")
    end = begin.end()
    if begin[1] is None:
        return labels, end
    while match := LABEL.match(text, end):
        if match[1] in KEPT_LABELS:
            labels[match[1]] = match[3]
        end = match.end()
    close = AFTER_LABELS.match(text, end)
    if close is None:
        raise PageError(f"labels that cannot be read: {text[:120]!r}")
    return labels, close.end()
