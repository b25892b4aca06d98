"""Who may ask, and who may change: two bearer tokens, or the machine itself where that is set."""

from __future__ import annotations

import hmac
import ipaddress
from urllib.parse import urlsplit

from starlette.requests import HTTPConnection

_PROXY_HEADERS = ("forwarded", "via", "x-real-ip", "x-client-ip", "true-client-ip")
_PROXY_PREFIXES = ("x-forwarded-", "cf-", "x-envoy-", "x-original-")
_LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")


class Denied(Exception):
    """A caller who may not; the text says what is missing."""

    def __init__(self, reason: str, status: int) -> None:
        """Say why, with the HTTP status."""
        super().__init__(reason)
        self.status = status


class Access:
    """A token to use the gateway, and another to change it.

    Without the first anybody who reaches the port may use it. Without the second nobody changes it,
    but for callers on this machine where `local_admin` says so.
    """

    def __init__(
        self, token: str | None, admin_token: str | None = None, local_admin: bool = False
    ) -> None:
        """Take the tokens.

        Args:
            token: To ask for tokens and look; None: anybody may.
            admin_token: To change what is served, and to use it.
            local_admin: Let callers on this machine change what is served without a token.

        Raises:
            ValueError: A token is empty or not ASCII, or both are the same.
        """
        for one in (token, admin_token):
            if one is not None and (not one or not one.isascii()):
                raise ValueError("a token must be ASCII and not empty")
        if token is not None and token == admin_token:
            raise ValueError("the admin token must differ from the token that all callers have")
        self._token, self._admin_token, self._local_admin = token, admin_token, local_admin

    async def is_authorized(self, request: HTTPConnection) -> None:
        """Let a caller ask for tokens and look.

        Raises:
            Denied: The token is missing or wrong.
        """
        self.check_use(request)

    def check_use(self, request: HTTPConnection) -> None:
        """As `is_authorized`, for whoever cannot wait."""
        if self._token is None or self._has(request, self._token):
            return
        if not self._has(request, self._admin_token):
            raise Denied("give the server's token as `Authorization: Bearer ...`", 401)

    async def may_change(self, request: HTTPConnection) -> None:
        """Let a caller change what is served.

        Raises:
            Denied: The admin token is missing or wrong, and the caller is not on this machine or
                that does not count.
        """
        if self._has(request, self._admin_token):
            return
        self.check_use(request)
        if not self._local_admin:
            raise Denied(
                "changes need the server's admin token as `Authorization: Bearer ...`", 403
            )
        if not _is_local(request):
            raise Denied(
                "without the server's admin token changes are accepted from this machine only, "
                "and from no proxy or foreign page",
                403,
            )

    @staticmethod
    def _has(request: HTTPConnection, token: str | None) -> bool:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if token is None or scheme.lower() != "bearer":
            return False
        return hmac.compare_digest(given.strip().encode(), token.encode())


def _is_local(request: HTTPConnection) -> bool:
    """Whether a caller is on this machine itself: no proxy, and no page of another site."""
    host, origin = request.headers.get("host", ""), request.headers.get("origin")
    return (
        _is_loopback(request)
        and not _is_forwarded(request)
        and _name_of(f"//{host}") in _LOCAL_HOSTS
        and (origin is None or urlsplit(origin).netloc == host)
    )


def _is_loopback(request: HTTPConnection) -> bool:
    if request.client is None:
        return False
    try:
        address = ipaddress.ip_address(request.client.host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    # Not all of 127.0.0.0/8: sidecars forward from other addresses of it.
    return str(mapped or address) in _LOCAL_HOSTS


def _is_forwarded(request: HTTPConnection) -> bool:
    """Whether a proxy has had the request; those that say nothing of it speak HTTP/1.0."""
    if request.scope.get("http_version") == "1.0":
        return True
    names = request.headers.keys()
    return any(one in _PROXY_HEADERS or one.startswith(_PROXY_PREFIXES) for one in names)


def _name_of(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None
