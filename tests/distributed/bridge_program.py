"""One rank of a run with two worlds, two ranks each: bridge_program.py RANK PORT DIES

Ranks 2 and 3 send messages to 0 and 1; rank 3 closes its mailbox long after rank 2 has ended. With DIES 1 it ends in
the middle, and the others print what they raise.
"""

from __future__ import annotations

import os
import sys
import time

import torch.distributed as dist

from rlmath.distributed.bridge import Bridge, Mailbox

MESSAGES, TIMEOUT_SECONDS = 3, 2.0

rank, port, dies = map(int, sys.argv[1:])
store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
bridge = Bridge(store, rank, 4, 2, TIMEOUT_SECONDS)
assert bridge.broadcast(f"of rank {rank}") == "of rank 0"
mailbox, found = Mailbox(bridge, [2, 3] if bridge.trains else [0, 1]), []
try:
    for number in range(MESSAGES):
        if not bridge.trains:
            mailbox.send_all((rank, number))
    if dies and rank == 3:
        os._exit(3)
    time.sleep(2 * TIMEOUT_SECONDS)  # messages may be as far apart as the heartbeat lets them
    while bridge.trains and len(found) < 2 * MESSAGES:
        found += [one.message for one in mailbox.receive(1.0)]
    if rank == 3:
        time.sleep(TIMEOUT_SECONDS)
    mailbox.close()
    print("received", sorted(found), flush=True)
except RuntimeError as error:
    print("raised", error, flush=True)
    os._exit(1)
if rank == 0:
    time.sleep(TIMEOUT_SECONDS)  # it has the store
os._exit(0)
