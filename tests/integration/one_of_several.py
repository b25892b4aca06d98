"""A carrier or a decider of the tree on PYTHONPATH, until SIGTERM.

ROLE PORT ENDPOINT_URL FOLDER [WIRE_VERSION]: a file in the folder names the decider's socket, as
Ray Serve would. It writes a line when it listens, and one when a health check would fail.
"""

import asyncio
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

from one_gateway import make_gateway

from serve_app.engines.tokenizer import EstimatingTokenizer
from serve_app.gateway.carrier import Carrier
from serve_app.gateway.decider import CarriedPool, Decider
from serve_app.http.api import create_gateway_api
from serve_app.http.auth import Access
from serve_app.http.listener import Listener
from serve_app.http.passage import create_carrier_api

ACCESS = Access(None)


async def decide(url, place, version, ends):
    """As `serve_app.app.DeciderReplica`."""
    gateway, backend = make_gateway(url, CarriedPool)
    decider = Decider(gateway, create_gateway_api(gateway, EstimatingTokenizer(), ACCESS))
    speak(decider, version)
    backend.start()
    await decider.start()
    name(place, decider.path)
    watching = asyncio.create_task(watch(decider))
    say("listens")
    await ends.wait()
    if place.read_text() == decider.path:
        place.unlink()
    await decider.resign()
    await gateway.drain()
    await decider.stop()
    watching.cancel()
    gateway.manager.stop()
    await backend.stop()


async def carry(port, url, place, version, ends):
    """As `serve_app.ray_serve.carrier_replica.CarrierReplica`."""
    gateway, backend = make_gateway(url)

    async def find():
        try:
            return place.read_text()
        except FileNotFoundError:
            raise ConnectionRefusedError("there is none") from None

    carrier = Carrier(gateway, find)
    speak(carrier, version)
    await carrier.start()
    api = create_carrier_api(carrier, EstimatingTokenizer(), ACCESS)
    listener = Listener(api, gateway.cluster.limits)
    await listener.start("127.0.0.1", port)
    watching = asyncio.create_task(watch(carrier))
    say("listens")
    await ends.wait()
    await listener.hand_over()
    listener.refuse()
    while carrier.in_flight:
        await asyncio.sleep(0.05)
    await listener.stop()
    await carrier.stop()
    watching.cancel()
    gateway.manager.stop()
    await backend.stop()


async def watch(end):
    while getattr(end, "outdated", None) is None:
        await asyncio.sleep(0.05)
    say("outdated")


def name(place, path):
    """Put a path into a file in one step."""
    made = place.with_suffix(f".{os.getpid()}")
    made.write_text(path)
    made.replace(place)


def say(word):
    os.write(sys.stdout.fileno(), f"{word}\n".encode())


def speak(end, version):
    """Have an end be of a release with another wire."""
    if version is not None:
        end.hello = replace(end.hello, wire_version=int(version))


async def main(role, port, url, folder, version=None):
    ends = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ends.set)
    place = Path(folder) / "decider"
    if role == "decider":
        await decide(url, place, version, ends)
    else:
        await carry(int(port), url, place, version, ends)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
