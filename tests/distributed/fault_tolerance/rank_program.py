"""A small run under the guard: steps with a gloo all-reduce, no model.

Started by torchrun from the tests.

rank_program.py OUTPUT_DIR BEHAVIOUR [stop_grace_seconds=..., other keys of RunConfig]
"""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from rlmath.config.schema import RunConfig
from rlmath.distributed.collectives import reduce_over_ranks
from rlmath.distributed.fault_tolerance.exit_codes import (
    FAILURE,
    SAVED_AND_STOPPED,
    write_exit_status,
)
from rlmath.distributed.fault_tolerance.heartbeat import Heartbeat
from rlmath.distributed.fault_tolerance.preemption import REASONS, StopRequest, launcher_advice
from rlmath.distributed.phase_timers import PhaseTimers
from rlmath.telemetry.console import setup_logging

RANK = int(os.environ["RANK"])


def waits_for_ever() -> None:
    while True:
        time.sleep(0.1)


def misbehave(behaviour: str, step: int) -> None:
    """What rank 1 does in its third step."""
    if RANK != 1 or step != 3:
        return
    if behaviour == "raise":
        raise LookupError("no such prompt\nmore of it")
    if behaviour == "hang":
        waits_for_ever()


def walk(heartbeat: Heartbeat, stop: StopRequest, folder: Path, behaviour: str) -> int:
    timers = PhaseTimers(heartbeat.enter_phase)
    for step in range(1, 10_000):
        heartbeat.step = step
        with timers.phase("rollout"):
            time.sleep(0.05)
            misbehave(behaviour, step)
        with timers.phase("update"):
            dist.all_reduce(torch.ones(1))
        (folder / f"step-{RANK}").write_text(str(step))
        reduced = reduce_over_ranks({}, {"stop": float(REASONS.index(stop.requested))})[1]
        if reduced["stop"]:
            with timers.phase("save"):
                if behaviour == "slow save":
                    waits_for_ever()
                time.sleep(1.0)
                (folder / f"saved-{RANK}").write_text(str(step))
                dist.barrier()
            if RANK == 0:
                write_exit_status(folder, SAVED_AND_STOPPED, f"step {step}")
            return SAVED_AND_STOPPED
    return 0


def main() -> int:
    folder = Path(sys.argv[1])
    behaviour = sys.argv[2]
    folder.mkdir(exist_ok=True)
    keys = {key: float(value) for key, value in (argument.split("=") for argument in sys.argv[3:])}
    settings = dataclasses.replace(RunConfig(output_dir=str(folder)), **keys)
    setup_logging(RANK)
    stop = StopRequest(settings.stop_grace_seconds, str(folder), RANK)
    stop.install()
    stop.in_steps = True
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    if RANK == 0:
        logging.info("advice: %s", launcher_advice(settings.stop_grace_seconds))
    try:
        with Heartbeat(settings, RANK, dist.get_world_size(), str(folder), stop) as heartbeat:
            (folder / f"pid-{RANK}").write_text(str(os.getpid()))
            status = walk(heartbeat, stop, folder, behaviour)
    except BaseException:
        logging.exception("rank %d failed", RANK)
        logging.shutdown()
        os._exit(FAILURE)
    dist.destroy_process_group()
    return status


if __name__ == "__main__":
    sys.exit(main())
