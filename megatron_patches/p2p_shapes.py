"""Shapes of messages between pipeline stages, from the packs instead of messages of their own.

Patches `P2PCommunicator._communicate_shapes` (megatron-core 0.16 and 0.19), which sends the shape of every tensor ahead
of it and waits for the whole device twice. With one model chunk a stage, tensors of both directions arrive in the order
of the micro-batches, so that a count is enough. It can go once Megatron takes shapes by micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

Shape = tuple[int, ...]


@contextmanager
def known_shapes(shapes: Sequence[Shape]) -> Iterator[None]:
    """While it is open, Megatron's schedule without interleaving sends no shapes; `shapes` are those of the hidden
    states of every micro-batch, and of their gradients."""
    forward, backward = iter(shapes), iter(shapes)

    def shapes_to_receive(
        communicator: P2PCommunicator,
        tensor_send_next: Any,
        tensor_send_prev: Any,
        recv_prev: bool,
        recv_next: bool,
    ) -> tuple[Shape | None, Shape | None]:
        return next(forward) if recv_prev else None, next(backward) if recv_next else None

    theirs = P2PCommunicator._communicate_shapes
    P2PCommunicator._communicate_shapes = shapes_to_receive
    try:
        yield
    finally:
        P2PCommunicator._communicate_shapes = theirs
