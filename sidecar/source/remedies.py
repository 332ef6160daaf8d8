"""What the user can do about a scrape that failed, by how it ended."""

from __future__ import annotations

from collections.abc import Mapping

from sidecar.source.snapshot import ScrapeOutcome

TIMEOUT_OPTION = "--scrape-timeout-s"
REMEDIES: Mapping[ScrapeOutcome, str] = {
    ScrapeOutcome.TIMEOUT: "look at vLLM's log and for firewalls on the way, and try a longer {timeout_option}",
    ScrapeOutcome.REFUSED: "start vLLM, which listens after some minutes, or correct host and port in --vllm",
    ScrapeOutcome.UNREACHABLE: "correct the host in --vllm: it has no address, or there is no way to it",
    ScrapeOutcome.TLS: "the port speaks no TLS, or none in common: correct the scheme of --vllm",
    ScrapeOutcome.UNAUTHORIZED: "set --vllm-token-file or --vllm-token to what stands before the server wants",
    ScrapeOutcome.REDIRECTED: "give the final base URL to --vllm",
    ScrapeOutcome.HTTP_ERROR: "point --vllm at vLLM itself, not at a gateway before it; if it does, see vLLM's log",
    ScrapeOutcome.BROKEN: "a port that wants TLS breaks off like this: try https:// in --vllm; else see vLLM's log",
    ScrapeOutcome.TOO_LARGE: "what answers there is no vLLM: correct --vllm",
    ScrapeOutcome.MALFORMED: "what answers there is no vLLM, or a version with another format: check --vllm",
    ScrapeOutcome.INTERNAL: "a bug of this program: report it with the traceback in its log",
}
"""For a page without series the page itself tells (`sidecar.source.parse.PageReader.lack`)."""
SOCKET_REMEDIES: Mapping[ScrapeOutcome, str] = {
    ScrapeOutcome.TIMEOUT: "look at vLLM's log, and try a longer {timeout_option}",
    ScrapeOutcome.REFUSED: "start vLLM with this path as --uds; it listens after some minutes",
    ScrapeOutcome.UNREACHABLE: "run this as a user who may write to the socket, or correct its path in --vllm",
    ScrapeOutcome.BROKEN: "see vLLM's log",
}
"""In their place over a Unix socket."""


def remedy_of(outcome: ScrapeOutcome, *, is_socket: bool = False, timeout_option: str = TIMEOUT_OPTION) -> str:
    """What its kind mostly means, where the failure itself tells no better; empty for OK."""
    table = {**REMEDIES, **SOCKET_REMEDIES} if is_socket else REMEDIES
    return table.get(outcome, "").format(timeout_option=timeout_option)
