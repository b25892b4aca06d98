"""An endpoint over HTTP whose engine batches continuously, at a pace that is known."""

import asyncio
import json
import time
from dataclasses import dataclass, field

import numpy as np
from unit.stub_endpoint import Stub, an_event

PAGE = """\
vllm:num_requests_waiting{engine="0"} %d
vllm:num_requests_running{engine="0"} %d
vllm:kv_cache_usage_perc{engine="0"} 0.1
"""


@dataclass(eq=False)
class _Sequence:
    prompt: int
    output: int
    events: asyncio.Queue = field(default_factory=asyncio.Queue)
    generated: int = 0


class PacedEndpoint(Stub):
    """Every iteration takes `iteration @ (1, prompt tokens, sequences that decode, their KV)`."""

    def __init__(self, iteration, max_batch=16):
        super().__init__()
        self.iteration = np.array(iteration)
        self.max_batch = max_batch
        self.waiting_now, self.running = [], []
        self.batches = []
        """What each iteration computed: 1, prompt tokens, sequences that decode, their KV."""
        self.took_s = []
        """How long it really took: a busy machine keeps no pace."""
        self.pages = {"/metrics": lambda: PAGE % (len(self.waiting_now), len(self.running))}
        self.has_work = asyncio.Event()

    async def run(self):
        """Iterate for ever."""
        due_s = ended_s = 0.0
        while True:
            while self.waiting_now and len(self.running) < self.max_batch:
                self.running.append(self.waiting_now.pop(0))
            if not self.running:
                self.has_work.clear()
                await self.has_work.wait()
                ended_s = time.perf_counter()
                continue
            new = [one for one in self.running if not one.generated]
            old = [one for one in self.running if one.generated]
            batch = [1, sum(one.prompt for one in new), len(old),
                     sum(one.prompt + one.generated for one in old)]  # fmt: skip
            self.batches.append(batch)
            # An iteration that ends late lets the next one begin earlier.
            due_s = max(due_s, time.perf_counter() - 0.05) + float(self.iteration @ batch)
            await asyncio.sleep(max(due_s - time.perf_counter(), 0.0))
            begun_s, ended_s = ended_s, time.perf_counter()
            self.took_s.append(ended_s - begun_s)
            for one in [*self.running]:
                one.generated += 1
                is_last = one.generated == one.output
                one.events.put_nowait(is_last)
                if is_last:
                    self.running.remove(one)

    async def _answer(self, reader, writer):
        self.num_asked += 1
        body = json.loads(self.bodies[-1])
        one = _Sequence(len(body["prompt"]), body["max_tokens"])
        self.waiting_now.append(one)
        self.has_work.set()
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
        writer.write(head + b"transfer-encoding: chunked\r\n\r\n")
        is_last = False
        while not is_last:
            is_last = await one.events.get()
            event = an_event("word ", "length" if is_last else None)
            writer.write(b"%x\r\n%b\r\n" % (len(event), event))
        usage = {"prompt_tokens": one.prompt, "completion_tokens": one.output}
        event = b"data: %b\n\n" % json.dumps({"choices": [], "usage": usage}).encode()
        writer.write(b"%x\r\n%b\r\n" % (len(event), event))
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        await writer.drain()
