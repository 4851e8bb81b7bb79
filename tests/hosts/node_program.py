"""A small run over several hosts, without a model.

It starts as every run does, and makes steps with an all-reduce.

node_program.py OUTPUT_DIR BEHAVIOUR [start_timeout_seconds=..., other keys of RunConfig]
"""

from __future__ import annotations

import dataclasses
import logging
import os
import socket
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from rlmath.config.schema import RunConfig
from rlmath.distributed.device import init_process_group, open_device
from rlmath.distributed.fault_tolerance.heartbeat import Heartbeat
from rlmath.distributed.fault_tolerance.preemption import StopRequest
from rlmath.distributed.ranks import RankReport, RendezvousResult
from rlmath.distributed.rendezvous import Rendezvous, open_rendezvous
from rlmath.run.nodes import environment_facts, meet
from rlmath.telemetry.console import setup_logging

HOST = socket.gethostname()


def facts(behaviour: str) -> dict[str, str]:
    """The facts of this node; node1's differ where the behaviour is "differ"."""
    host_facts = environment_facts() | {"run.seed": "1"}
    return (
        host_facts | {"torch": "2.12.0", "run.seed": "2"}
        if (behaviour, HOST) == ("differ", "node1")
        else host_facts
    )


def gather(rendezvous: Rendezvous, behaviour: str, settings: RunConfig) -> None:
    """Both meetings of the ranks, as `rlmath.run.startup` and `rlmath.run.loop` have them."""
    seconds = settings.start_timeout_seconds
    rank = rendezvous.rank_info.rank
    if behaviour == "hang":  # the limit begins when all are there, however long their imports took
        folder = Path(settings.output_dir)
        (folder / f"here-{rank}").touch()
        while len(list(folder.glob("here-*"))) < int(os.environ["WORLD_SIZE"]):
            time.sleep(0.05)
        if rank == 3:
            time.sleep(1000)
    meet(rendezvous, facts(behaviour), seconds)
    word = RankReport(rendezvous.rank_info.host, rendezvous.rank_info.node)
    rendezvous.sync("group", word, seconds, lambda reports: RendezvousResult())


def main() -> int:
    folder = Path(sys.argv[1])
    behaviour = sys.argv[2]
    folder.mkdir(exist_ok=True)
    keys = {key: float(value) for key, value in (argument.split("=") for argument in sys.argv[3:])}
    settings = dataclasses.replace(RunConfig(output_dir=str(folder)), **keys)
    rank = int(os.environ["RANK"])
    setup_logging(rank)
    try:
        rendezvous = open_rendezvous(120.0)
        assert rendezvous is not None
        gather(rendezvous, behaviour, settings)
        init_process_group(open_device("cpu"), 60.0, rendezvous.group_store(60.0))
        stop = StopRequest(60.0, str(folder), rank)
        with Heartbeat(settings, rank, dist.get_world_size(), str(folder), stop) as heartbeat:
            walk(heartbeat, folder, rank)
    except BaseException as error:
        logging.error("rank %d on %s: %s: %s", rank, HOST, type(error).__name__, error)
        logging.shutdown()
        os._exit(2 if isinstance(error, ValueError) else 1)
    dist.destroy_process_group()
    return 0


def walk(heartbeat: Heartbeat, folder: Path, rank: int) -> None:
    for step in range(1, 4):
        heartbeat.step = step
        heartbeat.enter_phase("update")
        dist.all_reduce(torch.ones(1000))
        if rank == 0:
            (folder / "step").write_text(str(step))
        time.sleep(0.02)


if __name__ == "__main__":
    sys.exit(main())
