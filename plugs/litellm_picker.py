"""Lets a Tokenyard gateway pick the deployments of LiteLLM's proxy.

Put this file beside the proxy's YAML, and name it there: `callbacks: litellm_picker.instance`. It
needs nothing that LiteLLM does not bring. TOKENYARD_URL is the gateway's or the picker's HTTP
address, TOKENYARD_TOKEN a key, if it asks for one. Where it does not answer, LiteLLM picks itself.
"""

import os

import httpx
from litellm._logging import verbose_logger
from litellm.integrations.custom_logger import CustomLogger

URL = os.environ.get("TOKENYARD_URL", "http://127.0.0.1:9003")
TOKEN = os.environ.get("TOKENYARD_TOKEN")
_DECISION = "tokenyard_decision"
_OF_REQUEST = ("max_tokens", "max_completion_tokens", "stream", "user", "service_tier", "tools")
_TIMEOUT_S = 5.0


class Picker(CustomLogger):
    """Asks for each call, and tells what came of it."""

    def __init__(self) -> None:
        super().__init__()
        headers = {"authorization": f"Bearer {TOKEN}"} if TOKEN else {}
        self._client = httpx.AsyncClient(base_url=URL, headers=headers, timeout=_TIMEOUT_S)

    async def async_filter_deployments(
        self, model, healthy_deployments, messages, request_kwargs=None, parent_otel_span=None
    ):
        """Return the deployment that is picked, or all where none is."""
        kwargs = request_kwargs or {}
        body = {name: kwargs[name] for name in _OF_REQUEST if kwargs.get(name) is not None}
        try:
            answer = await self._client.post(
                "/v1/picks", json={**body, "model": model, "messages": messages or []}
            )
            answer.raise_for_status()
        except httpx.HTTPError as error:
            verbose_logger.warning("Tokenyard does not pick: %s", error)
            return healthy_deployments
        picked = answer.json()
        by_url = {_url_of(deployment): deployment for deployment in healthy_deployments}
        for url in picked["replica_ids"]:
            if url in by_url:
                metadata = kwargs.setdefault("metadata", {})
                metadata[_DECISION] = picked["decision_id"]
                return [by_url[url]]
        await self._report(picked["decision_id"], outcome="abort")
        return healthy_deployments

    async def async_log_success_event(self, kwargs, response_obj, start_time, end_time):
        """Tell the end of an answer, and its usage."""
        usage = getattr(response_obj, "usage", None)
        choices = getattr(response_obj, "choices", None) or [None]
        is_cut = getattr(choices[0], "finish_reason", None) == "length"
        await self._report(
            _decision_of(kwargs),
            outcome="length" if is_cut else "stop",
            output_tokens=getattr(usage, "completion_tokens", 0) or 0,
            prompt_tokens=getattr(usage, "prompt_tokens", 0) or 0,
        )

    async def async_log_failure_event(self, kwargs, response_obj, start_time, end_time):
        """Tell that a deployment failed."""
        await self._report(_decision_of(kwargs), outcome="failed")

    async def _report(self, decision, **fields):
        if decision is None:
            return
        try:
            await self._client.post(f"/v1/picks/{decision}", json=fields)
        except httpx.HTTPError as error:
            verbose_logger.warning("Tokenyard takes no report: %s", error)


def _url_of(deployment):
    """A deployment's URL as the gateway knows it."""
    base = deployment.get("litellm_params", {}).get("api_base") or ""
    return base.rstrip("/").removesuffix("/v1")


def _decision_of(kwargs):
    metadata = (kwargs.get("litellm_params") or {}).get("metadata") or {}
    return metadata.get(_DECISION)


instance = Picker()
