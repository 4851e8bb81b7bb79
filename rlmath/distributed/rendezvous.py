"""Where the ranks of a start meet before they have a process group: in the key-value store of their launcher.

torchrun starts ranks once all nodes have come to its rendezvous. From then on a rank may still be late, find a mistake
that only its node has, or never come; a process group would wait for it and not say for whom.

    every rank    signs in as soon as its program runs                        info/<rank>, a ticket
    rank 0        answers every ticket with the name of this start            start/<ticket>
    every rank    comes to a roll call, with what it has to say               <start>/<call>/<rank>
    rank 0        waits until all are there, or the time is up, and decides   <start>/<call>/verdict

torchrun keeps the store when it starts its ranks again (--max-restarts), and its TORCHELASTIC_RESTART_COUNT differs
from node to node (pytorch/pytorch issue 108158). So the name of a start is rank 0's ticket, which no other start has,
and what an earlier start left is never taken for an answer. Messages and bytes grow with the number of ranks, not
faster.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import timedelta

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

POLL_SECONDS = 0.1
PROBLEM_SECONDS = 10.0
"""After a rank told a problem, how long the others may take to tell theirs, too."""
FIRST_WORD_SECONDS = 30.0
"""Rank 0 says whom it waits for after so long, and again whenever twice as long has passed."""
READ_SECONDS = 5.0
"""How long rank 0, after a result that ends the run, lets the others read it."""
SLACK_SECONDS = 30.0
"""How much longer than rank 0 the others wait for what it decides."""


class MissingRanksError(RuntimeError):
    """Ranks are missing, or one of them failed; the message names them."""


CheckReports = Callable[[Mapping[int, RankReport]], RendezvousResult]
"""From what all ranks reports."""


class Rendezvous:
    """One per rank, from the start of its program until its process group stands."""

    def __init__(self, place: RankInfo, store: dist.Store) -> None:
        """Sign in. RuntimeError where the store does not answer."""
        self.rank_info = place
        self._whole_store = store
        self._store = dist.PrefixStore("rlmath/rendezvous", store)
        self._ticket = self._store.add("tickets", 1)
        self._store.set(f"info/{place.rank}", json.dumps(asdict(place)))
        self._start = str(self._ticket) if place.rank == 0 else None
        self._answered = 0

    def sync(self, call: str, report: RankReport, seconds: float, check: CheckReports) -> None:
        """Come together; every rank calls it, with the same name and a new one each time.

        `check` is rank 0's; it gets the reports once all ranks are here. On all ranks ValueError where it or a rank
        found a mistake, MissingRanksError where ranks are missing after `seconds`, one has failed, or the store is
        lost.
        """
        try:
            if self.rank_info.rank == 0:
                result = self._coordinate(call, report, seconds, check)
            else:
                result = self._participate(call, report, seconds)
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
        """Let the others know, between two roll calls, that this rank will not come; never raises."""
        if self._start is None:
            return
        try:
            self._store.set(
                f"{self._start}/failure/{self.rank_info.rank}", f"{self.rank_info} failed: {reason}"
            )
            self._store.add(f"{self._start}/problems", 1)
        except RuntimeError as error:
            logger.debug("nobody could be told: %s", error)

    def group_store(self, seconds: float) -> dist.Store:
        """The store for this start's process group, in which waiting for a key ends after `seconds`."""
        assert self._start is not None, "after a roll call only"
        self._whole_store.set_timeout(timedelta(seconds=seconds))
        return dist.PrefixStore(f"rlmath/group/{self._start}", self._whole_store)

    # ------------------------------------------------------------ the others

    def _participate(self, call: str, report: RankReport, seconds: float) -> RendezvousResult:
        patience = seconds + SLACK_SECONDS
        if self._start is None:
            self._start = self._wait(f"start/{self._ticket}", patience).decode()
        self._store.set(f"{self._start}/{call}/{self.rank_info.rank}", json.dumps(asdict(report)))
        if report.problem is not None:
            self._store.add(f"{self._start}/problems", 1)
        self._store.add(f"{self._start}/{call}/here", 1)
        # From then on rank 0 waits for others as long as this rank has waited for it.
        self._wait(f"{self._start}/{call}/open", patience)
        result = RendezvousResult(**json.loads(self._wait(f"{self._start}/{call}/result", patience)))
        self._store.add(f"{self._start}/{call}/read", 1)
        return result

    def _wait(self, key: str, seconds: float) -> bytes:
        try:
            self._store.wait([key], timedelta(seconds=seconds))
        except dist.DistStoreError as error:
            head = self._known_ranks().get(0)
            where = f"rank 0 on {head.host} (pid {head.pid})" if head else "rank 0, which never signed in"
            raise MissingRanksError(
                f"{self.rank_info} waited {seconds:.0f} s at the start for {where} "
                "(run.start_timeout_seconds); look at the log of the first node"
            ) from error
        return self._store.get(key)

    # ------------------------------------------------------------ rank 0

    def _coordinate(
        self, call: str, report: RankReport, seconds: float, check: CheckReports
    ) -> RendezvousResult:
        self._store.set(f"{self._start}/{call}/open", "")
        here = self._wait_for_reports(call, report.problem is not None, seconds)
        texts = self._store.multi_get([f"{self._start}/{call}/{rank}" for rank in here]) if here else []
        reports = {0: report} | {
            rank: RankReport(**json.loads(text)) for rank, text in zip(here, texts, strict=True)
        }
        result = self._result_of(reports, seconds, check)
        self._store.set(f"{self._start}/{call}/result", json.dumps(asdict(result)))
        if result.error is not None:  # the store ends soon after this rank
            deadline = time.monotonic() + READ_SECONDS
            while (
                self._store.add(f"{self._start}/{call}/read", 0) < len(here) and time.monotonic() < deadline
            ):
                time.sleep(POLL_SECONDS)
        return result

    def _wait_for_reports(self, call: str, problem: bool, seconds: float) -> list[int]:
        """The other ranks that are here: all, or as many as were there when the time was up."""
        started, told = time.monotonic(), FIRST_WORD_SECONDS
        deadline = started + seconds
        while True:
            self._answer()
            here = 1 + self._store.add(f"{self._start}/{call}/here", 0)
            passed = time.monotonic() - started
            if here == self.rank_info.world_size:
                return list(range(1, here))
            if not problem and self._store.add(f"{self._start}/problems", 0) > 0:
                problem = True
            if problem:
                deadline = min(deadline, started + passed + PROBLEM_SECONDS)
            if started + passed >= deadline:
                return self._ranks_here(call)
            if passed >= told:
                told *= 2
                logger.info("%s", self._waiting_line(self._ranks_here(call), passed, seconds))
            time.sleep(POLL_SECONDS)

    def _answer(self) -> None:
        count = self._store.add("tickets", 0)
        for ticket in range(self._answered + 1, count + 1):
            self._store.set(f"start/{ticket}", self._start or "")
        self._answered = count

    def _ranks_here(self, call: str) -> list[int]:
        others = range(1, self.rank_info.world_size)
        return [rank for rank in others if self._store.check([f"{self._start}/{call}/{rank}"])]

    def _result_of(
        self, reports: Mapping[int, RankReport], seconds: float, check: CheckReports
    ) -> RendezvousResult:
        problems = {rank: word.problem for rank, word in reports.items() if word.problem is not None}
        if problems:
            return RendezvousResult(problems_text(problems, reports), is_mistake=True)
        if self._store.add(f"{self._start}/problems", 0) > 0:
            keys = [f"{self._start}/failure/{rank}" for rank in range(self.rank_info.world_size)]
            failures = [self._store.get(key).decode() for key in keys if self._store.check([key])]
            return RendezvousResult("; ".join(failures[:4]))
        if len(reports) < self.rank_info.world_size:
            return RendezvousResult(self._missing_text(reports, seconds))
        return check(reports)

    def _waiting_line(self, here: list[int], passed: float, seconds: float) -> str:
        return (
            f"{len(here) + 1} of {self.rank_info.world_size} ranks are here after {passed:.0f} s, until "
            f"{seconds:.0f} s (run.start_timeout_seconds) the run waits for {self._missing([0, *here])}"
        )

    def _missing_text(self, reports: Mapping[int, RankReport], seconds: float) -> str:
        return (
            f"{len(reports)} of {self.rank_info.world_size} ranks are at the start after {seconds:.0f} s "
            f"(run.start_timeout_seconds). Missing: {self._missing(list(reports))}. Look at the logs of those nodes; "
            "where they only need longer, raise run.start_timeout_seconds"
        )

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
        """Where the ranks are that signed in, in this start or an earlier one."""
        keys = {rank: f"info/{rank}" for rank in range(self.rank_info.world_size)}
        return {
            rank: RankInfo(**json.loads(self._store.get(key)))
            for rank, key in keys.items()
            if self._store.check([key])
        }


def open_rendezvous(seconds: float) -> Rendezvous | None:
    """Sign in, which may take so long; None where this rank is alone. RuntimeError where there is no store."""
    place = this_rank()
    if place.world_size == 1:
        return None
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    launcher_has_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store = dist.TCPStore(
            address,
            port,
            place.world_size,
            is_master=place.rank == 0 and not launcher_has_store,
            timeout=timedelta(seconds=seconds),
            wait_for_workers=False,
            multi_tenant=True,
        )
        return Rendezvous(place, store)
    except RuntimeError as error:
        raise MissingRanksError(
            f"{place} does not reach the key-value store of the run at {address}:{port} within {seconds:.0f} s. "
            f"Is the first node there, is {address} its address for this node, too (torchrun --local-addr), and "
            f"does no firewall close that port? {str(error).splitlines()[0]}"
        ) from error
