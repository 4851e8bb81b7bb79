"""Who samples what: engines draw their work while they sample, so that none waits for one with long answers.

The work of a rollout is drawn in two kinds of parts. A *scout* is the first sample of a prompt; scouts come from one
counter that all engines share, in the order of the prompts. The *rest* of its group is a part of its own, and comes
once the scouts are out: an engine takes the rests of its own scouts, longest scout first, then what other engines have
not begun. So the groups with long answers are known early and start early, and what is left for the end is short
enough to be spread evenly. (Groups' lengths from a first sample, longest first: Seer, arXiv:2511.14617.)

A second counter leads all engines together past the prompts whose rests others may not have begun. Each is looked at
once, not once by every engine: what a rollout asks of the store grows with prompts plus engines, not their product.

An engine draws as long as vLLM has a free place for a sequence, and nothing beyond, since what it holds nobody else
can take. Before its first completion it draws no more than an even share of the scouts: another engine may still be
waking up.

The counter and the marks of taken rests are in a store that all ranks reach. Of the ranks of an engine one draws, and
publishes what it drew; the others read it at the same point, as all of them run vLLM's scheduler in lockstep.
"""

# Shape legend: P prompts, G samples per prompt.

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch.distributed as dist

from rlmath.distributed.mesh import Mesh
from rlmath.rollout.sampling import Generated, Load, Request


class Part(NamedTuple):
    """What is drawn at once: the first sample of prompt `prompt`, or the rest of its group."""

    prompt: int
    is_rest: bool


class WorkQueue:
    """The requests of one rollout as they are drawn for the engine of this rank; a source for `Engine.generate`.

    Every rank makes one, with the same requests and a store (see `shared_store`) that no other rollout uses.
    """

    def __init__(
        self, store: dist.Store, requests_PG: Sequence[Sequence[Request]], mesh: Mesh, max_num_seqs: int
    ) -> None:
        """`max_num_seqs`: most sequences that one engine decodes at a time. A request's key starts with its P."""
        self._store = store
        self._requests_PG = requests_PG
        self._mesh = mesh
        self._capacity = max_num_seqs
        self._drawer = _Drawer(store, [len(row) > 1 for row in requests_PG], mesh)
        self._drawings = 0
        self._finished_any = False
        self._all_drawn = False

    def take(self, load: Load) -> list[Request]:
        """The requests to add before the engine's next step.

        RuntimeError where the rank that draws for this engine does not tell within the store's timeout.
        """
        self._drawer.steps += 1
        first = self._drawings == 0
        full = load.in_flight >= self._capacity or load.waiting > 0
        if self._all_drawn or not (first or (self._finished_any and not full)):
            return []
        free = self._capacity - load.in_flight
        parts = self._draw(free, first) if self._mesh.is_engine_leader else self._read()
        self._drawings += 1
        self._all_drawn = not parts
        return [request for part in parts for request in self._requests_of(part)]

    def finished(self, generated: Generated) -> None:
        """Tells of a completion as soon as it is there."""
        self._finished_any = True
        prompt, sample_index = generated.key
        if sample_index == self._requests_PG[prompt][0].key[1]:
            self._drawer.scout_finished(prompt, len(generated.token_ids))

    def forget(self) -> None:
        """Take this rollout's keys from the store. Call it once no rank draws or reads any more."""
        if not self._mesh.is_engine_leader:
            return
        self._drawer.forget()
        if self._mesh.engine_size > 1:
            for number in range(self._drawings):
                self._store.delete_key(self._drawing_key(number))

    def _requests_of(self, part: Part) -> Sequence[Request]:
        row = self._requests_PG[part.prompt]
        return row[1:] if part.is_rest else row[:1]

    def _draw(self, free: int, first: bool) -> list[Part]:
        parts = []
        for part in self._drawer.first_parts() if first else self._drawer.parts():
            parts.append(part)
            free -= len(self._requests_of(part))
            if free <= 0:
                break
        if self._mesh.engine_size > 1:
            self._store.set(self._drawing_key(self._drawings), json.dumps(parts))
        return parts

    def _read(self) -> list[Part]:
        key = self._drawing_key(self._drawings)
        try:
            parts = json.loads(self._store.get(key))
        except dist.DistStoreError as error:
            raise RuntimeError(
                f"rank {self._mesh.rank} waited {self._store.timeout.total_seconds():.0f} s to be told what engine"
                f" {self._mesh.engine_index} samples next; its first rank, which draws, has ended or hangs"
            ) from error
        return [Part(*part) for part in parts]

    def _drawing_key(self, number: int) -> str:
        return f"drawn/{self._mesh.engine_index}/{number}"


def idle_shares(seconds_by_rollout: Sequence[Sequence[float]]) -> list[float]:
    """By engine: the share of some rollouts' time in which it was done while another engine was not (0 to 1).

    Each rollout has the seconds that each engine was busy for, from a common start.

    >>> idle_shares([[3.0, 4.0], [1.0, 0.5]])  # of 5 s the first engine idled 1 s, the second 0.5 s
    [0.2, 0.1]
    """
    total = sum(max(seconds) for seconds in seconds_by_rollout)
    idle = [total - sum(busy) for busy in zip(*seconds_by_rollout, strict=True)]
    return [seconds / total for seconds in idle]


class _Drawer:
    """Draws parts for one engine, on the rank that speaks for it."""

    def __init__(self, store: dist.Store, has_rest_P: Sequence[bool], mesh: Mesh) -> None:
        self.steps = 0
        """Engine steps so far: tokens that a scout may have by now."""
        self._store = store
        self._has_rest_P = has_rest_P
        self._mesh = mesh
        self._even_share = -(-len(has_rest_P) // mesh.engines)
        self._gone: set[str] = set()
        """Counters that have led past the last prompt."""
        self._started: dict[int, int] = {}
        """By scout: the step at which it was drawn."""
        self._lengths: dict[int, int] = {}
        """By finished scout: its tokens."""
        self._open: set[int] = set()
        """Prompts of own scouts whose rests have not been tried yet."""
        self._won: list[int] = []

    def first_parts(self) -> Iterator[Part]:
        """Parts in the order in which they are to be drawn, for an engine that has nothing yet."""
        for _ in range(self._even_share):
            yield from self._scout()
        yield from self._own_rests()
        if not self._started:
            yield from self._others_rests()

    def parts(self) -> Iterator[Part]:
        """Parts in the order in which they are to be drawn; when they end, all is drawn."""
        while scout := self._scout():
            yield from scout
        yield from self._own_rests()
        yield from self._others_rests()

    def scout_finished(self, prompt: int, tokens: int) -> None:
        self._lengths[prompt] = tokens

    def forget(self) -> None:
        for prompt in self._won:
            self._store.delete_key(f"rest/{prompt}")
        if self._mesh.engine_index == 0:
            for counter in ("scouts", "others"):
                self._store.delete_key(counter)

    def _scout(self) -> list[Part]:
        """The next scout of all engines, or nothing."""
        prompt = self._next("scouts")
        if prompt is None:
            return []
        self._started[prompt] = self.steps
        if self._has_rest_P[prompt]:
            self._open.add(prompt)
        return [Part(prompt, is_rest=False)]

    def _own_rests(self) -> Iterator[Part]:
        while self._open:
            prompt = min(self._open, key=lambda p: (-self._length(p), p))
            self._open.remove(prompt)
            yield from self._rest(prompt)

    def _others_rests(self) -> Iterator[Part]:
        while (prompt := self._next("others")) is not None:
            if self._has_rest_P[prompt] and prompt not in self._started:
                yield from self._rest(prompt)

    def _next(self, counter: str) -> int | None:
        """The next prompt by a counter of all engines; None when it has led past the last one."""
        if counter in self._gone:
            return None
        prompt = self._store.add(counter, 1) - 1
        if prompt < len(self._has_rest_P):
            return prompt
        self._gone.add(counter)
        return None

    def _length(self, prompt: int) -> int:
        return self._lengths.get(prompt, self.steps - self._started[prompt])

    def _rest(self, prompt: int) -> list[Part]:
        """The rest of a group, or nothing where another engine was faster."""
        if self._store.add(f"rest/{prompt}", 1) > 1:
            return []
        self._won.append(prompt)
        return [Part(prompt, is_rest=True)]
