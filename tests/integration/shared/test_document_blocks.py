"""The shell blocks of README and the pages of use run, page by page, as a reader would type them.

Ports and the endpoints' addresses are others, and what would take minutes is asked for less.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from document_blocks import ROOT, blocks, pages_of_use
from unit.openai_endpoint import an_openai_endpoint

from serve_app.http.free_port import free_port

pytestmark = pytest.mark.integration

LIMIT_S = 900.0  # A machine that others use too takes long.
PLUGS = Path(os.environ.get("TOKENYARD_PLUGS", ROOT / ".plugs"))
NEEDS = {"docs/envoy.md": PLUGS / "envoy" / "bin" / "envoy"}
PORTS = ("8000", "8010", "8080", "9002", "9003")
FOLDERS = ("benchmarks", "clusters", "examples", "pipelines")
LESS = {
    "evaluate": "--streams 2",
    "train": "--minutes 0.05",
    "benchmarks/gateway_decision.py": "--decisions 100",
}
"""Options of commands; what the block itself says counts where it says it."""


class Reader:
    """Somebody who follows a page in a folder of their own."""

    def __init__(self, folder, endpoints):
        self.folder = folder
        ports = {port: str(free_port()) for port in PORTS}
        for number, url in enumerate(endpoints):
            own = url.rpartition(":")[2]
            ports |= {f"800{number + 1}": own, f"10.0.0.{number + 5}:8000": f"127.0.0.1:{own}"}
        self.ports = ports
        self.servers = []
        for name in FOLDERS:
            (folder / name).symlink_to(ROOT / name)
        (folder / ".plugs").symlink_to(PLUGS)
        (folder / "bin").mkdir()
        self.script("python", f'exec {sys.executable} "$@"')
        # Not from this folder (-P): from another path numba would compile everything anew.
        self.script("tokenyard", f'exec {sys.executable} -P -m pipelines.cli "$@"')
        self.script("make", 'test "$*" = install')  # It is installed already.
        path = os.pathsep.join((str(folder / "bin"), os.environ["PATH"]))
        self.environment = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)}

    def script(self, name, line):
        path = self.folder / "bin" / name
        path.write_text(f"#!/bin/sh\n{line}\n")
        path.chmod(0o755)

    def moved(self, text):
        """The text with ports and addresses of this machine."""
        names = "|".join(re.escape(one) for one in sorted(self.ports, key=len, reverse=True))
        return re.sub(rf"(?<![\d.])({names})(?!\d)", lambda found: self.ports[found[0]], text)

    def lessened(self, text):
        """The commands of a shell block with options that make them small."""
        text = re.sub(
            r"^(.*\btokenyard serve)\b", rf"\1 --port {self.ports['8000']}", text, flags=re.M
        )
        for command, options in LESS.items():
            script = command if command.endswith(".py") else rf"pipelines/{command}\.py"
            begin = rf"^(tokenyard {command}|python {script})(?=\s)"
            text = re.sub(begin, rf"\1 {options}", text, flags=re.M)
        return text

    def does(self, block):
        text = self.moved(block.text)
        if name := block.marks.get("file"):
            (self.folder / name).write_text(text)
        elif "stays" in block.marks:
            self.starts(block, self.lessened(text))
        elif block.language == "python":
            self.runs(block, [sys.executable, "-P", "-c", text])
        else:
            self.runs(block, ["bash", "-euo", "pipefail", "-c", self.lessened(text)])

    def runs(self, block, command):
        ended = subprocess.run(
            command, cwd=self.folder, env=self.environment, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT_S,
        )  # fmt: skip
        assert ended.returncode == 0, f"{block.place}\n{block.text}\n{ended.stdout[-3000:]}"

    def starts(self, block, text):
        log = self.folder / f"server-{len(self.servers)}.log"
        with log.open("w") as file:
            server = subprocess.Popen(
                ["bash", "-c", text], cwd=self.folder, env=self.environment, stdout=file,
                stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        self.servers.append(server)
        url, until_s = self.moved(block.marks["stays"]), time.monotonic() + LIMIT_S
        while time.monotonic() < until_s and server.poll() is None:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(url, timeout=10).status_code < 400:
                    return
            time.sleep(0.1)
        raise AssertionError(f"{block.place}: {url} does not answer\n{log.read_text()[-3000:]}")

    def leaves(self):
        for server in self.servers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)
            server.wait()


NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
AS_NOTEBOOKS = {f"docs/tutorials/{path.stem}.md" for path in NOTEBOOKS}
"""Pages that run as notebooks: these have their blocks (tests/unit/shared/test_documents.py)."""
PAGES = [
    page
    for page in pages_of_use()
    if page not in AS_NOTEBOOKS and any(one.runs for one in blocks(page, "shell"))
]


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_says_works(page, tmp_path):
    if page in NEEDS and not NEEDS[page].exists():
        pytest.skip(f"no {NEEDS[page]}: `make plugs`")
    told = blocks(page)
    with contextlib.ExitStack() as stack:
        endpoints = [stack.enter_context(an_openai_endpoint("my-model"))[1] for _ in range(2)]
        reader = Reader(tmp_path, endpoints)
        stack.callback(reader.leaves)
        brought = {"my.csv", "fleet.yaml"} - {one.marks.get("file") for one in told}
        for one in blocks("docs/tutorials/own-fleet.md")[:2]:
            if page != one.page and (one.marks.get("file", "my.csv") in brought):
                reader.does(one)
        for block in told:
            if block.runs or ("file" in block.marks and "not run" not in block.marks):
                reader.does(block)


def as_program(cells, lessened):
    """The program of a notebook's cells, for a Python that knows no `!` and `%%`."""
    lines = ["import subprocess as _run"]
    for cell in cells:
        head, _, rest = cell.partition("\n")
        if head.startswith("%%writefile "):
            lines.append(f"open({head.split()[1]!r}, 'w').write({rest!r})")
            continue
        for line in cell.replace("\\\n", "").splitlines():
            text = lessened(line.removeprefix("!"))
            lines.append(f"_run.run({text!r}, shell=True, check=True)" if line[:1] == "!" else text)
    return "\n".join(lines)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_top_to_bottom(path, tmp_path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    run = [one for one in cells if one["cell_type"] == "code" and not one["metadata"]]
    told = ["".join(one["source"]) for one in run]
    reader, log = Reader(tmp_path, []), tmp_path / "log"
    with log.open("w") as file:
        ran = subprocess.Popen(
            [sys.executable, "-P", "-c", reader.moved(as_program(told, reader.lessened))],
            cwd=tmp_path, env=reader.environment | {"TMPDIR": str(tmp_path)}, stdout=file,
            stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
    reader.servers.append(ran)
    try:
        assert ran.wait(LIMIT_S) == 0, log.read_text()[-3000:]
    finally:
        reader.leaves()
