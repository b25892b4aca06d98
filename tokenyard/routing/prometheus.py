"""Replicas from what vLLM publishes to a Prometheus server, as roughly as means over minutes tell.

Every five minutes make two equations for the estimator of `tokenyard.perf.online`: how long a mean
iteration took with the mean batch, by the gaps between tokens; and how long a mean prompt took to
be computed beside it. Batches hardly differ from one five minutes to the next, so the sum of the
four coefficients is told better than each of them: the prior says the rest.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from tokenyard.perf.online import PoolEstimator
from tokenyard.routing.fleet import IterationSpeed, MeasuredReplica

Row = dict[str, Any]
Ask = Callable[[str, dict[str, str]], Any]
"""Asks the API's `query` or `query_range`, and returns the result, a series each."""
_Key = tuple[str, str]
"""A replica's pod or instance, and the number of its engine."""
_STEP_S, _SPAN_S = 300, 6 * 3600
_VAGUE = 0.25
"""Weight of an equation of means."""
_DEFAULT_BATCH, _DEFAULT_KV_TOKENS = 256, 131_072.0
"""Where no replica was ever full, and where vLLM does not tell how many blocks it has."""
_GAPS = "vllm:inter_token_latency_seconds_{0}", "vllm:time_per_output_token_seconds_{0}"
"""Between tokens: today's name and the older one."""
_SUMS = {
    "gaps_s": " or ".join(f"increase({name.format('sum')}@)" for name in _GAPS),
    "gaps": " or ".join(f"increase({name.format('count')}@)" for name in _GAPS),
    "requests": "increase(vllm:time_to_first_token_seconds_count@)",
    "prompt": "increase(vllm:prompt_tokens_total@)",
    "cached": "increase(vllm:prefix_cache_hits_total@)",
    "prefill_s": "increase(vllm:request_prefill_time_seconds_sum@)",
    "prefills": "increase(vllm:request_prefill_time_seconds_count@)",
    "busy": "avg_over_time((vllm:num_requests_running# > bool 0)[300s:15s])",
}
"""What is asked for every step: # stands for the model, @ for that and the range."""


def read_vllm(ask: Ask, model: str | None) -> list[Row]:
    """Estimate the profiles of a model's replicas from the last six hours, a row each.

    Raises:
        ValueError: None is there now, none has answered anything, or several models are served and
            `model` is None.
    """

    def of_each(query: str) -> dict[_Key, dict[str, Any]]:
        return {_key(series): series for series in ask("query", {"query": query})}

    there = of_each("vllm:num_requests_running")
    served = {key: series["metric"].get("model_name", "") for key, series in there.items()}
    if model is None and len(models := {*served.values()}) > 1:
        raise ValueError(f"Prometheus has vLLM with {', '.join(sorted(models))}: give --model NAME")
    keys = sorted(key for key, name in served.items() if model in (None, name))
    of = "" if model is None else f'{{model_name="{model}"}}'
    if not keys:
        raise ValueError(f"Prometheus has no vllm:num_requests_running{of}")
    running, waiting = (
        of_each(f"max_over_time(vllm:num_requests_{what}{of}[{_SPAN_S}s])")
        for what in ("running", "waiting")
    )
    blocks = of_each("vllm:cache_config_info")
    iterations = _iterations(ask, of, keys)
    rows: list[Row] = []
    for key in keys:
        most, waited = (
            float(series[key]["value"][1]) if key in series else 0 for series in (running, waiting)
        )
        batch = max(int(most), 1 if waited else _DEFAULT_BATCH)
        replica = MeasuredReplica(
            name="/".join(key).removesuffix("/0"), max_batch=batch,
            token_budget=max(2048, 2 * batch), kv_capacity_tokens=_kv_tokens(blocks.get(key)),
            **iterations[key],
        )  # fmt: skip
        rows.append({"table": "replicas", **replica.model_dump(), "source": "estimated"})
    return rows


def _key(series: dict[str, Any]) -> _Key:
    labels = series["metric"]
    return labels.get("pod") or labels.get("instance", ""), labels.get("engine") or "0"


def _kv_tokens(info: dict[str, Any] | None) -> float:
    """Tokens that fit, by the labels of `vllm:cache_config_info`."""
    labels = info["metric"] if info else {}
    try:
        return float(labels["num_gpu_blocks"]) * float(labels["block_size"])
    except (KeyError, ValueError):
        return _DEFAULT_KV_TOKENS


def _iterations(ask: Ask, of: str, keys: list[_Key]) -> dict[_Key, dict[str, float]]:
    """How long iterations of every replica take; a ValueError where none has answered anything."""
    steps: dict[tuple[_Key, float], dict[str, float]] = {}
    end = int(time.time())
    span = {"start": str(end - _SPAN_S), "end": str(end), "step": str(_STEP_S)}
    for name, query in _SUMS.items():
        selected = query.replace("@", f"#[{_STEP_S}s]").replace("#", of)
        grouped = {"query": f"sum by (pod, instance, engine) ({selected})", **span}
        for series in ask("query_range", grouped):
            for at, value in series["values"]:
                if math.isfinite(number := float(value)):
                    steps.setdefault((_key(series), float(at)), {})[name] = number
    pool = PoolEstimator()
    replicas = {key: pool.add("/".join(key)) for key in keys}
    for (key, _), step in sorted(steps.items()):
        gaps, gaps_s, busy = (step.get(name, 0.0) for name in ("gaps", "gaps_s", "busy"))
        if key not in replicas or not gaps * gaps_s * busy > 0:
            continue
        batch = max(gaps_s / (busy * _STEP_S), 1.0)
        requests = max(step.get("requests", 0.0), 1.0)
        prompt = step.get("prompt", 0.0)
        computed = max(prompt - step.get("cached", 0.0), 0.0)
        held = (prompt + gaps / 2) / requests
        observe = replicas[key].observe
        observe(gaps_s / batch, gaps / batch, computed, gaps, gaps * held, _VAGUE)
        if (prefills := step.get("prefills", 0.0)) > 0 and computed > 0:
            beside = max(batch - 1.0, 0.0)
            own_s = step.get("prefill_s", 0.0) / prefills
            observe(own_s, 1.0, computed / requests, beside, beside * held, _VAGUE)
    if not any(replica.num_observations for replica in replicas.values()):
        raise ValueError(
            f"Prometheus has no tokens of vLLM{of} in the last {_SPAN_S // 3600} hours: nothing "
            "tells how fast the replicas are"
        )
    pool.share()
    return {
        key: dict(zip(IterationSpeed.model_fields, replica.shared_iteration.tolist(), strict=True))
        for key, replica in replicas.items()
    }
