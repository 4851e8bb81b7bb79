"""Routes of completions on their way to the ranks that train."""

from __future__ import annotations

import torch

from rlmath.algorithms.types import RoutesAt
from rlmath.rollout.routes import by_place


def test_the_routes_of_a_message_do_not_keep_the_message_in_memory() -> None:
    message_NLK = torch.arange(60, dtype=torch.uint8).view(10, 3, 2)
    places = [RoutesAt(1, 4, tokens=7), RoutesAt(1, 2, tokens=3)]
    routes = by_place(places, message_NLK)
    assert list(routes) == places
    assert torch.equal(torch.cat(list(routes.values())), message_NLK)
    sizes = [routes_NLK.untyped_storage().nbytes() for routes_NLK in routes.values()]
    assert sizes == [42, 18]
    assert by_place([], message_NLK[:0]) == {}
