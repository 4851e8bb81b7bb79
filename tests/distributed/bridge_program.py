"""Runs with two worlds of two ranks each, one run of every behaviour beside the others.

    bridge_program.py

Ranks 2 and 3 send messages to 0 and 1; rank 3 closes its mailbox long after rank 2 has ended. With
the behaviours "breaks off" and "unreadable" the last message of rank 3 breaks off or is none, and
ranks 0 and 1 report which call then raises which error. The program prints a dictionary of what
every rank reports, by behaviour. All ranks are forks of one process, which has imported torch.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from rlmath.distributed.bridge import Bridge, Mailbox
from tests.programs import free_port

BEHAVIOURS = ("closes", "closes lazily", "breaks off", "unreadable")
"""Lazily: as in a run of many ranks."""
RANKS = 4
MESSAGES = 3
TIMEOUT_SECONDS = 6.0
"""Timeout of the group: all ranks must have met by then, so they begin together."""
PAUSE_SECONDS = 7.0
"""Messages may be further apart."""


def send_what_is_no_message(bridge: Bridge, behaviour: str) -> None:
    for rank in (0, 1):
        bridge._group.send([torch.tensor([8])], rank, 1).wait()
        if behaviour == "unreadable":
            bridge._group.send([torch.zeros(8, dtype=torch.uint8)], rank, 2).wait()
    time.sleep(2)
    os._exit(3)


def errors_of(mailbox: Mailbox, box: object) -> str:
    assert box.get(timeout=60) is None
    ways = {"receive": mailbox.receive, "send": lambda: mailbox.send(2, 0), "close": mailbox.close}
    errors = ""
    for name, way in ways.items():
        try:
            way()
        except Exception as error:
            errors += f"{name} {type(error).__name__}; "
    return errors


def run_rank(rank: int, port: int, behaviour: str, told: Connection) -> None:
    """One rank of a run; it sends what it tells."""
    if behaviour == "closes lazily":
        os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
    closes = behaviour.startswith("closes")
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    store.set(f"here/{rank}", "")
    store.wait([f"here/{other}" for other in range(RANKS)])
    bridge = Bridge(store, rank, RANKS, 2, TIMEOUT_SECONDS)
    assert bridge.broadcast(f"of rank {rank}") == "of rank 0"
    mailbox = Mailbox(bridge, [2, 3] if bridge.trains else [0, 1])
    received = []
    box = mailbox.box(str)
    for number in range(MESSAGES):
        if not bridge.trains:
            mailbox.send_all((rank, number))
    if not closes and rank == 3:
        send_what_is_no_message(bridge, behaviour)
    if closes:
        time.sleep(PAUSE_SECONDS)
        while bridge.trains and len(received) < 2 * MESSAGES:
            received += [envelope.message for envelope in mailbox.receive(1.0)]
        if rank == 3:
            time.sleep(PAUSE_SECONDS)
        mailbox.close()
        told.send(sorted(received))
    elif bridge.trains:
        told.send(errors_of(mailbox, box))
    else:
        store.wait(["done/0", "done/1"])
    store.set(f"done/{rank}", "")
    if rank == 0:  # it has the store
        store.wait([f"done/{other}" for other in range(RANKS if closes else RANKS - 1)])
    os._exit(0)


def what_is_told(connection: Connection) -> object:
    """None of a rank that ended without a word."""
    try:
        return connection.recv()
    except EOFError:
        return None


def main() -> None:
    fork = multiprocessing.get_context("fork")
    connections: dict[str, list[Connection]] = {}
    for behaviour in BEHAVIOURS:
        port = free_port()
        connections[behaviour] = []
        for rank in range(RANKS):
            receiver, sender = fork.Pipe(duplex=False)
            fork.Process(target=run_rank, args=(rank, port, behaviour, sender), daemon=True).start()
            sender.close()
            connections[behaviour].append(receiver)
    print(
        {
            name: [what_is_told(connection) for connection in ranks]
            for name, ranks in connections.items()
        }
    )
    sys.stdout.flush()


if __name__ == "__main__":
    main()
