"""A probe of the engines: their log-probs of random tokens should agree with the policy's.

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
OTHER_ENGINE = ". With lora.engine=merged it computes without adapters of its own"
EngineScores = Callable[[Sequence[Sequence[int]]], Mapping[int, Sequence[Sequence[float]]]]
"""Gives each engine's log-probs of every token but the first of each sequence (nats).

A collective."""


def is_due(every: int, step: int) -> bool:
    """Whether what is due every so many steps (0: never) is due: at 0, N, 2 N, ...

    It is the same in a resumed run."""
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
        holds_adapters: bool = False,
    ) -> None:
        """`longest`: most tokens of a sequence that the engine takes.

        Engines that hold the policy's adapters compute with other kernels: the error says so."""
        self._mesh = mesh
        self._holds_adapters = holds_adapters
        self._settings = settings
        self._engine_scores = engine_scores
        # The engine scores a prompt at temperature 1 and masks nothing.
        self._policy = ForwardBackward(
            policy.chunks, mesh, policy.device, vocab_size=policy.vocab_size
        )
        draw = random.Random(0)
        length = max(2, min(TOKENS, longest - 1))
        self.sequences = [
            tuple(draw.randrange(policy.vocab_size) for _ in range(length))
            for _ in range(SEQUENCES)
        ]
        self._step = 0
        self._expected: list[list[float]] | None = None
        """Log-probs of each sequence, micro-batch by micro-batch; None: nothing to compare."""

    def score_policy(self, step: int) -> None:
        """Compute the policy's side where step `step` (from 0) is due.

        It is the log-probs of every token but the first of each sequence. The policy's parameters
        must be on the device."""
        self._step = step
        self._expected = None
        if not is_due(self._settings.probe_every, step):
            return
        samples = [
            Sample(ids[:1], ids[1:], (0.0,) * (len(ids) - 1), advantage=0.0)
            for ids in self.sequences
        ]
        # All samples on every data-parallel rank, in as few micro-batches as the layout takes.
        batches = [pack(samples, members, self._mesh.tensor) for members in self._members()]
        logprobs_by_batch = self._policy.logprobs(batches)
        rows = None
        if self._mesh.counts_loss and self._mesh.data_rank == 0:
            # One row a sample: the log-probs of its completion.
            rows = []
            for batch, logprobs_T in zip(batches, logprobs_by_batch, strict=True):
                bounds, packed = batch.cu_seqlens_S1.tolist(), logprobs_T.tolist()
                rows += [
                    packed[bounds[s] + 1 : bounds[s + 1]] for s in range(len(batch.sample_indices))
                ]
        (self._expected,) = [
            gathered_rows for gathered_rows in all_gather_objects(rows) if gathered_rows is not None
        ]

    def _members(self) -> list[range]:
        """The sequences of each micro-batch."""
        count = self._mesh.microbatch_multiple
        return [range(start, SEQUENCES, count) for start in range(count)]

    def compare(self) -> dict[str, float]:
        """Compare with the engines if the policy's side was due; metrics of the one furthest off.

        RuntimeError on all ranks where the mean is above `sync.probe_threshold`, or NaN."""
        if self._expected is None:
            return {}
        order = [index for members in self._members() for index in members]
        engines = sorted(self._engine_scores(self.sequences).items())
        differences = []
        for _, engine_rows in engines:
            pairs = zip(order, self._expected, strict=True)
            gaps = [
                abs(a - b) for i, row in pairs for a, b in zip(engine_rows[i], row, strict=True)
            ]
            differences.append(torch.tensor(gaps, dtype=torch.float64))
        self._expected = None
        worst = int(
            torch.stack([gap.mean() for gap in differences]).argmax()
        )  # for torch NaN is the largest
        mean = differences[worst].mean().item()
        largest = differences[worst].max().item()
        threshold = self._settings.probe_threshold
        if not mean <= threshold:
            raise RuntimeError(
                f"the probe after weight sync {self._step + 1}: log-probs of engine "
                f"{engines[worst][0]} and of the "
                f"policy differ by {mean:.3g} nats per token (at most {largest:.3g}); "
                "sync.probe_threshold is "
                f"{threshold:g}. The engine does not have the policy's weights, or computes "
                "otherwise: what it "
                f"samples is not on-policy{OTHER_ENGINE if self._holds_adapters else ''}"
            )
        return {"sync/probe_difference": mean, "sync/probe_difference_max": largest}
