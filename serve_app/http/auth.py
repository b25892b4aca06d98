"""Who may ask: a bearer token, or the machine itself."""

from __future__ import annotations

import hmac
import ipaddress

from fastapi import Request


class Denied(Exception):
    """A caller who may not; the text says what is missing."""

    def __init__(self, reason: str, status: int) -> None:
        """Say why, with the HTTP status."""
        super().__init__(reason)
        self.status = status


class Access:
    """With a token every call under /v1 needs it; without, changes are for loopback only."""

    def __init__(self, token: str | None) -> None:
        """Take the token.

        Raises:
            ValueError: It is empty or not ASCII.
        """
        if token is not None and (not token or not token.isascii()):
            raise ValueError("the token must be ASCII and not empty")
        self._token = token

    async def is_authorized(self, request: Request) -> None:
        """Let a caller ask for tokens and look.

        Raises:
            Denied: The token is missing or wrong.
        """
        if self._token is None:
            return
        given = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
        if not hmac.compare_digest(given.encode(), self._token.encode()):
            raise Denied("give the server's token as `Authorization: Bearer ...`", 401)

    async def may_change(self, request: Request) -> None:
        """Let a caller change what is served.

        Raises:
            Denied: The token is missing or wrong, or there is none and the caller is elsewhere.
        """
        await self.is_authorized(request)
        if self._token is None and not _is_loopback(request):
            raise Denied("without a token changes are accepted from this machine only", 403)


def _is_loopback(request: Request) -> bool:
    if request.client is None:
        return False
    try:
        address = ipaddress.ip_address(request.client.host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return address.is_loopback or (mapped is not None and mapped.is_loopback)
