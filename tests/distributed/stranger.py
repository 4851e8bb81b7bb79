"""A stranger who reaches a run's key-value store, lists its keys and writes over those of ours, or deletes them.

python -m tests.distributed.stranger HOST PORT SECONDS
"""

from __future__ import annotations

import random
import re
import sys
import time
from datetime import timedelta

import torch.distributed as dist

OURS = re.compile(r"(^|/)rlmath/(rendezvous|heartbeat|rollout|evaluation)/")
"""The others are torch's own: whoever writes there ends the run, and we cannot help it."""
FAILURE = '{"kind": "failed", "message": "\x1b[2J\x1b]0;owned\x07 it is over", "reporter": 0}'
STATUS = '{"rank": 7, "host": "\x1b[31m", "pid_namespace": "", "pid": 1, "left": true}'
GARBAGE = [
    "",
    "0",
    "-5",
    "999999",
    "\x1b[2J\x9bgarbage",
    FAILURE,
    STATUS,
    "[" * 100_000,
    "x" * 10**6,
    '"0"',
    "null",
]
GUESSED = ["rlmath/rendezvous/start", "rlmath/rendezvous/info/0", "rlmath/rendezvous/info/99"]


def disturb(store: dist.Store, seconds: float, seed: int = 0, pause: float = 0.4) -> list[str]:
    """Write or delete all keys of ours, again and again; the keys in order, each as often as it was."""
    draw, until, disturbed = random.Random(seed), time.monotonic() + seconds, []
    while time.monotonic() < until:
        keys = [key for key in store.list_keys() if OURS.search(key)]
        # Where a failure of the run would be.
        keys += [re.sub(r"status/\d+$", "failure", key) for key in keys if "/status/" in key]
        for key in [*keys, *GUESSED]:
            disturbed.append(key)
            if draw.random() < 0.3:
                store.delete_key(key)
            else:
                store.set(key, draw.choice(GARBAGE))
        time.sleep(pause)
    return disturbed


def connect(host: str, port: int) -> dist.Store:
    for _ in range(10):
        try:
            return dist.TCPStore(host, port, timeout=timedelta(seconds=10), wait_for_workers=False)
        except RuntimeError:
            time.sleep(0.2)
    raise ConnectionError(f"no store at {host}:{port}")


def main() -> None:
    store = connect(sys.argv[1], int(sys.argv[2]))
    try:
        print(len(disturb(store, float(sys.argv[3]))))
    except RuntimeError:  # the run has ended
        print("ended")


if __name__ == "__main__":
    main()
