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

MESSAGES = 3
TIMEOUT_SECONDS = 6.0
"""Of the group: all ranks must have met by then, so they begin together."""
PAUSE_SECONDS = 7.0
"""Messages may be further apart."""


def send_what_is_no_message(bridge: Bridge, behaviour: str) -> None:
    for rank in (0, 1):
        bridge._group.send([torch.tensor([8])], rank, 1).wait()
        if behaviour == "unreadable":
            bridge._group.send([torch.zeros(8, dtype=torch.uint8)], rank, 2).wait()
    time.sleep(2)
    os._exit(3)


def print_errors(mailbox: Mailbox, box: object) -> None:
    assert box.get(timeout=60) is None
    ways = {"receive": mailbox.receive, "send": lambda: mailbox.send(2, 0), "close": mailbox.close}
    for name, way in ways.items():
        try:
            way()
        except Exception as error:
            print(name, type(error).__name__, end="; ", flush=True)


rank, port, behaviour = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
store.set(f"here/{rank}", "")
store.wait([f"here/{other}" for other in range(4)])
bridge = Bridge(store, rank, 4, 2, TIMEOUT_SECONDS)
assert bridge.broadcast(f"of rank {rank}") == "of rank 0"
mailbox, found = Mailbox(bridge, [2, 3] if bridge.trains else [0, 1]), []
box = mailbox.box(str)
for number in range(MESSAGES):
    if not bridge.trains:
        mailbox.send_all((rank, number))
if behaviour != "closes" and rank == 3:
    send_what_is_no_message(bridge, behaviour)
if behaviour == "closes":
    time.sleep(PAUSE_SECONDS)
    while bridge.trains and len(found) < 2 * MESSAGES:
        found += [one.message for one in mailbox.receive(1.0)]
    if rank == 3:
        time.sleep(PAUSE_SECONDS)
    mailbox.close()
    print("received", sorted(found), flush=True)
elif bridge.trains:
    print_errors(mailbox, box)
else:
    store.wait(["done/0", "done/1"])
store.set(f"done/{rank}", "")
if rank == 0:  # it has the store
    store.wait([f"done/{other}" for other in range(4 if behaviour == "closes" else 3)])
os._exit(0)
