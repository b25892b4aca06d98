"""A process that publishes block events as vLLM does, as standard input tells it.

Arguments: two ports. Lines: `store FIRST NUMBER`, `remove FIRST NUMBER`, `clear`, and before any of
them `lose`: that one is not sent, but may be sent again. Blocks have two tokens, `FIRST * 1000` on.
"""

import sys
import threading
import time

import msgpack
import zmq

END = (-1).to_bytes(8, "big", signed=True)


def event_of(words):
    if words[0] == "clear":
        return ["AllBlocksCleared"]
    first, number = int(words[1]), int(words[2])
    hashes = [first * 1000 + at for at in range(number)]
    if words[0] == "remove":
        return ["BlockRemoved", hashes[::-1], "GPU"]
    ids = [first * 1000 + at for at in range(2 * number)]
    return ["BlockStored", hashes, None, ids, 2, None, "GPU", None]


def serve_replay(router, batches):
    while True:
        who, _, first = router.recv_multipart()
        for number, payload in (*batches,):
            if number >= int.from_bytes(first, "big"):
                router.send_multipart([who, b"", number.to_bytes(8, "big"), payload])
        router.send_multipart([who, b"", END, b""])


def main():
    context, batches = zmq.Context(), []
    published, router = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
    published.bind(f"tcp://127.0.0.1:{sys.argv[1]}")
    router.bind(f"tcp://127.0.0.1:{sys.argv[2]}")
    threading.Thread(target=serve_replay, args=(router, batches), daemon=True).start()
    for line in sys.stdin:
        words = line.split()
        is_lost = words[0] == "lose"
        payload = msgpack.packb([time.time(), [event_of(words[is_lost:])], 0])
        batches.append((len(batches), payload))
        if not is_lost:
            number = batches[-1][0].to_bytes(8, "big")
            published.send_multipart([b"kv@pod@model", number, payload])


if __name__ == "__main__":
    main()
