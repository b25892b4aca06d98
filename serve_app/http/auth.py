"""Who may ask, and who may change: holders of bearer keys, or local callers where allowed."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from starlette.requests import HTTPConnection

from serve_app.gateway.callers import (
    ADMIN_TOKEN,
    ANYBODY,
    TOKEN,
    UNLIMITED,
    ApiKey,
    Caller,
    CallerLimits,
    KeyFile,
    KeyRing,
)
from serve_app.policy.audit_log import ACTOR

_PROXY_HEADERS = ("forwarded", "via", "x-real-ip", "x-client-ip", "true-client-ip")
_PROXY_PREFIXES = ("x-forwarded-", "cf-", "x-envoy-", "x-original-")
_LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
_KEY_HEADERS = ("authorization", "x-api-key")
"""OpenAI's clients have the first, Anthropic's the second."""


class Denied(Exception):
    """A caller may not do this; the text says what is missing."""

    def __init__(self, reason: str, status: int) -> None:
        super().__init__(reason)
        self.status = status


class Access:
    """Who may use the gateway and who may change it: keys of a file, and two tokens.

    A token is a key without limits. Without any use key anybody who reaches the port may use the
    gateway. Without an admin's nobody changes it, but for callers on this machine where
    `local_admin` says so.
    """

    def __init__(
        self, token: str | None, admin_token: str | None = None, local_admin: bool = False,
        keys: KeyFile | None = None,
    ) -> None:  # fmt: skip
        """Take the tokens.

        Args:
            token: To ask for tokens and look; None: anybody may, unless there is a file of keys.
            admin_token: To change what is served, and to use it.
            local_admin: Let callers on this machine change what is served without a token.
            keys: More keys; `open` reads them.

        Raises:
            ValueError: A token is empty or not ASCII, or both are the same.
        """
        for secret in (token, admin_token):
            if secret is not None and (not secret or not secret.isascii()):
                raise ValueError("a token must be ASCII and not empty")
        if token is not None and token == admin_token:
            raise ValueError("the admin token must differ from the token that all callers have")
        given = ((TOKEN, token, False), (ADMIN_TOKEN, admin_token, True))
        tokens = [ApiKey.of_token(name, secret, admin) for name, secret, admin in given if secret]
        self._tokens = KeyRing(tokens, UNLIMITED if token is None and keys is None else None)
        self._local_admin, self.keys = local_admin, keys
        self.has_keys = bool(tokens) or keys is not None
        """Whether callers need a key."""

    def open(self) -> None:
        """Read the key file, if there is one; a ValueError says that it cannot be used."""
        if self.keys is not None:
            self.keys.open()

    @property
    def tenants(self) -> frozenset[str]:
        """Tenants of all keys."""
        return frozenset().union(*(ring.tenants for ring in self._rings()))

    def limits_of(self, caller: Caller) -> CallerLimits | None:
        """Return the limits of a caller; None: no limits; a LookupError: there is no such key."""
        for ring in self._rings():
            if not caller.key and ring.without_key is not None:
                return ring.without_key
            if caller.key in ring.limits:
                return ring.limits[caller.key]
        raise LookupError(f"key {caller.key!r} is not known")

    async def is_authorized(self, request: HTTPConnection) -> None:
        """Check that a caller may look, or raise Denied."""
        self.check_use(request)

    def check_use(self, request: HTTPConnection, generates: bool = False) -> Caller:
        """Check that a caller may look, or ask models (`generates`); return it, or raise Denied."""
        if not self.has_keys:
            return ANYBODY
        key = self._key_of(request)
        if key is not None:
            if generates and not key.generates:
                raise Denied(f"{key.name!r} is an admin's key, which asks no models", 403)
            models = None if key.models is None else frozenset(key.models)
            return Caller(key.tenant or "", key.name, _address_of(request), models)
        # Whoever gives a key means it. Where there are none, clients must give something.
        is_wrong = self.keys is not None and any(
            header in request.headers for header in _KEY_HEADERS
        )
        for ring in self._rings():
            if ring.without_key is not None and not is_wrong:
                is_free = ring.without_key == UNLIMITED
                return ANYBODY if is_free else Caller(address=_address_of(request))
        raise Denied("give the server's token as `Authorization: Bearer ...`", 401)

    async def may_see_all(self, request: HTTPConnection) -> None:
        """Check that a caller may see all tenants, or raise Denied: a tenant's key may not."""
        caller = self.check_use(request)
        if self.keys is not None and caller.key != TOKEN and not self.is_admin(request):
            raise Denied("this is of all tenants: give an admin's key, or the server's token", 403)

    async def may_change(self, request: HTTPConnection) -> None:
        """Check that a caller may change what is served, or raise Denied; note who it is.

        Without an admin's key it must be on this machine, where that counts.
        """
        ACTOR.set(self._actor_of(request))

    async def may_change_policies(self, request: HTTPConnection) -> None:
        """Check that a caller may change who decides, or raise Denied; note who it is."""
        if (key := self.autopilot_key(request)) is None:
            return await self.may_change(request)
        ACTOR.set(f"{key.name} at {_address_of(request)}")

    def autopilot_key(self, request: HTTPConnection) -> ApiKey | None:
        """The key of an autopilot that is no admin's; None: the caller has none."""
        key = self._key_of(request)
        return key if key is not None and key.autopilot and not key.admin else None

    def is_admin(self, request: HTTPConnection) -> bool:
        """Whether a caller may change what is served."""
        try:
            self._actor_of(request)
        except Denied:
            return False
        return True

    def _actor_of(self, request: HTTPConnection) -> str:
        """Return the name of who changes something; raises what `may_change` raises."""
        key, address = self._key_of(request), _address_of(request)
        if key is not None and key.admin:
            return f"{key.name} at {address}"
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
        return f"somebody at {address}"

    def _rings(self) -> tuple[KeyRing, ...]:
        return (self._tokens,) if self.keys is None else (self._tokens, self.keys.value)

    def _key_of(self, request: HTTPConnection) -> ApiKey | None:
        """The key of a caller; None: it sends none, or an unknown one."""
        # As the server has it: `request.headers` would be made for each request.
        sent = dict(request.scope["headers"])
        scheme, _, given = sent.get(b"authorization", b"").decode("latin-1").partition(" ")
        if scheme.lower() != "bearer":
            given = sent.get(b"x-api-key", b"").decode("latin-1")
        if not given:
            return None
        keys = (ring.find(given.strip()) for ring in self._rings())
        return next((key for key in keys if key is not None), None)


def _address_of(request: HTTPConnection) -> str:
    return "" if request.client is None else request.client.host


def _is_local(request: HTTPConnection) -> bool:
    """Whether a caller is on this machine: not behind a proxy, and no page of another site."""
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
    """Whether a request came through a proxy; one that adds no header speaks HTTP/1.0."""
    if request.scope.get("http_version") == "1.0":
        return True
    names = request.headers.keys()
    return any(name in _PROXY_HEADERS or name.startswith(_PROXY_PREFIXES) for name in names)


def _name_of(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None
