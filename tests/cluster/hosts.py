"""Hosts on one machine: network, process and mount namespaces, each with an sshd of its own.

A host sees its own processes, its own `/root`, `/tmp` and `/dev/shm`, and one network card on a
switch that nothing outside is connected to; `/root/shared` is the same folder on all. The process
namespace matters most: `ray stop`, which `ray up` runs on every host, kills every Ray process that
it can see.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

NETWORK = "10.77.0"
REPOSITORY = Path(__file__).parents[2]
CLEAN_ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
}
"""What a login on another machine would have: nothing of the environment of the tests."""
_SSHD = "/usr/sbin/sshd"
_INIT = """
set -e
hostname {name}
mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs /dev/shm
mkdir /run/sshd
cp {folder}/host_key {folder}/sshd_config /run/sshd
{borrow}
mkdir -p {folder}/root/shared
mount --bind {shared} {folder}/root/shared
mount --rbind {folder}/root /root
mount --rbind {folder}/tmp /tmp
exec {sshd} -D -f /run/sshd/sshd_config -E /run/sshd/log
"""
_SSHD_CONFIG = """
Port 22
HostKey /run/sshd/host_key
PermitRootLogin yes
PasswordAuthentication no
UsePAM no
PidFile none
"""


def why_not() -> str | None:
    """Say what is missing for hosts like these; None: nothing."""
    if os.geteuid() != 0:
        return "namespaces with an sshd need root"
    for tool in ("ip", "unshare", "nsenter", "setpriv", "ssh", "rsync", _SSHD):
        if shutil.which(tool) is None:
            return f"{tool} is not installed (Debian: openssh-server rsync iproute2 util-linux)"
    probe = "mount -t tmpfs tmpfs /run && ip link add tokenyard0 type veth peer name tokenyard1"
    unshare = ["unshare", "--mount", "--pid", "--uts", "--net", "--fork", "--mount-proc"]
    done = subprocess.run([*unshare, "sh", "-c", probe], capture_output=True, text=True)
    return None if done.returncode == 0 else f"no namespaces here: {done.stderr.strip()}"


@dataclass
class Host:
    """A host; `start` and `kill` are its power switch."""

    name: str
    number: int
    folder: Path
    prefix: str
    environment: dict[str, str] = field(default_factory=dict)
    """What an administrator has put into this host's login shell."""
    _process: subprocess.Popen[bytes] | None = None
    _services: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def address(self) -> str:
        """Where the other hosts find it."""
        return f"{NETWORK}.{self.number}"

    @property
    def namespace(self) -> str:
        """Its network namespace."""
        return f"{self.prefix}{self.name}"

    def install(self, public_key: str) -> None:
        """Lay its disk: ssh keys, login shell, and wheels where others reach a package index.

        The virtual environment borrows the packages of the one that runs the tests, so that the
        launcher's own `pip install` finds all requirements met and builds without a network.
        """
        root = self.folder / "root"
        for made in (root / ".ssh", self.folder / "tmp", root / ".config/pip"):
            made.mkdir(parents=True)
        root.chmod(0o700)
        (self.folder / "tmp").chmod(0o1777)
        (root / ".ssh/authorized_keys").write_text(public_key)
        key = self.folder / "host_key"
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key))
        (self.folder / "sshd_config").write_text(_SSHD_CONFIG)
        lines = [f"export {name}={value}" for name, value in self.environment.items()]
        (root / ".bashrc").write_text("\n".join(lines) + "\n")
        (root / ".profile").write_text(". ~/.bashrc\n")
        pip = "[global]\nno-index = true\n[install]\nno-build-isolation = false\n"
        (root / ".config/pip/pip.conf").write_text(pip)
        _lay_environment(root / "tokenyard/.venv")

    def start(self) -> None:
        """Switch it on; it takes connections soon after."""
        inner = _INIT.format(
            name=self.name, folder=self.folder, sshd=_SSHD, borrow=self._borrowed(),
            shared=self.folder.parent / "shared",
        )  # fmt: skip
        unshare = ["unshare", "--mount", "--pid", "--uts", "--ipc", "--fork", "--mount-proc"]
        # The host ends with this process, however that ends.
        leash = ["setpriv", "--pdeathsig", "KILL"]
        command = ["ip", "netns", "exec", self.namespace, *leash, *unshare, "--kill-child"]
        self._process = subprocess.Popen(
            [*command, "bash", "-c", inner], stdin=subprocess.DEVNULL, env=CLEAN_ENVIRONMENT
        )
        _run("ip", "-n", self.namespace, "link", "set", "eth0", "up")
        # Without a default route Ray takes 127.0.0.1 for the address of its node.
        _run("ip", "-n", self.namespace, "route", "replace", "default", "via", f"{NETWORK}.254")
        deadline = time.monotonic() + 60
        while not self._listens():
            assert time.monotonic() < deadline, f"no sshd on {self.name}"
            time.sleep(0.1)

    def kill(self) -> None:
        """Pull the plug: nothing is said to anybody, every process is gone at once."""
        _run("ip", "-n", self.namespace, "link", "set", "eth0", "down")
        init = self._init_pid()
        if init is not None:
            os.kill(init, signal.SIGKILL)
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._process = None
        for service in self._services:
            service.wait()
        self._services = []

    @property
    def is_on(self) -> bool:
        """Whether it was started and not killed."""
        return self._process is not None

    def command(self, text: str) -> list[str]:
        """Return the command that runs `text` in a login shell on this host."""
        init = self._init_pid()
        assert init is not None, f"{self.name} is off"
        enter = ["nsenter", "--target", str(init), "--mount", "--uts", "--ipc", "--net", "--pid"]
        return [*enter, "bash", "--login", "-c", f"cd ~ && {text}"]

    def sh(
        self, text: str, timeout_s: float = 60.0, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run a command line on this host."""
        done = subprocess.run(
            self.command(text), capture_output=True, text=True, timeout=timeout_s,
            stdin=subprocess.DEVNULL,
            env=CLEAN_ENVIRONMENT,
        )  # fmt: skip
        assert not check or done.returncode == 0, (
            f"{self.name}: {text}: exit {done.returncode}\n{done.stdout[-4000:]}\n"
            f"{done.stderr[-4000:]}"
        )
        return done

    def _listens(self) -> bool:
        """Whether its sshd does, seen from outside: the host may not be ready to be entered."""
        ask = ["ip", "netns", "exec", self.namespace, "ss", "-ltnH", "sport = :22"]
        return bool(subprocess.run(ask, capture_output=True, check=True).stdout.strip())

    def run_service(self, text: str) -> None:
        """Run a command line on this host for as long as the host runs."""
        quiet = subprocess.DEVNULL
        self._services.append(
            subprocess.Popen(
                self.command(f"exec {text}"), stdout=quiet, stderr=quiet, env=CLEAN_ENVIRONMENT
            )
        )

    def processes(self) -> list[str]:
        """Command lines of all that runs on this host besides its sshd and this question."""
        lines = self.sh("ps -eo args --no-headers", check=False).stdout.splitlines()
        return [one for one in lines if not one.startswith(("sshd:", _SSHD, "ps -eo", "bash --lo"))]

    def _borrowed(self) -> str:
        """Commands that keep this machine's Python visible where the host's own disk hides it."""
        lines = []
        for path in (sys.base_prefix, sys.prefix):
            for hidden in ("root", "tmp"):
                if path.startswith(f"/{hidden}/"):
                    there = f"{self.folder}{path}"
                    lines.append(f"mkdir -p {there} && mount --bind {path} {there}")
        return "\n".join(lines)

    def _init_pid(self) -> int | None:
        """Process 1 of the host, as this machine counts."""
        if self._process is None:
            return None
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        found = children.read_text().split() if children.exists() else []
        return int(found[0]) if found else None


@contextlib.contextmanager
def lan(names: list[str], folder: Path) -> Iterator[dict[str, Host]]:
    """Hosts of these names on one switch; all that they are and run ends with the block."""
    _sweep_up()
    prefix = f"ty{os.getpid()}-"
    switch = f"{prefix}switch"
    hosts = {
        name: Host(name, number, folder / name, prefix) for number, name in enumerate(names, 1)
    }
    try:
        (folder / "shared").mkdir()
        _run("ip", "netns", "add", switch)
        _run("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "br0", "up")
        for host in hosts.values():
            _connect(host, switch)
        yield hosts
    finally:
        for host in hosts.values():
            if host.is_on:
                with contextlib.suppress(subprocess.CalledProcessError):
                    host.kill()
            _run("ip", "netns", "del", host.namespace, check=False)
        _run("ip", "netns", "del", switch, check=False)


def _sweep_up() -> None:
    """Delete networks that a test left which was killed."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    for found in re.findall(r"(?m)^ty(\d+)-(\w+)", listed.stdout):
        if not Path(f"/proc/{found[0]}").exists():
            _run("ip", "netns", "del", f"ty{found[0]}-{found[1]}", check=False)


def _connect(host: Host, switch: str) -> None:
    _run("ip", "netns", "add", host.namespace)
    _run(
        "ip", "-n", host.namespace, "link", "add", "eth0", "type", "veth",
        "peer", "name", f"port{host.number}", "netns", switch,
    )  # fmt: skip
    _run("ip", "-n", switch, "link", "set", f"port{host.number}", "master", "br0", "up")
    _run("ip", "-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", "eth0")
    for card in ("lo", "eth0"):
        _run("ip", "-n", host.namespace, "link", "set", card, "up")


def _lay_environment(folder: Path) -> None:
    _run(sys.executable, "-m", "venv", "--without-pip", str(folder))
    packages = sysconfig.get_paths()["purelib"]
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "packages.pth").write_text(f"{packages}\n")
    scripts = Path(sysconfig.get_paths()["scripts"])
    for name in ("pip", "ray", "serve", "mlflow", "moto_server"):
        if (scripts / name).exists():
            text = (scripts / name).read_text().split("\n", 1)[1]
            (folder / "bin" / name).write_text(f"#!/root/tokenyard/.venv/bin/python\n{text}")
            (folder / "bin" / name).chmod(0o755)


def _run(*command: str, check: bool = True) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if check and done.returncode:
        raise subprocess.CalledProcessError(done.returncode, command, done.stdout, done.stderr)
