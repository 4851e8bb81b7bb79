"""Wait until all nodes are there, and name those that are missing.

torchrun itself waits for them silently.

On every node, before torchrun:

python launch/wait_for_nodes.py --nnodes=16 --endpoint=HEAD:29399 [--nodes=node01,node02,...]
[--seconds=600]

HEAD is the first node; the one that has its address counts the others. Ends with 0 on all nodes
when all are there, with 1 on all that are there when the time is up.
"""

from __future__ import annotations

import argparse
import re
import socket
import sys
import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from rlmath.config.terminal import escape_terminal
from rlmath.distributed.run_store import RunStore

STORE_NAME = "rlmath/nodes"
HOST_NAME = re.compile(r"[\w.-]{1,253}", re.ASCII)
POLL_SECONDS = 0.2
FIRST_LOG_SECONDS = 30.0
READ_SECONDS = 10.0
"""How long the head waits until the others have read how it ended."""
SLACK_SECONDS = 15.0


def main(argv: Sequence[str] | None = None) -> int:
    escape_terminal()
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--nnodes", type=int, required=True, help="how many nodes there must be")
    parser.add_argument(
        "--endpoint", required=True, help="HEAD:PORT, a port of the first node that is free"
    )
    parser.add_argument(
        "--nodes", default="", help="their names as `hostname` says, with commas between"
    )
    parser.add_argument(
        "--seconds", type=float, default=600.0, help="how long to wait (default 600)"
    )
    arguments = parser.parse_args(argv)
    host, _, port = arguments.endpoint.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        parser.error(
            f"--endpoint is {arguments.endpoint!r}; needed: HEAD:PORT, for example node01:29399"
        )
    own_name = socket.gethostname()
    try:
        if is_mine(host):
            store = dist.TCPStore("0.0.0.0", int(port), is_master=True, wait_for_workers=False)
            error = count_nodes(
                store,
                own_name,
                arguments.nnodes,
                seconds=arguments.seconds,
                names=arguments.nodes.split(","),
            )
        else:
            wait = timedelta(seconds=arguments.seconds + SLACK_SECONDS)
            store = dist.TCPStore(
                host, int(port), is_master=False, timeout=wait, wait_for_workers=False
            )
            error = report_to(store, own_name, arguments.seconds + SLACK_SECONDS)
    except (RuntimeError, OSError) as broken:
        error = f"{own_name} does not reach {arguments.endpoint}: {str(broken).splitlines()[0]}"
    if error:
        print(error, file=sys.stderr)
    return 1 if error else 0


def is_mine(host: str) -> bool:
    """Whether an address of this node has that name.

    OSError where nobody knows it."""
    family, kind, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind) as probe:
        try:
            probe.bind(address)
        except OSError:
            return False
    return True


def count_nodes(
    store: dist.TCPStore, first_node: str, n_nodes: int, seconds: float, names: Sequence[str]
) -> str:
    """Count the nodes, on the first one, until all are there or the time is over.

    `first_node` is the first node's name. Returns which nodes are missing, "" where all are there."""
    values = RunStore(store, STORE_NAME)
    started = time.monotonic()
    next_log = FIRST_LOG_SECONDS
    present = [first_node]
    while len(present) < n_nodes:
        present += [name for name in hosts_here(store, values) if name not in present]
        passed = time.monotonic() - started
        if passed >= seconds:
            break
        if passed >= next_log:
            next_log *= 2
            print(
                f"after {passed:.0f} s {missing_text(present, n_nodes, names)}",
                file=sys.stderr,
                flush=True,
            )
        time.sleep(POLL_SECONDS)
    error = missing_text(present, n_nodes, names) if len(present) < n_nodes else ""
    error = f"the nodes are not all there after {seconds:.0f} s: {error}" if error else ""
    readers = [f"left/{name}" for name in present[1:]]
    deadline = time.monotonic() + READ_SECONDS
    values.set("end", error)
    while len(values.get_all(readers)) < len(readers) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    return error


def hosts_here(store: dist.Store, values: RunStore) -> list[str]:
    """Names of the other hosts, each once: a node that was restarted is one node."""
    names = [
        key.removeprefix(f"{STORE_NAME}/host/") for key in store.list_keys() if "/host/" in key
    ]
    hosts = sorted(name for name in names if HOST_NAME.fullmatch(name))
    return [name for name in hosts if values.get(f"host/{name}") == name]


def missing_text(present: Sequence[str], n_nodes: int, names: Sequence[str]) -> str:
    """The sentence that says how many nodes are there, and which are missing.

    >>> missing_text(["a", "c"], 4, ["a", "b", "c", "d"])
    '2 of 4 nodes are here; missing: b, d'
    >>> missing_text(["a", "c"], 4, [""])
    '2 of 4 nodes are here (a, c); --nodes would name the 2 that are missing'
    >>> missing_text(["a"], 2, [""])
    '1 of 2 nodes is here (a); --nodes would name the 1 that is missing'
    """
    missing = [name for name in names if name and name not in present]
    verb = "is" if len(present) == 1 else "are"
    missing_count = n_nodes - len(present)
    if missing:
        return f"{len(present)} of {n_nodes} nodes {verb} here; missing: {', '.join(missing)}"
    text = f"{len(present)} of {n_nodes} nodes {verb} here ({', '.join(present)})"
    return (
        f"{text}; --nodes would name the {missing_count} that "
        f"{'is' if missing_count == 1 else 'are'} missing"
    )


def report_to(store: dist.TCPStore, node: str, seconds: float) -> str:
    """Runs on the other nodes; returns the first node's result."""
    values = RunStore(store, STORE_NAME)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        values.set(f"host/{node}", node)
        if isinstance(error := values.get("end"), str):
            values.set(f"left/{node}", node)
            return error
        time.sleep(POLL_SECONDS)
    return f"{node} got no answer from {store.host}:{store.port} within {seconds:.0f} s"


if __name__ == "__main__":
    sys.exit(main())
