"""A probe of the engines: log-probs of the same random tokens from the engine and from the policy, which should agree.

Where checksums compare bits, the probe compares what both sides compute: a wrong layout, mask or kernel shows, too.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from rlmath.algorithms.types import Sample
from rlmath.data.packing import pack
from rlmath.distributed.collectives import all_gather_objects
from rlmath.distributed.mesh import Mesh
from rlmath.models.forward_backward import ForwardBackward
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


class PolicyProbe:
    """The policy's side: `score_policy` first, then `compare` with the engines' log-probs. All training ranks call
    both."""

    def __init__(self, policy: ForwardBackward, mesh: Mesh, longest: int) -> None:
        """`longest`: most tokens of a sequence that the engine takes."""
        self._mesh = mesh
        # The engine scores a prompt at temperature 1 and masks nothing.
        self._policy = ForwardBackward(policy.chunks, mesh, policy.device, policy.vocab_size)
        draw = random.Random(0)
        length = max(2, min(TOKENS, longest - 1))
        self.sequences = [
            tuple(draw.randrange(policy.vocab_size) for _ in range(length)) for _ in range(SEQUENCES)
        ]
        self._expected: list[list[float]] | None = None

    def score_policy(self) -> None:
        """The policy's log-probs of every token but the first of each sequence, under its present weights."""
        samples = [Sample(ids[:1], ids[1:], (0.0,) * (len(ids) - 1), 0.0) for ids in self.sequences]
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

    def differences(self, found: Sequence[Sequence[float]]) -> torch.Tensor:
        """Between an engine's log-probs and the policy's, by token (nats)."""
        assert self._expected is not None, "score_policy comes first"
        order = [index for members in self._members() for index in members]
        values = [
            abs(a - b)
            for index, row in zip(order, self._expected, strict=True)
            for a, b in zip(found[index], row, strict=True)
        ]
        return torch.tensor(values, dtype=torch.float64)

    def compare(self, found: Mapping[int, Sequence[Sequence[float]]]) -> ProbeResult:
        """With the log-probs of engines, by engine; of the one that differs most."""
        by_engine = {engine: self.differences(rows) for engine, rows in sorted(found.items())}
        return worst_of([(engine, one.mean().item(), one.max().item()) for engine, one in by_engine.items()])


class Probe(PolicyProbe):
    """Both sides, where each training rank has a part of an engine: `score_policy` while the policy's parameters are on
    the device, then `compare_engine`."""

    def __init__(self, policy: ForwardBackward, engine: Engine, mesh: Mesh, longest: int) -> None:
        super().__init__(policy, mesh, longest)
        self._engine = engine

    def compare_engine(self) -> ProbeResult:
        """The engines' log-probs of the same tokens, compared with the policy's; returns the same on all ranks."""
        mine = self.differences(self._engine.score(self.sequences))
        self._expected = None
        everyone = all_gather_objects((mine.mean().item(), mine.max().item()))
        return worst_of(
            [(rank // self._mesh.engine_size, mean, largest) for rank, (mean, largest) in enumerate(everyone)]
        )


def worst_of(found: Sequence[tuple[int, float, float]]) -> ProbeResult:
    """Of (engine, mean, largest), the one with the largest mean."""
    # torch's max keeps a NaN, Python's may lose it.
    worst = int(torch.tensor([mean for _, mean, _ in found]).argmax())
    return ProbeResult(*found[worst])
