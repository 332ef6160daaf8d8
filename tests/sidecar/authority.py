"""Certificates that a server of one vLLM, and a client of it, show each other."""

from __future__ import annotations

import ssl
from pathlib import Path

import trustme


class Authority:
    """A CA, a certificate that it issued for the server, one for a client, and files of them."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._ca = trustme.CA()
        self.ca, self.cert, self.key = folder / "ca.pem", folder / "cert.pem", folder / "key.pem"
        self._ca.cert_pem.write_to_path(self.ca)
        client = self._ca.issue_cert("sidecar")
        client.cert_chain_pems[0].write_to_path(self.cert)
        client.private_key_pem.write_to_path(self.key)

    def context(self, *, host: str = "127.0.0.1", ask_clients: bool = False) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._ca.issue_cert(host).configure_cert(context)
        if ask_clients:
            self._ca.configure_trust(context)
            context.verify_mode = ssl.CERT_REQUIRED
        return context
