"""OpenAI's routes: the list of models, and descriptions of the routes that replicas answer."""

from __future__ import annotations

import math
import time
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header
from fastapi.responses import Response

from serve_app.gateway.gateway import Gateway
from serve_app.http.auth import Access
from serve_app.http.openai_schema import (
    ChatAnswer,
    ChatBody,
    CompletionAnswer,
    CompletionBody,
    ErrorAnswer,
    ModelCard,
    ModelList,
)
from serve_app.http.reasons import BadRequest
from serve_app.models import ModelCatalog

_ClassHeader = Annotated[str | None, Header(alias="x-service-tier", max_length=40)]
_ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorAnswer, "description": "Bad input"},
    401: {"model": ErrorAnswer, "description": "Token missing or wrong"},
    404: {"model": ErrorAnswer, "description": "Unknown model"},
    413: {"model": ErrorAnswer, "description": "Body too large"},
    429: {"model": ErrorAnswer, "description": "Too much in flight; see Retry-After"},
    503: {"model": ErrorAnswer, "description": "No replica could answer"},
}
described = APIRouter()
"""Routes of `serve_app.http.data_path` for the schema: nothing is ever sent here."""


@described.post("/v1/completions", response_model=CompletionAnswer, responses=_ERRORS)
def completions(body: CompletionBody, service_tier: _ClassHeader = None) -> Response:
    """Continue a prompt; `stream: true` gives server-sent events."""
    raise NotImplementedError


@described.post("/v1/chat/completions", response_model=ChatAnswer, responses=_ERRORS)
def chat_completions(body: ChatBody, service_tier: _ClassHeader = None) -> Response:
    """Answer a conversation; `stream: true` gives server-sent events."""
    raise NotImplementedError


def make_router(gateway: Gateway, access: Access) -> APIRouter:
    """Make OpenAI's routes about models."""
    router, is_authorized = APIRouter(), [Depends(access.is_authorized)]
    started_s, catalog = int(time.time()), ModelCatalog(gateway.cluster)

    def card_of(name: str) -> ModelCard:
        gateway.refresh()
        served = catalog.models[name]
        longest = gateway.max_tokens_of(served)
        length = int(longest) if math.isfinite(longest) else None
        return ModelCard(id=name, created=started_s, max_model_len=length, parent=served.parent)

    @router.get("/v1/models", dependencies=is_authorized, responses={401: _ERRORS[401]})
    async def models() -> ModelList:
        """List the models that are served, and their adapters."""
        return ModelList(data=[card_of(name) for name in catalog.models])

    @router.get(
        "/v1/models/{model:path}", dependencies=is_authorized,
        responses={status: _ERRORS[status] for status in (400, 401, 404)},
    )  # fmt: skip
    async def model(model: str) -> ModelCard:
        """Describe one of the models that are served."""
        if model not in catalog.models:
            raise BadRequest(catalog.refusal(model), 404, "model")
        return card_of(model)

    return router
