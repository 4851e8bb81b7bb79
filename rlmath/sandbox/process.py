"""A sandbox: the forked process that executes the calls of one completion.

It is confined before the first of them.

It reads requests from its channel and writes a reply to each. The channel is its only descriptor,
beside /dev/null as standard streams. What it says is not trusted: see `server`.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import sys
from dataclasses import dataclass
from typing import NoReturn

from rlmath.sandbox import kernel
from rlmath.sandbox.calls import Limits
from rlmath.sandbox.cell import Session
from rlmath.sandbox.frames import LENGTH_BYTES, Reply, decoded_request, encoded_reply, framed

CHANNEL = 3
"""The channel's descriptor."""
WARM_UP = "print(1)\n1 + 1"
FIRST_COPY = 16
"""Lowest descriptor for copies that wait for their places."""
_read = os.read
_write = os.write


@dataclass(frozen=True)
class Confinement:
    """The parts of the confinement that the server prepares once for all sandboxes."""

    limits: Limits
    ruleset: int | None
    """Descriptor of Landlock's rules."""
    instructions: bytes | None
    """The filter."""
    address_space_bytes: int
    """Address space of the server itself, and the limit."""
    null: int
    """Descriptor of /dev/null."""


def run_sandbox(channel: socket.socket, server: int, confinement: Confinement) -> NoReturn:
    """Confine this process and execute calls until the channel is closed.

    `server` is the process id of its parent."""
    try:
        try:
            _enter(channel.fileno(), server, confinement)
        except OSError as error:
            channel.sendall(
                framed(encoded_reply(Reply(0, "error", dropped_characters=0, text=str(error))))
            )
            raise
        # A first execution copies the server's memory that any call writes to, ahead of the calls.
        Session(confinement.limits.output_characters).execute(number=0, seed=0, code=WARM_UP)
        session = Session(confinement.limits.output_characters)
        while True:
            length = int.from_bytes(_read_bytes(LENGTH_BYTES), "big")
            number, seed, code = decoded_request(_read_bytes(length))
            _write_bytes(framed(encoded_reply(session.execute(number, seed, code))))
    finally:
        os._exit(1)  # also with an exception: nobody reads a traceback of it


def _enter(channel: int, server: int, confinement: Confinement) -> None:
    """Leave the server's group, signals and descriptors, then give up what the isolation denies."""
    os.setsid()
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    ruleset = _keep_descriptors(channel, confinement)
    sys.argv = [""]
    kernel.drop_capabilities()
    kernel.die_with_parent(server)
    kernel.set_resource_limits(
        confinement.address_space_bytes, confinement.limits.whole_cpu_seconds
    )
    kernel.confine(ruleset, confinement.instructions)


def _keep_descriptors(channel: int, confinement: Confinement) -> int | None:
    """Close all descriptors but the channel, the standard streams and Landlock's rules.

    The channel becomes CHANNEL, and the standard streams become /dev/null. Returns the new
    descriptor of the rules."""
    # Copies first: a descriptor may be one of those that others become.
    sources = [confinement.null, channel]
    if confinement.ruleset is not None:
        sources.append(confinement.ruleset)
    copies = [fcntl.fcntl(source, fcntl.F_DUPFD, FIRST_COPY) for source in sources]
    for stream in (0, 1, 2):
        os.dup2(copies[0], stream)
    os.dup2(copies[1], CHANNEL)
    ruleset = os.dup2(copies[2], CHANNEL + 1) if len(copies) > 2 else None
    os.closerange(CHANNEL + 1 if ruleset is None else CHANNEL + 2, os.sysconf("SC_OPEN_MAX"))
    return ruleset


def _read_bytes(count: int) -> bytes:
    """Read so many bytes from the channel; the process ends where it is closed."""
    parts = []
    while count:
        part = _read(CHANNEL, min(count, 2**16))
        if not part:
            os._exit(0)
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def _write_bytes(content: bytes) -> None:
    unsent = memoryview(content)
    while unsent:
        unsent = unsent[_write(CHANNEL, unsent) :]
