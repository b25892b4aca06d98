"""Users for locust: `MODEL=m locust -f locustfile.py --headless ...`."""

import json
import os

from locust import FastHttpUser, HttpUser, constant, task

BODY = {
    "model": os.environ["MODEL"],
    "messages": [{"role": "user", "content": "Say something."}],
    "max_tokens": 8,
}


class Whole(HttpUser):
    """Asks for whole answers, by `requests`."""

    wait_time = constant(0.05)

    @task
    def ask(self):
        with self.client.post("/v1/chat/completions", json=BODY, catch_response=True) as answer:
            if answer.json()["usage"]["completion_tokens"] != 8:
                answer.failure("not all tokens came")


class Streaming(FastHttpUser):
    """Asks for streams, by `geventhttpclient`."""

    wait_time = constant(0.05)

    @task
    def ask(self):
        path, body = "/v1/chat/completions", {**BODY, "stream": True}
        with self.client.post(path, json=body, stream=True, catch_response=True) as answer:
            lines = answer.text.split("\n\n")
            events = [json.loads(one[6:]) for one in lines if one.startswith("data: {")]
            ends = [one["finish_reason"] for event in events for one in event["choices"]]
            if "data: [DONE]" not in lines or "length" not in ends:
                answer.failure("the stream has no end")
