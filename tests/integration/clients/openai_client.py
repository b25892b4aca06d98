"""Run by the interpreter of the official client's own environment: `openai_client.py URL MODEL`."""

import asyncio
import sys

import openai

SAID = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Say something."}]
ASKED = {"max_tokens": 12, "temperature": 0.5, "top_p": 0.9, "seed": 3}


def ask_for_all(url, model):
    """Models, texts and conversations, whole and in pieces; and what an unknown model is."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        assert model in [one.id for one in client.models.list()]
        assert client.models.retrieve(model).id == model
        text = client.completions.create(model=model, prompt="Once upon a time", **ASKED)
        assert text.usage.completion_tokens == 12, text
        stream = client.completions.create(
            model=model, prompt="Once upon a time", stream=True,
            stream_options={"include_usage": True}, **ASKED,
        )  # fmt: skip
        assert [one.usage for one in stream][-1].completion_tokens == 12
        whole = client.chat.completions.create(model=model, messages=SAID, user="me", **ASKED)
        assert whole.choices[0].message.role == "assistant"
        assert whole.choices[0].finish_reason == "length"
        raw = client.chat.completions.with_raw_response.create(model=model, messages=SAID, **ASKED)
        assert raw.headers["x-request-id"]
        with client.chat.completions.stream(model=model, messages=SAID, **ASKED) as events:
            assert [one.type for one in events].count("content.delta") >= 1
            assert events.current_completion_snapshot.choices[0].message.content
        assert refusal(client, "nobody's") == "model_not_found"


def refusal(client, model):
    """The code of a 404."""
    try:
        client.chat.completions.create(model=model, messages=SAID)
    except openai.NotFoundError as error:
        return error.code
    raise AssertionError("an unknown model was served")


async def ask_at_once(url, model):
    """Sixteen conversations at once: streams, and whole answers."""
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:

        async def ask(number):
            create = client.chat.completions.create
            if number % 2:
                return (await create(model=model, messages=SAID, **ASKED)).choices[0].finish_reason
            stream = await create(model=model, messages=SAID, stream=True, **ASKED)
            return [one async for one in stream if one.choices][-1].choices[0].finish_reason

        assert set(await asyncio.gather(*map(ask, range(16)))) == {"length"}


if __name__ == "__main__":
    ask_for_all(*sys.argv[1:])
    asyncio.run(ask_at_once(*sys.argv[1:]))
