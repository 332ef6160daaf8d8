"""Serve an application until SIGINT or SIGTERM: one worker, a clear error on a taken port, a bounded shutdown."""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import socket
import ssl
from types import FrameType

import uvicorn
from fastapi import FastAPI

from service.admission import Admission, fit_open_files
from service.bounds import bounded_protocol
from service.errors import ConfigError, ConflictError
from service.settings import ServiceSettings

logger = logging.getLogger(__name__)

GRACEFUL_SHUTDOWN_S = 5


def serve(app: FastAPI, settings: ServiceSettings, *, many_clients: bool = False, large_bodies: bool = False) -> None:
    """Serve until a signal; returns after a clean stop.

    With ``many_clients`` uvicorn takes httptools and uvloop where they are installed: a third of the time per request;
    with ``large_bodies`` httptools alone, which takes large pieces of a body at once.

    ``app.state.url`` is where it listens.

    Raises:
        ConflictError: the port is taken.
        ConfigError: the host is not an address of this machine.
    """
    listener = bind(settings.host, settings.port)
    host, port = listener.getsockname()[:2]
    admission: Admission | None = getattr(app.state, "admission", None)
    if admission is not None:
        admission.limit = fit_open_files(admission.limit)
    scheme = "https" if settings.tls_cert else "http"
    app.state.url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
    config = uvicorn.Config(
        app,
        workers=1,
        http=bounded_protocol(many_clients=many_clients or large_bodies, admission=admission),
        ws="none",  # an upgraded connection would be out of bounds
        loop="auto" if many_clients else "asyncio",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=GRACEFUL_SHUTDOWN_S,
        ssl_certfile=settings.tls_cert,
        ssl_keyfile=settings.tls_key,
        ssl_ca_certs=str(settings.tls_ca) if settings.tls_cert and settings.tls_ca else None,
        ssl_cert_reqs=ssl.CERT_REQUIRED if settings.tls_cert and settings.tls_ca else ssl.CERT_NONE,
    )
    server = Server(config, f"service={settings.service} url={app.state.url}")
    # Before uvicorn takes the signals over they must not be lost, and once it has stopped it raises them again: the
    # default action would then turn a clean stop into 143.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: server.stop_soon())
    with listener:
        server.run(sockets=[listener])


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to ``host:port`` (not yet listening)."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # By name, or asyncio leaves TCP_NODELAY off: an answer's body then waits 40 ms for the acknowledgement of its head.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as exc:
        listener.close()
        if exc.errno == errno.EADDRINUSE:
            raise ConflictError(
                f"{port} on {host} is in use", field="port", remedy="stop its owner or choose another --port"
            ) from exc
        raise ConfigError(f"cannot listen on {host}:{port}: {exc.strerror or exc}", field="host") from exc
    return listener


class Server(uvicorn.Server):
    """Sets the application's exit event as soon as the signal arrives, so that long polls answer instead of hanging."""

    def __init__(self, config: uvicorn.Config, description: str = "") -> None:
        super().__init__(config)
        self._description = description

    def stop_soon(self) -> None:
        self.should_exit = True

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            logger.info("listening %s", self._description)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._loop.call_soon_threadsafe(self._announce_exit)
        super().handle_exit(sig, frame)

    def _announce_exit(self) -> None:
        app = self.config.app
        if isinstance(app, FastAPI) and app.state.tasks is not None:
            app.state.tasks.exit.set()
