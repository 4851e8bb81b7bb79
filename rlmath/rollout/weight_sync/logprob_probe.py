"""A probe of the engines: log-probs of the same random tokens from the engine and from the policy, which should agree.

Where checksums compare bits, the probe compares what both sides compute: a wrong layout, mask or kernel shows, too.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from rlmath.algorithms.types import Sample
from rlmath.data.packing import pack
from rlmath.distributed.collectives import all_gather_objects
from rlmath.distributed.mesh import Mesh
from rlmath.models.forward_backward import ForwardBackward
from rlmath.models.logprobs import MinTokensMask
from rlmath.rollout.engine import Engine

SEQUENCES = 4
TOKENS = 64
"""Of one sequence, at most."""


@dataclass(frozen=True)
class ProbeResult:
    """Difference between the two log-probs in the engine that differs most (nats); NaN where either side has one."""

    engine: int
    mean: float
    """Over the probed tokens."""
    largest: float


class Probe:
    """Scores the tokens on both sides: `score_policy` first, while its parameters are on the device, then
    `compare_engine`. All ranks call both."""

    def __init__(self, policy: ForwardBackward, engine: Engine, mesh: Mesh, longest: int) -> None:
        """`longest`: most tokens of a sequence that the engine takes."""
        self._engine, self._mesh = engine, mesh
        # The engine scores a prompt at temperature 1 and masks nothing.
        self._policy = ForwardBackward(
            policy.chunks, mesh, policy.device, 1.0, policy.vocab_size, MinTokensMask()
        )
        draw = random.Random(0)
        length = max(2, min(TOKENS, longest - 1))
        self._sequences = [
            tuple(draw.randrange(policy.vocab_size) for _ in range(length)) for _ in range(SEQUENCES)
        ]
        self._expected: list[list[float]] | None = None

    def score_policy(self) -> None:
        """The policy's log-probs of every token but the first of each sequence, under its present weights."""
        samples = [Sample(ids[:1], ids[1:], (0.0,) * (len(ids) - 1), 0.0) for ids in self._sequences]
        # All samples on every data-parallel rank, in as few micro-batches as the layout takes.
        batches = [pack(samples, members, self._mesh.tensor) for members in self._members()]
        mine = self._policy.logprobs(batches)
        found = None
        if self._mesh.counts_loss and self._mesh.data_rank == 0:
            # One row a sample: the log-probs of its completion.
            found = []
            for batch, result in zip(batches, mine, strict=True):
                bounds, row_T = batch.cu_seqlens_S1.tolist(), result.logprobs_T.tolist()
                found += [row_T[bounds[s] + 1 : bounds[s + 1]] for s in range(len(batch.sample_indices))]
        (self._expected,) = [values for values in all_gather_objects(found) if values is not None]

    def _members(self) -> list[range]:
        """Which sequences each micro-batch has."""
        count = self._mesh.microbatch_multiple
        return [range(start, SEQUENCES, count) for start in range(count)]

    def compare_engine(self) -> ProbeResult:
        """The engines' log-probs of the same tokens, compared with the policy's; returns the same on all ranks."""
        assert self._expected is not None, "score_policy comes first"
        found = self._engine.score(self._sequences)
        order = [index for members in self._members() for index in members]
        differences = [
            abs(a - b)
            for index, row in zip(order, self._expected, strict=True)
            for a, b in zip(found[index], row, strict=True)
        ]
        self._expected = None
        mine = torch.tensor(differences, dtype=torch.float64)
        everyone = all_gather_objects((mine.mean().item(), mine.max().item()))
        # torch's max keeps a NaN, Python's may lose it.
        worst = int(torch.tensor([mean for mean, _ in everyone]).argmax())
        return ProbeResult(worst // self._mesh.engine_size, *everyone[worst])
