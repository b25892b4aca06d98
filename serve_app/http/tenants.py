"""Who a request is for."""

from __future__ import annotations

from collections.abc import Iterable

TENANT_HEADER = b"x-tenant"


def tenant_of(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """Return the tenant that a request names; None: it names none.

    Args:
        headers: Of the request, as ASGI has them: names in lower case.
    """
    for name, value in headers:
        if name == TENANT_HEADER:
            return bytes(value).decode("latin-1")
    return None
