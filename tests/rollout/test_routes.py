"""Routes of completions on their way to the ranks that train."""

from __future__ import annotations

import torch

from rlmath.algorithms.types import RoutesAt
from rlmath.rollout.routes import RouteStore, by_place


def test_the_routes_of_a_message_do_not_keep_the_message_in_memory() -> None:
    message_NLK = torch.arange(60, dtype=torch.uint8).view(10, 3, 2)
    places = [RoutesAt(1, 4, tokens=7), RoutesAt(1, 2, tokens=3)]
    routes = by_place(places, message_NLK)
    assert list(routes) == places
    assert torch.equal(torch.cat(list(routes.values())), message_NLK)
    sizes = [routes_NLK.untyped_storage().nbytes() for routes_NLK in routes.values()]
    assert sizes == [42, 18]
    assert by_place([], message_NLK[:0]) == {}


def test_a_store_keeps_the_routes_that_are_still_needed() -> None:
    store = RouteStore(1)
    first, second, third = (store.keep(torch.zeros(n, 3, 2, dtype=torch.uint8)) for n in (1, 2, 4))
    store.keep_only([first, third, RoutesAt(0, second.number, tokens=2)])
    assert store.bytes == 5 * 6
    store.drop([first, RoutesAt(0, third.number, tokens=4)])
    assert store.bytes == 4 * 6 and len(store.get(third)) == 4
    assert store.keep(torch.zeros(3, 3, 2, dtype=torch.uint8)) not in (first, second, third)
