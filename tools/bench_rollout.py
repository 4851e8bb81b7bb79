"""A rollout in which one prompt in 50 has answers 20 times longer: drawn by the engines, against fixed shares.

    python tools/bench_rollout.py [--quick]

Ranks under torchrun, one engine each, 2 and 4 of them, with a random Qwen2 of 0.6M parameters. A prompt has 4 answers
of 5 to 15 tokens, and of every 50 prompts in a row one, drawn anew for every repeat, answers of 20 times that. (Were
all of a group equally long, fixed shares would keep whole groups in step, as no real answers do.) An engine decodes 8
sequences at a time. The same requests are sampled in two ways, which take turns in going first:

- ours: engines draw from what is left (`rlmath.rollout.work_queue`);
- "fixed shares": engine i of E gets prompts i, i+E, i+2E, ..., all at once.

Prints figures (tools/figures.py):

- rollout_seconds: until the last engine is done (median);
- engine_steps: those of the engine that makes most (median);
- idle_share: share of the seconds in which an engine was done already, mean over engines (median; for the ratio at
  least 0.001);
- least_speedup, least_speedup_in_steps: the fixed shares' seconds, or steps, divided by ours, of the repeat where that
  is least. Where luck makes fixed shares exactly even, ours may be one short answer slower.

"own cores" runs every engine as fast as it can, and is measured where each has a core of its own: with more engines
than cores one that is done lends its core to the others, which hides what its waiting costs. "paced" lets no engine
step take less than 10 ms, by sleeping. Then the time goes by steps and not by computing, as it does on a GPU, where a
step takes about as long for few sequences as for many, and the engines disturb each other less. Seconds are of use on
an otherwise idle machine only; steps are nearly the same on any.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch.distributed as dist

from rlmath.cli.demo import one_thread, torchrun
from rlmath.config.schema import RolloutConfig
from rlmath.distributed.collectives import all_gather_objects, shared_store
from rlmath.distributed.device import init_process_group, open_device
from rlmath.distributed.mesh import Mesh
from rlmath.distributed.ranks import environment_rank, environment_world_size
from rlmath.models.hf_config import read_model_shape
from rlmath.rollout.engine import Engine
from rlmath.rollout.sampling import AllAtOnce, Load, Request, RequestResult, RequestSource, request_seed
from rlmath.rollout.weight_sync.shard_layouts import engine_shapes
from rlmath.rollout.work_queue import WorkQueue, idle_shares
from tools.figures import print_figure

REPOSITORY = Path(__file__).resolve().parents[1]
LONG_EVERY, LONG_FACTOR, SHORT_TOKENS, GROUP_SIZE, MAX_NUM_SEQS = 50, 20, (5, 15), 4, 8
ENGINES = (2, 4)
STEP_SECONDS = 0.010
"""Pace of the paced cases."""
PROMPT = (5, 6, 7, 8, 9, 10, 11)
LEAST_IDLE_SHARE = 0.001


@dataclass(frozen=True)
class Case:
    engines: int
    prompts: int
    step_seconds: float
    """An engine step takes at least so long; 0: as long as it takes."""
    repeats: int

    def __str__(self) -> str:
        pace = f"paced at {1000 * self.step_seconds:.0f} ms" if self.step_seconds else "own cores"
        return f"{self.engines} engines, {pace}, {self.prompts} prompts"


@dataclass(frozen=True)
class Figures:
    """Of one way in one repeat."""

    rollout_seconds: float
    engine_steps: int
    idle_share: float


# ---------------------------------------------------------------- work


def make_requests(prompts: int, draw: int) -> list[list[Request]]:
    """The groups' requests, with exact lengths; one group in LONG_EVERY is long."""
    chosen = random.Random(draw)
    long = {start + chosen.randrange(LONG_EVERY) for start in range(0, prompts, LONG_EVERY)}
    return [
        [
            Request((p, g), (*PROMPT, p % 90 + 3), request_seed(1, draw, str(p), g), tokens, tokens)
            for g in range(GROUP_SIZE)
            for tokens in [chosen.randint(*SHORT_TOKENS) * (LONG_FACTOR if p in long else 1)]
        ]
        for p in range(prompts)
    ]


class Paced:
    """A source that lets no engine step take less than `step_seconds`."""

    def __init__(self, source: RequestSource, step_seconds: float) -> None:
        self._source = source
        self._step_seconds = step_seconds
        self._next = time.perf_counter()
        self.steps = 0

    def pop(self, load: Load) -> Sequence[Request]:
        """Asked before every step; nothing is waited for where no step follows."""
        requests = self._source.pop(load)
        self.steps += 1
        if load.in_flight:
            time.sleep(max(0.0, self._next - time.perf_counter()))
        self._next = time.perf_counter() + self._step_seconds
        return requests

    def finished(self, generated: RequestResult) -> None:
        self._source.finished(generated)


def measure(engine: Engine, source: RequestSource, case: Case) -> Figures:
    """One rollout of the case's engines, which begin together."""
    dist.barrier()
    started = time.perf_counter()
    paced = Paced(source, case.step_seconds)
    count = sum(1 for _ in engine.generate(paced))
    reports = all_gather_objects((count, time.perf_counter() - started, paced.steps))
    counts, seconds, steps = zip(*reports[: case.engines], strict=True)
    assert sum(counts) == case.prompts * GROUP_SIZE, "every completion is made once"
    return Figures(max(seconds), max(steps), statistics.mean(idle_shares([seconds])))


def source_of(way: str, case: Case, draw: int) -> RequestSource:
    """What this rank's engine is to sample; nothing where the case has fewer engines than there are ranks."""
    rank, requests_PG = environment_rank(), make_requests(case.prompts, draw)
    store = shared_store(f"{case}/{draw}")  # a collective at its first call
    if rank >= case.engines:
        return AllAtOnce([])
    if way == "ours":
        mesh = Mesh(rank, case.engines, tensor=1, pipeline=1, engine_size=1)
        return WorkQueue(store, requests_PG, mesh, MAX_NUM_SEQS)
    return AllAtOnce([request for row in requests_PG[rank :: case.engines] for request in row])


def compare(engine: Engine, case: Case, draw: int) -> tuple[Figures, Figures]:
    """Ours and the fixed shares' on the same prompts."""
    order = ("ours", "fixed") if draw % 2 else ("fixed", "ours")
    found = {way: measure(engine, source_of(way, case, draw), case) for way in order}
    return found["ours"], found["fixed"]


# ---------------------------------------------------------------- output


def report_case(case: str, pairs: Sequence[tuple[Figures, Figures]]) -> None:
    """The medians of (ours, fixed shares), and the repeat that was least in our favour."""
    for metric, unit, least in (
        ("rollout_seconds", "s", 0.0),
        ("engine_steps", "steps", 0.0),
        ("idle_share", "share", LEAST_IDLE_SHARE),
    ):
        ours, fixed = (
            statistics.median(getattr(figures, metric) for figures in way) for way in zip(*pairs, strict=True)
        )
        told, ratio = f"fixed shares: {fixed:.4f}", fixed / max(ours, least)
        print_figure("rollout", case, metric, ours, unit, baseline=told, ratio=ratio)
    for metric, figure in (
        ("least_speedup", "rollout_seconds"),
        ("least_speedup_in_steps", "engine_steps"),
    ):
        least = min(getattr(fixed, figure) / getattr(ours, figure) for ours, fixed in pairs)
        print_figure("rollout", case, metric, least, "ratio", baseline="fixed shares", ratio=least)


# ---------------------------------------------------------------- program


def cases(quick: bool, cores: int) -> list[Case]:
    """Paced, and at full speed where each engine has a core; with `quick` one of the two for each number of engines."""
    found = []
    for engines in ENGINES:
        prompts, repeats = (50 if quick else 100) * engines, 2 if quick else 5
        enough_cores = engines <= cores
        if enough_cores:
            found.append(Case(engines, prompts, 0.0, repeats))
        if not (quick and enough_cores):
            found.append(Case(engines, prompts, STEP_SECONDS, repeats))
    return found


def run_rank(folder: Path, quick: bool) -> None:
    """What every rank under torchrun does; each has an engine of its own."""
    device = open_device("cpu")
    mesh = Mesh(environment_rank(), environment_world_size(), tensor=1, pipeline=1, engine_size=1)
    init_process_group(device, 600.0)
    settings = RolloutConfig(max_num_seqs=MAX_NUM_SEQS, cpu_kv_cache_gib=0.1)
    shapes = engine_shapes(read_model_shape(folder), engine_size=1)
    engine = Engine(
        str(folder), settings, len(PROMPT) + 1 + LONG_FACTOR * SHORT_TOKENS[1], mesh, device, shapes
    )
    list(engine.generate(make_requests(LONG_EVERY, 0)[mesh.rank]))
    for case in cases(quick, len(os.sched_getaffinity(0))):
        pairs = [compare(engine, case, draw) for draw in range(1, case.repeats + 1)]
        if mesh.rank == 0:
            report_case(str(case), pairs)
    dist.barrier()
    engine.close()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer prompts and repeats, within a minute")
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)  # set for the ranks, by this program
    options = parser.parse_args(arguments)
    if options.model is not None:
        run_rank(options.model, options.quick)
        return
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "model"
        make = [sys.executable, "-m", "rlmath.cli.make_tiny_model", "--output", str(folder)]
        subprocess.run(make, cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL)
        command = [*torchrun(max(ENGINES)), str(Path(__file__).resolve()), "--model", str(folder)]
        command += ["--quick"] if options.quick else []
        subprocess.run(command, cwd=REPOSITORY, env=one_thread(), check=True)


if __name__ == "__main__":
    main()
