"""The process that forks answer checkers. Started by `pool`, never imported by the trainer.

Why not multiprocessing's forkserver: its children import the trainer's main module again (torch, vLLM: many
seconds for every replaced worker), and it is one per process, so that whoever starts it first decides what it
has loaded.

A small process imports math-verify once, warms it up, and then forks a worker in milliseconds whenever it is
told to. It talks over one socket: "fork" comes with a file descriptor, the new worker's channel, and is
answered with its process id; "kill <id>" ends a worker. It ends itself, and the kernel then its workers, when
the pool's process is gone.

    python -m rlmath.rewards.forkserver <socket> <parent's process id> <memory limit, bytes> <seconds>
"""

from __future__ import annotations

import ctypes
import gc
import json
import logging
import os
import resource
import select
import signal
import socket
import sys
from multiprocessing.connection import Connection

from rlmath.rewards.verify import symbolic_verdict

PARENT_CHECK_SECONDS = 1.0
"""How soon an orphaned forkserver notices, should a forked copy of the parent still hold the socket open."""

GRACE_SECONDS = 5.0
"""How much later than the pool's limit the kernel ends a worker, should the pool not be there to do it."""

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def serve(control: socket.socket, parent: int, memory_bytes: int, timeout_seconds: float) -> None:
    """Forks and kills workers on demand until the parent is gone."""
    children: set[int] = set()
    control.send(b"ready")
    while os.getppid() == parent:
        readable, _, _ = select.select([control], [], [], PARENT_CHECK_SECONDS)
        _reap(children)
        if not readable:
            continue
        message, fds, _, _ = socket.recv_fds(control, 64, 1)
        if not message:
            break
        if message == b"fork":
            child = os.fork()
            if child == 0:
                control.close()
                _run_worker(fds[0], memory_bytes, timeout_seconds)
            os.close(fds[0])
            children.add(child)
            control.send(str(child).encode())
        else:
            child = int(message.removeprefix(b"kill "))
            if child in children:  # not reaped, so the id is still its own
                os.kill(child, signal.SIGKILL)
    for child in children:
        os.kill(child, signal.SIGKILL)


def _reap(children: set[int]) -> None:
    for child in tuple(children):
        if os.waitpid(child, os.WNOHANG)[0] == child:
            children.remove(child)


def _run_worker(channel_fd: int, memory_bytes: int, timeout_seconds: float) -> None:
    """A worker's whole life: one JSON question in, one JSON answer out, until the pool closes the channel."""
    forkserver = os.getppid()
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != forkserver:
        os._exit(1)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    try:
        _answer_questions(Connection(channel_fd), timeout_seconds)
    except (EOFError, OSError):
        os._exit(0)
    finally:
        os._exit(1)


def _answer_questions(channel: Connection, timeout_seconds: float) -> None:
    channel.send_bytes(b"ready")
    while True:
        question = json.loads(channel.recv_bytes())
        signal.setitimer(
            signal.ITIMER_REAL, timeout_seconds + GRACE_SECONDS
        )  # SIGALRM's default action: the end
        verdict = symbolic_verdict(question["answer"], question["solutions"])
        signal.setitimer(signal.ITIMER_REAL, 0)
        channel.send_bytes(json.dumps({"correct": verdict.correct, "verdict": verdict.verdict}).encode())


def main() -> None:
    control_fd, parent, memory_bytes, timeout_seconds = sys.argv[1:]
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches the whole group; the pool decides when we end
    logging.disable(
        logging.CRITICAL
    )  # math-verify warns that its time limits are off, and logs what it cannot parse
    symbolic_verdict(
        "\\frac{1}{2}", ("0.5", "x^2", "\\{1,2\\}")
    )  # so that no worker pays for the first parse
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=int(control_fd)) as control:
        serve(control, int(parent), int(memory_bytes), float(timeout_seconds))


if __name__ == "__main__":
    main()
