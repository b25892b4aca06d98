"""Records docs/console.gif and docs/console.png: the gateway's page before emulated fleets.

    python docs/figures/record_console.py

It needs chromium with its driver, and takes seven minutes.
"""

import io
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from PIL import Image, ImageDraw, ImageFont
from selenium import webdriver

ROOT = Path(__file__).resolve().parents[2]
PORT, SIZE, WIDTH, CAPTION = 8791, (1280, 1000), 900, 36
BEFORE_S, EVERY_S, FRAMES = 24.0, 2.0, 26
URL = f"http://127.0.0.1:{PORT}"
LOAD = f"pipelines/replay.py --url {URL} --rate 7 --length-scale 0.06 --duration-s 150"
AGENTS = (
    f"benchmarks/live_sessions.py --url {URL} --repeats 1 "
    "--arms 'marginal_delay+sjf@60 index_las:lease_s=1:growth_tokens=40:hold_s=12'"
)
L4 = {"gpu": "l4", "llm": "llama2_7b", "time_scale": 10}
ALLOCATION = {
    "scenario": "emulated_l4x4",
    "policy": "autoscaler_70",
    "start": {"parallelism": "data", "num_gpus": 1},
    "template": {
        "name": "l4",
        "replica_cpus": 0.05,
        "config": {"model": "emulated", "emulates": L4, "max_batch": 8, "rank_cpus": 0.1},
    },
}


@dataclass(frozen=True)
class Part:
    """A cluster with a few fields of its own, its load, and where on the page to look."""

    caption: str
    cluster: str
    load: str
    fields: dict = field(default_factory=dict)
    section: str = "status"
    canary: str | None = None


PARTS = (
    Part(
        "A worse policy gets half of the requests, and is stopped",
        "emulated",
        LOAD,
        {"classes": [{"name": "default", "response_s": 4.0}]},
        canary="round_robin+sjf@60",
    ),
    Part(
        "Load comes, and the allocator gives the pool more GPUs",
        "emulated",
        LOAD,
        {"pools": [], "allocation": ALLOCATION},
        "allocation",
    ),
    Part(
        "Sessions that do not fit into KV memory are held",
        "emulated_sessions",
        AGENTS,
        section="waiting",
    ),
)


def ask(path, body=None):
    """Ask the gateway, and return its answer."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{URL}{path}", data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def wait_until_served(limit_s=240.0):
    """Wait for the gateway's port and its replicas."""
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        try:
            ask("/healthz")
            return
        except OSError:
            time.sleep(1.0)
    raise SystemExit("the gateway does not answer")


@contextmanager
def running(command):
    """A script of ours that runs meanwhile."""
    environment = os.environ | {"TOKENYARD_LOCAL_ADMIN": "1"}
    process = subprocess.Popen([sys.executable, *command], cwd=ROOT, env=environment)
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def record(part, browser):
    """Serve the cluster, send it load, and return pictures of the page."""
    shipped = (ROOT / f"serve_app/clusters/{part.cluster}.yaml").read_text(encoding="utf-8")
    cluster = Path(tempfile.mkdtemp(), "cluster.yaml")
    cluster.write_text(yaml.safe_dump(yaml.safe_load(shipped) | part.fields), encoding="utf-8")
    serve = f"pipelines/deploy.py --policy marginal_delay+sjf@60 --port {PORT} --cluster {cluster}"
    with running(serve.split()):
        wait_until_served()
        browser.get(URL)
        with running(shlex.split(part.load)):
            time.sleep(BEFORE_S)
            for number in range(FRAMES):
                if part.canary and number == 3:
                    canary = {"action": "canary", "policy": part.canary, "share": 0.5}
                    ask("/v1/policies", canary)
                look = "document.getElementById(arguments[0]).scrollIntoView({block: 'nearest'})"
                browser.execute_script(look, part.section)
                yield captioned(browser.get_screenshot_as_png(), part.caption)
                time.sleep(EVERY_S)
            if part.canary:
                height = browser.execute_script("return document.body.scrollHeight")
                browser.set_window_size(SIZE[0], height + 140)  # Its frame counts.
                browser.execute_script("scrollTo(0, 0)")
                time.sleep(2.0)
                browser.save_screenshot(str(ROOT / "docs/console.png"))
                browser.set_window_size(*SIZE)


def captioned(png, caption):
    """A smaller picture, with a line of text above it."""
    page = Image.open(io.BytesIO(png)).convert("RGB")
    size = (WIDTH, page.height * WIDTH // page.width)
    picture = Image.new("RGB", (WIDTH, size[1] + CAPTION), "#16202e")
    picture.paste(page.resize(size, Image.Resampling.LANCZOS), (0, CAPTION))
    font = ImageFont.load_default(17)
    ImageDraw.Draw(picture).text((14, 8), caption, fill="white", font=font)
    return picture


def main():
    """Record the parts one after another into one picture."""
    options = webdriver.ChromeOptions()
    for argument in ("--headless=new", "--no-sandbox", "--hide-scrollbars"):
        options.add_argument(argument)
    with webdriver.Chrome(options=options) as browser:
        browser.set_window_size(*SIZE)
        frames = [frame for part in PARTS for frame in record(part, browser)]
    # One palette for all, so that colours do not flicker.
    ends = Image.new("RGB", (frames[0].width, frames[0].height * len(PARTS)))
    for number, frame in enumerate(frames[FRAMES - 1 :: FRAMES]):
        ends.paste(frame, (0, number * frame.height))
    palette = ends.quantize(256)
    small = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    path = ROOT / "docs/console.gif"
    small[0].save(path, save_all=True, append_images=small[1:], duration=400, loop=0, optimize=True)
    sys.stdout.write(f"{path}: {path.stat().st_size / 1e6:.1f} MB\n")


if __name__ == "__main__":
    main()
