"""The endpoints of a service of Kubernetes: its EndpointSlices, listed and then watched."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

from serve_app.endpoints import Found, KubernetesService
from serve_app.gateway.upstream import Origin, UpstreamClient, url_of

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Folder with a pod's token, its namespace, and the certificate of the API server's issuer."""
_AGAIN_S = 0.5
_LIST_S, _WATCH_S = 10.0, 240
_MAX_LIST_BYTES = 64 << 20


async def watch_service(
    service: KubernetesService, use: Callable[[Found], None], fail: Callable[[str], None]
) -> None:
    """Watch without end.

    `use` is called with the URLs of ready endpoints, each with one that names the service, and
    `fail` with why nothing new is known.
    """
    while True:
        try:
            watch = _Watch(service, use)
            try:
                await watch.run()
            finally:
                await watch.client.close()
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            fail(f"the API server of Kubernetes: {error or type(error).__name__}")
        await asyncio.sleep(_AGAIN_S)


class _Watch:
    """One list of endpoints, and its changes from then on."""

    def __init__(self, service: KubernetesService, use: Callable[[Found], None]) -> None:
        url = str(service.api_server or "").rstrip("/")
        if not url:
            host = os.environ.get("KUBERNETES_SERVICE_HOST")
            if host is None:
                raise ValueError("no pod of Kubernetes runs here: give api_server")
            url = url_of(host, int(os.environ["KUBERNETES_SERVICE_PORT"]), "https")
        issuer = ACCOUNT / "ca.crt"
        tls = ssl.create_default_context(cafile=issuer if issuer.exists() else None)
        self._origin, self.client = Origin.of(url), UpstreamClient(_LIST_S, tls)
        self._service, self._use, self._slices = service, use, dict[str, Any]()
        self._namespace = service.namespace or (ACCOUNT / "namespace").read_text().strip()

    async def run(self) -> None:
        """List and watch; return once Kubernetes no longer has the changes since."""
        async with asyncio.timeout(_LIST_S):
            status, body = await self.client.get(self._origin, self._head(""), _MAX_LIST_BYTES)
        if status != 200:
            raise ValueError(f"it answered {status}")
        listed = json.loads(body)
        self._slices = {item["metadata"]["name"]: item for item in listed["items"]}
        self._tell()
        version = listed["metadata"]["resourceVersion"]
        while version:
            version = await self._follow(version)
            await asyncio.sleep(_AGAIN_S / 5)

    async def _follow(self, version: str) -> str | None:
        """Apply changes until the answer ends; return the last version, None: list again."""
        query = f"&watch=1&allowWatchBookmarks=true&resourceVersion={quote(version)}"
        head, rest = self._head(f"{query}&timeoutSeconds={_WATCH_S}"), b""
        async with asyncio.timeout(_WATCH_S + _LIST_S):
            connection = await self.client.send(self._origin, head)
            try:
                while connection.status == 200 and (piece := await connection.read()):
                    *lines, rest = (rest + piece).split(b"\n")
                    for event in map(json.loads, filter(None, lines)):
                        if event["type"] == "ERROR":
                            return None  # Such as 410, Gone.
                        version = self._take(event["type"], event["object"])
                    self._tell()
            finally:
                self.client.release(connection)
        return version if connection.status == 200 else None

    def _take(self, kind: str, item: Any) -> str:
        if kind == "DELETED":
            self._slices.pop(item["metadata"]["name"], None)
        elif kind != "BOOKMARK":
            self._slices[item["metadata"]["name"]] = item
        return str(item["metadata"]["resourceVersion"])

    def _tell(self) -> None:
        """Report the ready endpoints; of a service with both kinds of IP, those of IPv4."""
        wanted, urls = self._service.port, dict[str, str | None]()
        kinds = {item["addressType"] for item in self._slices.values()}
        for item in self._slices.values():
            listed = item.get("ports") or ()
            ports = [port["port"] for port in listed if wanted in (None, port.get("name"))]
            ports = [wanted] if isinstance(wanted, int) else ports
            if not ports or (item["addressType"] == "IPv6" and "IPv4" in kinds):
                continue
            named = url_of(f"{self._service.service}.{self._namespace}.svc", ports[0])
            for endpoint in item.get("endpoints") or ():
                if (endpoint.get("conditions") or {}).get("ready") is not False:
                    urls[url_of(endpoint["addresses"][0], ports[0])] = named
        self._use(urls)

    def _head(self, query: str) -> bytes:
        token = ACCOUNT / "token"  # Kubernetes puts another there now and then.
        key = f"authorization: Bearer {token.read_text().strip()}\r\n" if token.exists() else ""
        label = quote(f"kubernetes.io/service-name={self._service.service}")
        path = f"/apis/discovery.k8s.io/v1/namespaces/{self._namespace}/endpointslices"
        path += f"?labelSelector={label}{query}"
        return self._origin.head(b"GET", path.encode(), key.encode(), 0)
