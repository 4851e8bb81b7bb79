"""A probe of the engines: log-probs of the same random tokens from the engine and from the policy,
which should agree.

Where checksums compare bits, the probe compares what both sides compute: a wrong layout, mask or
kernel shows, too.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

import torch

from rlmath.algorithms.types import Sample
from rlmath.config.schema import SyncConfig
from rlmath.data.packing import pack
from rlmath.distributed.collectives import all_gather_objects
from rlmath.distributed.mesh import Mesh
from rlmath.models.forward_backward import ForwardBackward

SEQUENCES = 4
TOKENS = 64
"""Most tokens of one sequence."""
EngineScores = Callable[[Sequence[Sequence[int]]], Mapping[int, Sequence[Sequence[float]]]]
"""By engine, its log-probs of every token but the first of each sequence (nats). A collective."""


def is_due(every: int, step: int) -> bool:
    """Whether what is due every so many steps (0: never) is due: at 0, N, 2 N, ..., the same in a
    resumed run."""
    return every > 0 and step % every == 0


class Probe:
    """Compares both sides where that is due.

    All training ranks call its methods alike."""

    def __init__(
        self,
        policy: ForwardBackward,
        mesh: Mesh,
        longest: int,
        settings: SyncConfig,
        engine_scores: EngineScores,
    ) -> None:
        """`longest`: most tokens of a sequence that the engine takes."""
        self._mesh, self._settings, self._engine_scores = mesh, settings, engine_scores
        # The engine scores a prompt at temperature 1 and masks nothing.
        self._policy = ForwardBackward(policy.chunks, mesh, policy.device, policy.vocab_size)
        draw = random.Random(0)
        length = max(2, min(TOKENS, longest - 1))
        self.sequences = [
            tuple(draw.randrange(policy.vocab_size) for _ in range(length))
            for _ in range(SEQUENCES)
        ]
        self._step = 0
        self._expected: list[list[float]] | None = None
        """By micro-batch and sequence in it; None where nothing is to be compared."""

    def score_policy(self, step: int) -> None:
        """The policy's side, where step `step` (from 0) is due: its log-probs of every token but
        the first of each sequence. Its parameters must be on the device."""
        self._step, self._expected = step, None
        if not is_due(self._settings.probe_every, step):
            return
        samples = [Sample(ids[:1], ids[1:], (0.0,) * (len(ids) - 1), 0.0) for ids in self.sequences]
        # All samples on every data-parallel rank, in as few micro-batches as the layout takes.
        batches = [pack(samples, members, self._mesh.tensor) for members in self._members()]
        mine = self._policy.logprobs(batches)
        found = None
        if self._mesh.counts_loss and self._mesh.data_rank == 0:
            # One row a sample: the log-probs of its completion.
            found = []
            for batch, result in zip(batches, mine, strict=True):
                bounds, row_T = batch.cu_seqlens_S1.tolist(), result.tolist()
                found += [
                    row_T[bounds[s] + 1 : bounds[s + 1]] for s in range(len(batch.sample_indices))
                ]
        (self._expected,) = [values for values in all_gather_objects(found) if values is not None]

    def _members(self) -> list[range]:
        """Which sequences each micro-batch has."""
        count = self._mesh.microbatch_multiple
        return [range(start, SEQUENCES, count) for start in range(count)]

    def compare(self) -> dict[str, float]:
        """The engines' side, if the policy's was due: metrics of the engine that differs most.

        RuntimeError on all ranks where the mean is above `sync.probe_threshold`, or NaN."""
        if self._expected is None:
            return {}
        order = [index for members in self._members() for index in members]
        engines = sorted(self._engine_scores(self.sequences).items())
        differences = []
        for _, found in engines:
            pairs = zip(order, self._expected, strict=True)
            values = [abs(a - b) for i, row in pairs for a, b in zip(found[i], row, strict=True)]
            differences.append(torch.tensor(values, dtype=torch.float64))
        self._expected = None
        worst = int(
            torch.stack([one.mean() for one in differences]).argmax()
        )  # for torch NaN is the largest
        mean, largest = differences[worst].mean().item(), differences[worst].max().item()
        threshold = self._settings.probe_threshold
        if not mean <= threshold:
            raise RuntimeError(
                f"the probe after weight sync {self._step + 1}: log-probs of engine "
                f"{engines[worst][0]} and of the "
                f"policy differ by {mean:.3g} nats per token (at most {largest:.3g}); "
                "sync.probe_threshold is "
                f"{threshold:g}. The engine does not have the policy's weights, or computes "
                "otherwise: what it "
                "samples is not on-policy"
            )
        return {"sync/probe_difference": mean, "sync/probe_difference_max": largest}
