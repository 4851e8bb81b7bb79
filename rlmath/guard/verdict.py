"""Why a run is over: the first cause that a rank finds is written where all ranks read it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Literal

import torch.distributed as dist

from rlmath.guard.pulse import Pulse

Kind = Literal["failed", "gone", "silent", "hang", "store"]


@dataclass(frozen=True)
class Verdict:
    """The cause that ends a run."""

    kind: Kind
    message: str
    author: int
    """The rank that found it."""

    def as_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str | bytes) -> Verdict:
        return Verdict(**json.loads(text))


def failed(mine: Pulse, reason: str) -> Verdict:
    return Verdict("failed", f"{mine} failed: {reason}", mine.rank)


def lost(mine: Pulse, reason: str, silent: Iterable[Pulse]) -> Verdict:
    """A rank's collective broke; `silent` are those that do not beat any more."""
    names = "; ".join(str(one) for one in silent)
    told = f". No sign of life any more from: {names}" if names else ""
    return Verdict("failed", f"{mine} failed: {reason}{told}", mine.rank)


def gone(other: Pulse, author: int) -> Verdict:
    why = "killed by a signal, by the kernel for want of memory (see dmesg), or by the launcher"
    return Verdict(
        "gone", f"{other} at its last beat, has died: its process ended without a word ({why})", author
    )


def silent(rank: int, other: Pulse | None, seconds: float, author: int) -> Verdict:
    last = f"its last word: {other}" if other else "it never gave one"
    told = (
        f"rank {rank} has given no sign of life for {seconds:.0f} s (run.heartbeat_timeout_seconds); {last}"
    )
    return Verdict("silent", told, author)


def hang(seconds: float, author: int) -> Verdict:
    told = f"no rank has made progress for {seconds:.0f} s (run.hang_timeout_seconds)"
    return Verdict("hang", told, author)


def store_lost(where: str, reason: str, author: int) -> Verdict:
    told = (
        f"the key-value store of the run at {where} is lost ({reason}); it lives in the launcher of the first node: "
        "that launcher or its node has ended, or the network to it is cut"
    )
    return Verdict("store", told, author)


def first_line(error: BaseException) -> str:
    """ "ValueError: what its text's first line says"."""
    text = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def may_be_a_peers_fault(error: BaseException) -> bool:
    """Whether the error may only tell that another rank is gone: gloo and NCCL raise RuntimeError for that."""
    return type(error) is RuntimeError or isinstance(error, dist.DistError)
