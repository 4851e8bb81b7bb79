"""How a rank ends by a verdict: it tells it, after a hang also where everybody is, and goes."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from rlmath.guard.exit_status import FAILURE, FILE_NAME, write_exit_status
from rlmath.guard.pulse import Pulse
from rlmath.guard.stacks import innermost_call, stacks_path, write_stacks
from rlmath.guard.verdict import Verdict

logger = logging.getLogger(__name__)

STACKS_SECONDS = 15.0
"""How long the ranks wait for each other's stacks."""


class Ending:
    """What a rank does when the run is over."""

    def __init__(self, output_dir: str, rank: int, world_size: int) -> None:
        self._output_dir, self._rank, self._world_size = output_dir, rank, world_size

    def end(self, verdict: Verdict, store: dist.Store, mine: Pulse) -> NoReturn:
        """Tell and end. From a thread: the main thread may hang for ever."""
        try:
            if verdict.kind == "hang":
                self._report_hang(verdict, store, mine)
            speaks = self._rank in (0, verdict.author) or os.environ.get("LOCAL_RANK", "0") == "0"
            log = logger.error if speaks else logger.info
            log("rank %d on %s ends: %s", self._rank, mine.host, verdict.message)
            self.record(verdict)
        except (OSError, RuntimeError) as error:
            logger.error("%s; and while that was told: %s", verdict.message, error)
        finally:
            self.leave()

    def record(self, verdict: Verdict) -> None:
        """Leave the exit status behind, if it is for this rank to do so. Who lost the store does not know why, and
        leaves the word of one who does."""
        told = verdict.kind == "store" and (Path(self._output_dir) / FILE_NAME).exists()
        if self._rank == verdict.author and not told:
            write_exit_status(self._output_dir, FAILURE, verdict.message)

    def leave(self) -> NoReturn:
        """At once: threads and process groups of a broken run may wait for peers that wait for us."""
        logging.shutdown()
        os._exit(FAILURE)

    def pulses(self, store: dist.Store) -> dict[int, Pulse]:
        """The last pulse of every rank that gave one."""
        # All ranks may ask at once: two requests each, if all ranks have beaten.
        keys = [f"pulse/{rank}" for rank in range(self._world_size)]
        all_there = store.check(keys)
        there = [rank for rank, key in enumerate(keys) if all_there or store.check([key])]
        said = store.multi_get([keys[rank] for rank in there]) if there else []
        return {rank: Pulse.from_json(text) for rank, text in zip(there, said, strict=True)}

    def _report_hang(self, verdict: Verdict, store: dist.Store, mine: Pulse) -> None:
        """Every rank writes its stacks; rank 0 waits for all and tells who is where."""
        write_stacks(self._output_dir, self._rank, f"{mine}: {verdict.message}")
        store.set(f"stacks/{self._rank}", innermost_call())
        told = "stacks/told"
        deadline = time.monotonic() + STACKS_SECONDS
        waits_for = [f"stacks/{rank}" for rank in range(self._world_size)] if self._rank == 0 else [told]
        while not store.check(waits_for) and time.monotonic() < deadline:
            time.sleep(0.2)
        if self._rank == 0:
            logger.error("%s", self._summary(store, verdict))
            store.set(told, "yes")

    def _summary(self, store: dist.Store, verdict: Verdict) -> str:
        pulses = self.pulses(store)
        fewest = min(one.entries for one in pulses.values())
        all_level = all(one.entries == fewest for one in pulses.values())
        lines = [f"The run hangs: {verdict.message}."]
        for rank in range(self._world_size):
            if rank not in pulses:
                lines.append(f"  rank {rank}: never gave a sign of life")
                continue
            key = f"stacks/{rank}"
            call = (
                store.get(key).decode()
                if store.check([key])
                else "no stacks: its interpreter does not answer"
            )
            behind = "" if all_level or pulses[rank].entries > fewest else "  <- BEHIND"
            lines.append(f"  {pulses[rank]}: {call}{behind}")
        folder = stacks_path(self._output_dir, 0).parent
        return "\n".join([*lines, f"The stacks of all threads are in {folder}"])
