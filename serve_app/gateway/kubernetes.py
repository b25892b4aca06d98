"""The endpoints of a service, or of an InferencePool, of Kubernetes, listed and then watched.

An InferencePool has the ready pods that its selector matches, on each of its ports. Its
InferenceObjectives say how important requests are that name them (Gateway API Inference Extension).
"""

from __future__ import annotations

import asyncio
import json
import os
import ssl
from collections.abc import Callable, Collection, Coroutine
from pathlib import Path
from typing import Any
from urllib.parse import quote

from serve_app.endpoints import Found, KubernetesService
from serve_app.gateway.upstream import Origin, UpstreamClient, url_of

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Folder with a pod's token, its namespace, and the certificate of the API server's issuer."""
_AGAIN_S = 0.5
_LIST_S, _WATCH_S, _POOL_S = 10.0, 240, 30
"""Longest times of a list, of a watch, and of one of a pool's pods."""
_OBJECTIVES_S = 10.0
_POOLS = "/apis/inference.networking.k8s.io/v1/namespaces/{}/inferencepools/{}"
_OBJECTIVES = (
    "/apis/inference.networking.x-k8s.io/v1alpha2/namespaces/{}/inferenceobjectives",
    "/apis/llm-d.ai/v1alpha2/namespaces/{}/inferenceobjectives",
)
"""The group in which they began, and that of llm-d 0.8."""
_MAX_LIST_BYTES = 64 << 20


async def watch_service(
    service: KubernetesService, use: Callable[[Found], None], fail: Callable[[str], None]
) -> None:
    """Watch without end.

    `use` is called with the URLs of ready endpoints, of a service each with one that names it, and
    `fail` with why nothing new is known.
    """
    await _repeat(service, lambda api: _watch_endpoints(api, use), fail, _AGAIN_S)


async def list_objectives(
    service: KubernetesService, use: Callable[[dict[str, int]], None], fail: Callable[[str], None]
) -> None:
    """Call `use` with priorities of the pool's InferenceObjectives now and then, without end."""
    await _repeat(service, lambda api: _list_objectives(api, use), fail, _OBJECTIVES_S)


async def _repeat(
    service: KubernetesService, ask: Callable[[_Api], Coroutine[Any, Any, None]],
    fail: Callable[[str], None], pause_s: float,
) -> None:  # fmt: skip
    while True:
        try:
            api = _Api(service)
            try:
                await ask(api)
            finally:
                await api.client.close()
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            fail(f"the API server of Kubernetes: {error or type(error).__name__}")
        await asyncio.sleep(pause_s)


async def _watch_endpoints(api: _Api, use: Callable[[Found], None]) -> None:
    """Report endpoints, until Kubernetes no longer has the changes since they were listed."""
    service, namespace = api.service, api.namespace
    if service.inference_pool is None:
        path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
        name = f"{service.service}.{namespace}.svc"
        label = f"kubernetes.io/service-name={service.service}"
        await api.watch(path, label, lambda slices: use(_of_slices(slices, service, name)))
        return
    spec = (await api.get(_POOLS.format(namespace, service.inference_pool)))["spec"]
    ports = [port["number"] for port in spec["targetPorts"]]
    labels = ",".join(f"{key}={value}" for key, value in spec["selector"]["matchLabels"].items())
    path = f"/api/v1/namespaces/{namespace}/pods"
    # It returns each time, so that the pool is read anew.
    await api.watch(path, labels, lambda pods: use(_of_pods(pods, ports)), _POOL_S, False)


async def _list_objectives(api: _Api, use: Callable[[dict[str, int]], None]) -> None:
    for path in _OBJECTIVES:
        # A cluster may have neither of the two groups.
        listed = await api.get(path.format(api.namespace), may_be_missing=True)
        objectives = [item for item in listed.get("items", ()) if _is_of(item, api.service)]
        if objectives or path == _OBJECTIVES[-1]:
            use({o["metadata"]["name"]: int(o["spec"].get("priority") or 0) for o in objectives})
            return


def _is_of(objective: Any, service: KubernetesService) -> bool:
    return bool(objective["spec"]["poolRef"]["name"] == service.inference_pool)


class _Api:
    """The API server, as the service's settings and the pod's account name it."""

    def __init__(self, service: KubernetesService) -> None:
        url = str(service.api_server or "").rstrip("/")
        if not url:
            host = os.environ.get("KUBERNETES_SERVICE_HOST")
            if host is None:
                raise ValueError("no pod of Kubernetes runs here: give api_server")
            url = url_of(host, int(os.environ["KUBERNETES_SERVICE_PORT"]), "https")
        issuer = ACCOUNT / "ca.crt"
        tls = ssl.create_default_context(cafile=issuer if issuer.exists() else None)
        self._origin, self.client = Origin.of(url), UpstreamClient(_LIST_S, tls)
        self.service = service
        self.namespace = service.namespace or (ACCOUNT / "namespace").read_text().strip()

    async def get(self, path: str, may_be_missing: bool = False) -> Any:
        """Return the object at a path, an empty one where it may be missing."""
        async with asyncio.timeout(_LIST_S):
            status, body = await self.client.get(self._origin, self._head(path), _MAX_LIST_BYTES)
        if status == 404 and may_be_missing:
            return {}
        if status != 200:
            raise ValueError(f"it answered {status}")
        return json.loads(body)

    async def watch(
        self, path: str, labels: str, tell: Callable[[Collection[Any]], None],
        watch_s: int = _WATCH_S, goes_on: bool = True,
    ) -> None:  # fmt: skip
        """List the objects with some labels, tell them, and again at each change.

        Returns once Kubernetes no longer has the changes since; after one watch unless it goes on.
        """
        path += f"?labelSelector={quote(labels)}"
        listed = await self.get(path)
        objects = {item["metadata"]["name"]: item for item in listed["items"]}
        tell(objects.values())
        version = listed["metadata"]["resourceVersion"]
        while version:
            version = await self._follow(path, version, watch_s, objects, tell)
            await asyncio.sleep(_AGAIN_S / 5)
            if not goes_on:
                return

    async def _follow(
        self, path: str, version: str, watch_s: int, objects: dict[str, Any],
        tell: Callable[[Collection[Any]], None],
    ) -> str | None:  # fmt: skip
        """Apply changes until the answer ends; return the last version, None: list again."""
        path += f"&watch=1&allowWatchBookmarks=true&resourceVersion={quote(version)}"
        head, rest = self._head(f"{path}&timeoutSeconds={watch_s}"), b""
        async with asyncio.timeout(watch_s + _LIST_S):
            connection = await self.client.send(self._origin, head)
            try:
                while connection.status == 200 and (piece := await connection.read()):
                    *lines, rest = (rest + piece).split(b"\n")
                    for event in map(json.loads, filter(None, lines)):
                        if event["type"] == "ERROR":
                            return None  # Such as 410, Gone.
                        version = _take(event["type"], event["object"], objects)
                    tell(objects.values())
            finally:
                self.client.release(connection)
        return version if connection.status == 200 else None

    def _head(self, path: str) -> bytes:
        token = ACCOUNT / "token"  # Kubernetes puts another there now and then.
        key = f"authorization: Bearer {token.read_text().strip()}\r\n" if token.exists() else ""
        return self._origin.head(b"GET", path.encode(), key.encode(), 0)


def _take(kind: str, item: Any, objects: dict[str, Any]) -> str:
    if kind == "DELETED":
        objects.pop(item["metadata"]["name"], None)
    elif kind != "BOOKMARK":
        objects[item["metadata"]["name"]] = item
    return str(item["metadata"]["resourceVersion"])


def _of_slices(slices: Collection[Any], service: KubernetesService, name: str) -> Found:
    """Return the ready endpoints; of a service with both kinds of IP, those of IPv4."""
    wanted, urls = service.port, dict[str, str | None]()
    kinds = {item["addressType"] for item in slices}
    for item in slices:
        listed = item.get("ports") or ()
        ports = [port["port"] for port in listed if wanted in (None, port.get("name"))]
        ports = [wanted] if isinstance(wanted, int) else ports
        if not ports or (item["addressType"] == "IPv6" and "IPv4" in kinds):
            continue
        for endpoint in item.get("endpoints") or ():
            if (endpoint.get("conditions") or {}).get("ready") is not False:
                urls[url_of(endpoint["addresses"][0], ports[0])] = url_of(name, ports[0])
    return urls


def _of_pods(pods: Collection[Any], ports: list[int]) -> Found:
    """Return each port of the pods that are ready, and are not about to end."""
    urls: dict[str, str | None] = {}
    for pod in pods:
        states = {row["type"]: row["status"] for row in pod["status"].get("conditions") or ()}
        if states.get("Ready") == "True" and "deletionTimestamp" not in pod["metadata"]:
            urls |= {url_of(pod["status"]["podIP"], port): None for port in ports}
    return urls
