"""The queue from which engines pop work while they sample; none waits for one with long answers.

The samples of a prompt are two items of work. Its *first sample* is popped in the order of the
prompts: an engine has a part of its own, an even share as far as it has places, for which it asks
nobody, as all engines begin at once; what is behind those parts comes from one counter that all
engines share. Its *remaining samples* are an item of their own, and come once all first samples are
out: an engine pops those of its own prompts, longest first sample first, then those that other
engines have not begun. So the groups with long answers are known early and start early, and what is
left for the end is short enough to be spread evenly. (The lengths of a group from its first sample,
longest first: Seer, arXiv:2511.14617.)

A second counter leads all engines together past the prompts whose remaining samples others may not
have begun. Each is looked at once, not once by every engine: what a rollout asks of the store grows
with prompts plus engines, not their product.

An engine pops as long as vLLM has a free place for a sequence. Before its first completion it pops
the first samples of its own part only: another engine may still be waking up.

The counters and the marks of taken items are values in a store that all ranks reach. One rank of
each engine pops; the others get what it popped at the same point, as all of them run vLLM's
scheduler in lockstep.
"""

# Shape legend: P prompts, G samples per prompt.

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from rlmath.distributed.mesh import Mesh
from rlmath.distributed.run_store import RunStore
from rlmath.rollout.running_completions import Load
from rlmath.rollout.sampling import Key, Request


class WorkItem(NamedTuple):
    """Samples that are popped at once: the first one of prompt `prompt`, or all its others."""

    prompt: int
    is_remaining: bool


@dataclass(frozen=True)
class EngineUsage:
    seconds: float
    """Time from the start to its last completion."""
    steps: int
    tail_steps: int
    """The last steps, in which it began nothing and nothing waited."""
    fill: float
    """Mean of the sequences that it decoded in a step, as a share of the most (0 to 1)."""
    waiting_seconds: float = 0.0
    """Part of `seconds` in which it only waited for tools."""


ItemT = TypeVar("ItemT")
Share = Callable[[list[WorkItem]], list[WorkItem]]
"""Gives all ranks of an engine the items that its first rank has popped."""


def share_in_engine(items: list[ItemT]) -> list[ItemT]:
    """Broadcast the items over the process group of this rank's vLLM engine.

    A collective."""
    from vllm.distributed.parallel_state import get_tp_group

    return get_tp_group().broadcast_object(items, src=0)


class WorkQueue:
    """The requests of one rollout as they are popped for this rank's engine.

    It is a source for `RunningCompletions.sample`. Every rank makes one, with the same requests and
    a store (see `shared_store`) that no other rollout uses."""

    def __init__(
        self,
        store: RunStore,
        requests_PG: Sequence[Sequence[Request]],
        mesh: Mesh,
        max_num_seqs: int,
        share: Share = share_in_engine,
    ) -> None:
        """`max_num_seqs`: most sequences that one engine decodes at a time.

        A request's key starts with its P. `share` is called where an engine has several ranks."""
        self._requests_PG = requests_PG
        self._mesh = mesh
        self._capacity = max_num_seqs
        self._share = share
        self._items = _EngineItems(
            store, [len(row) > 1 for row in requests_PG], mesh, max_num_seqs=max_num_seqs
        )
        self._popped_any = False
        self._ended_any = False
        self._empty = False
        self._running: list[int] = []
        """Sequences that the engine decodes, by step."""
        self._tail_steps = 0

    def pop(self, load: Load) -> list[Request]:
        """The requests to add before the engine's next step."""
        is_idle = load.called == load.in_flight > 0
        self._items.steps += not is_idle
        requests = self._pop(load)
        if is_idle and not requests:
            return []
        if load.in_flight:
            self._running.append(load.in_flight - load.waiting - load.called)
        self._tail_steps = (
            0 if requests or load.waiting else self._tail_steps + bool(load.in_flight)
        )
        return requests

    def _pop(self, load: Load) -> list[Request]:
        """Pop work on the engine's first rank where there are free places, and share it."""
        first = not self._popped_any
        full = load.in_flight >= self._capacity or load.waiting > 0
        if self._empty or not (first or (self._ended_any and not full)):
            return []
        free = self._capacity - load.in_flight
        items = self._pop_items(free, first) if self._mesh.is_engine_leader else []
        if self._mesh.engine_size > 1:
            items = self._share(items)
        self._popped_any = True
        self._empty = not items
        return [request for work_item in items for request in self._requests_of(work_item)]

    def ended(self, key: Key, tokens: int) -> None:
        """Called for every completion as soon as it is there, with its sampled tokens."""
        self._ended_any = True
        prompt, sample_index = key
        if sample_index == self._requests_PG[prompt][0].key[1]:
            self._items.lengths[prompt] = tokens

    def close(self) -> None:
        """Delete this rollout's keys from the store.

        Call it once no rank pops or reads any more."""
        if self._mesh.is_engine_leader:
            self._items.close()

    def usage(self, seconds: float, waiting_seconds: float = 0.0) -> EngineUsage:
        """What the engine did in so many seconds, in some of which it only waited for tools."""
        most_running = max(self._running, default=0)
        fill = sum(self._running) / (most_running * len(self._running)) if most_running else 0.0
        return EngineUsage(
            seconds,
            len(self._running),
            self._tail_steps,
            fill=fill,
            waiting_seconds=waiting_seconds,
        )

    def _requests_of(self, work_item: WorkItem) -> Sequence[Request]:
        row = self._requests_PG[work_item.prompt]
        return row[1:] if work_item.is_remaining else row[:1]

    def _pop_items(self, free: int, first: bool) -> list[WorkItem]:
        """Pop items until the free places are filled."""
        items = []
        for work_item in self._items.first_pop() if first else self._items.later_pop():
            items.append(work_item)
            free -= len(self._requests_of(work_item))
            if free <= 0:
                break
        return items


class _EngineItems:
    """Pops items for one engine, on its leading rank."""

    def __init__(
        self, store: RunStore, has_remaining_P: Sequence[bool], mesh: Mesh, max_num_seqs: int
    ) -> None:
        self.steps = 0
        """Engine steps so far: tokens that a first sample may have by now."""
        self.lengths: dict[int, int] = {}
        """Tokens of each prompt's finished first sample."""
        self._store = store
        self._has_remaining_P = has_remaining_P
        self._with_remaining = [
            p for p, has_remaining in enumerate(has_remaining_P) if has_remaining
        ]
        self._mesh = mesh
        prompts = len(has_remaining_P)
        share = min(-(-prompts // mesh.num_engines), max_num_seqs)
        # Every engine takes every n-th row: rows that are alike follow one another.
        own_prompts = range(
            mesh.engine_index, min(mesh.num_engines * share, prompts), mesh.num_engines
        )
        self._own_first = deque(own_prompts)
        """Prompts whose first samples are this engine's, and not popped yet."""
        self._shared_first = range(min(mesh.num_engines * share, prompts), prompts)
        """Prompts whose first samples are no engine's own."""
        self._exhausted: set[str] = set()
        """Counters that have led past the last prompt."""
        self._started: dict[int, int] = {}
        """Step at which each prompt's first sample was popped here."""
        self._untried: set[int] = set()
        """Own prompts whose remaining samples have not been tried yet."""
        self._claimed: list[int] = []

    def first_pop(self) -> Iterator[WorkItem]:
        """Items in the order in which an engine that has nothing yet pops them."""
        yield from self._own_first_samples()
        yield from self._own_remaining()
        if not self._started:
            yield from self._others_remaining()

    def later_pop(self) -> Iterator[WorkItem]:
        """Items in the order in which they are popped later; when they end, the queue is empty."""
        yield from self._own_first_samples()
        while (prompt := self._next_prompt("first samples", self._shared_first)) is not None:
            yield self._first_sample(prompt)
        yield from self._own_remaining()
        yield from self._others_remaining()

    def close(self) -> None:
        for prompt in self._claimed:
            self._store.delete(f"remaining/{prompt}")
        if self._mesh.engine_index == 0:
            for counter in ("first samples", "others"):
                self._store.delete(counter)

    def _own_first_samples(self) -> Iterator[WorkItem]:
        while self._own_first:
            yield self._first_sample(self._own_first.popleft())

    def _first_sample(self, prompt: int) -> WorkItem:
        self._started[prompt] = self.steps
        if self._has_remaining_P[prompt]:
            self._untried.add(prompt)
        return WorkItem(prompt, is_remaining=False)

    def _own_remaining(self) -> Iterator[WorkItem]:
        while self._untried:
            length = {p: self.lengths.get(p, self.steps - self._started[p]) for p in self._untried}
            prompt = min(self._untried, key=lambda p: (-length[p], p))
            self._untried.remove(prompt)
            yield from self._claim(prompt)

    def _others_remaining(self) -> Iterator[WorkItem]:
        while (prompt := self._next_prompt("others", self._with_remaining)) is not None:
            if prompt not in self._started:
                yield from self._claim(prompt)

    def _next_prompt(self, counter: str, prompts: Sequence[int]) -> int | None:
        """The next of some prompts, by a counter that all engines share; None after the last."""
        if counter in self._exhausted or not prompts:
            return None
        place = self._store.fetch_add(counter)
        if place < len(prompts):
            return prompts[place]
        self._exhausted.add(counter)
        return None

    def _claim(self, prompt: int) -> list[WorkItem]:
        """The remaining samples of a prompt, or nothing where another engine was faster."""
        engine = self._mesh.engine_index
        if self._store.set_first(f"remaining/{prompt}", engine) != engine:
            return []
        self._claimed.append(prompt)
        return [WorkItem(prompt, is_remaining=True)]


def idle_shares(seconds_by_rollout: Sequence[Sequence[float]]) -> list[float]:
    """The share of some rollouts' time in which each engine was idle (0 to 1).

    It was done then while another engine was not. For each rollout there are the seconds that each
    engine was busy, from a common start.

    >>> idle_shares([[3.0, 4.0], [1.0, 0.5]])  # of 5 s the first engine idled 1 s, the second 0.5 s
    [0.2, 0.1]
    """
    total = sum(max(seconds) for seconds in seconds_by_rollout)
    idle = [total - sum(busy) for busy in zip(*seconds_by_rollout, strict=True)]
    return [seconds / total for seconds in idle]
