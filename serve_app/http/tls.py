"""TLS of the gateway's own: a certificate that may be replaced while it is used."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from pathlib import Path

from serve_app.cluster import TlsFiles
from serve_app.watched_file import identity_of

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 1.0


class Certificate:
    """A certificate with its key; connections that are made later have the one of then."""

    def __init__(self, files: TlsFiles) -> None:
        """Read the files.

        Raises:
            ValueError: They cannot be used together.
        """
        self._files = files
        self._seen = self._identity()
        self.problem: str | None = None
        """Why the files cannot be used as they are now, so that what they held before counts."""
        self._current = _context(files.certificate, files.key)
        self.context = _context(files.certificate, files.key)
        """For a server: it hands every handshake on to the certificate of then."""
        self.context.sni_callback = self._choose

    def reload(self) -> bool:
        """Read the files again if they are others than before; return whether there is news.

        Those that cannot be used are read until they can be.
        """
        seen = self._identity()
        if seen == self._seen and self.problem is None:
            return False
        try:
            self._current = _context(self._files.certificate, self._files.key)
        except ValueError as error:
            # Perhaps one of both is replaced, or there were too many open files for a moment.
            told, self.problem = self.problem, str(error)
            if self.problem != told:
                logger.error("%s; the certificate from before still counts", error)
            return self.problem != told
        self._seen, self.problem = seen, None
        logger.info("certificate %s was read again", self._files.certificate)
        return True

    async def watch(self) -> None:
        """Look every second whether the files have changed, without end."""
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            await asyncio.to_thread(self.reload)

    def _choose(
        self, connection: ssl.SSLSocket | ssl.SSLObject, name: str | None, context: ssl.SSLContext
    ) -> None:
        connection.context = self._current

    def _identity(self) -> tuple[tuple[int, ...] | None, ...]:
        return identity_of(self._files.certificate), identity_of(self._files.key)


def _context(certificate: Path, key: Path) -> ssl.SSLContext:
    """Make what a server needs.

    Raises:
        ValueError: The files cannot be read, or are no certificate with its key.
    """
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.minimum_version = ssl.TLSVersion.TLSv1_2
    made.set_alpn_protocols(["http/1.1"])
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
