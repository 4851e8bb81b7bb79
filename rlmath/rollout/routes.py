"""The experts of sampled tokens, held by the rank that sampled, until ranks that train need them.

    engine -> RouteStore (its first rank) -> fetch_routes -> the ranks with those micro-batches

A token has layers x experts numbers, 384 bytes where its id and log-prob have 8: they are not
gathered to every rank. A completion says where its own are (`RoutesAt`).
"""

# Shape legend: N tokens of one completion that have a route, L layers of the model or of the rank
# that trains, K experts of a token in a layer.

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from rlmath.algorithms.types import RoutesAt
from rlmath.checkpoint.route_files import read_routes, write_routes
from rlmath.checkpoint.unfinished_groups import route_file
from rlmath.config.model_shape import ModelShape
from rlmath.distributed.collectives import all_gather_objects, first_error

MESSAGE_BYTES = 2**25
"""Most bytes of a message between two ranks; one completion may have more."""


class RouteStore:
    """The routes of completions that this rank's engine has sampled, or of slices of them.

    They stay until their completions are learned from or dropped."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._routes: dict[int, Tensor] = {}
        self._numbers = itertools.count()

    def keep(self, routes_NLK: Tensor) -> RoutesAt:
        """Keep the routes of a slice; returns where they are."""
        place = RoutesAt(self.rank, next(self._numbers), tokens=len(routes_NLK))
        self._routes[place.number] = routes_NLK
        return place

    def get(self, place: RoutesAt) -> Tensor:
        """Routes that this rank holds, [N, L, K]."""
        assert place.rank == self.rank, f"{place} is not on rank {self.rank}"
        return self._routes[place.number]

    @property
    def bytes(self) -> int:
        """What all of them take (bytes)."""
        return sum(routes_NLK.nbytes for routes_NLK in self._routes.values())

    @property
    def held(self) -> Mapping[int, Tensor]:
        """All of them by their number."""
        return self._routes

    def files(self, places: Iterable[RoutesAt]) -> dict[str, bytes]:
        """A file of those of these places that this rank holds, by its name; empty without any."""
        routes = {place.number: self.get(place) for place in places if place.rank == self.rank}
        return {route_file(self.rank): write_routes(routes)} if routes else {}

    def clear(self) -> None:
        """Forget all, and count from 0 again."""
        self._routes.clear()
        self._numbers = itertools.count()

    def keep_only(self, places: Iterable[RoutesAt]) -> None:
        """Forget the routes of other places."""
        kept_numbers = {place.number for place in places if place.rank == self.rank}
        self._routes = {
            number: self._routes[number] for number in self._routes if number in kept_numbers
        }

    def drop(self, places: Iterable[RoutesAt]) -> None:
        """Forget the routes of these places."""
        for place in places:
            if place.rank == self.rank:
                self._routes.pop(place.number, None)


def load_routes(
    store: RouteStore,
    folder: Path,
    places: Sequence[RoutesAt],
    world_size: int,
    shape: ModelShape,
) -> dict[RoutesAt, RoutesAt]:
    """Keep this rank's part of the routes of a checkpoint or capture; returns where each is now.

    What the store had before is forgotten. `places` are those that the folder has, in an order that
    all ranks have. Each rank takes what it had; what ranks had that are no more is spread over the
    others. OSError or ValueError where this rank's part cannot be read."""
    store.clear()
    moved = {}
    files: dict[int, dict[int, Tensor]] = {}
    numbers = [itertools.count() for _ in range(world_size)]
    for place in places:
        rank = place.rank % world_size
        moved[place] = RoutesAt(rank, next(numbers[rank]), tokens=place.tokens)
        if rank != store.rank:
            continue
        if place.rank not in files:
            files[place.rank] = read_routes(folder / route_file(place.rank), shape)
        routes_NLK = files[place.rank].pop(place.number, None)
        if routes_NLK is None or len(routes_NLK) != place.tokens:
            raise ValueError(f"{route_file(place.rank)} does not have {place}")
        kept_at = store.keep(routes_NLK)
        assert kept_at == moved[place], f"{place} came to {kept_at}"
    return moved


def load_on_all_ranks(
    store: RouteStore,
    folder: Path,
    places: Sequence[RoutesAt],
    world_size: int,
    shape: ModelShape,
) -> dict[RoutesAt, RoutesAt]:
    """`load_routes` on every rank.

    A collective. ValueError on all ranks where one cannot read its part."""
    moved: dict[RoutesAt, RoutesAt] = {}
    problem = None
    try:
        moved = load_routes(store, folder, places, world_size=world_size, shape=shape)
    except (OSError, ValueError) as error:
        problem = f"rank {store.rank}: {error}"
    problem = first_error(problem)
    if problem is not None:
        raise ValueError(problem)
    return moved


def fetch_routes(
    store: RouteStore,
    needed: Sequence[RoutesAt],
    layers: Sequence[int],
    experts_per_token: int,
    dtype: torch.dtype,
) -> dict[RoutesAt, Tensor]:
    """The routes that this rank needs, [N, L, K], of its `layers` (from 0) alone.

    Ranks talk in pairs: in turn s a rank sends to the s-th behind it and receives from the s-th
    before it, so that it has one message of each on its way. A collective."""
    needs = all_gather_objects((list(needed), list(layers)))
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    token_shape = (len(layers), experts_per_token)
    fetched = {place: store.get(place)[:, layers] for place in needed if place.rank == rank}
    for shift in range(1, world_size):
        receiver = (rank + shift) % world_size
        sender = (rank - shift) % world_size
        places_of_receiver, receiver_layers = needs[receiver]
        token_bytes = len(receiver_layers) * experts_per_token * dtype.itemsize
        sends = messages(places_of_receiver, rank, token_bytes)
        own_token_bytes = len(layers) * experts_per_token * dtype.itemsize
        receives = messages(needed, sender, own_token_bytes)
        for sent, received in itertools.zip_longest(sends, receives, fillvalue=()):
            works = []
            tokens = sum(place.tokens for place in received)
            arrived = torch.empty((tokens, *token_shape), dtype=dtype)
            if sent:
                routes = torch.cat([store.get(place)[:, receiver_layers] for place in sent])
                works.append(dist.isend(routes.flatten().view(torch.uint8), receiver))
            if received:
                works.append(dist.irecv(arrived.flatten().view(torch.uint8), sender))
            for work in works:
                assert work is not None, "both ranks are in the default process group"
                work.wait()
            fetched |= by_place(received, arrived)
    return fetched


def by_place(places: Sequence[RoutesAt], message_NLK: Tensor) -> dict[RoutesAt, Tensor]:
    """The routes of a message, each in memory of its own.

    So the message is not held until the last of them is laid out."""
    parts = message_NLK.split([place.tokens for place in places])
    return {place: part.clone() for place, part in zip(places, parts, strict=True)}


def messages(
    places: Sequence[RoutesAt], sender: int, token_bytes: int
) -> Iterator[tuple[RoutesAt, ...]]:
    """What `sender` holds of some routes, by message, the same on both sides.

    >>> places = [RoutesAt(rank, number, tokens=2**24) for number in range(3) for rank in range(2)]
    >>> [[place.number for place in message] for message in messages(places, 1, token_bytes=1)]
    [[0, 1], [2]]
    """
    message: list[RoutesAt] = []
    tokens = 0
    for place in dict.fromkeys(place for place in places if place.rank == sender):
        if message and (tokens + place.tokens) * token_bytes > MESSAGE_BYTES:
            yield tuple(message)
            message = []
            tokens = 0
        message.append(place)
        tokens += place.tokens
    if message:
        yield tuple(message)
