"""The rendezvous of a run's ranks before they have a process group.

It is in the key-value store of their launcher, and chooses the network interface.

torchrun starts ranks once all nodes have joined its own rendezvous. From then on a rank may still
be late, find a mistake that only its node has, or never start; a process group would wait for it
without naming it.

    every rank    registers as soon as its program runs                       info/<rank>
    rank 0        publishes the name of this start                            start
    every rank    calls `sync` with its report                                <start>/<name>/<rank>
    rank 0        waits until all reports are there, or the time is up,
                  and publishes the result, with the port of the store
                  that the ranks of a single node have from then on           <start>/<name>/result
    every rank    notes that it has read an error, and waits for the others   <start>/<name>/read/<rank>

torchrun keeps the store when it restarts its ranks (--max-restarts), and its
TORCHELASTIC_RESTART_COUNT differs from node to node (pytorch/pytorch issue 108158). So a report has
a nonce of its rank, and a rank believes only a result that repeats it: what an earlier start left
is never taken for an answer. Messages and bytes grow linearly with the number of ranks.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
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
from rlmath.distributed.run_store import RunStore, record_of, run_id

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
POLL_SECONDS = 0.1
SLOWEST_POLL_SECONDS = 0.5
PROBLEM_SECONDS = 10.0
"""Seconds that rank 0 waits for further problems after the first one."""
FIRST_LOG_SECONDS = 30.0
"""Rank 0 logs which ranks are missing after so long, and again whenever that time has doubled."""
READ_SECONDS = 15.0
"""Seconds that a rank which has read an error waits for the others to read it."""
SLACK_SECONDS = 30.0
"""Seconds that the other ranks wait longer than rank 0 for the result."""


class MissingRanksError(RuntimeError):
    """Ranks are missing, or one of them failed; the message names them."""


CheckReports = Callable[[Mapping[int, RankReport]], RendezvousResult]
"""Runs on rank 0 with the reports of all ranks."""


@dataclass(frozen=True)
class _Entry:
    """The record that a rank publishes at a sync."""

    nonce: str
    """A random word, new in every start of the rank."""
    report: dict


@dataclass(frozen=True)
class _Outcome:
    """The record that rank 0 publishes at a sync."""

    nonces: dict[str, str]
    """The nonces of the ranks whose reports it has read, by rank."""
    result: dict
    ranks_port: int
    """Port of the ranks' own store on the loopback interface.

    It is 0 on several nodes, and if the result is an error."""


class Rendezvous:
    """One per rank, from the start of its program until the process group exists."""

    def __init__(self, rank_info: RankInfo, store: dist.Store) -> None:
        """Register this rank.

        RuntimeError where the store does not answer."""
        self.rank_info = rank_info
        self._whole_store = store
        self._store = RunStore(store, f"rlmath/{run_id()}/rendezvous")
        self._nonce = secrets.token_hex(8)
        self._store.set(f"info/{rank_info.rank}", asdict(rank_info))
        self._start: str | None = None
        """Name of this start; other ranks than rank 0 know it after the first sync.

        They learn `_ranks_port` then, too."""
        self._ranks_store: dist.TCPStore | None = None
        self._ranks_port = 0
        """Port of the ranks' own store on a single node."""
        if rank_info.rank == 0:
            self._start = secrets.token_hex(8)
            self._store.set("start", self._start)

    def sync(
        self, name: str, report: RankReport, seconds: float, check: CheckReports
    ) -> Mapping[str, str]:
        """Wait for all ranks, and return the `values` of rank 0's result.

        All ranks call it with the same name, a new one each time. `check` is called on rank 0, with
        all reports. On all ranks ValueError if it or a rank found a mistake, MissingRanksError if
        ranks are missing after `seconds`, one has failed, or the store is lost."""
        try:
            if self.rank_info.rank == 0:
                result = self._coordinate(name, report, seconds, check)
            else:
                result = self._participate(name, report, seconds)
        except MissingRanksError:
            raise
        except RuntimeError as error:  # what torch's stores raise
            raise MissingRanksError(
                f"{self.rank_info} lost the run's key-value store at the start: the launcher of "
                "the first node or the "
                "node has ended (look at its log), or the network to it is cut. "
                f"{str(error).splitlines()[0]}"
            ) from error
        if result.error is not None:
            raise (ValueError if result.is_mistake else MissingRanksError)(result.error)
        return result.values

    def report_failure(self, reason: str) -> None:
        """Report, between two syncs, that this rank has failed; never raises."""
        if self._start is None:
            return
        try:
            key = f"{self._start}/failure/{self.rank_info.rank}"
            self._store.set(key, f"{self.rank_info} failed: {reason}")
            self._store.set(f"{self._start}/problem", self.rank_info.rank)
        except RuntimeError as error:
            logger.debug("the failure could not be reported: %s", error)

    def group_store(self, seconds: float) -> dist.Store:
        """The store for this start's process group.

        Waiting for a key in it ends after `seconds`. On a single node it lives in rank 0, so that
        the ranks can finish a step and save it when the launcher has been killed."""
        assert self._start is not None, "call sync first"
        if self._ranks_store is None and self._ranks_port:
            self._ranks_store = self._connect_to_ranks_store(seconds)
        store = self._ranks_store or self._whole_store
        store.set_timeout(timedelta(seconds=seconds))
        return dist.PrefixStore(f"rlmath/group/{self._start}", store)

    def _connect_to_ranks_store(self, seconds: float) -> dist.TCPStore:
        try:
            timeout = timedelta(seconds=seconds)
            return dist.TCPStore(
                LOOPBACK, self._ranks_port, timeout=timeout, wait_for_workers=False
            )
        except RuntimeError as error:
            raise MissingRanksError(
                f"{self.rank_info} does not reach the store of rank 0 at "
                f"{LOOPBACK}:{self._ranks_port} within "
                f"{seconds:.0f} s: rank 0 has ended; look at its log. {str(error).splitlines()[0]}"
            ) from error

    def _serve_ranks_store(self) -> None:
        """Serve the ranks' store from rank 0 of a single node, on loopback, at a free port."""
        if self.rank_info.several_nodes or self._ranks_store is not None:
            return
        with socket.create_server((LOOPBACK, 0)) as server:
            port = server.getsockname()[1]
            listener = server.detach()
        self._ranks_store = dist.TCPStore(
            LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener
        )
        self._ranks_port = port

    def _wait_until_read(self, at: str, ranks: Iterable[str]) -> None:
        """Wait until all ranks have read the error, for at most READ_SECONDS.

        A rank that ends with an error makes its launcher end the node's other ranks, and on the
        first node the store."""
        deadline = time.monotonic() + READ_SECONDS
        with suppress(RuntimeError):  # what torch's stores raise: rank 0 has ended
            self._store.set(f"{at}/read/{self.rank_info.rank}", True)
            keys = [f"{at}/read/{rank}" for rank in ranks]
            while not self._store.all_there(keys) and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)

    # ------------------------------------------------------------ other ranks

    def _participate(self, name: str, report: RankReport, seconds: float) -> RendezvousResult:
        """Publish this rank's report, and wait for the result of rank 0."""
        entry = asdict(_Entry(self._nonce, asdict(report)))
        patience = seconds + SLACK_SECONDS
        started = time.monotonic()
        deadline = started + patience
        opened = None
        reported = None
        while (current_time := time.monotonic()) < deadline:
            # Until its first result a rank cannot know whether the name is that of this start.
            start = self._start or self._store.get("start")
            at = f"{start}/{name}"
            if start is not None and reported != start:
                self._store.set(f"{at}/{self.rank_info.rank}", entry)
                if report.problem is not None:
                    self._store.set(f"{start}/problem", self.rank_info.rank)
                reported = start
            if start is not None and opened != start and self._store.get(f"{at}/open") is not None:
                # From now on rank 0 waits for others as long as this rank has waited for it.
                opened = start
                deadline = current_time + patience
            if start is not None and (outcome := self._outcome(at)) is not None:
                self._start = start
                self._ranks_port = outcome.ranks_port
                result = RendezvousResult(**outcome.result)
                if result.error is not None:
                    self._wait_until_read(at, outcome.nonces)
                return result
            time.sleep(
                min(SLOWEST_POLL_SECONDS, max(POLL_SECONDS / 4, (current_time - started) / 10))
            )
        head = self._known_ranks().get(0)
        place = (
            f"rank 0 on {head.host} (pid {head.pid})" if head else "rank 0, which never registered"
        )
        raise MissingRanksError(
            f"{self.rank_info} waited {seconds:.0f} s at the start for {place} "
            f"(run.start_timeout_seconds); look at the log of the first node"
        )

    def _outcome(self, at: str) -> _Outcome | None:
        """The outcome that rank 0 has published, if it had read this rank's report."""
        outcome = record_of(_Outcome, self._store.get(f"{at}/result"))
        has_read = (
            outcome is not None and outcome.nonces.get(str(self.rank_info.rank)) == self._nonce
        )
        return outcome if has_read else None

    # ------------------------------------------------------------ rank 0

    def _coordinate(
        self, name: str, report: RankReport, seconds: float, check: CheckReports
    ) -> RendezvousResult:
        """Wait for the reports of all ranks, and publish the result, on rank 0."""
        at = f"{self._start}/{name}"
        entries = self._wait_for_entries(at, _Entry(self._nonce, asdict(report)), seconds)
        reports = {rank: RankReport(**entry.report) for rank, entry in entries.items()}
        result = self._result_of(reports, seconds, check)
        if result.error is None:
            try:
                self._serve_ranks_store()
            except (OSError, RuntimeError) as error:
                text = (
                    f"{self.rank_info} cannot open a store for the ranks at a port of "
                    f"{LOOPBACK}: {error}"
                )
                result = RendezvousResult(text)
        port = self._ranks_port if result.error is None else 0
        nonces = {str(rank): entry.nonce for rank, entry in entries.items()}
        self._store.set(f"{at}/result", asdict(_Outcome(nonces, asdict(result), port)))
        if result.error is not None:
            self._wait_until_read(at, nonces)
        return result

    def _wait_for_entries(self, at: str, own_entry: _Entry, seconds: float) -> dict[int, _Entry]:
        """The entries of all ranks, or of those that are there at the timeout, by rank."""
        entries = {0: own_entry}
        problem = own_entry.report["problem"] is not None
        started = time.monotonic()
        next_log = FIRST_LOG_SECONDS
        deadline = started + seconds
        self._store.set(f"{at}/open", True)
        while True:
            current_time = time.monotonic()
            missing = {
                f"{at}/{rank}": rank
                for rank in range(self.rank_info.world_size)
                if rank not in entries
            }
            logs = current_time - started >= next_log
            if logs or current_time >= deadline or self._store.all_there(list(missing)):
                for key, record in self._store.get_all(list(missing)).items():
                    if (entry := record_of(_Entry, record)) is not None:
                        entries[missing[key]] = entry
            if current_time >= deadline or len(entries) == self.rank_info.world_size:
                return entries
            if problem := problem or self._store.get(f"{self._start}/problem") is not None:
                deadline = min(deadline, current_time + PROBLEM_SECONDS)
            if logs:
                next_log *= 2
                logger.info(
                    f"{len(entries)} of {self.rank_info.world_size} ranks {_are(entries)} here "
                    "after "
                    f"{current_time - started:.0f} s, until {seconds:.0f} s "
                    "(run.start_timeout_seconds) "
                    "the run waits for "
                    f"{self._missing(entries)}"
                )
            time.sleep(POLL_SECONDS)

    def _result_of(
        self, reports: Mapping[int, RankReport], seconds: float, check: CheckReports
    ) -> RendezvousResult:
        """An error if a rank has a problem, has failed or is missing; else what `check` returns."""
        problems = {
            rank: report.problem for rank, report in reports.items() if report.problem is not None
        }
        if problems:
            mistakes = any(not reports[rank].may_pass for rank in problems)
            return RendezvousResult(problems_text(problems, reports), is_mistake=mistakes)
        if self._store.get(f"{self._start}/problem") is not None:
            keys = [f"{self._start}/failure/{rank}" for rank in range(self.rank_info.world_size)]
            if failures := self._store.get_all(keys):
                return RendezvousResult("; ".join(list(failures.values())[:4]))
        if len(reports) < self.rank_info.world_size:
            return RendezvousResult(
                f"{len(reports)} of {self.rank_info.world_size} ranks {_are(reports)} at the "
                "start after "
                f"{seconds:.0f} s (run.start_timeout_seconds). Missing: {self._missing(reports)}. "
                "Look at the logs of "
                f"those nodes; where they only need longer, raise run.start_timeout_seconds"
            )
        return check(reports)

    def _missing(self, present_ranks: Iterable[int]) -> str:
        """Which ranks are missing, and where.

        For example "ranks 2-3 on node1 (started, not here yet), ranks 4-5 of the node with number 2
        (never started)"."""
        known_ranks = self._known_ranks()
        groups = {}
        hosts = {rank_info.node: rank_info.host for rank_info in known_ranks.values()}
        for rank in sorted(set(range(self.rank_info.world_size)) - set(present_ranks)):
            node = (
                known_ranks[rank].node
                if rank in known_ranks
                else rank // self.rank_info.ranks_per_node
            )
            host = f"on {hosts[node]}" if node in hosts else f"of the node with number {node}"
            state = "started, not here yet" if rank in known_ranks else "never started"
            groups.setdefault((host, state), []).append(rank)
        named = [f"{ranks_text(ranks)} {host} ({state})" for (host, state), ranks in groups.items()]
        return ", ".join(named[:16]) + (
            f" and those of {len(named) - 16} more nodes" if named[16:] else ""
        )

    def _known_ranks(self) -> dict[int, RankInfo]:
        """The ranks that have registered, in this start or an earlier one."""
        records = self._store.get_all(
            [f"info/{rank}" for rank in range(self.rank_info.world_size)]
        ).values()
        infos = [
            rank_info
            for record in records
            if (rank_info := record_of(RankInfo, record)) is not None
        ]
        return {rank_info.rank: rank_info for rank_info in infos}


def open_rendezvous(seconds: float) -> Rendezvous | None:
    """Register within so many seconds; None if this is the only rank.

    MissingRanksError if there is no store."""
    rank_info = this_rank()
    if rank_info.world_size == 1:
        return None
    address = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    opens = rank_info.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        store = dist.TCPStore(
            address,
            port,
            rank_info.world_size,
            is_master=opens,
            timeout=timedelta(seconds=seconds),
            wait_for_workers=False,
            multi_tenant=True,
        )
        return Rendezvous(rank_info, store)
    except RuntimeError as error:
        if opens:
            raise MissingRanksError(
                f"{rank_info} cannot open the run's key-value store at port {port}; does another "
                "program use it? Set "
                "MASTER_PORT to a free one, or start the run by torchrun, which finds one: "
                f"{str(error).splitlines()[0]}"
            ) from error
        raise MissingRanksError(
            f"{rank_info} does not reach the key-value store of the run at {address}:{port} within "
            f"{seconds:.0f} s. "
            f"Is the first node there, is {address} its address for this node, too (torchrun "
            "--local-addr), and "
            f"does no firewall close that port? {str(error).splitlines()[0]}"
        ) from error


# ---------------------------------------------------------------- the network between nodes

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


@dataclass(frozen=True)
class Route:
    """The end of the route to the first node that is on this node."""

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
    """The address and interface by which packets to a host leave; None without a route or name.

    Nothing is sent."""
    try:
        family, kind, *_, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            address = probe.getsockname()[0]
    except OSError:
        return None
    for interface, addresses in psutil.net_if_addrs().items():
        if any(
            interface_address.address.partition("%")[0] == address
            for interface_address in addresses
        ):
            return Route(address, interface)
    return Route(address, "")


def prefer_for_gloo(route: Route | None) -> None:
    """Make gloo listen where other nodes can reach this one, unless the user chose an interface.

    Gloo takes the address of this host's own name. On Debian and its derivatives /etc/hosts maps
    that to 127.0.1.1, which no other node can reach. NCCL searches for interfaces itself, and is
    not changed."""
    if route is not None and route.interface and not route.is_loopback:
        os.environ.setdefault(GLOO_INTERFACE, route.interface)


def _are(ranks: Collection[int]) -> str:
    return "is" if len(ranks) == 1 else "are"
