"""An engine for `ray.serve.llm` that computes nothing: words come at a pace.

Imported by replicas, in the environment that has vLLM.
"""

import asyncio
import json
import os
import time

from ray.llm._internal.serve.core.engine.protocol import LLMEngine
from ray.serve.llm.openai_api_models import ChatCompletionResponse, CompletionResponse

PREFILL_S, TOKEN_S = 0.02, 0.005


class PacedEngine(LLMEngine):
    def __init__(self, llm_config):
        self._model = llm_config.model_id

    async def start(self):
        pass

    async def check_health(self):
        pass

    def routing_stats(self):
        return {}

    async def _answer(self, request, kind, whole, piece_of):
        base = {
            "id": f"id-{os.getpid()}", "object": kind, "model": self._model,
            "created": int(time.time()),
        }  # fmt: skip
        num_tokens = request.max_tokens
        usage = {
            "prompt_tokens": 10, "completion_tokens": num_tokens, "total_tokens": 10 + num_tokens,
        }  # fmt: skip
        await asyncio.sleep(PREFILL_S)
        if not request.stream:
            await asyncio.sleep(num_tokens * TOKEN_S)
            choice = piece_of("word " * num_tokens, False) | {"index": 0, "finish_reason": "length"}
            yield whole(**base, choices=[choice], usage=usage)
            return
        for number in range(num_tokens):
            await asyncio.sleep(TOKEN_S)
            reason = "length" if number + 1 == num_tokens else None
            choice = piece_of("word ", True) | {"index": 0, "finish_reason": reason}
            yield f"data: {json.dumps(base | {'choices': [choice]})}\n\n"
        yield "data: [DONE]\n\n"

    async def chat(self, request, raw_request_info=None):
        def piece_of(text, is_streamed):
            return {"delta" if is_streamed else "message": {"role": "assistant", "content": text}}

        kind = "chat.completion.chunk" if request.stream else "chat.completion"
        async for part in self._answer(request, kind, ChatCompletionResponse, piece_of):
            yield part

    async def completions(self, request, raw_request_info=None):
        def piece_of(text, is_streamed):
            return {"text": text}

        async for part in self._answer(request, "text_completion", CompletionResponse, piece_of):
            yield part


PacedEngine.__abstractmethods__ = frozenset()  # Nobody asks for the rest here.
