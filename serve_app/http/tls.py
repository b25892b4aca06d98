"""The gateway's TLS: a certificate that can be replaced while it is used."""

from __future__ import annotations

import os
import ssl
from collections.abc import Sequence
from pathlib import Path

from serve_app.cluster import TlsFiles
from serve_app.watched_file import WatchedFile, identity_of


class Certificate(WatchedFile[ssl.SSLContext]):
    """A certificate with its key; later connections use the latest one."""

    def __init__(self, files: TlsFiles, protocols: Sequence[str] = ("http/1.1",)) -> None:
        """Read the files, for servers of these protocols, as ALPN names them.

        Raises:
            ValueError: They cannot be used together.
        """
        self._files = files
        self.context = _context(files.certificate, files.key, protocols)
        """Context of the server; each handshake gets the latest certificate."""
        super().__init__(
            files.certificate, "certificate and key", self.context,
            lambda path: _context(path, files.key, protocols), lambda *_: "another one",
        )  # fmt: skip
        self.open()
        self.context.sni_callback = self._choose

    def _choose(
        self, connection: ssl.SSLSocket | ssl.SSLObject, name: str | None, context: ssl.SSLContext
    ) -> None:
        connection.context = self.value

    def _identity(self) -> object:
        return identity_of(self._files.certificate), identity_of(self._files.key)


def _context(certificate: Path, key: Path, protocols: Sequence[str]) -> ssl.SSLContext:
    """Make the TLS context of a server; a ValueError says why the files cannot be used."""
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.minimum_version = ssl.TLSVersion.TLSv1_2
    made.set_alpn_protocols(protocols)
    for path in (certificate, key):
        # False also where its folder may not be read, of which pathlib makes an error.
        if not os.path.isfile(path):
            raise ValueError(f"there is no file {path}, or it may not be read")
    try:
        # A key with a password is refused: nobody is there to type it.
        made.load_cert_chain(certificate, key, password="")
    except (ssl.SSLError, OSError) as error:
        reason = getattr(error, "reason", None) or error.strerror or "it has a password"
        raise ValueError(f"certificate {certificate} with key {key}: {reason}") from None
    return made
