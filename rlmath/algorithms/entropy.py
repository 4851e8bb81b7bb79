"""A coefficient of the entropy bonus that follows a target: pure (Skywork-OR1,
arXiv:2505.22312)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EntropyControl:
    """Where the coefficient stands after a step; a checkpoint has it."""

    coef: float
    weight: float
    """Of the entropy in the next step's loss: the coefficient, or 0 while the entropy is above the
    target."""

    def after(self, entropy: float, target: float, delta: float) -> EntropyControl:
        """After a step whose entropy was this (nats per token): the coefficient rises by `delta`
        below the target, and falls by it, to 0 at least, elsewhere.

        >>> EntropyControl(0.25, 0.0).after(0.1, target=0.2, delta=0.125)
        EntropyControl(coef=0.375, weight=0.375)
        >>> EntropyControl(0.25, 0.25).after(0.3, target=0.2, delta=0.125)
        EntropyControl(coef=0.125, weight=0.0)
        """
        coef = max(0.0, self.coef + (delta if entropy < target else -delta))
        return EntropyControl(coef, coef if entropy <= target else 0.0)
