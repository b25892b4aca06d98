"""Endpoints of external pools as data: where they are, how they are found, what they publish."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    HttpUrl,
    field_validator,
    model_validator,
)

from tokenyard.config import FrozenModel

_PASSABLE = re.compile(
    r"(?!(authorization|connection|content-(encoding|length)|expect|host|keep-alive|proxy-.*|te|trailer"
    r"|transfer-encoding|upgrade|x-api-key|x-order-key.*|x-prompt-tokens)$)[a-z0-9!#$%&'*+.^_`|~-]+"
)


def _passable(name: str) -> str:
    if not _PASSABLE.fullmatch(name.lower()):
        raise ValueError(f"header {name!r} cannot be passed")
    return name.lower()


PassedHeader = Annotated[str, AfterValidator(_passable)]
"""Name of a caller's header that endpoints may get."""


def _absolute(path: Path) -> Path:
    if not path.is_absolute():
        raise ValueError(f"{path} must begin with /: it is one of the gateway's machine")
    return path


GatewayPath = Annotated[Path, AfterValidator(_absolute)]
"""A file on the machine where the gateway runs."""
_Port = Annotated[int, Field(ge=1, le=65_535)]
_ZmqAddress = Annotated[str, Field(pattern=r"^(tcp|ipc)://.+$")]
_Label = Annotated[str, Field(pattern=r"^[a-z0-9-]+$")]


class Endpoint(FrozenModel):
    """One replica of an external pool."""

    url: HttpUrl
    """Base of `/v1/completions`, with or without that `/v1`."""

    @field_validator("url")
    @classmethod
    def _holds_no_secret(cls, url: HttpUrl) -> HttpUrl:
        if url.username or url.password:
            # It names the replica in logs and on pages.
            raise ValueError("leave user and password out; api_key_env names the token's variable")
        return url

    @property
    def address(self) -> str:
        """Its URL without `/v1` and a slash at the end, by which it is known."""
        return str(self.url).rstrip("/").removesuffix("/v1").rstrip("/")


AnyEndpoint = Annotated[
    Endpoint, BeforeValidator(lambda given: {"url": given} if isinstance(given, str) else given)
]
"""`{url: ...}`, or the URL alone."""


class KubernetesService(FrozenModel):
    """A service of Kubernetes, or an InferencePool: what is ready of it is watched."""

    service: _Label | None = None
    """Its name."""
    inference_pool: _Label | None = None
    """Name of an InferencePool (`inference.networking.k8s.io/v1`), in place of a service. Its
    InferenceObjectives are read too: one of a priority below 0 is shed first."""
    namespace: _Label | None = None
    """None: the gateway's own."""
    port: _Port | str | None = None
    """The pods' (`targetPort`), by number or by its name in the service; None: the first. A pool
    names its own."""
    api_server: HttpUrl | None = None
    """None: that of the cluster where the gateway runs."""

    @model_validator(mode="after")
    def _check(self) -> KubernetesService:
        if (self.service is None) == (self.inference_pool is None):
            raise ValueError("give one of service and inference_pool")
        if self.inference_pool is not None and self.port is not None:
            raise ValueError("an InferencePool names its ports; leave port out")
        return self


class ServiceDiscovery(FrozenModel):
    """From where a pool's endpoints are known, beside those of the cluster file."""

    file: GatewayPath | None = None
    """YAML with a list `endpoints`, read anew when it changes."""
    dns: AnyEndpoint | None = None
    """Each address of its host is an endpoint."""
    kubernetes: KubernetesService | None = None


class MetricNames(FrozenModel):
    """Where endpoints publish metrics, and names that the gateway does not know by itself.

    A name may have a label: `name{label=value}`.
    """

    path: Annotated[str, Field(pattern=r"^/[!-~]*$")] | None = None
    """None: `/metrics`, or else `/prometheus/metrics`."""
    port: _Port | None = None
    """None: that of the endpoint."""
    waiting: str | None = None
    """Requests that wait in the engine."""
    running: str | None = None
    """Requests that the engine computes."""
    kv_used: str | None = None
    """A share, from 0 to 1."""


class KvEvents(FrozenModel):
    """Where replicas publish what their prefix caches hold: see `serve_app.gateway.kv_events`.

    Keys are those of vLLM's `--kv-events-config`; `*` in an address is the endpoint's host.
    """

    endpoint: _ZmqAddress = "tcp://*:5557"
    """Where events are published."""
    replay_endpoint: _ZmqAddress | None = None
    """Where those of the past are sent again; None: nowhere, and then a gateway that starts after
    its endpoints believes what it sent."""
    topic: str = ""
    """Prefix of the topics that are read; empty: all."""
    tokenizer: str | None = None
    """Folder with the model's tokenizer, or a hub id; None: the pool's `model`, where that is a
    folder, or that of an own pool of the same model."""


Found = Mapping[str, str | None]
"""URLs of endpoints; each with the URL that names its host, where it is an address of that."""
Pattern = Annotated[str, Field(pattern=r"^[0-9a-z*?.:/-]+$")]
"""A network, an address, or the name of a host with wildcards."""
_NEVER = ("0.0.0.0", "169.254.0.0/16", "224.0.0.0/4", "::", "fe80::/10", "ff00::/8")
"""Networks that only `allowed` opens; the metadata services of clouds are among them."""


def is_allowed(host: str, allowed: Sequence[str]) -> bool:
    """Whether an endpoint that comes at run time may be on a host, a name or an address.

    Without patterns all are allowed but link-local, multicast and unspecified addresses.
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return not allowed or any(fnmatchcase(host, pattern) for pattern in allowed)
    address = getattr(address, "ipv4_mapped", None) or address
    networks = [network for network in map(_network, allowed or _NEVER) if network]
    is_in = any(address in network for network in networks)
    return is_in == bool(allowed)


def _network(pattern: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    try:
        return ipaddress.ip_network(pattern, strict=False)
    except ValueError:
        return None


class Autoscaling(FrozenModel):
    """How many endpoints a pool should have, for what starts and ends them: HPA, KEDA."""

    scenario: str
    """Allocation scenario, by name or YAML path: GPU, model, SLO and the most GPUs."""
    tensor_parallel: Annotated[int, Field(ge=1)] = 1
    """GPUs of one endpoint."""
    policy: str = "autoscaler_70"
    """champion, a policy file (.npz) or an allocation rule's name."""
    min_replicas: Annotated[int, Field(ge=1)] = 1
    """Fewest that are recommended; the most are as many as the scenario has GPUs for."""


class PeerSettings(FrozenModel):
    """Other gateways and pickers before the same replicas: see `serve_app.gateway.peers`."""

    listen: _ZmqAddress
    """Where this one tells what it sends, as ZeroMQ names addresses: `tcp://0.0.0.0:9005`."""
    connect: tuple[_ZmqAddress, ...]
    """Where the others do: `tcp://10.0.0.2:9005`. Its own address among them does no harm."""
