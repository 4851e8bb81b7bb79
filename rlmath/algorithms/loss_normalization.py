"""What a token weighs in the loss, and what its sample adds to the denominator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

NormalisationKind = Literal["token", "sequence", "constant"]


@dataclass(frozen=True)
class Normalisation:
    """How the losses of a minibatch's tokens become one number: the sum over tokens of weight times loss, divided by
    the sum over samples of `count`, both over all ranks and micro-batches.

    | kind | loss of a minibatch | source |
    |---|---|---|
    | "token" | mean over all its tokens | DAPO, arXiv:2503.14476 |
    | "sequence" | mean over samples of the mean over their tokens | GRPO, arXiv:2402.03300 |
    | "constant" | mean over samples of (sum over their tokens / constant) | Dr. GRPO, arXiv:2503.20783 |

    >>> Normalisation("sequence").weight(n_tokens=4), Normalisation("sequence").count(n_tokens=4)
    (0.25, 1)
    """

    kind: NormalisationKind = "token"
    constant: int = 1
    """Tokens that "constant" divides by: the longest completion that may be."""

    def weight(self, n_tokens: int) -> float:
        """Of each of a completion's `n_tokens` tokens."""
        if self.kind == "sequence":
            return 1.0 / n_tokens if n_tokens else 0.0
        return 1.0 / self.constant if self.kind == "constant" else 1.0

    def count(self, n_tokens: int) -> int:
        """What a completion of `n_tokens` tokens adds to the denominator."""
        return n_tokens if self.kind == "token" else 1


TOKEN_MEAN = Normalisation()
