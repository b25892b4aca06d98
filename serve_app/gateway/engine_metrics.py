"""The metrics that engines publish: one table of their names, and how pages are read."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from serve_app.endpoints import MetricNames
from serve_app.gateway.replicas import EndpointInfo

PATHS = ("/metrics", "/prometheus/metrics")
"""Paths of pages; trtllm-serve has JSON of its iterations at the first."""
_QUANTITIES = ("waiting", "running", "kv_used_fraction")
_STUCK_S, _STUCK_IN_USE_S, _USES = 10.0, 2.0, 4
"""Time without any change after which what is published is no news; with so many requests sent or
ended meanwhile the second."""


class _Engine(NamedTuple):
    """Names of an engine's metrics after its prefix, and fields of its own page.

    Of names between blanks the first that is there counts. `name{label=value}` are the samples with
    that label, `name@label` the numbers in that label, and `a*b` is a product.
    """

    name: str
    waiting: str = ""
    running: str = ""
    kv_used: str = ""
    kv_tokens: str = ""
    pages: str = ""
    """Paths of further pages, in JSON."""
    page_fields: tuple[str, str, str] = ("", "", "")
    """Longest prompt plus output, largest batch, and tokens of KV."""


# vLLM, SGLang, TensorRT-LLM: the model server protocol of llm-d-router; SGLang has gauges of pages
# since 0.5.11. llama.cpp: tools/server/README.md; its usage of KV went in 2025. TGI: its reference
# of metrics, and /info. Ray's agent puts `ray_` before all names, and `_` for `:`.
_KV_BLOCKS = "kv_cache_block_metrics{kv_cache_block_type="
_ENGINES = {
    "vllm": _Engine(
        "vllm", "num_requests_waiting", "num_requests_running",
        "kv_cache_usage_perc gpu_cache_usage_perc", "cache_config_info@kv_cache_size_tokens "
        "cache_config_info@num_gpu_blocks*cache_config_info@block_size",
    ),
    "sglang": _Engine(
        "sglang", "num_queue_reqs", "num_running_reqs", "token_usage", "max_total_num_tokens "
        "num_pages*page_size cache_config_info@num_pages*cache_config_info@page_size",
        "/get_server_info /server_info",
        ("context_length", "max_running_requests", "max_total_num_tokens"),
    ),
    "llamacpp": _Engine(
        "llama.cpp", "requests_deferred", "requests_processing", "kv_cache_usage_ratio", "",
        "/props", ("default_generation_settings.n_ctx", "total_slots",
                   "default_generation_settings.n_ctx*total_slots"),
    ),
    "tgi": _Engine(
        "tgi", "queue_size", "batch_current_size", "", "", "/info",
        ("max_total_tokens", "max_batch_size", "max_batch_total_tokens"),
    ),
    "trtllm": _Engine(
        "trtllm-serve", "num_requests_waiting", "num_requests_running", "kv_cache_utilization",
        "kv_cache_max_blocks*kv_cache_tokens_per_block",
    ),
    "nv_trt_llm": _Engine(
        "triton", "request_metrics{request_type=waiting}",
        "request_metrics{request_type=scheduled}", _KV_BLOCKS + "fraction}",
        f"{_KV_BLOCKS}max}}*{_KV_BLOCKS}tokens_per}}",
    ),
}  # fmt: skip
_BY_NAME = {engine.name: engine for engine in _ENGINES.values()}
_OWNERS = {"vllm": "vllm", "sglang": "sglang", "llamacpp": "llama.cpp"}
"""Engines, by `owned_by` of their models."""
_PREFIX = re.compile(rb"\n((?:ray_)?(%b)[:_])" % "|".join(_ENGINES).encode())


@dataclass(frozen=True)
class Reading:
    """What a page of metrics says; None: nothing usable."""

    engine: str | None = None
    waiting: int | None = None
    running: int | None = None
    kv_used_fraction: float | None = None
    kv_capacity_tokens: float | None = None

    @property
    def missing(self) -> tuple[str, ...]:
        """The values that the gateway's own counts stand in for."""
        return tuple(name for name in _QUANTITIES if getattr(self, name) is None)


def read_metrics(page: bytes, own: MetricNames) -> Reading:
    """Read a Prometheus page; the engines behind one endpoint are added up.

    Only the lines that are needed are read, and of these what is no number, or cannot be true, is
    as good as not there. `own` names are read in place of those that are known.
    """
    page = b"\n" + page
    prefix = _PREFIX.search(page)
    engine = _ENGINES[prefix[2].decode()] if prefix else _Engine("")

    def read(name: str | None, usual: str) -> list[float]:
        names = [name] if name else [prefix[1].decode() + end for end in usual.split() if prefix]
        return next((values for candidate in names if (values := _samples(page, candidate))), [])

    waiting, running = read(own.waiting, engine.waiting), read(own.running, engine.running)
    used = [fraction for fraction in read(own.kv_used, engine.kv_used) if fraction <= 1.0]
    sizes = (
        sum(total) * math.prod(sum(factor) / len(factor) if factor else 0.0 for factor in factors)
        for product in engine.kv_tokens.split()
        for total, *factors in [[read(None, part) for part in product.split("*")]]
    )
    return Reading(
        engine.name or None,
        int(sum(waiting)) if waiting else None,
        int(sum(running)) if running else None,
        sum(used) / len(used) if used else None,
        next(filter(None, sizes), None),
    )


def _samples(page: bytes, name: str) -> list[float]:
    """Usable values of a metric on a page that begins with a newline."""
    name, _, label = name.partition("@")
    name, _, pair = name.rstrip("}").replace('"', "").partition("{")
    lines = re.findall(rb"\n%b(?:\{(.*)\})?[ \t]+(\S+)" % re.escape(name.encode()), page)
    wanted = '{}="{}"'.format(*pair.split("=", 1)).encode() if "=" in pair else b""
    values = [text for labels, text in lines if wanted in labels]
    if label:
        labels = b"\n".join(labels for labels, _ in lines)
        values = re.findall(rb'\b%b="(.*?)"' % label.encode(), labels)
    return [number for text in values if 0 <= (number := _number(text)) < 1e9]


def _number(text: bytes) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


class StuckMetrics:
    """Finds metrics that stay constant for longer than those of a working engine."""

    def __init__(self) -> None:
        self._last, self._since_s, self._num_uses = Reading(), 0.0, 0
        self._stuck: set[str] = set()

    def left_out(self, reading: Reading, now_s: float, num_own: int, num_uses: int) -> Reading:
        """Return a reading without stuck metrics, which count again once they change.

        Args:
            reading: The latest.
            now_s: Any clock that does not go back, seconds.
            num_own: The gateway's requests in flight there; no more than these is never stuck.
            num_uses: Those that were sent or ended so far.
        """
        last, self._last = self._last, reading
        changed = {name for name in _QUANTITIES if getattr(reading, name) != getattr(last, name)}
        if changed:
            self._since_s, self._num_uses = now_s, num_uses
            self._stuck -= changed
        limit_s = _STUCK_IN_USE_S if num_uses - self._num_uses >= _USES else _STUCK_S
        num = (reading.waiting or 0) + (reading.running or 0)
        if now_s - self._since_s > limit_s and not 0 < num <= num_own:
            self._stuck = {name for name in _QUANTITIES if getattr(reading, name)}
        return replace(reading, **dict.fromkeys(self._stuck)) if self._stuck else reading


def read_models(answer: Any) -> EndpointInfo:
    """Read an answer of `GET /v1/models`; what cannot be read is None."""
    cards = answer.get("data") if isinstance(answer, dict) else None
    cards = [card for card in cards if isinstance(card, dict)] if isinstance(cards, list) else []
    names = frozenset(card["id"] for card in cards if isinstance(card.get("id"), str))
    lengths = [_count(card, "max_model_len") or 0 for card in cards]
    engine = _OWNERS.get(str(cards[0].get("owned_by"))) if cards else None
    return EndpointInfo(engine, names or None, max(lengths, default=0) or None)


def pages_of(engine: str | None) -> list[str]:
    """Paths of pages with more about an engine; only the first that exists is needed."""
    return _BY_NAME[engine].pages.split() if engine else []


def with_page(info: EndpointInfo, engine: str, page: Any) -> EndpointInfo:
    """Add what an engine's own page says."""
    length, batch, tokens = (
        _count(page, page_field) for page_field in _BY_NAME[engine].page_fields
    )
    length = info.max_model_len or length
    return replace(info, max_model_len=length, max_batch=batch, kv_capacity_tokens=tokens)


def _count(page: Any, fields: str) -> int | None:
    product = 1
    for field in fields.split("*"):
        value = page
        for key in field.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 10**9:
            return None
        product *= value
    return product
