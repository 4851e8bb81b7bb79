"""The prompts of each step, and the mixture of files by weights.

Both are functions of the step and of the run's rollbacks."""

# Shape legend: P prompts of one step, N prompts kept in all, K places of one epoch.

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

# ---------------------------------------------------------------- shares of files


@dataclass(frozen=True)
class Share:
    """One file of a mixture.

    >>> Share(n_prompts=10, weight=0.25).places
    3
    """

    n_prompts: int
    weight: float
    """The number of times that its prompts come in one epoch: 1 once, 0.5 half of them, 2 twice."""

    @property
    def places(self) -> int:
        """Prompts that the file gives to every epoch.

        They are weight x prompts, rounded up from a half on, at least 1."""
        return max(1, math.floor(self.weight * self.n_prompts + 0.5))


def shares_of(counts: Sequence[int], weights: Sequence[float]) -> tuple[Share, ...]:
    """One share for each file; without weights all prompts come once."""
    return tuple(
        Share(n_prompts, weight)
        for n_prompts, weight in zip(counts, weights or [1.0] * len(counts), strict=True)
    )


def shuffled_range(n: int, name: str) -> tuple[int, ...]:
    """The numbers 0 .. n-1 in the order of the SHA-256 of "name:index".

    It does not depend on the libraries' versions."""
    return tuple(
        sorted(range(n), key=lambda index: hashlib.sha256(f"{name}:{index}".encode()).digest())
    )


@lru_cache(maxsize=2)
def epoch_order(shares: tuple[Share, ...], seed: int, epoch: int, shuffle: bool) -> tuple[int, ...]:
    """K prompt indices of an epoch, counted over all files one behind the other.

    Each file has an endless sequence of its prompts, one permutation after the other, and gives the
    next of them to each epoch: with weight 0.5 an epoch has one half, and the next epoch the other.
    Then all are shuffled. Without `shuffle` the sequence is the file over and over, and the files
    stand one behind the other."""
    indices: list[int] = []
    first = 0
    for number, share in enumerate(shares):
        n = share.n_prompts
        start = epoch * share.places
        stop = (epoch + 1) * share.places
        for turn in range(start // n, (stop - 1) // n + 1):
            order = shuffled_range(n, f"{seed}:file{number}:{turn}") if shuffle else range(n)
            indices += (
                first + index for index in order[max(0, start - turn * n) : stop - turn * n]
            )
        first += n
    if not shuffle:
        return tuple(indices)
    return tuple(indices[place] for place in shuffled_range(len(indices), f"{seed}:{epoch}"))


def weighted_permutation(shares: Sequence[Share], name: str) -> list[int]:
    """All prompts, those of heavier files likelier to come early (Efraimidis and Spirakis 2006)."""
    keyed: list[tuple[float, int]] = []
    for share in shares:
        for index in range(len(keyed), len(keyed) + share.n_prompts):
            digest = hashlib.sha256(f"{name}:{index}".encode()).digest()
            uniform = (int.from_bytes(digest[:7], "big") + 1) / 2**56
            keyed.append((-math.log(uniform) / share.weight, index))
    return [index for _, index in sorted(keyed)]


# ---------------------------------------------------------------- the order of a run


@dataclass(frozen=True)
class Rollback:
    """A return of the run to an earlier checkpoint (`algorithm.rollback`)."""

    number: int
    """The number of the rollback, counted from 1 over the run."""
    step: int
    """Steps done in that checkpoint."""
    draw_step: int
    """The first step whose prompts and samples have another seed; later than `step` where groups
    were in flight."""
    diverged_step: int = 0
    """The step, counted from 1, in which the run diverged; 0: not known."""
    reason: str = ""


def seed_after(run_seed: int, rollbacks: int) -> int:
    """The seed in place of `run.seed` after so many rollbacks: 31 bits of the SHA-256 of both.

    >>> seed_after(1, 0), seed_after(1, 1) != seed_after(1, 2)
    (1, True)
    """
    if rollbacks == 0:
        return run_seed
    digest = hashlib.sha256(f"{run_seed}:rollback:{rollbacks}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


class Draw(NamedTuple):
    """One prompt of all that a run draws."""

    step: int
    prompt: int
    """The index of the prompt among all prompts."""
    times: int
    """The number of times that the same prompt comes before it in that step."""


@dataclass(frozen=True)
class Reseed:
    """A place from which on the order is another one."""

    place: int
    """The place, counted from 0 over all epochs."""
    rollback: int
    """The number of the run's rollback, from which the new order is drawn."""


class PromptOrder:
    """The prompts of each step, a pure function of the step: resuming needs no other cursor.

    Each epoch has its own order, a permutation drawn from (seed, epoch), of K = N places; with
    weights K is another number, and a prompt may come more than once (see `epoch_order`). Only
    whole steps are used: the last K modulo P places of every epoch's order are left out; with
    `shuffle` they are others each epoch, without it they are always the last ones.

    >>> PromptOrder(n_prompts=5, prompts_per_step=2, seed=1, shuffle=False).batch(3)
    (1, [2, 3])
    """

    def __init__(
        self,
        n_prompts: int,
        prompts_per_step: int,
        seed: int,
        shuffle: bool,
        shares: tuple[Share, ...] = (),
    ) -> None:
        """`shares` are the files that the prompts come from; without them each comes once an epoch.

        Raises ValueError when a step asks for more prompts than an epoch has."""
        assert not shares or sum(share.n_prompts for share in shares) == n_prompts, (
            shares,
            n_prompts,
        )
        self.shares = shares if any(share.weight != 1 for share in shares) else ()
        self.n_places = sum(share.places for share in self.shares) or n_prompts
        if prompts_per_step < 1:
            raise ValueError(f"data.prompts_per_step is {prompts_per_step}; it must be at least 1")
        if prompts_per_step > self.n_places:
            weighted = (
                f", which data.train_weights makes {self.n_places} an epoch" if self.shares else ""
            )
            prompts_left = "1 prompt is" if n_prompts == 1 else f"{n_prompts} prompts are"
            raise ValueError(
                f"data.prompts_per_step is {prompts_per_step}, but only {prompts_left} left after"
                f" filtering{weighted}; lower data.prompts_per_step or give more prompts"
            )
        self.n_prompts = n_prompts
        self.prompts_per_step = prompts_per_step
        self.seed = seed
        self.shuffle = shuffle
        self.rollbacks: tuple[Rollback, ...] = ()
        """Rollbacks of the run that still count (`roll_back`)."""

    @property
    def steps_per_epoch(self) -> int:
        return self.n_places // self.prompts_per_step

    @property
    def left_out_per_epoch(self) -> int:
        """Places of an epoch that fill no whole step."""
        return self.n_places % self.prompts_per_step

    def roll_back(self, rollbacks: Iterable[Rollback]) -> None:
        """The run's rollbacks, in their order.

        From `draw_step` of each on, what is left of its epoch comes in another order, and so do all
        later epochs: no prompt of the discarded steps is lost, each is drawn again in what is left
        of the epoch. Samples have another seed (`seed_at`). Without `shuffle` the order stays."""
        self.rollbacks = ()
        for rollback in rollbacks:
            earlier_rollbacks = tuple(
                other for other in self.rollbacks if other.draw_step < rollback.draw_step
            )
            self.rollbacks = (*earlier_rollbacks, rollback)

    def seed_at(self, step: int) -> int:
        """The seed of what a step samples: `run.seed`, until the run goes back to a checkpoint."""
        number = max(
            (rollback.number for rollback in self.rollbacks if rollback.draw_step <= step),
            default=0,
        )
        return seed_after(self.seed, number)

    def batch(self, step: int) -> tuple[int, list[int]]:
        """(epoch, P prompt indices) of a step; both count from 0 over the whole run."""
        assert step >= 0, step
        per_step = self.prompts_per_step
        epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
        first = step_in_epoch * per_step
        reseeds = []
        for rollback in self.rollbacks:
            changed, step_in_its_epoch = divmod(rollback.draw_step, self.steps_per_epoch)
            reseeds.append(
                Reseed(changed * self.n_places + step_in_its_epoch * per_step, rollback.number)
            )
        order_K = self._epoch(epoch, reseeds, self.steps_per_epoch * per_step)
        return epoch, [order_K[position] for position in range(first, first + per_step)]

    def place(self, number: int, reseeds: Sequence[Reseed] = ()) -> int:
        """The prompt of a place of the endless order, counted from 0 over all epochs.

        `reseeds` come by rising place."""
        epoch, place_in_epoch = divmod(number, self.n_places)
        return self._epoch(epoch, reseeds, self.n_places)[place_in_epoch]

    def _epoch(self, epoch: int, reseeds: Sequence[Reseed], used: int) -> Sequence[int]:
        """K prompt indices of an epoch, of which the first `used` are used."""
        if not self.shuffle:
            return self.first_order(epoch)
        first = epoch * self.n_places
        end = (epoch + 1) * self.n_places
        earlier = [Reseed(first, reseed.rollback) for reseed in reseeds if reseed.place < first]
        within_epoch = [reseed for reseed in reseeds if first <= reseed.place < end]
        return _reordered(self, epoch, (*earlier[-1:], *within_epoch), used)

    def first_order(self, epoch: int) -> Sequence[int]:
        """K prompt indices of an epoch before any rollback."""
        if self.shares:
            return epoch_order(self.shares, self.seed, epoch, self.shuffle)
        return (
            permutation(self.n_prompts, self.seed, epoch) if self.shuffle else range(self.n_prompts)
        )

    def drawn(self, draw: int) -> Draw:
        """A place of all steps' prompts, counted from 0 over the whole run.

        >>> PromptOrder(n_prompts=5, prompts_per_step=2, seed=1, shuffle=False).drawn(7)
        Draw(step=3, prompt=3, times=0)
        """
        step, place = divmod(draw, self.prompts_per_step)
        indices = self.batch(step)[1]
        return Draw(step, indices[place], indices[:place].count(indices[place]))

    def extra(self, step: int, step_prompts: Collection[int] | None = None) -> Iterator[int]:
        """All prompts but `step_prompts`, in an order drawn from (seed, step).

        None stands for those of `batch`. Prompts of heavier files come earlier. Dynamic sampling
        takes them for dropped groups. They keep their turn in the epochs."""
        batch_prompts = set(self.batch(step)[1] if step_prompts is None else step_prompts)
        name = f"{self.seed_at(step)}:extra:{step}"
        shares = self.shares
        order_N = (
            weighted_permutation(shares, name) if shares else shuffled_range(self.n_prompts, name)
        )
        yield from (index for index in order_N if index not in batch_prompts)

    def line(self) -> str:
        """One line for the console."""
        count = self.left_out_per_epoch
        left_out = (
            f"; the {count} that fill no whole step are left out of each epoch" if count else ""
        )
        places = f" ({self.n_places} places an epoch by data.train_weights)" if self.shares else ""
        return (
            f"Order: {self.steps_per_epoch} step{'s' * (self.steps_per_epoch != 1)} per epoch,"
            f" {self.prompts_per_step} of {self.n_prompts} prompts{places} a step,"
            f" {'shuffled in every epoch' if self.shuffle else 'in the order of the file'}"
            f"{left_out}."
        )


@lru_cache(maxsize=2)
def permutation(n: int, seed: int, epoch: int) -> tuple[int, ...]:
    """The numbers 0 .. n-1 in the order of an epoch."""
    return shuffled_range(n, f"{seed}:{epoch}")


@lru_cache(maxsize=4)
def _reordered(
    order: PromptOrder, epoch: int, reseeds: tuple[Reseed, ...], used: int
) -> Sequence[int]:
    """An epoch's order after `reseeds`.

    Each of them has shuffled anew what lies between its place and `used`."""
    order_K = order.first_order(epoch)
    for reseed in reseeds:
        place = reseed.place - epoch * order.n_places
        remaining = order_K[place:used]
        shuffled = shuffled_range(
            len(remaining), f"{seed_after(order.seed, reseed.rollback)}:{epoch}:from {place}"
        )
        order_K = (*order_K[:place], *(remaining[index] for index in shuffled), *order_K[used:])
    return order_K
