"""Shapes of messages between pipeline stages, from the packs instead of messages of their own.

Patches `P2PCommunicator._communicate_shapes` (megatron-core 0.16 and 0.19), which sends the shape
of every tensor ahead of it and waits for the whole device twice. Tensors of each direction arrive
in the order of Megatron's schedule, so that a count is enough. It can go once Megatron takes shapes
by micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

Shape = tuple[int, ...]


@contextmanager
def known_shapes(hidden_states: Sequence[Shape], gradients: Sequence[Shape]) -> Iterator[None]:
    """Context in which Megatron's schedules send no shapes, because all are known.

    `hidden_states` are the shapes that this stage receives from the one before, `gradients` those
    from the one behind, each in their order. RuntimeError where more of them come, and at its end
    where fewer have."""
    forward = iter(hidden_states)
    backward = iter(gradients)

    def next_of(expected: Iterator[Shape]) -> Shape:
        for shape in expected:
            return shape
        raise RuntimeError(
            "more hidden states or gradients arrived from other stages than expected"
        )

    def shapes_to_receive(
        communicator: P2PCommunicator,
        tensor_send_next: Any,
        tensor_send_prev: Any,
        recv_prev: bool,
        recv_next: bool,
    ) -> tuple[Shape | None, Shape | None]:
        return next_of(forward) if recv_prev else None, next_of(backward) if recv_next else None

    original = P2PCommunicator._communicate_shapes
    P2PCommunicator._communicate_shapes = shapes_to_receive
    try:
        yield
        if (missing := sum(1 for shapes in (forward, backward) for _ in shapes)) > 0:
            raise RuntimeError(
                f"{missing} hidden states or gradients between stages were expected and did not "
                "come"
            )
    finally:
        P2PCommunicator._communicate_shapes = original
