"""A Slurm of a test's own on this machine.

Munge, the controller and emulated nodes are all in one folder.

Nothing of it is in /etc or at Slurm's usual ports, it needs no other user and no root, and its
processes end with the test's (see `keeper`). Two nodes of one machine have one address and one host
name; else they are two machines to Slurm.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from tests.programs import REPOSITORY

NODES = ("n1", "n2")
COMMANDS = (
    "munged",
    "slurmctld",
    "slurmd",
    "srun",
    "sbatch",
    "scontrol",
    "sinfo",
    "squeue",
    "scancel",
)
ANSWER_SECONDS = 60.0

CONF = """
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdLogFile={folder}/slurmd.%n.log
SlurmdSpoolDir={folder}/spool.%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=0,sched_interval=2,sched_min_interval=0
ReturnToService=0
KillWait={kill_wait}
MinJobAge=3600
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
NodeName={nodes} NodeAddr=127.0.0.1 NodeHostname={host} Port={first_port}-{last_port} CPUs=2 RealMemory=1000
PartitionName=short Nodes={nodes} Default=YES MaxTime=60 State=UP
PartitionName=one Nodes={first_node} MaxTime=INFINITE State=UP
PartitionName=closed Nodes={nodes} State=DOWN
"""
KILL_WAIT_SECONDS = 30


class Cluster:
    """Use as a context: `with Cluster(folder) as cluster: cluster.ask("sinfo")`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = os.environ | {
            "SLURM_CONF": str(folder / "slurm.conf"),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(REPOSITORY),
        }

    def __enter__(self) -> Cluster:
        self._write_files()
        # Its own log is the last word of daemons that cannot open theirs.
        self._keeper = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("keeper.py"))],
            stdin=subprocess.PIPE,
            stdout=(self.folder / "keeper.log").open("w"),
            stderr=subprocess.STDOUT,
            env=self.environment,
            text=True,
        )
        try:
            self._start_munge()
            self.start("slurmctld", "-D")
            for node in NODES:
                self.start_node(node)
            self.wait_for(
                lambda: self._states() == {node: "idle" for node in NODES}, ANSWER_SECONDS
            )
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._keeper.stdin.close()
        self._keeper.wait(ANSWER_SECONDS)

    # ------------------------------------------------------------ what tests do with it

    def start(self, *command: str) -> None:
        """A daemon, in the foreground; it ends with the cluster."""
        self._keeper.stdin.write(
            json.dumps([shutil.which(command[0], path=PATH), *command[1:]]) + "\n"
        )
        self._keeper.stdin.flush()

    def start_node(self, node: str) -> None:
        self.start("slurmd", "-D", "-N", node)

    def ask(self, *command: str) -> str:
        """What one of Slurm's commands prints; CalledProcessError where it fails."""
        done = subprocess.run(
            command,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=ANSWER_SECONDS,
            check=True,
        )
        return done.stdout

    def job(self, number: str, key: str) -> str:
        """What Slurm says of a job: its "JobState", "ExitCode", "Restarts"."""
        words = self.ask("scontrol", "show", "job", number).split()
        return next(word.partition("=")[2] for word in words if word.startswith(f"{key}="))

    def set_down(self, node: str) -> None:
        """Take a node down as if the machine were switched off and Slurm had found out."""
        self.kill_node(node)
        self.ask("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=power lost")

    def kill_node(self, node: str) -> None:
        """Kill everything that runs on a node.

        That is its daemon, the daemons of its steps, and the steps' processes."""
        tasks = self.processes(lambda environment: environment.get("SLURMD_NODENAME") == node)
        steps = [step for task in tasks if (step := step_daemon_of(task)) is not None]
        for process in {*self._daemons_of(node), *steps, *tasks}:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def bring_back(self, node: str) -> None:
        self.start_node(node)
        self.wait_for(lambda: self._states().get(node, "").rstrip("*") == "down", ANSWER_SECONDS)
        self.ask("scontrol", "update", f"NodeName={node}", "State=RESUME")

    def processes_of(self, job: str) -> list[psutil.Process]:
        """All that run in a job, on any node."""
        return self.processes(lambda environment: environment.get("SLURM_JOB_ID") == job)

    def processes(self, chosen: Callable[[dict[str, str]], bool]) -> list[psutil.Process]:
        """The cluster's processes, by their environment."""
        processes = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                environment = process.environ()
                if environment.get("SLURM_CONF") == self.environment["SLURM_CONF"] and chosen(
                    environment
                ):
                    processes.append(process)
        return processes

    def wait_for(
        self, condition: Callable[[], bool], seconds: float, log: Path | None = None
    ) -> None:
        """Fails with the end of `log`, or of the daemons' logs."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, (
                f"nothing within {seconds} s\n{self._last_words(log)}"
            )
            time.sleep(0.2)

    # ------------------------------------------------------------ how it is made

    def _write_files(self) -> None:
        (self.folder / "state").mkdir(parents=True)
        self.folder.chmod(0o755)
        for node in NODES:
            (self.folder / f"spool.{node}").mkdir()
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        first, last = free_ports(len(NODES))
        text = CONF.format(
            controller_port=free_ports(1)[0],
            user=getpass.getuser(),
            folder=self.folder,
            kill_wait=KILL_WAIT_SECONDS,
            nodes=f"n[1-{len(NODES)}]",
            first_node=NODES[0],
            host=socket.gethostname(),
            first_port=first,
            last_port=last,
        )
        (self.folder / "slurm.conf").write_text(text)

    def _start_munge(self) -> None:
        files = {"key": "munge.key", "pid": "munge.pid", "log": "munge.log", "seed": "munge.seed"}
        paths = [f"--{name}-file={self.folder}/{file}" for name, file in files.items()]
        socket_path = self.folder / "munge.socket"
        self.start("munged", "--foreground", "--force", f"--socket={socket_path}", *paths)
        self.wait_for(socket_path.exists, ANSWER_SECONDS)

    def _states(self) -> dict[str, str]:
        try:
            lines = self.ask("sinfo", "--Node", "--noheader", "--partition=short", "--format=%N %t")
        except subprocess.SubprocessError:  # the controller does not answer yet
            return {}
        return dict(line.split() for line in lines.splitlines())

    def _daemons_of(self, node: str) -> Iterator[psutil.Process]:
        for process in psutil.Process(self._keeper.pid).children():
            with contextlib.suppress(psutil.Error):
                if process.cmdline()[-2:] == ["-N", node]:
                    yield process

    def _last_words(self, log: Path | None) -> str:
        paths = [log] if log is not None else sorted(self.folder.glob("*.log"))
        return "\n".join(
            f"== {path}\n{path.read_text()[-3000:]}" for path in paths if path.exists()
        )


PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/sbin", "/usr/sbin"])
"""Debian keeps daemons where only root looks."""


def missing_commands() -> list[str]:
    return [command for command in COMMANDS if shutil.which(command, path=PATH) is None]


def step_daemon_of(task: psutil.Process) -> psutil.Process | None:
    """Slurm's daemon for one step on one node, if it is what has started this process."""
    with contextlib.suppress(psutil.Error):
        parent = task.parent()
        if parent is not None and parent.name().startswith("slurmstepd"):
            return parent
    return None


def free_ports(count: int) -> tuple[int, int]:
    """The first and the last of so many free ports in a row.

    Nobody uses them, and they are below those that the kernel hands out."""
    for _ in range(200):
        first = 10000 + secrets.randbelow(20000)
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first, first + count - 1
    raise AssertionError("no free ports")
