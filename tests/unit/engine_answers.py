"""What pools of tests answer by, in place of an engine behind HTTP: the engine's own writer."""

from contextlib import aclosing

from serve_app.http.answer_writer import AnswerWriter


async def relay(stream, attempt):
    """Write chunks of text as an engine does.

    Args:
        stream: Makes them of a generation.
        attempt: Whose answer it is.
    """
    request, downstream = attempt.request, attempt.downstream
    generation = request.generation
    writer = AnswerWriter(generation, request.request_id)
    async with aclosing(stream(generation)) as chunks:
        async for chunk in chunks:
            attempt.take(chunk.num_tokens, chunk.finish_reason)
            data = writer.add(chunk)
            if data and not downstream.begun:
                await downstream.begin(200, writer.headers)
            if data:
                await downstream.write(data)
    if not downstream.begun:
        await downstream.begin(200, writer.headers)
    await downstream.write(writer.finish())
