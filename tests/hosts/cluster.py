"""Several hosts on one machine.

They are network namespaces with addresses, interfaces and host names of their own.

                      bridge (a namespace of its own)
            link0 |          | link1          ...
    node0: eth0 10.77.0.1    node1: ens1 10.77.0.2

Every program runs in the namespaces of its node for network, host name and process ids, so that
ranks see no process of another node, as on a cluster. Disks are shared. When the first process of a
program is killed, the kernel ends all others of it. Needs root.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.programs import ENVIRONMENT, REPOSITORY

PREFIX = "rlmath"
PORT = 29400
_NUMBERS = itertools.count()


def why_not() -> str | None:
    """Why there can be no namespaces here; None where there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [name for name in ("ip", "unshare") if shutil.which(name) is None]
    if missing:
        return f"no {', '.join(missing)} (Debian's iproute2 and util-linux)"
    probe = f"{PREFIX}-{os.getpid()}-probe"
    tries = (
        ["ip", "netns", "add", probe],
        ["ip", "-n", probe, "link", "add", "probe", "type", "bridge"],
    )
    try:
        for command in tries:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
            if done.returncode != 0:
                return f"`{' '.join(command)}` fails: {done.stderr.strip()}"
    finally:
        subprocess.run(["ip", "netns", "del", probe], capture_output=True, check=False, timeout=30)
    return None


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=30)


@dataclass
class Program:
    """A program on a node, with its console in a file."""

    process: subprocess.Popen[bytes]
    console_path: Path

    @property
    def console(self) -> str:
        return self.console_path.read_text(errors="replace")

    def ends_within(self, seconds: float) -> int:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"still there after {seconds} s:\n{self.console[-6000:]}"
            ) from None

    def everyone(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def ranks(self) -> dict[int, psutil.Process]:
        """The processes of the ranks, by rank.

        Processes that a rank has started have its environment, but not its parent."""
        processes = {}
        for process in self.everyone():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                parent = process.parent()
                if "RANK" in process.environ() and parent and "RANK" not in parent.environ():
                    processes[int(process.environ()["RANK"])] = process
        return processes

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(30)


@dataclass
class Node:
    """A host."""

    name: str
    space: str
    link: str
    interface: str
    bridge: str
    programs: list[Program] = field(default_factory=list)

    def start(
        self, command: Sequence[str], console: Path, environment: Mapping[str, str] | None = None
    ) -> Program:
        unshare_options = ("--uts", "--pid", "--fork", "--mount-proc", "--kill-child")
        named = ("sh", "-c", 'hostname "$0" && exec "$@"', self.name)
        whole = ["ip", "netns", "exec", self.space, "unshare", *unshare_options, *named, *command]
        # A name of its own for every start: consoles of earlier ones stay.
        path = console.with_name(f"{console.name}-{self.name}-{len(self.programs)}.txt")
        with path.open("wb") as output:
            process = subprocess.Popen(
                whole,
                cwd=REPOSITORY,
                env=ENVIRONMENT | dict(environment or {}),
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self.programs.append(Program(process, path))
        return self.programs[-1]

    def cut(self) -> None:
        """Nothing reaches the node any more, and nobody is told."""
        ip("-n", self.bridge, "link", "set", self.link, "down")

    def mend(self) -> None:
        ip("-n", self.bridge, "link", "set", self.link, "up")


@contextlib.contextmanager
def cluster(count: int) -> Iterator[list[Node]]:
    """So many nodes, which can reach each other by name; all is removed at the end of the block."""
    _remove_leftovers()
    prefix = f"{PREFIX}-{os.getpid()}-{next(_NUMBERS)}"
    bridge = f"{prefix}-bridge"
    nodes = [
        Node(f"node{i}", f"{prefix}-node{i}", f"link{i}", "eth0" if i == 0 else f"ens{i}", bridge)
        for i in range(count)
    ]
    try:
        ip("netns", "add", bridge)
        ip("-n", bridge, "link", "add", "bridge", "type", "bridge")
        ip("-n", bridge, "link", "set", "bridge", "up")
        names = "".join(f"10.77.0.{i + 1} node{i}\n" for i in range(count))
        for i, node in enumerate(nodes):
            _connect(node, f"10.77.0.{i + 1}/24", f"127.0.0.1 localhost\n{names}")
        yield nodes
    finally:
        for node in nodes:
            for program in node.programs:
                program.kill()
        for name in (*(node.space for node in nodes), bridge):
            _remove(name)


def _connect(node: Node, address: str, hosts: str) -> None:
    ip("netns", "add", node.space)
    pair = ("type", "veth", "peer", "name", node.interface, "netns", node.space)
    ip("link", "add", node.link, "netns", node.bridge, *pair)
    ip("-n", node.bridge, "link", "set", node.link, "master", "bridge")
    ip("-n", node.bridge, "link", "set", node.link, "up")
    ip("-n", node.space, "addr", "add", address, "dev", node.interface)
    for interface in ("lo", node.interface):
        ip("-n", node.space, "link", "set", interface, "up")
    # `ip netns exec` lays the files of this folder over those of /etc.
    files = Path("/etc/netns") / node.space
    files.mkdir(parents=True, exist_ok=True)
    (files / "hosts").write_text(hosts)


def _remove(space: str) -> None:
    pids = subprocess.run(
        ["ip", "netns", "pids", space], capture_output=True, text=True, check=False
    )
    for pid in pids.stdout.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False, timeout=30)
    shutil.rmtree(Path("/etc/netns") / space, ignore_errors=True)
    with contextlib.suppress(OSError):
        Path("/etc/netns").rmdir()  # if it is empty, and ours


def _remove_leftovers() -> None:
    """Remove what a test run that was killed has left."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False)
    for line in listed.stdout.splitlines():
        name = line.split()[0]
        kind, _, suffix = name.partition("-")
        owner = suffix.partition("-")[0]
        if kind == PREFIX and owner.isdecimal() and not psutil.pid_exists(int(owner)):
            _remove(name)
