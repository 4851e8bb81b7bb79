"""One rank of a run with two worlds, two ranks each: bridge_program.py RANK PORT BEHAVIOUR

Ranks 2 and 3 send messages to 0 and 1; rank 3 closes its mailbox long after rank 2 has ended. With another behaviour
than "closes" the last message of rank 3 breaks off or is none, and ranks 0 and 1 print what then raises what.
"""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist

from rlmath.distributed.bridge import Bridge, Mailbox

MESSAGES, TIMEOUT_SECONDS = 3, 2.0


def send_what_is_no_message(bridge: Bridge, behaviour: str) -> None:
    for rank in (0, 1):
        bridge._group.send([torch.tensor([8])], rank, 1).wait()
        if behaviour == "unreadable":
            bridge._group.send([torch.zeros(8, dtype=torch.uint8)], rank, 2).wait()
    time.sleep(TIMEOUT_SECONDS)
    os._exit(3)


def print_errors(mailbox: Mailbox, box: object) -> None:
    assert box.get(timeout=10 * TIMEOUT_SECONDS) is None
    ways = {"receive": mailbox.receive, "send": lambda: mailbox.send(2, 0), "close": mailbox.close}
    for name, way in ways.items():
        try:
            way()
        except Exception as error:
            print(name, type(error).__name__, end="; ", flush=True)


rank, port, behaviour = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
bridge = Bridge(store, rank, 4, 2, TIMEOUT_SECONDS)
assert bridge.broadcast(f"of rank {rank}") == "of rank 0"
mailbox, found = Mailbox(bridge, [2, 3] if bridge.trains else [0, 1]), []
box = mailbox.box(str)
for number in range(MESSAGES):
    if not bridge.trains:
        mailbox.send_all((rank, number))
if behaviour != "closes" and rank == 3:
    send_what_is_no_message(bridge, behaviour)
time.sleep(2 * TIMEOUT_SECONDS)  # messages may be as far apart as the heartbeat lets them
if behaviour == "closes":
    while bridge.trains and len(found) < 2 * MESSAGES:
        found += [one.message for one in mailbox.receive(1.0)]
    if rank == 3:
        time.sleep(TIMEOUT_SECONDS)
    mailbox.close()
    print("received", sorted(found), flush=True)
elif bridge.trains:
    print_errors(mailbox, box)
if rank == 0:
    time.sleep(TIMEOUT_SECONDS)  # it has the store
os._exit(0)
