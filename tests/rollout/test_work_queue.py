"""Engines that draw their work, played step by step without a model.

Every sequence gets one token per step."""

from __future__ import annotations

import random
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import pytest
import torch.distributed as dist

from rlmath.distributed.mesh import Mesh
from rlmath.distributed.run_store import RunStore
from rlmath.rollout.running_completions import AllAtOnce, Load, RequestSource
from rlmath.rollout.sampling import Request
from rlmath.rollout.work_queue import EngineUsage, WorkItem, WorkQueue, idle_shares

ONE_ENGINE = Mesh(0, 1, 1, 1, 1)


def make_requests(lengths_P: Sequence[int], group_size: int) -> list[list[Request]]:
    return [
        [
            Request((p, g), (3,), seed=0, min_new_tokens=length, max_new_tokens=length)
            for g in range(group_size)
        ]
        for p, length in enumerate(lengths_P)
    ]


def engine_mesh(engine: int, engines: int) -> Mesh:
    return Mesh(engine, engines, 1, 1, 1)


class PlayedEngine:
    """An engine without a model.

    It adds what its source gives and makes a token of each of the first `places` sequences per
    step."""

    def __init__(self, source: RequestSource, places: int) -> None:
        self.source = source
        self.places = places
        self.queue: list[list] = []
        self.made: list[tuple[int, int]] = []
        self.loads: list[int] = []
        self.steps = 0

    def step(self) -> bool:
        """False once there is nothing to do."""
        waiting = max(0, len(self.queue) - self.places)
        self.queue += [[request, 0] for request in self.source.pop(Load(len(self.queue), waiting))]
        if not self.queue:
            return False
        self.steps += 1
        self.loads.append(len(self.queue))
        for row in self.queue[: self.places]:
            row[1] += 1
        for request, tokens in [row for row in self.queue if row[1] == row[0].max_new_tokens]:
            self.made.append(request.key)
            self.source.ended(request.key, tokens)
        self.queue = [row for row in self.queue if row[1] < row[0].max_new_tokens]
        return True


def play_in_step(engines: Sequence[PlayedEngine]) -> list[int]:
    """All engines at one pace, to the end; the steps of each."""
    running = list(engines)
    while running:
        running = [engine for engine in running if engine.step()]
    return [engine.steps for engine in engines]


def new_store(inner: dist.Store | None = None) -> RunStore:
    return RunStore(inner or dist.HashStore(), "rollout")


def sharing_engines(
    lengths_P: Sequence[int],
    group_size: int,
    engines: int,
    places: int,
    inner: dist.Store | None = None,
) -> list[PlayedEngine]:
    # Ranks know what they have taken, so each has a store object of its own.
    requests_PG = make_requests(lengths_P, group_size)
    inner = inner or dist.HashStore()
    meshes = [engine_mesh(engine, engines) for engine in range(engines)]
    return [
        PlayedEngine(WorkQueue(new_store(inner), requests_PG, mesh, places), places)
        for mesh in meshes
    ]


def one_in_50_is_20_times_longer(prompts: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    long = {start + draw.randrange(50) for start in range(0, prompts, 50)}
    return [160 if p in long else 8 for p in range(prompts)]


@pytest.mark.parametrize("engines", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("prompts", "group_size", "places"),
    [(20, 4, 8), (20, 3, 8), (20, 1, 2), (7, 5, 3), (3, 4, 256), (2, 4, 1), (1, 1, 1), (0, 4, 8)],
)
def test_every_sample_is_drawn_once_whatever_the_pace(
    engines: int, prompts: int, group_size: int, places: int
):
    for seed in range(5):
        draw = random.Random(seed)
        lengths = [draw.choice((1, 2, 3, 30)) for _ in range(prompts)]
        played = sharing_engines(lengths, group_size, engines, places)
        running = list(played)
        while running:
            engine = draw.choice(running)
            if not engine.step():
                running.remove(engine)
        keys = [key for engine in played for key in engine.made]
        assert sorted(keys) == [(p, g) for p in range(prompts) for g in range(group_size)]


def test_an_engine_is_full_while_there_is_work_and_holds_no_more_than_that():
    # 12 groups of 3 samples, 5 tokens each, 8 places: the last pop may bring 2 remaining samples
    # for one place.
    (engine,) = sharing_engines([5] * 12, 3, engines=1, places=8)
    play_in_step([engine])
    assert engine.steps == 25, "36 samples of 5 tokens in 8 places: four full rounds and one of 4"
    assert all(8 <= load <= 9 for load in engine.loads[:20])


def test_an_engine_that_wakes_late_finds_its_even_share():
    early, late = sharing_engines([50] * 8, 1, engines=2, places=100)
    for _ in range(49):
        early.step()
    late.step()
    assert (early.loads[-1], late.loads[-1]) == (4, 4)


def test_an_engine_that_has_finished_something_takes_what_another_has_not_begun():
    early, late = sharing_engines([5] * 8, 2, engines=2, places=4)
    while early.step():
        pass
    assert len(early.made) == 12, "all but the first samples of the late one's part"
    while late.step():
        pass
    assert late.made == [(1, 0), (3, 0), (5, 0), (7, 0)]


def test_engines_that_begin_at_once_ask_nothing_of_the_store():
    requests_PG = make_requests([5] * 50, 4)
    store = Unasked()
    work_queue = [WorkQueue(new_store(store), requests_PG, engine_mesh(e, 4), 8) for e in range(4)]
    popped = [
        [request.key for request in engine_queue.pop(Load(0, 0))] for engine_queue in work_queue
    ]
    assert popped == [[(p, 0) for p in range(e, 32, 4)] for e in range(4)]


def test_engines_begin_with_as_many_sequences_where_rows_are_uneven() -> None:
    """Completions that are continued stand first, a row for each; then whole groups."""
    carried = make_requests([5] * 40, 1)
    fresh = make_requests([5] * 20, 8)
    rows = [
        *carried,
        *([replace(r, key=(p, r.key[1])) for r in row] for p, row in enumerate(fresh, start=40)),
    ]
    work_queue = [WorkQueue(new_store(), rows, engine_mesh(e, 2), 256) for e in range(2)]
    assert [len(engine_queue.pop(Load(0, 0))) for engine_queue in work_queue] == [20 + 10 * 8] * 2


def test_what_an_engine_did_by_hand() -> None:
    work_queue = WorkQueue(new_store(), make_requests([5] * 5, 1), ONE_ENGINE, 4)
    assert len(work_queue.pop(Load(0, 0))) == 4
    for load in (
        Load(4, 0),
        Load(4, 2),
    ):  # two of them are put off for want of room in the KV cache
        assert work_queue.pop(load) == []
    work_queue.ended((0, 0), 5)
    assert len(work_queue.pop(Load(3, 0))) == 1
    for load in (Load(4, 1), Load(4, 0), Load(2, 0), Load(1, 0)):
        assert work_queue.pop(load) == []
    # 4, 2, 3, 3, 4, 2 and 1 sequences in seven steps; in the last three nothing is begun and
    # nothing waits.
    assert work_queue.usage(1.5) == EngineUsage(1.5, steps=7, tail_steps=3, fill=19 / (4 * 7))


class Unasked(dist.Store):
    """A store that raises at every request."""


def test_nothing_is_drawn_while_sequences_wait_for_the_kv_cache():
    work_queue = WorkQueue(new_store(), make_requests([5] * 9, 1), ONE_ENGINE, 4)
    assert len(work_queue.pop(Load(0, 0))) == 4
    work_queue.ended((0, 0), 5)
    assert work_queue.pop(Load(3, 1)) == []
    assert [request.key for request in work_queue.pop(Load(3, 0))] == [(4, 0)]


def test_remaining_samples_of_the_longest_first_samples_come_first():
    work_queue = WorkQueue(new_store(), make_requests([1, 1, 1, 1], 2), ONE_ENGINE, 4)
    assert [request.key for request in work_queue.pop(Load(0, 0))] == [
        (0, 0),
        (1, 0),
        (2, 0),
        (3, 0),
    ]
    for _ in range(5):
        work_queue.pop(Load(4, 0))
    work_queue.ended((1, 0), 2)
    work_queue.ended((2, 0), 3)
    # First samples 0 and 3 have run for 6 steps and are not done, 2 had 3 tokens, 1 had 2.
    order = [work_queue.pop(Load(3, 0))[0].key for _ in range(4)]
    assert order == [(0, 1), (3, 1), (2, 1), (1, 1)]
    assert work_queue.pop(Load(0, 0)) == []


class Passed:
    """Gives the second rank of an engine, which asks later, what the first one popped."""

    def __init__(self) -> None:
        self._items: deque[list[WorkItem]] = deque()

    def from_first(self, items: list[WorkItem]) -> list[WorkItem]:
        self._items.append(items)
        return items

    def to_second(self, items: list[WorkItem]) -> list[WorkItem]:
        assert items == []
        return self._items.popleft()


def engine_of_two(
    engine: int, inner: dist.Store, requests_PG: list[list[Request]]
) -> list[PlayedEngine]:
    passed = Passed()
    meshes = [Mesh(2 * engine + k, 4, 1, 1, 2) for k in range(2)]
    shares = (passed.from_first, passed.to_second)
    return [
        PlayedEngine(WorkQueue(new_store(inner), requests_PG, mesh, 4, share), 4)
        for mesh, share in zip(meshes, shares, strict=True)
    ]


def test_all_ranks_of_an_engine_are_given_the_same():
    first, second = engine_of_two(0, dist.HashStore(), make_requests([3, 9, 1, 1, 2], 3))
    while first.step():
        assert second.step()
    assert not second.step()
    assert first.made == second.made and len(first.made) == 13, (
        "two first samples are the other engine's part"
    )


@pytest.mark.parametrize("engine_size", [1, 2])
def test_no_key_stays_in_the_store(engine_size: int):
    inner = dist.HashStore()
    lengths = [3, 9, 1, 1, 2]
    if engine_size == 1:
        played = sharing_engines(lengths, 3, 4, 4, inner)
    else:
        played = [
            player
            for e in range(2)
            for player in engine_of_two(e, inner, make_requests(lengths, 3))
        ]
    play_in_step(played)
    assert inner.num_keys() > 0
    for engine in played:
        engine.source.close()
    assert inner.num_keys() == 0


@pytest.mark.parametrize(("engines", "prompts"), [(2, 200), (2, 400), (4, 400), (4, 800)])
def test_rare_long_answers_idle_at_most_half_as_long_as_with_fixed_shares(
    engines: int, prompts: int
):
    shared = []
    fixed = []
    for seed in range(10):
        lengths = one_in_50_is_20_times_longer(prompts, seed)
        shared.append(play_in_step(sharing_engines(lengths, 4, engines, places=8)))
        requests_PG = make_requests(lengths, 4)
        shares = [list(chain(*requests_PG[engine::engines])) for engine in range(engines)]
        fixed.append(play_in_step([PlayedEngine(AllAtOnce(share), 8) for share in shares]))
    # Where luck has made the fixed shares exactly even, ours may end one short answer later.
    assert all(
        max(shared_steps) <= max(fixed_steps) + 8
        for shared_steps, fixed_steps in zip(shared, fixed, strict=True)
    )
    assert sum(map(max, shared)) < 0.95 * sum(map(max, fixed))
    idle = [statistics.mean(idle_shares(engine_steps)) for engine_steps in (shared, fixed)]
    assert idle[0] < idle[1] / 2
