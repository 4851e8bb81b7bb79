"""What one rank must do in a phase, in units that a machine has a speed for."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Work:
    """Of the rank that has the most.

    >>> (Work(flops=2.0, messages=1.0) + Work(flops=3.0)).times(2.0)
    Work(flops=10.0, memory=0.0, node=0.0, network=0.0, host=0.0, messages=2.0, decode_steps=0.0, sequence_steps=0.0, \
microbatches=0.0, tokens=0.0, switches=0.0, steps=0.0)
    """

    flops: float = 0.0
    """Matrix multiplications and attention, with what is idle in a pipeline counted as work."""
    memory: float = 0.0
    """Bytes read from and written to the device's memory, beside those of large matrix multiplications."""
    node: float = 0.0
    """Bytes sent to devices of the same node."""
    network: float = 0.0
    """Bytes sent to other nodes."""
    host: float = 0.0
    """Bytes to and from the host's memory."""
    messages: float = 0.0
    """Collectives and messages, whatever their size."""
    decode_steps: float = 0.0
    """Engine steps, whatever their batch."""
    sequence_steps: float = 0.0
    """Tokens sampled: sequences of an engine step, added up over the steps."""
    microbatches: float = 0.0
    """Passes of a micro-batch, a backward pass being one of its own."""
    tokens: float = 0.0
    """Tokens that the host handles one by one: every rank learns all that was sampled."""
    switches: float = 0.0
    """Turns from training to sampling and back."""
    steps: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(*(getattr(self, name) + getattr(other, name) for name in NAMES))

    def times(self, factor: float) -> Work:
        return Work(*(factor * getattr(self, name) for name in NAMES))


NAMES = tuple(field.name for field in fields(Work))
