"""How the ranks of a run find each other before they have a process group: in the key-value store of their launcher,
and over which network interface.

torchrun starts ranks once all nodes have joined its own rendezvous. From then on a rank may still be late, find a
mistake that only its node has, or never start; a process group would wait for it without naming it.

    every rank    registers as soon as its program runs                       info/<rank>, a ticket
    rank 0        answers every ticket with the name of this start            start/<ticket>
    every rank    calls `sync` with its report                                <start>/<name>/<rank>
    rank 0        waits until all reports are there, or the time is up,
                  and publishes the result                                    <start>/<name>/result

torchrun keeps the store when it restarts its ranks (--max-restarts), and its TORCHELASTIC_RESTART_COUNT differs from
node to node (pytorch/pytorch issue 108158). So the name of a start is rank 0's ticket, which is unique, and what an
earlier start left is never taken for an answer. Messages and bytes grow linearly with the number of ranks.
"""

from __future__ import annotations

import ipaddress
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta

import psutil
import torch.distributed as dist

from rlmath.distributed.ranks import (
    RankInfo,
    RankReport,
    RendezvousResult,
    problems_text,
    ranks_text,
    this_rank,
)

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
POLL_SECONDS = 0.1
PROBLEM_SECONDS = 10.0
"""How long rank 0 waits for further problems after the first one."""
FIRST_LOG_SECONDS = 30.0
"""Rank 0 logs which ranks are missing after so long, and again whenever that time has doubled."""
READ_SECONDS = 5.0
"""How long rank 0 waits for the others to read a result that ends the run."""
SLACK_SECONDS = 30.0
"""How much longer than rank 0 the others wait for the result."""


class MissingRanksError(RuntimeError):
    """Ranks are missing, or one of them failed; the message names them."""


CheckReports = Callable[[Mapping[int, RankReport]], RendezvousResult]
"""Runs on rank 0 with the reports of all ranks."""


class Rendezvous:
    """One per rank, from the start of its program until the process group exists."""

    def __init__(self, own: RankInfo, store: dist.Store) -> None:
        """Register this rank. RuntimeError where the store does not answer."""
        self.rank_info = own
        self._whole_store = store
        self._store = dist.PrefixStore("rlmath/rendezvous", store)
        self._ticket = self._store.add("tickets", 1)
        self._store.set(f"info/{own.rank}", json.dumps(asdict(own)))
        self._start = str(self._ticket) if own.rank == 0 else None
        self._answered = 0
        self._ranks_store: dist.Store | None = None

    def sync(self, name: str, report: RankReport, seconds: float, check: CheckReports) -> None:
        """Wait for all ranks; each of them calls it, with the same name, a new one each time.

        `check` is rank 0's; it gets the reports once all ranks are here. On all ranks ValueError where it or a rank
        found a mistake, MissingRanksError where ranks are missing after `seconds`, one has failed, or the store is
        lost.
        """
        try:
            if self.rank_info.rank == 0:
                result = self._coordinate(name, report, seconds, check)
            else:
                result = self._participate(name, report, seconds)
        except MissingRanksError:
            raise
        except RuntimeError as error:  # what torch's stores raise
            raise MissingRanksError(
                f"{self.rank_info} lost the run's key-value store at the start: the launcher of the first node or the "
                f"node has ended (look at its log), or the network to it is cut. {str(error).splitlines()[0]}"
            ) from error
        if result.error is not None:
            raise (ValueError if result.is_mistake else MissingRanksError)(result.error)

    def report_failure(self, reason: str) -> None:
        """Report, between two syncs, that this rank has failed; never raises."""
        if self._start is None:
            return
        try:
            key = f"{self._start}/failure/{self.rank_info.rank}"
            self._store.set(key, f"{self.rank_info} failed: {reason}")
            self._store.add(f"{self._start}/problems", 1)
        except RuntimeError as error:
            logger.debug("the failure could not be reported: %s", error)

    def group_store(self, seconds: float) -> dist.Store:
        """The store for this start's process group, in which waiting for a key ends after `seconds`. On a single node
        it lives in rank 0, so that the ranks can finish a step and save it when the launcher has been killed."""
        assert self._start is not None, "call sync first"
        if self.rank_info.several_nodes:
            self._whole_store.set_timeout(timedelta(seconds=seconds))
            return dist.PrefixStore(f"rlmath/group/{self._start}", self._whole_store)
        if self._ranks_store is None:
            self._ranks_store = self._open_ranks_store(seconds)
        return dist.PrefixStore(f"rlmath/group/{self._start}", self._ranks_store)

    def _open_ranks_store(self, seconds: float) -> dist.Store:
        """Rank 0 serves it on the loopback interface alone, at a free port that the others read from the launcher's."""
        key, is_master, listener = f"{self._start}/group port", self.rank_info.rank == 0, None
        if is_master:
            with socket.create_server((LOOPBACK, 0)) as server:
                port, listener = server.getsockname()[1], server.detach()
        else:
            port = int(self._wait(key, seconds))
        store = dist.TCPStore(
            LOOPBACK,
            port,
            is_master=is_master,
            timeout=timedelta(seconds=seconds),
            wait_for_workers=False,
            master_listen_fd=listener,
        )
        if is_master:
            self._store.set(key, str(port))
        return store

    # ------------------------------------------------------------ other ranks

    def _participate(self, name: str, report: RankReport, seconds: float) -> RendezvousResult:
        patience = seconds + SLACK_SECONDS
        if self._start is None:
            self._start = self._wait(f"start/{self._ticket}", patience).decode()
        self._store.set(f"{self._start}/{name}/{self.rank_info.rank}", json.dumps(asdict(report)))
        if report.problem is not None:
            self._store.add(f"{self._start}/problems", 1)
        self._store.add(f"{self._start}/{name}/here", 1)
        # From then on rank 0 waits for others as long as this rank has waited for it.
        self._wait(f"{self._start}/{name}/open", patience)
        result = RendezvousResult(**json.loads(self._wait(f"{self._start}/{name}/result", patience)))
        self._store.add(f"{self._start}/{name}/read", 1)
        return result

    def _wait(self, key: str, seconds: float) -> bytes:
        try:
            self._store.wait([key], timedelta(seconds=seconds))
        except dist.DistStoreError as error:
            head = self._known_ranks().get(0)
            where = f"rank 0 on {head.host} (pid {head.pid})" if head else "rank 0, which never registered"
            raise MissingRanksError(
                f"{self.rank_info} waited {seconds:.0f} s at the start for {where} "
                "(run.start_timeout_seconds); look at the log of the first node"
            ) from error
        return self._store.get(key)

    # ------------------------------------------------------------ rank 0

    def _coordinate(
        self, name: str, report: RankReport, seconds: float, check: CheckReports
    ) -> RendezvousResult:
        self._store.set(f"{self._start}/{name}/open", "")
        here = self._wait_for_reports(name, report.problem is not None, seconds)
        texts = self._store.multi_get([f"{self._start}/{name}/{rank}" for rank in here]) if here else []
        reports = {0: report} | {
            rank: RankReport(**json.loads(text)) for rank, text in zip(here, texts, strict=True)
        }
        result = self._result_of(reports, seconds, check)
        self._store.set(f"{self._start}/{name}/result", json.dumps(asdict(result)))
        if result.error is not None:  # the store ends soon after this rank
            deadline, readers = time.monotonic() + READ_SECONDS, f"{self._start}/{name}/read"
            while self._store.add(readers, 0) < len(here) and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
        return result

    def _wait_for_reports(self, name: str, problem: bool, seconds: float) -> list[int]:
        """The other ranks whose reports are there: all, or those at the timeout."""
        started, next_log = time.monotonic(), FIRST_LOG_SECONDS
        deadline = started + seconds
        while True:
            tickets = self._store.add("tickets", 0)
            for ticket in range(self._answered + 1, tickets + 1):
                self._store.set(f"start/{ticket}", self._start or "")
            self._answered = tickets
            here = 1 + self._store.add(f"{self._start}/{name}/here", 0)
            passed = time.monotonic() - started
            if here == self.rank_info.world_size:
                return list(range(1, here))
            problem = problem or self._store.add(f"{self._start}/problems", 0) > 0
            if problem:
                deadline = min(deadline, started + passed + PROBLEM_SECONDS)
            if started + passed >= deadline:
                return self._ranks_here(name)
            if passed >= next_log:
                next_log *= 2
                arrived = [0, *self._ranks_here(name)]
                logger.info(
                    f"{len(arrived)} of {self.rank_info.world_size} ranks are here after {passed:.0f} s, until "
                    f"{seconds:.0f} s (run.start_timeout_seconds) the run waits for {self._missing(arrived)}"
                )
            time.sleep(POLL_SECONDS)

    def _ranks_here(self, name: str) -> list[int]:
        others = range(1, self.rank_info.world_size)
        return [rank for rank in others if self._store.check([f"{self._start}/{name}/{rank}"])]

    def _result_of(
        self, reports: Mapping[int, RankReport], seconds: float, check: CheckReports
    ) -> RendezvousResult:
        problems = {rank: one.problem for rank, one in reports.items() if one.problem is not None}
        if problems:
            return RendezvousResult(problems_text(problems, reports), is_mistake=True)
        if self._store.add(f"{self._start}/problems", 0) > 0:
            keys = [f"{self._start}/failure/{rank}" for rank in range(self.rank_info.world_size)]
            failures = [self._store.get(key).decode() for key in keys if self._store.check([key])]
            return RendezvousResult("; ".join(failures[:4]))
        if len(reports) < self.rank_info.world_size:
            return RendezvousResult(
                f"{len(reports)} of {self.rank_info.world_size} ranks are at the start after {seconds:.0f} s "
                f"(run.start_timeout_seconds). Missing: {self._missing(list(reports))}. Look at the logs of those "
                "nodes; where they only need longer, raise run.start_timeout_seconds"
            )
        return check(reports)

    def _missing(self, here: list[int]) -> str:
        """ "ranks 2-3 on node1 (started, not here yet), ranks 4-5 of the node with number 2 (never started)"."""
        known, groups = self._known_ranks(), {}
        hosts = {info.node: info.host for info in known.values()}
        for rank in sorted(set(range(self.rank_info.world_size)) - set(here)):
            node = known[rank].node if rank in known else rank // self.rank_info.ranks_per_node
            host = f"on {hosts[node]}" if node in hosts else f"of the node with number {node}"
            state = "started, not here yet" if rank in known else "never started"
            groups.setdefault((host, state), []).append(rank)
        named = [f"{ranks_text(ranks)} {host} ({state})" for (host, state), ranks in groups.items()]
        return ", ".join(named[:16]) + (f" and those of {len(named) - 16} more nodes" if named[16:] else "")

    def _known_ranks(self) -> dict[int, RankInfo]:
        """The ranks that have registered, in this start or an earlier one."""
        keys = [f"info/{rank}" for rank in range(self.rank_info.world_size)]
        infos = [RankInfo(**json.loads(self._store.get(key))) for key in keys if self._store.check([key])]
        return {info.rank: info for info in infos}


def open_rendezvous(seconds: float) -> Rendezvous | None:
    """Register within so many seconds; None where this is the only rank. MissingRanksError where there is no store."""
    own = this_rank()
    if own.world_size == 1:
        return None
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        store = dist.TCPStore(
            address,
            port,
            own.world_size,
            is_master=own.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
            timeout=timedelta(seconds=seconds),
            wait_for_workers=False,
            multi_tenant=True,
        )
        return Rendezvous(own, store)
    except RuntimeError as error:
        raise MissingRanksError(
            f"{own} does not reach the key-value store of the run at {address}:{port} within {seconds:.0f} s. "
            f"Is the first node there, is {address} its address for this node, too (torchrun --local-addr), and "
            f"does no firewall close that port? {str(error).splitlines()[0]}"
        ) from error


# ---------------------------------------------------------------- the network between nodes

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


@dataclass(frozen=True)
class Route:
    """This node's end of the route to the first node."""

    address: str
    interface: str
    """Empty where no interface has the address."""

    @property
    def is_loopback(self) -> bool:
        return ipaddress.ip_address(self.address.partition("%")[0]).is_loopback

    def __str__(self) -> str:
        """ "10.0.0.7 (eth0)"."""
        return f"{self.address} ({self.interface or 'no interface'})"


def route_to(host: str) -> Route | None:
    """The address and interface that packets to a host leave by; nothing is sent. None where there is no route, or the
    name is unknown."""
    try:
        family, kind, *_, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            address = probe.getsockname()[0]
    except OSError:
        return None
    for interface, addresses in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == address for one in addresses):
            return Route(address, interface)
    return Route(address, "")


def prefer_for_gloo(route: Route | None) -> None:
    """Make gloo listen where the other nodes can reach this one, unless the user has chosen an interface.

    gloo takes the address of this host's own name. On Debian and its derivatives /etc/hosts maps that to 127.0.1.1,
    which no other node can reach. NCCL searches for interfaces itself, and is not changed.
    """
    if route is not None and route.interface and not route.is_loopback:
        os.environ.setdefault(GLOO_INTERFACE, route.interface)
