"""Ask the service in this container whether it is alive: exit code 0 when it is, 1 with one line when not.

    python3 -I healthcheck.py sidecar

It reads port and TLS files where the service reads them, in ``WADILOCO_<SERVICE>_PORT``, ``…_TLS_CERT`` and
``…_TLS_KEY``; whoever sets them by argument or file sets them here too. Standard library alone, and no proxy.
"""

from __future__ import annotations

import http.client
import os
import ssl
import sys
from collections.abc import Mapping

TIMEOUT_S = 4.0


def connect(environ: Mapping[str, str], service: str) -> http.client.HTTPConnection:
    """A connection, not yet open, to the service on loopback.

    Raises:
        KeyError: the environment names no port.
    """
    prefix = f"WADILOCO_{service.upper()}_"
    port = int(environ[f"{prefix}PORT"])
    certificate = environ.get(f"{prefix}TLS_CERT")
    if certificate is None:
        return http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    # The certificate is of another name than 127.0.0.1; under mutual TLS the service's own one is shown to it.
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.load_cert_chain(certificate, environ.get(f"{prefix}TLS_KEY"))
    return http.client.HTTPSConnection("127.0.0.1", port, timeout=TIMEOUT_S, context=context)


def complaint(environ: Mapping[str, str], service: str) -> str | None:
    """Why the service is not alive; None when it is."""
    try:
        connection = connect(environ, service)
        connection.request("GET", "/healthz")
        answer = connection.getresponse()
        body = answer.read(2000).decode(errors="replace")
    except KeyError as exc:
        return f"{exc.args[0]} is not set: set the port by environment"
    except (OSError, ValueError, http.client.HTTPException) as exc:
        return f"no answer: {exc}"
    return None if answer.status == http.client.OK else f"{answer.status}: {body}"


def main() -> int:
    if len(sys.argv) != 2:
        sys.stderr.write("usage: healthcheck.py sidecar|controller\n")
        return 2
    problem = complaint(os.environ, sys.argv[1])
    if problem is not None:
        sys.stderr.write(f"{sys.argv[1]}: {problem}\n")
    return int(problem is not None)


if __name__ == "__main__":
    raise SystemExit(main())
