"""Records docs/console.gif and docs/console.png: an emulated fleet, and a canary that is stopped.

    python docs/figures/record_console.py

It needs chromium with its driver, and takes three minutes.
"""

import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from PIL import Image
from selenium import webdriver

ROOT = Path(__file__).resolve().parents[2]
PORT, SIZE, WIDTH = 8791, (1280, 1000), 900
BEFORE_S, EVERY_S, FRAMES = 30.0, 2.0, 40
SLO_S = 4.0
RULE, CANARY = "marginal_delay+sjf@60", "round_robin+sjf@60"
URL = f"http://127.0.0.1:{PORT}"


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


def main():
    """Serve, send load, begin a canary, take pictures."""
    environment = os.environ | {"TOKENYARD_LOCAL_ADMIN": "1"}
    # An SLO that matters at this load.
    cluster = Path(tempfile.mkdtemp(), "emulated.yaml")
    shipped = (ROOT / "serve_app/clusters/emulated.yaml").read_text(encoding="utf-8")
    cluster.write_text(
        shipped.replace("response_s: 30.0", f"response_s: {SLO_S}"), encoding="utf-8"
    )
    serve = [
        "pipelines/deploy.py",
        "--cluster",
        str(cluster),
        "--policy",
        RULE,
        "--port",
        str(PORT),
    ]
    load = [
        "pipelines/replay.py",
        "--url",
        URL,
        "--rate",
        "7",
        "--length-scale",
        "0.06",
        "--duration-s",
        "150",
    ]
    served = subprocess.Popen([sys.executable, *serve], cwd=ROOT, env=environment)
    loaded = None
    options = webdriver.ChromeOptions()
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--hide-scrollbars",
        "--force-device-scale-factor=1",
    ):
        options.add_argument(argument)
    try:
        wait_until_served()
        loaded = subprocess.Popen([sys.executable, *load], cwd=ROOT, env=environment)
        time.sleep(BEFORE_S)
        with webdriver.Chrome(options=options) as browser:
            browser.set_window_size(*SIZE)
            browser.get(URL)
            frames = []
            for number in range(FRAMES):
                if number == 3:
                    ask("/v1/policies", {"action": "canary", "policy": CANARY, "share": 0.5})
                frames.append(
                    Image.open(io.BytesIO(browser.get_screenshot_as_png())).convert("RGB")
                )
                time.sleep(EVERY_S)
            height = browser.execute_script("return document.body.scrollHeight")
            browser.set_window_size(SIZE[0], height)
            time.sleep(2.0)
            browser.save_screenshot(str(ROOT / "docs/console.png"))
        size = (WIDTH, frames[0].height * WIDTH // frames[0].width)
        # One palette for all, so that colours do not flicker.
        palette = frames[-1].resize(size, Image.Resampling.LANCZOS).quantize(128)
        small = [
            frame.resize(size, Image.Resampling.LANCZOS).quantize(
                palette=palette, dither=Image.Dither.NONE
            )
            for frame in frames
        ]
        path = ROOT / "docs/console.gif"
        small[0].save(
            path, save_all=True, append_images=small[1:], duration=400, loop=0, optimize=True
        )
        sys.stdout.write(f"{path}: {path.stat().st_size / 1e6:.1f} MB\n")
    finally:
        for process in (loaded, served):
            if process is not None:
                process.send_signal(signal.SIGTERM)
                process.wait()


if __name__ == "__main__":
    main()
