"""A coefficient of the entropy bonus that follows a target (Skywork-OR1, arXiv:2505.22312).

All functions are pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EntropyControl:
    """The coefficient after a step; a checkpoint has it."""

    coef: float
    weight: float
    """Weight of the entropy in the next step's loss.

    It is the coefficient, or 0 while the entropy is above the target."""

    def after(self, entropy: float, target: float, delta: float) -> EntropyControl:
        """The control after a step whose entropy was this (nats per token).

        The coefficient rises by `delta` below the target, and falls by it, to 0 at least,
        elsewhere.

        >>> EntropyControl(0.25, 0.0).after(0.1, target=0.2, delta=0.125)
        EntropyControl(coef=0.375, weight=0.375)
        >>> EntropyControl(0.25, 0.25).after(0.3, target=0.2, delta=0.125)
        EntropyControl(coef=0.125, weight=0.0)
        """
        coef = max(0.0, self.coef + (delta if entropy < target else -delta))
        return EntropyControl(coef, coef if entropy <= target else 0.0)
